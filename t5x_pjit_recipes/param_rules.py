"""Train states laid out by patterns on parameter names: for models whose parameters have no axis names, or not all.

A parameter's own axis names come first; the rules lay out those that have none. The optimizer's slots follow their
parameters either way, since each optimizer says itself which slot has whose axes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from t5x_pjit_recipes.errors import RuleError, StateError, offenders
from t5x_pjit_recipes.layout.axes import AxisMetadata, AxisNames, axis_names, canonical
from t5x_pjit_recipes.layout.explain import target_text
from t5x_pjit_recipes.layout.logical_rules import LogicalRules
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.layout.patterns import is_scalar
from t5x_pjit_recipes.layout.regex_rules import RegexRules
from t5x_pjit_recipes.param_axes import axes_lookup

ParamRules = RegexRules | Sequence[tuple[Any, Any]]


class StandIns:
    """Names that stand for specs in a state's logical axes, so that slots can be laid out by their parameter's dims."""

    def __init__(self) -> None:
        self._specs: dict[tuple[str, ...], PartitionSpec] = {}
        self._entries: dict[str, Any] = {}

    def add(self, name: str, rank: int, spec: PartitionSpec) -> tuple[str, ...]:
        """Makes names for the dims of a parameter that lies by `spec`."""
        names = tuple(f'{name} dim {dim}' for dim in range(rank))
        self._specs[names] = spec
        self._entries |= zip(names, [*spec, *[None] * rank], strict=False)
        return names

    def spec(self, names: tuple[Any, ...] | None) -> PartitionSpec | None:
        """Returns the spec that names of a parameter, or of some of its dims, stand for; None if they are names."""
        if names in self._specs:
            return self._specs[names]
        if names and not self._entries.keys().isdisjoint(names):
            return PartitionSpec(*map(self._entries.get, names))
        return None


def read_param_rules(rules: ParamRules | None) -> RegexRules | None:
    """Reads what `PjitPartitioner` takes as `param_rules`: rules, or a list of pairs with full match."""
    return rules if rules is None or isinstance(rules, RegexRules) else RegexRules(rules)


def own_axes(train_state: Any) -> dict[str, Any]:
    """Maps the names of a state's parameters to their own logical axes, None where they have none.

    Raises:
      StateError: if the state is of a kind that keeps no axes.
    """
    if not hasattr(train_state, 'params_axes') or not hasattr(train_state, 'replace'):
        raise StateError(
            f'Cannot lay out a {type(train_state).__name__} by param_rules: it lacks the field params_axes, or the '
            'method replace. Use FlaxOptimTrainState or InferenceState, or a partitioner without param_rules.'
        )
    known = axes_lookup(train_state.params_axes or {})
    return {name: axis_names(known.get(name)) for name in named_leaves(train_state.params)}


def complete_axes(train_state: Any, rules: RegexRules, logical_rules: LogicalRules) -> tuple[Any, StandIns]:
    """Gives each parameter axis names: its own, or those that the rules give it, or stand-ins for a spec of theirs.

    Returns:
      The state with all axes, and what the stand-ins stand for. A slot has the names of its parameter, so a stand-in
      tells whose spec it wants.

    Raises:
      RuleError: if a parameter has neither axes nor a rule, if a rule matches nothing, or listing the parameters whose
        own axes and rule do not agree.
    """
    own = own_axes(train_state)
    known = {name: names for name, names in own.items() if names is not None}
    params = named_leaves(train_state.params)
    targets = rules.targets(params, known=known)
    _check_agreement(params, known, targets, rules, logical_rules)
    axes, stand_ins = {}, StandIns()
    for name, target in targets.items():
        names = known.get(name, tuple(target))
        if name not in known and isinstance(target, PartitionSpec):
            names = stand_ins.add(name, np.ndim(params[name]), target)
        axes[name] = AxisMetadata(names=names)
    return train_state.replace(params_axes=axes), stand_ins


def _check_agreement(
    params: Mapping[str, Any],
    known: Mapping[str, Any],
    targets: Mapping[str, Any],
    rules: RegexRules,
    logical_rules: LogicalRules,
) -> None:
    faults = []
    for name, names in known.items():
        number, target = rules.deciding(name), targets[name]
        if number is None or is_scalar(np.shape(params[name])):
            continue
        ours = logical_rules.spec(names)
        theirs = logical_rules.spec(target) if isinstance(target, AxisNames) else target
        if canonical(ours) != canonical(theirs):
            faults.append(
                f'{name} {np.shape(params[name])}: the model says {names}, which is {target_text(ours)}; rule {number} '
                f'{rules.patterns[number - 1]!r} says {target_text(target)}, which is {target_text(theirs)}'
            )
    if faults:
        raise RuleError(
            f'Cannot lay out {len(faults)} of {len(params)} parameters: their own axis names and the param_rules '
            f'contradict each other. Narrow the patterns, or take the names away:\n{offenders(faults)}'
        )
