"""Ordered rules from logical axis names to mesh axes, with Flax Linen's meaning.

Rules are tried in order. A rule takes a dim whose name it has, unless the dim is taken already or one of the rule's
mesh axes is used in this array; a rule that maps to None takes the dim too, and leaves it unsharded.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from t5x_pjit_recipes.errors import RuleError, did_you_mean, offenders
from t5x_pjit_recipes.layout.axes import axis_names, is_axes_leaf, spec_axes
from t5x_pjit_recipes.layout.paths import named_leaves

Rule = tuple[str, Any]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What became of one rule at one leaf or dim.

    Attributes:
      number: the rule's number, counted from 1.
      rule: the rule.
      outcome: 'decides', or why it does not.
    """

    number: int
    rule: tuple[Any, Any]
    outcome: str

    @property
    def decides(self) -> bool:
        """Whether this is the rule that decided."""
        return self.outcome == DECIDES


DECIDES = 'decides'


class LogicalRules:
    """Ordered (logical axis name, mesh axis) pairs; a mesh axis may be None or a tuple of several.

    >>> rules = LogicalRules([('batch', 'data'), ('embed', None), ('mlp', 'model')])
    >>> tuple(rules.spec(('embed', 'mlp')))
    (None, 'model')
    """

    def __init__(self, rules: Iterable[Rule]):
        self.rules: tuple[Rule, ...] = tuple(_checked(i, rule) for i, rule in enumerate(rules, 1))
        self._assign = functools.cache(self._assign_uncached)

    def __repr__(self) -> str:
        return f'LogicalRules({list(self.rules)})'

    @property
    def names(self) -> tuple[str, ...]:
        """The logical axis names that have a rule, each once, in order."""
        return tuple(dict.fromkeys(name for name, _ in self.rules))

    def spec(self, names: Any) -> PartitionSpec | None:
        """Returns one array's spec, of full rank, from its logical names in any spelling; None for None.

        Raises:
          RuleError: if one name stands for two dims.
        """
        names = axis_names(names)
        return None if names is None else PartitionSpec(*self._assign(names)[0])

    def deciding(self, names: Any) -> tuple[int | None, ...]:
        """Returns for each dim the number of the rule that decided it, counted from 1, or None."""
        names = axis_names(names)
        return () if names is None else self._assign(names)[1]

    def attempts(self, names: Any) -> tuple[tuple[Attempt, ...], ...]:
        """Returns for each dim of an array the rules that have its name, in order, and what became of each."""
        names = axis_names(names)
        return () if names is None else self._assign(names)[2]

    def specs(self, axes: Any) -> Any:
        """Returns a tree of specs like `axes`, a tree of logical names in any spelling.

        Raises:
          RuleError: naming every leaf in which one name stands for two dims.
        """
        self.check_names(axes)
        return jax.tree.map(self.spec, axes, is_leaf=is_axes_leaf)

    def check_names(self, axes: Any) -> None:
        """Raises RuleError naming every leaf in which one name stands for two dims."""
        if not any(map(_doubled, _distinct(axes))):
            return
        doubled = [
            f'{leaf}: {names} has {", ".join(twice)} more than once'
            for leaf, given in named_leaves(axes, is_leaf=is_axes_leaf).items()
            if (names := axis_names(given)) is not None and (twice := _doubled(names))
        ]
        if doubled:
            raise RuleError(
                f'Cannot derive specs for {len(doubled)} leaves: a logical axis name stands for two dims. Give each '
                f'dim of an array a name of its own:\n{offenders(doubled)}'
            )

    def reasons(self, axes: Any) -> dict[str, str]:
        """Maps each leaf's name to the rules that decided its dims, for the plan's table."""
        leaves = named_leaves(axes, is_leaf=is_axes_leaf)
        return {leaf: self._reason(axis_names(names)) for leaf, names in leaves.items()}

    def unknown(self, axes: Any) -> dict[str, tuple[str, ...]]:
        """Maps each leaf that has names without a rule to those names."""
        known = {*self.names, None}
        if all(known.issuperset(names) for names in _distinct(axes)):
            return {}
        found = {
            leaf: tuple(n for n in axis_names(given) or () if isinstance(n, str) and n not in known)
            for leaf, given in named_leaves(axes, is_leaf=is_axes_leaf).items()
        }
        return {leaf: names for leaf, names in found.items() if names}

    def describe_unknown(self, axes: Any) -> str:
        """Lists the leaves that have names without a rule, with near misses; empty where there are none."""
        lines = [
            f'{leaf}: {", ".join(f"{n!r}{self._offer(n)}" for n in names)}'
            for leaf, names in self.unknown(axes).items()
        ]
        if not lines:
            return ''
        return (
            f'Cannot find rules for the logical axis names of {len(lines)} arrays: those dims are replicated. Add '
            f'a rule for each name, or (name, None) to say that it is meant:\n{offenders(lines)}'
        )

    def _offer(self, name: str) -> str:
        if any(name in spec_axes(target) for _, target in self.rules):
            return f' (a mesh axis; PartitionSpec({name!r}, ...) names those)'
        return did_you_mean(name, self.names)

    def check_mesh(self, mesh_axes: Iterable[str]) -> None:
        """Raises RuleError for rules that name axes the mesh does not have, all at once."""
        known = tuple(mesh_axes)
        lines = [
            f'rule {i} ({name!r}, {target!r}): no mesh axis {axis!r}{did_you_mean(axis, known)}'
            for i, (name, target) in enumerate(self.rules, 1)
            for axis in spec_axes(target)
            if axis not in known
        ]
        if lines:
            raise RuleError(
                f'Cannot use {len(lines)} rules on a mesh with axes {known}: they name axes that it does not have. '
                f'Change the rules or the mesh:\n{offenders(lines)}'
            )

    def _reason(self, names: tuple[Any, ...] | None) -> str:
        if names is None:
            return 'no names'
        decided = zip(names, self._assign(names)[1], strict=True)
        return ', '.join('-' if name is None else f'{name}: {self._verdict(name, number)}' for name, number in decided)

    def _verdict(self, name: Any, number: int | None) -> str:
        if number is not None:
            return f'rule {number}'
        return 'mesh axis taken' if name in self.names else 'no rule'

    def _assign_uncached(self, names: tuple[Any, ...]) -> tuple[Any, ...]:
        if doubled := _doubled(names):
            raise RuleError(
                f'Cannot derive a spec for {names}: {", ".join(doubled)} stands for two dims. Give each dim a name of '
                'its own.'
            )
        entries: list[Any] = [None] * len(names)
        deciding: list[int | None] = [None] * len(names)
        attempts: list[list[Attempt]] = [[] for _ in names]
        used: dict[str, int] = {}
        for number, (name, target) in enumerate(self.rules, 1):
            if name not in names:
                continue
            dim = names.index(name)
            outcome = _outcome(deciding[dim], {axis: used[axis] for axis in spec_axes(target) if axis in used})
            attempts[dim].append(Attempt(number, (name, target), outcome))
            if outcome == DECIDES:
                entries[dim], deciding[dim] = target, number
                used |= dict.fromkeys(spec_axes(target), number)
        return tuple(entries), tuple(deciding), tuple(map(tuple, attempts))


