"""Ordered rules from patterns on leaf names to specs, for models whose arrays have no axis names.

The first rule whose pattern matches a leaf decides. What a match is, is the rules' dialect: of the whole name, as here
by default; of any part of it, as EasyLM and scalax have it; or of neighbouring components of the path, as Flax's T5
example.
"""

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from t5x_pjit_recipes.errors import MAX_LISTED, RuleError, did_you_mean, offenders
from t5x_pjit_recipes.layout.axes import AxisNames, spec_axes
from t5x_pjit_recipes.layout.logical_rules import LogicalRules
from t5x_pjit_recipes.layout.paths import map_named, named_leaves
from t5x_pjit_recipes.layout.patterns import (
    DIALECTS,
    FULLMATCH,
    WINDOWS,
    Pattern,
    Rule,
    Target,
    is_scalar,
    likeness,
    matcher,
    read_rules,
)


class RegexRules:
    """Ordered (pattern, target) pairs; the first whose pattern matches a leaf's name decides.

    Args:
      rules: the pairs. A target is a PartitionSpec, whose entries are mesh axes; or AxisNames, or a plain tuple or list
        of names and Nones, which are *logical* axes that `logical_rules` turn into mesh axes; or None for replicated. A
        text such as "PartitionSpec('data', None)" or "P('data', None)" means the spec that it spells, for files that
        cannot hold one.
      dialect: 'fullmatch' (a pattern must match the whole name), 'search' (any part of it), or 'windows' (patterns are
        tuples, see `from_windows`).
      allow_unused: whether rules may match nothing.

    A spec longer than its array's rank is left to `Plan`, which lists it with all other faults; logical axes must be
    as many as the dims, or none for replicated.

    Raises:
      RuleError: listing by number every rule that is no pair, no regular expression or has no target.

    >>> rules = RegexRules([('.*/(wi|q)/kernel', PartitionSpec(None, 'model')), ('.*', PartitionSpec())])
    >>> tuple(rules.spec('mlp/wi/kernel', (512, 2048)))
    (None, 'model')
    """

    def __init__(self, rules: Iterable[Any], *, dialect: str = FULLMATCH, allow_unused: bool = False):
        if dialect not in DIALECTS:
            raise RuleError(
                f'Cannot read rules in dialect {dialect!r}{did_you_mean(dialect, DIALECTS)}: there are '
                f'{", ".join(map(repr, DIALECTS))}. Use one of them.'
            )
        self.dialect, self.allow_unused = dialect, allow_unused
        self.rules: tuple[Rule, ...] = read_rules(list(rules), dialect)
        self._matchers = [matcher(pattern, dialect) for pattern, _ in self.rules]
        self.matching = functools.cache(self._matching)

    @classmethod
    def from_windows(cls, rules: Iterable[Any], *, allow_unused: bool = False) -> 'RegexRules':
        """Reads rules whose patterns are tuples: each part must match a whole component, the tuple may sit anywhere.

        >>> rules = RegexRules.from_windows([(('SelfAttention', '(q|k|v)', 'kernel'), PartitionSpec(None, 'mp'))])
        >>> rules.deciding('encoder/block/0/layer/0/SelfAttention/q/kernel'), rules.deciding('SelfAttention/o/kernel')
        (1, None)
        """
        return cls(rules, dialect=WINDOWS, allow_unused=allow_unused)

    def __repr__(self) -> str:
        extras = f', dialect={self.dialect!r}' if self.dialect != FULLMATCH else ''
        return f'RegexRules({list(self.rules)}{extras}{", allow_unused=True" if self.allow_unused else ""})'

    def __len__(self) -> int:
        return len(self.rules)

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns, in order."""
        return tuple(pattern for pattern, _ in self.rules)

    @property
    def is_logical(self) -> bool:
        """Whether a target names logical axes, so that logical rules must finish the job."""
        return any(isinstance(target, AxisNames) for _, target in self.rules)

    def _matching(self, name: str) -> tuple[int, ...]:
        """Returns the numbers of all rules whose pattern matches a leaf's name, counted from 1."""
        return tuple(number for number, matches in enumerate(self._matchers, 1) if matches(name))

    def deciding(self, name: str) -> int | None:
        """Returns the number of the rule that decides a leaf, counted from 1; None where no pattern matches."""
        return next(iter(self.matching(name)), None)

    def target(self, name: str, shape: Iterable[int]) -> Target:
        """Returns what the rules give one leaf: a spec or logical axes; scalars are replicated whatever they say.

        Raises:
          RuleError: if no rule matches, or names another number of logical axes than there are dims.
        """
        leaves = {name: _Shaped(tuple(shape))}
        self._check(leaves, (), self._faults(leaves))
        return self._target(name, leaves[name].shape)

    def spec(self, name: str, shape: Iterable[int], logical_rules: LogicalRules | Iterable[Any] | None = None) -> Any:
        """Returns one leaf's spec.

        Args:
          name: the leaf's name, as `decoder/layers_0/mlp/wi/kernel`.
          shape: its shape.
          logical_rules: turn logical axes into mesh axes, where a target names such.

        Raises:
          RuleError: if no rule matches, or the logical axes that it names have no rule or do not fit.
        """
        return finish(self.target(name, shape), logical_rules, name)

    def targets(self, params: Any, *, known: Collection[str] = ()) -> Any:
        """Returns a tree like `params` of what the rules give each leaf: PartitionSpecs and AxisNames.

        Args:
          params: the arrays, or anything with shapes.
          known: names of leaves that need no rule.

        Raises:
          RuleError: listing every leaf that no rule matches and, unless `allow_unused`, every rule that matches none;
            or if there are no leaves at all.
        """
        leaves = named_leaves(params)
        if not leaves:
            raise RuleError(
                f'Cannot match {len(self)} rules with a tree of no arrays. Give the parameters, or their shapes.'
            )
        dead = () if self.allow_unused else self.dead(leaves)
        faults = {name: fault for name, fault in self._faults(leaves).items() if fault or name not in known}
        self._check(leaves, dead, faults)
        return map_named(lambda name, leaf: self._target(name, np.shape(leaf)), params)

    def specs(self, params: Any, logical_rules: LogicalRules | Iterable[Any] | None = None) -> Any:
        """Returns a tree of PartitionSpecs like `params`, arrays or shapes, in the same containers.

        Args:
          params: the arrays, or anything with shapes.
          logical_rules: turn logical axes into mesh axes, where targets name such.

        Raises:
          RuleError: as `targets`, and listing every leaf whose logical axes have no rule.
        """
        targets = self.targets(params)
        named = named_leaves(targets, is_leaf=_is_target)
        specs = _finish_all(named, logical_rules)
        return map_named(lambda name, _: specs[name], targets, is_leaf=_is_target)

    def dead(self, params: Any) -> tuple[int, ...]:
        """Returns the numbers of the rules whose patterns match no leaf of `params`, counted from 1."""
        alive = {number for name in named_leaves(params) for number in self.matching(name)}
        return tuple(number for number in range(1, len(self) + 1) if number not in alive)

    def check_mesh(self, mesh_axes: Iterable[str]) -> None:
        """Raises RuleError for rules that name axes the mesh does not have, all at once."""
        known = tuple(mesh_axes)
        lines = [
            f'rule {number} {pattern!r}: no mesh axis {axis!r}{did_you_mean(axis, known)}'
            for number, (pattern, target) in enumerate(self.rules, 1)
            if isinstance(target, PartitionSpec)
            for axis in dict.fromkeys(axis for entry in target for axis in spec_axes(entry))
            if axis not in known
        ]
        if lines:
            raise RuleError(
                f'Cannot use {len(lines)} rules on a mesh with axes {known}: they name axes that it does not have. '
                f'Change the rules or the mesh:\n{offenders(lines)}'
            )

    def reasons(self, params: Any, logical_rules: LogicalRules | None = None) -> dict[str, str]:
        """Maps each leaf's name to what decided its spec, for the plan's table."""
        return {name: self._reason(name, np.shape(leaf), logical_rules) for name, leaf in named_leaves(params).items()}

    def _reason(self, name: str, shape: tuple[int, ...], logical_rules: LogicalRules | None) -> str:
        number = self.deciding(name)
        if is_scalar(shape):
            return 'a scalar'
        if number is None:
            return 'no rule'
        pattern, target = self.rules[number - 1]
        text = f'rule {number} {pattern!r}'
        if logical_rules is not None and isinstance(target, AxisNames):
            text += f' {logical_rules.reasons({"": target})[""]}'
        return text

    def _target(self, name: str, shape: tuple[int, ...]) -> Target:
        number = self.deciding(name)
        return PartitionSpec() if is_scalar(shape) or number is None else self.rules[number - 1][1]

    def _faults(self, leaves: Mapping[str, Any]) -> dict[str, str]:
        """Maps the leaves that the rules cannot lay out to why; '' where no rule matches."""
        faults = {}
        for name, leaf in leaves.items():
            shape, number = np.shape(leaf), self.deciding(name)
            if is_scalar(shape):
                continue
            target = None if number is None else self.rules[number - 1][1]
            if target is None:
                faults[name] = ''
            elif isinstance(target, AxisNames) and target and len(target) != len(shape):
                faults[name] = f'rule {number} names {len(target)} logical axes {tuple(target)} for {len(shape)} dims'
        return faults

    def _check(self, leaves: Mapping[str, Any], dead: tuple[int, ...], faults: Mapping[str, str]) -> None:
        if not faults and not dead:
            return
        unmatched = sum(not fault for fault in faults.values())
        whys = [
            f'no rule matches {unmatched}' if unmatched else '',
            f'{len(faults) - unmatched} have another number of dims' if len(faults) > unmatched else '',
            f'{len(dead)} rules match nothing' if dead else '',
        ]
        lines = []
        for name, fault in faults.items():
            # Near misses cost time, and no more than these are shown.
            fault = fault or (self._near_patterns(name) if len(lines) < MAX_LISTED else '')
            lines.append(f'{name} {np.shape(leaves[name])}: {fault}')
        parts = [offenders(lines)] if lines else []
        parts += [offenders(self._describe_dead(number, leaves) for number in dead)] if dead else []
        raise RuleError(
            f'Cannot lay out {len(leaves)} arrays by {len(self)} rules: {", ".join(filter(None, whys))}. '
            f'{_remedy(bool(faults), bool(dead))}:\n' + '\n'.join(parts)
        )

    def _near_patterns(self, name: str) -> str:
        if self.dialect == FULLMATCH:
            for number, pattern in enumerate(self.patterns, 1):
                if re.search(pattern, name):
                    return f'no rule; rule {number} {pattern!r} matches a part of it only'
        ranked = sorted(enumerate(self.patterns, 1), key=lambda rule: -likeness(name, rule[1]))
        near = ' and '.join(f'rule {number} {pattern!r}' for number, pattern in ranked[:2])
        return f'no rule; the nearest: {near}' if near else 'no rule'

    def _describe_dead(self, number: int, leaves: Mapping[str, Any]) -> str:
        pattern = self.patterns[number - 1]
        nearest = max(leaves, key=functools.partial(likeness, pattern=pattern))
        if self.dialect == FULLMATCH and (part := next((n for n in leaves if re.search(pattern, n)), None)):
            return f'rule {number} {pattern!r} matches no whole name, but a part of {part}'
        return f'rule {number} {pattern!r} matches nothing; the nearest: {nearest}'


