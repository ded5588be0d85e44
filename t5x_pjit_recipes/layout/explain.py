"""Why a leaf got its spec: the rules that were tried, the one that decided, and what kept the others from it."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.sharding import PartitionSpec

from t5x_pjit_recipes.errors import PlanError, near_misses
from t5x_pjit_recipes.layout.axes import AxisNames, axis_names, is_axes_leaf, spec_axes
from t5x_pjit_recipes.layout.logical_rules import DECIDES, Attempt, LogicalRules
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.layout.patterns import is_scalar
from t5x_pjit_recipes.layout.plan import Plan, Row, format_bytes, spec_text
from t5x_pjit_recipes.layout.regex_rules import RegexRules

NO_MATCH = 'no match'


@dataclasses.dataclass(frozen=True)
class Derivation:
    """The rules that made a plan's specs: where a leaf has axes of its own these, else the patterns, name its dims.

    Attributes:
      logical_rules: turn logical axes into mesh axes.
      axes: a tree of logical axes, in any spelling; None where a leaf has none of its own.
      regex_rules: give the other leaves a spec, or logical axes.

    >>> rules = LogicalRules([('embed', None), ('mlp', 'model')])
    >>> Derivation(rules, axes={'w': ('embed', 'mlp')}).reasons({'w': 0})
    {'w': 'embed: rule 1, mlp: rule 2'}
    """

    logical_rules: LogicalRules | None = None
    axes: Any = None
    regex_rules: RegexRules | None = None

    def reasons(self, shapes: Any) -> dict[str, str]:
        """Maps each leaf's name to what decided its spec."""
        own = {name: axes for name, axes in self._own_axes().items() if axes is not None}
        by_pattern = {} if self.regex_rules is None else self.regex_rules.reasons(shapes, self.logical_rules)
        by_name = {} if self.logical_rules is None else self.logical_rules.reasons(own)
        return {name: by_name.get(name, by_pattern.get(name, '')) for name in named_leaves(shapes)}

    def own_axes(self, name: str) -> AxisNames | None:
        """Returns the logical axes that a leaf has of its own."""
        names = axis_names(self._own_axes().get(name))
        return None if names is None else AxisNames(*names)

    def _own_axes(self) -> dict[str, Any]:
        return {} if self.axes is None else named_leaves(self.axes, is_leaf=is_axes_leaf)


