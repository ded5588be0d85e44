"""What every optimizer is: a definition without arrays, and the same with its parameters and its state."""

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax.numpy as jnp
from flax import serialization, traverse_util

from t5x_pjit_recipes.errors import StateError
from t5x_pjit_recipes.state_utils import restore_like


@flax.struct.dataclass
class OptimizerState:
    """How many updates were made (int32), and what the optimizer keeps besides."""

    step: Any
    param_states: Any


class OptimizerDef:
    """The recipe of an optimizer; holds no arrays, and compares and hashes by its meaning."""

    # Whether `param_states` is a tree like the parameters, with one node for each of them.
    state_by_param = True

    def __init__(self, hyper_params: Any) -> None:
        self.hyper_params = hyper_params

    def init_state(self, params: Any) -> OptimizerState:
        """Makes the state for `params` before the first update."""
        raise NotImplementedError

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        """Makes one update; returns the new parameters and the new state."""
        raise NotImplementedError

    def update_hyper_params(self, **hyper_param_overrides: Any) -> Any:
        """Returns the hyperparameters with some of them replaced."""
        hyper_params = hyper_param_overrides.pop('hyper_params', self.hyper_params)
        return hyper_params.replace(**hyper_param_overrides) if hyper_param_overrides else hyper_params

    def uses_learning_rate(self, state: OptimizerState) -> bool:
        """Tells whether a learning rate passed to `apply_gradient` takes effect."""
        del state
        return True

    def create(self, target: Any) -> 'Optimizer':
        """Makes an optimizer for the parameters `target`."""
        return Optimizer(self, self.init_state(target), target)

    def state_dict(self, target: Any, state: OptimizerState) -> dict[str, Any]:
        """Returns parameters and state as nested dicts, under 'target' and 'state'; empty dicts vanish."""
        return traverse_util.unflatten_dict(
            traverse_util.flatten_dict(serialization.to_state_dict({'target': target, 'state': state}))
        )

    def restore_state(
        self, opt_target: Any, opt_state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[Any, OptimizerState]:
        """Puts a state dict's leaves into copies of parameters and state; see `state_utils.restore_like`."""
        reference = {'target': opt_target, 'state': opt_state}
        restored = restore_like(reference, {key: state_dict[key] for key in reference if key in state_dict})
        state = restored['state']
        return restored['target'], state.replace(step=canonical_step(state.step))


def canonical_step(step: Any) -> Any:
    """Makes a Python integer an int32 array, and leaves anything else as it is.

    >>> canonical_step(3).dtype, canonical_step(None)
    (dtype('int32'), None)
    """
    return jnp.asarray(step, jnp.int32) if isinstance(step, int) else step


class Optimizer(flax.struct.PyTreeNode):
    """An optimizer's recipe with the parameters (`target`) and the state that it works on."""

    optimizer_def: OptimizerDef = flax.struct.field(pytree_node=False)
    state: OptimizerState
    target: Any

    def apply_gradient(self, grads: Any, **hyper_param_overrides: Any) -> 'Optimizer':
        """Returns the optimizer after one update with `grads`, which is a tree like `target`."""
        hyper_params = self.optimizer_def.update_hyper_params(**hyper_param_overrides)
        target, state = self.optimizer_def.apply_gradient(hyper_params, self.target, self.state, grads)
        return self.replace(target=target, state=state)

    def state_dict(self) -> dict[str, Any]:
        """Returns parameters and state as nested dicts, under 'target' and 'state'."""
        return self.optimizer_def.state_dict(self.target, self.state)

    def restore_state(self, state_dict: Mapping[str, Any]) -> 'Optimizer':
        """Returns the optimizer with the leaves of a state dict."""
        target, state = self.optimizer_def.restore_state(self.target, self.state, state_dict)
        return self.replace(target=target, state=state)


def derive_logical_axes(optimizer: Optimizer, param_logical_axes: Any) -> Optimizer:
    """Returns the optimizer with logical axes, or None where replicated, in place of arrays.

    Raises:
      StateError: if the optimizer's definition cannot tell the axes of its state.
    """
    if not hasattr(optimizer.optimizer_def, 'derive_logical_axes'):
        name = type(optimizer.optimizer_def).__name__
        raise StateError(
            f'Cannot lay out the state of {name}: it has no method derive_logical_axes. Give {name} the method '
            'derive_logical_axes(optimizer, param_logical_axes), or use OptaxWrapper, Adafactor or MultiOptimizer.'
        )
    return optimizer.optimizer_def.derive_logical_axes(optimizer, param_logical_axes)


def bind_param_axes(optimizer_def: OptimizerDef, param_logical_axes: Any) -> OptimizerDef:
    """Returns a definition that knows the parameters' axes, without changing one that another state may share.

    A foreign definition that has `set_param_axes` alone is changed in place, as it has no other way.
    """
    if hasattr(optimizer_def, 'with_param_axes'):
        return optimizer_def.with_param_axes(param_logical_axes)
    if hasattr(optimizer_def, 'set_param_axes'):
        optimizer_def.set_param_axes(param_logical_axes)
    return optimizer_def


def needs_param_axes(optimizer_def: OptimizerDef) -> bool:
    """Tells whether the definition cannot make its state without the parameters' logical axes."""
    return getattr(optimizer_def, 'needs_param_axes', hasattr(optimizer_def, 'set_param_axes'))
