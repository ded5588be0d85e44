"""Several optimizers, each for a part of the parameters."""

import copy
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from flax import traverse_util
from flax.core import FrozenDict, freeze

from t5x_pjit_recipes.errors import ConfigError, offenders
from t5x_pjit_recipes.layout.paths import SEPARATOR
from t5x_pjit_recipes.layout.slots import specs_like
from t5x_pjit_recipes.optimizer_defs import (
    Optimizer,
    OptimizerDef,
    OptimizerState,
    bind_param_axes,
    derive_logical_axes,
    needs_param_axes,
)

Path = tuple[str, ...]


class MultiOptimizer(OptimizerDef):
    """Gives each part of the parameters an optimizer of its own; parameters of no part stay as they are.

    Where each part keeps its state parameter by parameter, `param_states` is one tree like the parameters, with None
    for those of no part. Where a part is an `OptaxWrapper`, it is a tuple with one entry for each part.

    Args:
      traversals_and_optimizers: pairs of a Flax `ModelParamTraversal` and the `OptimizerDef` for what it selects.
    """

    def __init__(self, traversals_and_optimizers: Sequence[tuple[Any, OptimizerDef]]) -> None:
        self.traversals = tuple(traversal for traversal, _ in traversals_and_optimizers)
        self.sub_optimizers = tuple(sub_optimizer for _, sub_optimizer in traversals_and_optimizers)
        super().__init__([sub_optimizer.hyper_params for sub_optimizer in self.sub_optimizers])

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._identity() == self._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        return self.traversals, self.sub_optimizers

    def update_hyper_params(self, **hyper_param_overrides: Any) -> list[Any]:
        """Returns each part's hyperparameters with the overrides applied to all of them."""
        parts = hyper_param_overrides.pop('hyper_params', self.hyper_params)
        if not hyper_param_overrides:
            return parts
        pairs = zip(self.sub_optimizers, parts, strict=True)
        return [sub.update_hyper_params(hyper_params=part, **hyper_param_overrides) for sub, part in pairs]

    def uses_learning_rate(self, state: OptimizerState) -> bool:
        """Tells whether a learning rate passed to `apply_gradient` takes effect in any part."""
        if self.state_by_param:
            return any(sub_optimizer.uses_learning_rate(state) for sub_optimizer in self.sub_optimizers)
        parts = zip(self.sub_optimizers, state.param_states, strict=True)
        return any(sub.uses_learning_rate(OptimizerState(state.step, states)) for sub, states in parts)

    def init_state(self, params: Any) -> OptimizerState:
        """Makes the state for `params`; a parameter that two parts select is a ConfigError."""
        selections = [_selected(traversal, params) for traversal in self.traversals]
        _check_disjoint(selections)
        parts = zip(self.sub_optimizers, selections, strict=True)
        states = [sub_optimizer.init_state(_cut(params, paths)).param_states for sub_optimizer, paths in parts]
        return OptimizerState(jnp.zeros((), jnp.int32), self._joined(params, states))

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        """Makes one update of every part."""
        new_params, new_states = [], []
        for part, part_hyper_params in zip(self._parts(params, state), hyper_params, strict=True):
            paths, optimizer = part
            target, part_state = optimizer.optimizer_def.apply_gradient(
                part_hyper_params, optimizer.target, optimizer.state, _cut(grads, paths)
            )
            new_params.append(target)
            new_states.append(part_state.param_states)
        return _pasted(params, new_params), OptimizerState(state.step + 1, self._joined(params, new_states))

    def trained_names(self, params: Any) -> set[str]:
        """Names the parameters that belong to a part; all others stay as they are."""
        return {
            SEPARATOR.join(map(str, path)) for traversal in self.traversals for path in _selected(traversal, params)
        }

    def check_first_step(self, step: int) -> None:
        """Checks that training can start at `step`, as far as a part can tell."""
        for sub_optimizer in self.sub_optimizers:
            if hasattr(sub_optimizer, 'check_first_step'):
                sub_optimizer.check_first_step(step)

    @property
    def needs_param_axes(self) -> bool:
        """Whether any part needs the parameters' logical axes."""
        return any(map(needs_param_axes, self.sub_optimizers))

    def set_param_axes(self, param_logical_axes: Any) -> None:
        """Makes the parameters' logical axes known to the parts, in place."""
        bound = self.with_param_axes(param_logical_axes)
        self.sub_optimizers, self.hyper_params = bound.sub_optimizers, bound.hyper_params

    def with_param_axes(self, param_logical_axes: Any) -> 'MultiOptimizer':
        """Returns a definition whose parts know the parameters' logical axes."""
        bound = copy.copy(self)
        bound.sub_optimizers = tuple(
            bind_param_axes(sub, _cut(param_logical_axes, _selected(traversal, param_logical_axes)))
            for traversal, sub in zip(self.traversals, self.sub_optimizers, strict=True)
        )
        bound.hyper_params = [sub_optimizer.hyper_params for sub_optimizer in bound.sub_optimizers]
        return bound

    def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: Any) -> Optimizer:
        """Returns `optimizer` with logical axes, or None where replicated, in place of arrays."""
        axes = specs_like(optimizer.target, param_logical_axes)
        parts = self._parts(optimizer.target, optimizer.state)
        states = [derive_logical_axes(part, _cut(axes, paths)).state.param_states for paths, part in parts]
        return Optimizer(self, OptimizerState(None, self._joined(axes, states)), axes)

    @property
    def state_by_param(self) -> bool:
        """Whether `param_states` is a tree like the parameters."""
        return all(sub_optimizer.state_by_param for sub_optimizer in self.sub_optimizers)

    def _parts(self, params: Any, state: OptimizerState) -> list[tuple[Collection[Path], Optimizer]]:
        """Cuts out each part's paths, parameters and state."""
        parts = []
        for number, (traversal, sub_optimizer) in enumerate(zip(self.traversals, self.sub_optimizers, strict=True)):
            paths = _selected(traversal, params)
            states = _cut(state.param_states, paths) if self.state_by_param else state.param_states[number]
            parts.append((paths, Optimizer(sub_optimizer, OptimizerState(state.step, states), _cut(params, paths))))
        return parts

    def _joined(self, params: Any, states: Sequence[Any]) -> Any:
        """Puts the states of all parts together; `_parts` takes them apart."""
        if not self.state_by_param:
            return tuple(states)
        flat = dict.fromkeys(traverse_util.flatten_dict(params))
        for part in states:
            flat.update(traverse_util.flatten_dict(part, is_leaf=lambda path, _: path in flat))
        return traverse_util.unflatten_dict(flat)


