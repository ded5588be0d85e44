"""What is wrong with rules, or not as it seems, before they are used: each a finding, as data."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from t5x_pjit_recipes.errors import RuleError, did_you_mean
from t5x_pjit_recipes.layout.axes import AxisNames, axis_names, canonical, is_axes_leaf, spec_axes
from t5x_pjit_recipes.layout.explain import target_text
from t5x_pjit_recipes.layout.logical_rules import LogicalRules
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.layout.patterns import FULLMATCH, SEARCH, WINDOWS, is_scalar, matcher
from t5x_pjit_recipes.layout.regex_rules import RegexRules

ERROR, WARNING, NOTE = 'error', 'warning', 'note'


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing found in rules.

    Attributes:
      level: 'error' (the rules cannot be used so), 'warning' (they do what is seldom meant) or 'note'.
      kind: 'unmatched', 'dead', 'shadowed', 'over-broad', 'rank', 'mesh axis', 'logical axis' or 'dialect'.
      rule: the rule's number, counted from 1; None where it is none's.
      text: what was found.
      leaves: the names of the leaves that it concerns.
    """

    level: str
    kind: str
    rule: int | None
    text: str
    leaves: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f'{self.level}: {self.kind}: {self.text}'


def lint(
    rules: RegexRules | LogicalRules,
    tree: Any,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    logical_rules: LogicalRules | None = None,
) -> tuple[Finding, ...]:
    """Looks for rules that are dead, shadowed or over-broad, and for what else they may not be meant to do.

    Args:
      rules: the rules; of `LogicalRules` dead, shadowed and unknown names are found.
      tree: what they are for: of `RegexRules` arrays or shapes, of `LogicalRules` a tree of logical axes.
      mesh: the mesh, or one without devices; without it mesh axes are not looked at.
      logical_rules: what finishes the job of `RegexRules` whose targets name logical axes.

    Returns:
      The findings, errors first.

    Raises:
      RuleError: if the tree has no leaves.

    >>> rules = RegexRules([('mlp/w', PartitionSpec('modle')), ('b', PartitionSpec())])
    >>> from t5x_pjit_recipes.layout.meshes import abstract_mesh
    >>> for finding in lint(rules, {'mlp': {'w': np.zeros((8, 4))}}, abstract_mesh(data=4, model=2)):
    ...     print(finding)
    error: dead: rule 2 'b' matches nothing
    error: mesh axis: rule 1 'mlp/w' names 'modle', which the mesh (data, model) lacks (did you mean 'model'?)
    """
    leaves = named_leaves(tree, is_leaf=is_axes_leaf if isinstance(rules, LogicalRules) else None)
    if not leaves:
        raise RuleError('Cannot lint rules on a tree without leaves. Give the parameters, or their shapes.')
    if isinstance(rules, LogicalRules):
        found = [*_idle_names(rules, leaves), *_unknown_names(rules, leaves), *_logical_mesh_axes(rules, mesh)]
    else:
        found = [*_pattern_findings(rules, leaves), *_target_findings(rules, leaves, mesh, logical_rules)]
    return tuple(sorted(found, key=lambda finding: (ERROR, WARNING, NOTE).index(finding.level)))


def _pattern_findings(rules: RegexRules, leaves: Mapping[str, Any]) -> Iterator[Finding]:
    matched = {number: [n for n in leaves if number in rules.matching(n)] for number in range(1, len(rules) + 1)}
    decided = {number: [n for n in names if rules.deciding(n) == number] for number, names in matched.items()}
    alone = [n for n, leaf in leaves.items() if rules.deciding(n) is None and not is_scalar(np.shape(leaf))]
    if alone:
        yield Finding(ERROR, 'unmatched', None, f'no rule matches {_some(alone)}', tuple(alone))
    for number in matched:
        if not matched[number]:
            level = WARNING if rules.allow_unused else ERROR
            yield Finding(level, 'dead', number, f'{_title(rules, number)} matches nothing')
        elif not decided[number]:
            yield from _shadowed(rules, number, matched[number])
        else:
            yield from _over_broad(rules, number, {n: np.shape(leaves[n]) for n in decided[number]}, len(leaves))
        yield from _dialect(rules, number, matched[number], leaves)


def _shadowed(rules: RegexRules, number: int, names: list[str]) -> Iterator[Finding]:
    if number == len(rules) and not _splits(rules, number):
        return  # A last rule that replicates what is left is customary, and may have nothing to do.
    earlier = sorted({rules.deciding(name) for name in names})
    by = ' and '.join(_title(rules, other) for other in earlier)
    text = f'{_title(rules, number)} decides nothing: its {_some(names)} went to {by}'
    yield Finding(WARNING, 'shadowed', number, text, tuple(names))


