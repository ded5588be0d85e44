"""Train states: step, parameters, optimizer state and Flax mutables as one pytree.

A state knows the logical axes of its parameters, so `as_logical_axes` can say how all of it lies on a mesh.
"""

from collections.abc import Mapping
from typing import Any

import flax.core
import flax.struct
import jax.numpy as jnp
from flax import serialization
from flax.core import FrozenDict
from flax.core.scope import FrozenVariableDict, MutableVariableDict, VariableDict
from typing_extensions import Protocol, runtime_checkable

from t5x_pjit_recipes.errors import StateError
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.layout.slot_report import describe_slots
from t5x_pjit_recipes.optimizer_defs import (
    Optimizer,
    OptimizerDef,
    bind_param_axes,
    canonical_step,
    derive_logical_axes,
    needs_param_axes,
)
from t5x_pjit_recipes.param_axes import AXES_REMEDY, mutables_names, names_like, params_names, split_variables
from t5x_pjit_recipes.state_utils import restore_like

__all__ = [
    'EMPTY_DICT',
    'FlaxOptimTrainState',
    'FrozenDict',
    'FrozenVariableDict',
    'InferenceState',
    'MutableVariableDict',
    'TrainState',
    'VariableDict',
]

EMPTY_DICT: FrozenDict = flax.core.freeze({})


@runtime_checkable
class TrainState(Protocol):
    """What trainers, partitioners and checkpoints ask of a train state. States are never changed in place."""

    @property
    def step(self) -> Any:
        """How many updates were made (int32)."""
        ...

    @property
    def params(self) -> FrozenVariableDict:
        """The parameters."""
        ...

    @property
    def param_states(self) -> FrozenVariableDict:
        """What the optimizer keeps besides the step."""
        ...

    @property
    def flax_mutables(self) -> FrozenVariableDict:
        """The model's other variable collections."""
        ...

    def state_dict(self) -> MutableVariableDict:
        """Returns the state as nested dicts, under 'target', 'state' and, if there are any, 'flax_mutables'."""
        ...

    def restore_state(self, state_dict: Mapping[str, Any]) -> 'TrainState':
        """Returns the state with the leaves of a state dict."""
        ...

    def replace_params(self, params: VariableDict) -> 'TrainState':
        """Returns the state with other parameters."""
        ...

    def replace_flax_mutables(self, flax_mutables: FrozenDict) -> 'TrainState':
        """Returns the state with other mutables."""
        ...

    def replace_step(self, step: Any) -> 'TrainState':
        """Returns the state at another step."""
        ...

    def apply_gradient(self, grads: Any, learning_rate: Any, flax_mutables: FrozenDict = EMPTY_DICT) -> 'TrainState':
        """Returns the state after one update."""
        ...

    def as_logical_axes(self) -> 'TrainState':
        """Returns the state with logical axes, or None where replicated, in place of arrays."""
        ...


class FlaxOptimTrainState(flax.struct.PyTreeNode):
    """The state of a model in training."""

    _optimizer: Optimizer
    params_axes: FrozenDict | None = None
    flax_mutables: FrozenDict = EMPTY_DICT
    flax_mutables_axes: FrozenDict | None = None

    @classmethod
    def create(cls, optimizer_def: OptimizerDef, model_variables: Mapping[str, Any]) -> 'FlaxOptimTrainState':
        """Makes the state before the first step.

        Args:
          optimizer_def: the optimizer; it is not changed, and may serve other states as well.
          model_variables: what `init` of a Flax module returns: 'params', 'params_axes' if the parameters are
            annotated, and other collections, each with its own `<name>_axes` or without.

        Raises:
          StateError: naming each parameter that has no axes, or not one for each dim.
        """
        params, params_axes, mutables, mutables_axes = split_variables(model_variables)
        if params_axes is not None:
            optimizer_def = bind_param_axes(optimizer_def, names_like(params, params_axes))
        elif needs_param_axes(optimizer_def):
            raise StateError(
                f'Cannot bind {type(optimizer_def).__name__} to {len(named_leaves(params))} parameters: '
                f'its factor rules need their logical axes, and there are none. {AXES_REMEDY}'
            )
        return cls(
            optimizer_def.create(params),
            params_axes=params_axes,
            flax_mutables=mutables,
            flax_mutables_axes=mutables_axes or None,
        )

    @property
    def step(self) -> Any:
        """How many updates were made (int32)."""
        return self._optimizer.state.step

    @property
    def params(self) -> FrozenVariableDict:
        """The parameters."""
        return self._optimizer.target

    @property
    def param_states(self) -> FrozenVariableDict:
        """What the optimizer keeps besides the step."""
        return self._optimizer.state.param_states

    def state_dict(self) -> MutableVariableDict:
        """Returns the state as nested dicts, under 'target', 'state' and, if there are any, 'flax_mutables'."""
        return {**self._optimizer.state_dict(), **_mutables_dict(self.flax_mutables)}

    def apply_gradient(
        self, grads: Any, learning_rate: Any, flax_mutables: Mapping[str, Any] = EMPTY_DICT
    ) -> 'FlaxOptimTrainState':
        """Returns the state after one update.

        Args:
          grads: gradients, a tree like the parameters.
          learning_rate: step size; see the optimizer's `uses_learning_rate`.
          flax_mutables: new values of mutable collections; collections that are not given keep theirs.
        """
        return self.replace(
            _optimizer=self._optimizer.apply_gradient(grads, learning_rate=learning_rate),
            flax_mutables=flax.core.freeze({**self.flax_mutables, **flax_mutables}),
        )

    def replace_params(self, params: VariableDict) -> 'FlaxOptimTrainState':
        """Returns the state with other parameters."""
        return self.replace(_optimizer=self._optimizer.replace(target=params))

    def replace_flax_mutables(self, flax_mutables: FrozenDict) -> 'FlaxOptimTrainState':
        """Returns the state with other mutables."""
        return self.replace(flax_mutables=flax_mutables)

    def replace_step(self, step: Any) -> 'FlaxOptimTrainState':
        """Returns the state at another step."""
        state = self._optimizer.state.replace(step=canonical_step(step))
        return self.replace(_optimizer=self._optimizer.replace(state=state))

    def restore_state(self, state_dict: Mapping[str, Any]) -> 'FlaxOptimTrainState':
        """Returns the state with the leaves of a state dict: arrays, shape structs, specs or None.

        Raises:
          StateError: naming each leaf that is absent from `state_dict` or has another shape there.
        """
        return self.replace(
            _optimizer=self._optimizer.restore_state(state_dict),
            flax_mutables=_restored_mutables(self.flax_mutables, state_dict),
        )

    def as_logical_axes(self) -> 'FlaxOptimTrainState':
        """Returns the state with logical axes, or None where replicated, in place of arrays.

        Raises:
          StateError: if the parameters have no logical axes, or the optimizer cannot tell those of its state.
        """
        return FlaxOptimTrainState(
            derive_logical_axes(self._optimizer, params_names(self.params, self.params_axes)),
            flax_mutables=mutables_names(self.flax_mutables, self.flax_mutables_axes),
        )

    def describe(self) -> str:
        """Says how the optimizer's state lies beside the parameters: how many slots as theirs, and what is replicated.

        Raises:
          StateError: as `as_logical_axes`.
        """
        axes = self.as_logical_axes()
        return describe_slots(self.param_states, axes.param_states, self.params, axes.params)