_SELECTED = object()


def _selected(traversal: Any, params: Any) -> Collection[Path]:
    marked = traverse_util.flatten_dict(traversal.update(lambda _: _SELECTED, params))
    return {path: None for path, leaf in marked.items() if leaf is _SELECTED}.keys()


def _cut(tree: Any, paths: Collection[Path]) -> dict[str, Any]:
    """Returns the part of a tree that lies at or below `paths`, as nested dicts."""
    flat = traverse_util.flatten_dict(tree, is_leaf=lambda path, _: path in paths)
    return traverse_util.unflatten_dict({path: flat[path] for path in paths})


def _pasted(params: Any, parts: Sequence[Any]) -> Any:
    flat = traverse_util.flatten_dict(params, keep_empty_nodes=True)
    for part in parts:
        flat.update(traverse_util.flatten_dict(part))
    pasted = traverse_util.unflatten_dict(flat)
    return freeze(pasted) if isinstance(params, FrozenDict) else pasted


def _check_disjoint(selections: Sequence[Collection[Path]]) -> None:
    owners: dict[Path, list[int]] = {}
    for number, paths in enumerate(selections):
        for path in paths:
            owners.setdefault(path, []).append(number)
    doubled = [
        f'{SEPARATOR.join(map(str, path))}: parts {numbers}' for path, numbers in owners.items() if len(numbers) > 1
    ]
    if doubled:
        raise ConfigError(
            f'Cannot divide {len(owners)} parameters among {len(selections)} optimizers: '
            f'more than one part selects {len(doubled)} of them. Narrow the traversals:\n{offenders(doubled)}'
        )