@dataclasses.dataclass(frozen=True)
class Dim:
    """How one dim of a leaf got its entry: its size, its logical axis, its mesh axes, and the rules for that axis."""

    size: int
    logical_axis: str | None
    mesh_axes: tuple[str, ...]
    ways: int
    attempts: tuple[Attempt, ...] = ()


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a leaf got its spec; `str` of it is made to be read.

    Attributes:
      row: the leaf, as the plan has it.
      source: what named its dims, or gave it its spec.
      patterns: what became of each rule by pattern.
      dims: how each dim got its entry.
      faults: what keeps the spec from being applied.
    """

    row: Row
    source: str
    patterns: tuple[Attempt, ...]
    dims: tuple[Dim, ...]
    faults: tuple[str, ...]

    def __str__(self) -> str:
        return '\n'.join(self._lines())

    def _lines(self) -> Iterator[str]:
        row = self.row
        held, whole = format_bytes(row.bytes_per_device), format_bytes(row.num_bytes)
        yield f'{row.name} {row.shape} {row.dtype}: spec {spec_text(row.spec)}, {held} of {whole} on each device'
        yield self.source
        tried = [attempt for attempt in self.patterns if attempt.outcome != NO_MATCH]
        yield from (f'  {_rule_text(attempt)}' for attempt in tried)
        if others := [str(attempt.number) for attempt in self.patterns if attempt.outcome == NO_MATCH]:
            yield f'  no match: rule{"s" if len(others) > 1 else ""} {", ".join(others)}'
        for number, dim in enumerate(self.dims):
            yield from _dim_lines(number, dim)
        yield from (f'fault: {fault}' for fault in self.faults)


def explain(name: str, plan: Plan) -> Explanation:
    """Tells why a leaf got its spec, dim by dim.

    Args:
      name: the leaf's name, as the plan's table spells it.
      plan: the plan; made with `rules=`, it knows what decided.

    Raises:
      PlanError: if the plan has no such leaf.

    >>> from t5x_pjit_recipes.layout.meshes import abstract_mesh
    >>> import numpy as np
    >>> rules = RegexRules([('mlp/.*', PartitionSpec(None, 'model')), ('.*', PartitionSpec())])
    >>> params = {'mlp': {'w': np.ones((4, 8), np.float32)}, 'b': np.ones(8, np.float32)}
    >>> plan = Plan(params, rules.specs(params), abstract_mesh(data=4, model=2), rules=rules)
    >>> print(explain('mlp/w', plan))
    mlp/w (4, 8) float32: spec (None, 'model'), 64 B of 128 B on each device
    patterns, of the whole name:
      rule 1 'mlp/.*' -> PartitionSpec(None, 'model'): decides
      rule 2 '.*' -> PartitionSpec(): shadowed by rule 1
    dim 0 of 4: not divided
    dim 1 of 8: divided 2 ways, by 'model'
    """
    row = next((row for row in plan.rows if row.name == name), None)
    if row is None:
        near = near_misses(name, [row.name for row in plan.rows])
        raise PlanError(
            f'Cannot explain {name!r}: the plan has {len(plan.rows)} arrays, none of this name. '
            f'{"Did you mean " + " or ".join(map(repr, near)) + "?" if near else "Take a name from its table."}'
        )
    derivation = _derivation(plan.rules)
    source, patterns, axes = _source(row, derivation)
    attempts = () if axes is None or derivation.logical_rules is None else derivation.logical_rules.attempts(axes)
    faults = [fault for fault in plan.faults if fault.startswith(f'{name} {row.shape}: ')]
    return Explanation(row, source, patterns, _dims(row, axes, attempts, dict(plan.mesh.shape)), tuple(faults))


def _derivation(rules: Any) -> Derivation:
    if isinstance(rules, Derivation):
        return rules
    return Derivation(regex_rules=rules if isinstance(rules, RegexRules) else None)


_SPANS = {'fullmatch': 'of the whole name', 'search': 'of a part of the name', 'windows': 'of neighbouring components'}


def _source(row: Row, derivation: Derivation) -> tuple[str, tuple[Attempt, ...], AxisNames | None]:
    """Says what the leaf's dims were named by, with the patterns that were tried and the names."""
    rules, own = derivation.regex_rules, derivation.own_axes(row.name)
    if own is not None:
        return f'logical axes of its own: {tuple(own)}', (), own
    if rules is None:
        known = f'decided by: {row.rule}' if row.rule else 'the plan does not know its rules (Plan(..., rules=...))'
        return known, (), None
    number, matching = rules.deciding(row.name), rules.matching(row.name)
    attempts = tuple(Attempt(n, rule, _outcome(n, number, matching)) for n, rule in enumerate(rules.rules, 1))
    target = None if number is None or is_scalar(row.shape) else rules.rules[number - 1][1]
    source = f'patterns, {_SPANS[rules.dialect]}:'
    if is_scalar(row.shape):
        source = f'a scalar, replicated whatever rules say; {source}'
    return source, attempts, target if isinstance(target, AxisNames) else None


def _outcome(number: int, deciding: int | None, matching: tuple[int, ...]) -> str:
    if number not in matching:
        return NO_MATCH
    return DECIDES if number == deciding else f'shadowed by rule {deciding}'


def _dims(row: Row, axes: Any, attempts: Any, sizes: dict[str, int]) -> tuple[Dim, ...]:
    entries = [*row.spec, *[None] * len(row.shape)]
    dims = []
    for number, (size, entry) in enumerate(zip(row.shape, entries, strict=False)):
        mesh_axes, ways = spec_axes(entry), 1
        for axis in mesh_axes:
            ways *= sizes.get(axis, 1)
        name = axes[number] if axes and number < len(axes) else None
        dims.append(Dim(size, name, mesh_axes, ways, attempts[number] if number < len(attempts) else ()))
    return tuple(dims)


def _dim_lines(number: int, dim: Dim) -> Iterator[str]:
    name = '' if dim.logical_axis is None else f', {dim.logical_axis!r}'
    by = ' and '.join(map(repr, dim.mesh_axes))
    yield f'dim {number} of {dim.size}{name}: ' + (f'divided {dim.ways} ways, by {by}' if by else 'not divided')
    if dim.logical_axis is not None and not dim.attempts:
        yield f'  no rule has the name {dim.logical_axis!r}'
    for attempt in dim.attempts:
        yield f'  rule {attempt.number} {attempt.rule}: {attempt.outcome}'


def _rule_text(attempt: Attempt) -> str:
    pattern, target = attempt.rule
    kind = '' if isinstance(target, AxisNames) else 'PartitionSpec'
    return f'rule {attempt.number} {pattern!r} -> {kind}{target_text(target)}: {attempt.outcome}'


def target_text(target: Any) -> str:
    """Spells what a rule leads to as a tuple; the same on every version of JAX."""
    return spec_text(PartitionSpec(*target))