def _outcome(decided_by: int | None, taken: dict[str, int]) -> str:
    if decided_by is not None:
        return f'shadowed by rule {decided_by}'
    if taken:
        return ' and '.join(f'mesh axis {axis!r} is taken by rule {number}' for axis, number in taken.items())
    return DECIDES


def _checked(number: int, rule: Any) -> Rule:
    if not isinstance(rule, tuple | list) or len(rule) != 2 or not isinstance(rule[0], str):
        raise RuleError(
            f'Cannot read rule {number}, {rule!r}: it is not a pair of a logical axis name and a mesh axis. '
            "Write ('embed', 'model'), ('embed', None) or ('batch', ('replica', 'data'))."
        )
    name, target = rule
    if isinstance(target, list):
        target = tuple(target)
    if target == 'None' or not all(isinstance(axis, str) for axis in spec_axes(target)):
        raise RuleError(f'Cannot read rule {number}, {rule!r}: {target!r} is not a mesh axis. Write a name, or None.')
    return (name, target)


def _distinct(axes: Any) -> set[tuple[Any, ...]]:
    """Returns the different names there are in a tree: a few, however many leaves have them."""
    return {axis_names(leaf) or () for leaf in jax.tree.leaves(axes, is_leaf=is_axes_leaf)}


def _doubled(names: tuple[Any, ...]) -> list[str]:
    strings = [n for n in names if isinstance(n, str)]
    return [repr(n) for n in dict.fromkeys(strings) if strings.count(n) > 1]
