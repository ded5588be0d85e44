"""Optimizers: what turns gradients into new parameters, and how its state lies on the mesh.

Any optax transformation becomes an `OptimizerDef` by `OptaxWrapper`. All aliases of optax and all of `optax.contrib`
are here under their own names; only optax's Adafactor, which is not T5X's, is here as `optax_adafactor`. T5X's `amos`
is left out, as the library that has it (jestimator) does not run on current JAX.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from t5x_pjit_recipes.errors import ConfigError, warn
from t5x_pjit_recipes.layout.axes import axis_names, is_axes_leaf
from t5x_pjit_recipes.layout.slots import slot_specs, specs_like
from t5x_pjit_recipes.multi_optimizer import MultiOptimizer
from t5x_pjit_recipes.optimizer_defs import Optimizer, OptimizerDef, OptimizerState

__all__ = [
    'MultiOptimizer',
    'OptaxStatePartitionRules',
    'OptaxWrapper',
    'Optimizer',
    'OptimizerDef',
    'OptimizerDefType',
    'OptimizerState',
    'OptimizerStateType',
    'OptimizerType',
    'adabelief',
    'adagrad',
    'adam',
    'adamw',
    'chain',
    'dpsgd',
    'fromage',
    'lamb',
    'lars',
    'lion',
    'noisy_sgd',
    'radam',
    'rmsprop',
    'sgd',
    'wrap_optax_optimizer',
    'yogi',
]

OptimizerType = Optimizer
OptimizerStateType = OptimizerState
OptimizerDefType = OptimizerDef


class OptaxStatePartitionRules:
    """Logical axes for the state of any optax transformation.

    The axes of a slot are those of its parameter's dims, which its path and its shape tell; see `layout.slot_specs`.
    `_RULES` holds the exceptions: a class of optax states, exactly, to a function of such a state and the parameters'
    axes that returns the state with axes, or None where replicated, in place of arrays.
    """

    _RULES: dict[type, Callable[[Any, Any], Any]] = {}

    @classmethod
    def derive_optax_logical_axes(
        cls, optax_state: Any, params_axes: Any, *, params: Any = None, init: Callable[[Any], Any] | None = None
    ) -> Any:
        """Returns `optax_state` with logical axes, or None where replicated, in place of arrays.

        Args:
          optax_state: the state, as arrays or shape structs.
          params_axes: the parameters' logical axes.
          params: the parameters or their shapes. Without them the number of dims stands in for the shape.
          init: the transformation's `init`, which tells apart dims of equal sizes; it is traced, not run.
        """
        if params is None:
            shapes, params, init = _ranks(optax_state, np.ndim), _ranks(params_axes, _num_axes), None
        else:
            shapes = optax_state
        specs = slot_specs(shapes, params, params_axes, init=init)

        def ruled(node: Any) -> bool:
            return type(node) in cls._RULES

        return jax.tree.map(
            lambda node, spec: cls._RULES[type(node)](node, params_axes) if ruled(node) else spec,
            optax_state,
            specs,
            is_leaf=ruled,
        )

    @classmethod
    def derive_params_axes(cls, optax_params: Any, params_axes: Any) -> Any:
        """Copies the parameters' axes, but keeps optax's `MaskedNode` where `optax_params` has one."""
        return specs_like(optax_params, params_axes)


def _ranks(tree: Any, rank: Callable[[Any], int]) -> Any:
    return jax.tree.map(lambda leaf: np.empty((0,) * rank(leaf)), tree, is_leaf=is_axes_leaf)


def _num_axes(axes: Any) -> int:
    return len(axis_names(axes) or ())


@flax.struct.dataclass
class _OptaxHyperParams:
    """The one hyperparameter that a trainer passes; see `OptaxWrapper`."""

    learning_rate: Any = None


class OptaxWrapper(OptimizerDef):
    """Makes an optax transformation an `OptimizerDef`.

    The transformation carries its own learning rate or schedule. A rate passed to `apply_gradient` takes effect where
    `optax.inject_hyperparams` exposes 'learning_rate' as a number; elsewhere it is ignored, with one warning.
    """

    state_by_param = False

    def __init__(self, optax_optimizer: optax.GradientTransformation) -> None:
        super().__init__(_OptaxHyperParams())
        self.optax_optimizer = optax_optimizer
        self._warned = False

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.optax_optimizer == self.optax_optimizer

    def __hash__(self) -> int:
        return hash((type(self), self.optax_optimizer))

    def init_state(self, params: Any) -> OptimizerState:
        """Makes the state for `params` before the first update."""
        return OptimizerState(step=jnp.zeros((), jnp.int32), param_states=self.optax_optimizer.init(params))

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        """Makes one update; warns once if it ignores `hyper_params.learning_rate`."""
        param_states = state.param_states
        if hyper_params.learning_rate is not None:
            self._warn_if_ignored(state)
            param_states = _with_learning_rate(param_states, hyper_params.learning_rate)
        updates, param_states = self._update(grads, param_states, params)
        return optax.apply_updates(params, updates), OptimizerState(state.step + 1, param_states)

    def _update(self, grads: Any, param_states: Any, params: Any) -> tuple[Any, Any]:
        try:
            return self.optax_optimizer.update(grads, param_states, params)
        except TypeError as error:
            if 'required keyword-only' not in str(error):
                raise
            wanted = ', '.join(re.findall(r"'(\w+)'", str(error)))
            raise ConfigError(
                f'Cannot update by gradients alone: this optax transformation wants {wanted} besides. Call the update '
                'of its optax_optimizer in a step of your own (get_mesh_axes lays out the state all the same), or '
                'choose another transformation.'
            ) from error

    def uses_learning_rate(self, state: OptimizerState) -> bool:
        """Tells whether a learning rate passed to `apply_gradient` takes effect, as `state`'s structure tells."""
        return any(map(_takes_learning_rate, jax.tree.leaves(state.param_states, is_leaf=_takes_learning_rate)))

    def _warn_if_ignored(self, state: OptimizerState) -> None:
        if not self._warned and not self.uses_learning_rate(state):
            self._warned = True
            warn(
                'The learning_rate passed to apply_gradient has no effect: the wrapped optax optimizer carries its own '
                'rate. Wrap optax.inject_hyperparams(optax.adamw)(learning_rate=0.0) to have the passed rate used, or '
                'give the optax optimizer the schedule itself and do not trust the reported learning_rate.'
            )

    def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: Any) -> Optimizer:
        """Returns `optimizer` with logical axes, or None where replicated, in place of arrays."""
        params = optimizer.target
        param_states = OptaxStatePartitionRules.derive_optax_logical_axes(
            optimizer.state.param_states, param_logical_axes, params=params, init=self.optax_optimizer.init
        )
        return Optimizer(self, OptimizerState(None, param_states), specs_like(params, param_logical_axes))