class InferenceState(flax.struct.PyTreeNode):
    """The state of a model that is not trained: parameters and mutables at a step."""

    step: Any
    params: FrozenVariableDict
    params_axes: FrozenDict | None = None
    flax_mutables: FrozenDict = EMPTY_DICT
    flax_mutables_axes: FrozenDict | None = None

    @classmethod
    def create(cls, model_variables: Mapping[str, Any]) -> 'InferenceState':
        """Makes the state at step 0; see `FlaxOptimTrainState.create`."""
        params, params_axes, mutables, mutables_axes = split_variables(model_variables)
        return cls(jnp.zeros((), jnp.int32), params, params_axes, mutables, mutables_axes or None)

    @property
    def param_states(self) -> FrozenVariableDict:
        """Raises NotImplementedError: nothing is trained here."""
        raise NotImplementedError('InferenceState has no optimizer. Use FlaxOptimTrainState to train.')

    def apply_gradient(self, *args: Any, **kwargs: Any) -> 'InferenceState':
        """Raises NotImplementedError: nothing is trained here."""
        raise NotImplementedError('InferenceState has no optimizer. Use FlaxOptimTrainState to train.')

    def state_dict(self) -> MutableVariableDict:
        """Returns the state as nested dicts, under 'target', 'state' and, if there are any, 'flax_mutables'."""
        state_dict = {'target': serialization.to_state_dict(self.params), 'state': {'step': self.step}}
        return {**state_dict, **_mutables_dict(self.flax_mutables)}

    def replace_params(self, params: VariableDict) -> 'InferenceState':
        """Returns the state with other parameters."""
        return self.replace(params=params)

    def replace_flax_mutables(self, flax_mutables: FrozenDict) -> 'InferenceState':
        """Returns the state with other mutables."""
        return self.replace(flax_mutables=flax_mutables)

    def replace_step(self, step: Any) -> 'InferenceState':
        """Returns the state at another step."""
        return self.replace(step=canonical_step(step))

    def restore_state(self, state_dict: Mapping[str, Any]) -> 'InferenceState':
        """Returns the state with the leaves of a state dict, that of a state in training included.

        Raises:
          StateError: naming each leaf that is absent from `state_dict` or has another shape there.
        """
        reference = {'target': self.params, 'state': {'step': self.step}}
        given = {'target': state_dict['target'], 'state': {'step': state_dict['state']['step']}}
        # A state without parameters, as projects make for loading, takes what it is given.
        restored = restore_like(reference, given) if self.params else given
        return self.replace(
            step=canonical_step(restored['state']['step']),
            params=flax.core.freeze(restored['target']),
            flax_mutables=_restored_mutables(self.flax_mutables, state_dict),
        )

    def as_logical_axes(self) -> 'InferenceState':
        """Returns the state with logical axes, or None where replicated, in place of arrays.

        Raises:
          StateError: if the parameters have no logical axes.
        """
        return InferenceState(
            step=None,
            params=params_names(self.params, self.params_axes),
            flax_mutables=mutables_names(self.flax_mutables, self.flax_mutables_axes),
        )


def _mutables_dict(mutables: Any) -> dict[str, Any]:
    return {'flax_mutables': flax.core.unfreeze(mutables)} if mutables else {}


def _restored_mutables(mutables: FrozenDict, state_dict: Mapping[str, Any]) -> FrozenDict:
    """Returns the mutables of a state dict; collections that the state did not have are taken as they are."""
    given = state_dict.get('flax_mutables', {})
    known = {name: given[name] for name in given if name in mutables}
    restored = restore_like({'flax_mutables': mutables}, {'flax_mutables': known})
    return flax.core.freeze({**flax.core.unfreeze(given), **flax.core.unfreeze(restored['flax_mutables'])})