class _Shaped:
    """A leaf of which the shape alone is known."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape


def finish(target: Target, logical_rules: Any, name: str = '(the whole)') -> PartitionSpec:
    """Turns one target into a spec: a PartitionSpec is one already, logical axes go through `logical_rules`.

    Raises:
      RuleError: for logical axes without logical rules, or without one of their own.

    >>> tuple(finish(AxisNames('embed', 'mlp'), [('embed', None), ('mlp', 'model')]))
    (None, 'model')
    """
    return _finish_all({name: target}, logical_rules)[name]


def _finish_all(targets: Mapping[str, Target], logical_rules: Any) -> dict[str, PartitionSpec]:
    named = {name: target for name, target in targets.items() if isinstance(target, AxisNames) and target}
    if named and logical_rules is None:
        raise RuleError(
            f'Cannot make specs of {len(named)} arrays: their rules name logical axes, and there are no logical rules. '
            'Give logical_rules, or write PartitionSpec(...) if mesh axes are meant:\n'
            f'{offenders(f"{name}: {tuple(target)}" for name, target in named.items())}'
        )
    if not named:
        return {name: PartitionSpec(*target) for name, target in targets.items()}
    rules = logical_rules if isinstance(logical_rules, LogicalRules) else LogicalRules(logical_rules)
    rules.check_names(named)
    if unknown := rules.describe_unknown(named):
        raise RuleError(unknown)
    return {name: rules.spec(t) if name in named else PartitionSpec(*t) for name, t in targets.items()}


def _is_target(x: Any) -> bool:
    return isinstance(x, PartitionSpec | AxisNames)


def _remedy(unmatched: bool, dead: bool) -> str:
    first = 'Correct a pattern or add a rule' if unmatched else 'Correct or remove them'
    return f'{first}; allow_unused=True lets rules match nothing' if dead else first