def _over_broad(rules: RegexRules, number: int, shapes: Mapping[str, tuple[int, ...]], total: int) -> Iterator[Finding]:
    ranks = sorted({len(shape) for shape in shapes.values() if not is_scalar(shape)})
    title = f'{_title(rules, number)} -> {target_text(rules.rules[number - 1][1])}'
    names = tuple(shapes)
    if _splits(rules, number) and len(ranks) > 1:
        text = f'{title} decides arrays of {" and ".join(map(str, ranks))} dims: {_some(names)}'
        yield Finding(WARNING, 'over-broad', number, text, names)
    if len(names) == total > 1 and (_splits(rules, number) or number < len(rules)):
        yield Finding(WARNING, 'over-broad', number, f'{title} decides all {total} arrays', names)


def _dialect(rules: RegexRules, number: int, matched: list[str], leaves: Iterable[str]) -> Iterator[Finding]:
    if rules.dialect == WINDOWS:
        return
    other = SEARCH if rules.dialect == FULLMATCH else FULLMATCH
    pattern = rules.patterns[number - 1]
    otherwise = [name for name in leaves if matcher(pattern, other)(name)]
    if otherwise == matched:
        return
    change = sorted(set(matched) ^ set(otherwise))
    verb, spelt = ('search', 'match anywhere') if other == SEARCH else ('full match', 'match whole names')
    text = (
        f'{_title(rules, number)} matches {len(matched)} arrays, and {len(otherwise)} where patterns {spelt} ({verb}): '
        f'{_some(change)}'
    )
    yield Finding(NOTE, 'dialect', number, text, tuple(change))


def _target_findings(
    rules: RegexRules, leaves: Mapping[str, Any], mesh: Any, logical_rules: LogicalRules | None
) -> Iterator[Finding]:
    for number, (_, target) in enumerate(rules.rules, 1):
        logical = isinstance(target, AxisNames)
        entries = len(target) if logical else len(canonical(target))
        shapes = {n: np.shape(leaf) for n, leaf in leaves.items() if rules.deciding(n) == number}
        fits = int.__eq__ if logical else int.__le__
        unfit = [n for n, shape in shapes.items() if not is_scalar(shape) and not fits(entries, len(shape))]
        if unfit and entries:
            text = f'{_title(rules, number)} -> {target_text(target)} does not fit the dims of {_some(unfit)}'
            yield Finding(ERROR, 'rank', number, text, tuple(unfit))
        if logical and logical_rules is not None:
            yield from _unknown_names(logical_rules, {_title(rules, number): target}, number)
        elif not logical and mesh is not None:
            yield from _mesh_axes(_title(rules, number), number, target, mesh)


def _mesh_axes(title: str, number: int, entries: Iterable[Any], mesh: Any) -> Iterator[Finding]:
    known = tuple(mesh.axis_names)
    for axis in dict.fromkeys(axis for entry in entries for axis in spec_axes(entry)):
        if axis not in known:
            near = did_you_mean(axis, known)
            text = f'{title} names {axis!r}, which the mesh ({", ".join(known)}) lacks{near}'
            yield Finding(ERROR, 'mesh axis', number, text)


def _idle_names(rules: LogicalRules, leaves: Mapping[str, Any]) -> Iterator[Finding]:
    by_leaf = {leaf: axis_names(names) or () for leaf, names in leaves.items()}
    attempts = [attempt for names in set(by_leaf.values()) for dim in rules.attempts(names) for attempt in dim]
    decided = {attempt.number for attempt in attempts if attempt.decides}
    for number, rule in enumerate(rules.rules, 1):
        outcomes = sorted({attempt.outcome for attempt in attempts if attempt.number == number})
        if not outcomes:
            yield Finding(NOTE, 'dead', number, f'rule {number} {rule}: no array has the name {rule[0]!r}')
        elif number not in decided:
            names = tuple(leaf for leaf, given in by_leaf.items() if rule[0] in given)
            text = f'rule {number} {rule} decides nothing: {"; ".join(outcomes)}'
            yield Finding(WARNING, 'shadowed', number, text, names)


def _unknown_names(rules: LogicalRules, leaves: Mapping[str, Any], number: int | None = None) -> Iterator[Finding]:
    by_name: dict[str, list[str]] = {}
    for leaf, names in rules.unknown(leaves).items():
        for name in names:
            by_name.setdefault(name, []).append(leaf)
    for name, where in by_name.items():
        offer = did_you_mean(name, rules.names)
        text = f'no logical rule has the name {name!r}{offer} of {_some(where)}'
        yield Finding(ERROR, 'logical axis', number, text, tuple(where))


def _logical_mesh_axes(rules: LogicalRules, mesh: Any) -> Iterator[Finding]:
    for number, (name, target) in enumerate(rules.rules, 1):
        if mesh is not None:
            yield from _mesh_axes(f'rule {number} {(name, target)}', number, (target,), mesh)


def _splits(rules: RegexRules, number: int) -> bool:
    return bool(canonical(PartitionSpec(*rules.rules[number - 1][1])))


def _title(rules: RegexRules, number: int) -> str:
    return f'rule {number} {rules.patterns[number - 1]!r}'


def _some(names: Iterable[str], most: int = 3) -> str:
    names = list(names)
    more = f' and {len(names) - most} more' if len(names) > most else ''
    return ', '.join(names[:most]) + more