def _takes_learning_rate(node: Any) -> bool:
    """Tells whether `node` is an injecting state whose learning rate is a number that no schedule overwrites."""
    scheduled = getattr(node, 'hyperparams_states', ())
    return 'learning_rate' in getattr(node, 'hyperparams', ()) and 'learning_rate' not in scheduled


def _with_learning_rate(param_states: Any, learning_rate: Any) -> Any:
    def replaced(node: Any) -> Any:
        if not _takes_learning_rate(node):
            return node
        dtype = jnp.result_type(node.hyperparams['learning_rate'])
        return node._replace(hyperparams={**node.hyperparams, 'learning_rate': jnp.asarray(learning_rate, dtype)})

    return jax.tree.map(replaced, param_states, is_leaf=_takes_learning_rate)


def wrap_optax_optimizer(optax_optimizer: Callable[..., optax.GradientTransformation]) -> Callable[..., OptaxWrapper]:
    """Makes a constructor of an optax transformation one of an `OptaxWrapper`, with the same arguments.

    Arguments that are optax transformations themselves may be wrapped or not.
    """

    @functools.wraps(optax_optimizer)
    def wrapped(*args: Any, **kwargs: Any) -> OptaxWrapper:
        return OptaxWrapper(optax_optimizer(*map(_unwrapped, args), **{k: _unwrapped(v) for k, v in kwargs.items()}))

    return wrapped


def _unwrapped(argument: Any) -> Any:
    return argument.optax_optimizer if isinstance(argument, OptaxWrapper) else argument


@wrap_optax_optimizer
def chain(transformations: Sequence[optax.GradientTransformation]) -> optax.GradientTransformation:
    """Applies optax transformations one after the other; takes them as one sequence."""
    return optax.chain(*map(_unwrapped, transformations))


adabelief = wrap_optax_optimizer(optax.adabelief)
adagrad = wrap_optax_optimizer(optax.adagrad)
adam = wrap_optax_optimizer(optax.adam)
adamw = wrap_optax_optimizer(optax.adamw)
dpsgd = wrap_optax_optimizer(optax.contrib.dpsgd)
fromage = wrap_optax_optimizer(optax.fromage)
lamb = wrap_optax_optimizer(optax.lamb)
lars = wrap_optax_optimizer(optax.lars)
lion = wrap_optax_optimizer(optax.lion)
noisy_sgd = wrap_optax_optimizer(optax.noisy_sgd)
radam = wrap_optax_optimizer(optax.radam)
rmsprop = wrap_optax_optimizer(optax.rmsprop)
sgd = wrap_optax_optimizer(optax.sgd)
yogi = wrap_optax_optimizer(optax.yogi)


def _others_of_optax() -> Iterator[tuple[str, Callable[..., OptaxWrapper]]]:
    """Yields what the installed optax has besides, by name: its aliases, and the transformations of `optax.contrib`."""
    for module in (optax, optax.contrib):
        for name, make in vars(module).items():
            home = getattr(getattr(make, 'func', make), '__module__', '')  # nadam is a partial
            known = home.endswith('.alias') if module is optax else home.startswith('optax.contrib.')
            if not known or isinstance(make, type) or name.startswith('_') or name.endswith('_eval_params'):
                continue
            wrapped = wrap_optax_optimizer(make)
            wrapped.__name__ = wrapped.__qualname__ = name = 'optax_adafactor' if name == 'adafactor' else name
            if name not in globals():
                yield name, wrapped


_OTHERS = dict(_others_of_optax())
globals().update(_OTHERS)
__all__ += sorted(_OTHERS)
