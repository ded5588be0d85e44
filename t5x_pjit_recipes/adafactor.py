"""Adafactor (Shazeer and Stern, https://arxiv.org/abs/1804.04235): second moments in factors, steps in scale.

The second moment of a matrix is kept as its row means and its column means, so that the state of a parameter of
n × m elements takes n + m numbers.
"""

import copy
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from t5x_pjit_recipes.adafactor_hyper_params import _AdafactorHyperParams, check_hyper_params
from t5x_pjit_recipes.errors import ConfigError, offenders
from t5x_pjit_recipes.factor_rules import (
    HEURISTIC_RULE,
    FactorDim,
    Factoring,
    FactorRule,
    HParamMap,
    dims_of_rule,
    factor_name_to_factordim,
    heuristic_dims,
    is_ignored,
    rule_fault,
    rules_from_axes,
    standard_logical_factor_rules,
)
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.layout.slots import kept_axes, specs_like
from t5x_pjit_recipes.optimizer_defs import Optimizer, OptimizerDef, OptimizerState

__all__ = [
    'HEURISTIC_RULE',
    'Adafactor',
    'FactorDim',
    'HParamMap',
    'factor_name_to_factordim',
    'standard_logical_factor_rules',
]

_log = logging.getLogger(__name__)


@flax.struct.dataclass
class _AdafactorParamState:
    """One parameter's moments (float32), and its momentum; an array of shape (1,) stands for what is not kept."""

    v_row: Any
    v_col: Any
    v: Any
    m: Any


class Adafactor(OptimizerDef):
    """Adafactor as T5X has it.

    Args:
      learning_rate: step size; usually passed to `apply_gradient` instead.
      factored: whether large parameters keep their second moment in factors.
      multiply_by_parameter_scale: whether steps are relative to a parameter's root mean square; or by path.
      beta1: decay of the momentum; None keeps none.
      decay_rate: exponent d of the second moment's decay, 1 - t^-d at update t.
      step_offset: updates made before t counts from 1, as when a trained model is tuned further.
      clipping_threshold: root mean square that an update is clipped to; None clips none.
      weight_decay_rate: share of the weights taken off at each update, apart from the learning rate.
      min_dim_size_to_factor: without a rule, the smallest second largest dim that is factored.
      epsilon1: added to squared gradients.
      epsilon2: the least parameter scale.
      dtype_momentum: dtype that the momentum is kept in.
      factor_map: rules by parameter path: a tuple of `FactorDim` or of their names, `HEURISTIC_RULE`, or None.
      logical_factor_rules: the `FactorDim` of each logical axis, from which `set_param_axes` makes the factor map.
      weight_decay_rate_lr_exponent: multiplies the weight decay by the learning rate to this power.
      global_norm_clip_threshold: norm over all gradients that they are clipped to before all else.
      max_parameter_scale: the largest parameter scale.
      skip_nan_updates: whether elements that would become NaN stay as they are.
      shard_factored_slots: whether factors lie as the dims that they keep; T5X has all of every factor on every device.

    Raises:
      ConfigError: naming every argument that is out of its range; it is a TypeError too where a type is at fault.
    """

    def __init__(
        self,
        learning_rate: Any = None,
        factored: bool = True,
        multiply_by_parameter_scale: bool | HParamMap = True,
        beta1: float | None = None,
        decay_rate: float = 0.8,
        step_offset: int = 0,
        clipping_threshold: float | None = 1.0,
        weight_decay_rate: float | None = None,
        min_dim_size_to_factor: int = 128,
        epsilon1: float = 1e-30,
        epsilon2: float = 1e-3,
        dtype_momentum: Any = jnp.float32,
        factor_map: HParamMap | None = None,
        logical_factor_rules: Mapping[str, FactorDim | str] | None = None,
        weight_decay_rate_lr_exponent: float | None = None,
        global_norm_clip_threshold: float | None = None,
        max_parameter_scale: float | None = None,
        skip_nan_updates: bool | None = False,
        *,
        shard_factored_slots: bool = False,
    ) -> None:
        super().__init__(
            _AdafactorHyperParams(
                learning_rate,
                factored,
                multiply_by_parameter_scale,
                beta1,
                decay_rate,
                step_offset,
                clipping_threshold,
                weight_decay_rate,
                min_dim_size_to_factor,
                epsilon1,
                epsilon2,
                factor_map,
                logical_factor_rules
                and {axis: factor_name_to_factordim(dim) for axis, dim in logical_factor_rules.items()},
                weight_decay_rate_lr_exponent,
                global_norm_clip_threshold,
                max_parameter_scale,
                skip_nan_updates,
            )
        )
        check_hyper_params(self.hyper_params)
        self.dtype_momentum = jax.dtypes.canonicalize_dtype(dtype_momentum)
        self.shard_factored_slots = shard_factored_slots
        self._warned = False

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._identity() == self._identity()

    def __hash__(self) -> int:
        # The factor map is left out, as set_param_axes may change it, and mappings have no hash.
        params = self.hyper_params
        return hash((type(self), self.dtype_momentum, params.factored, params.beta1, params.decay_rate))

    def _identity(self) -> tuple[Any, ...]:
        return self.hyper_params, self.dtype_momentum, self.shard_factored_slots

    @property
    def needs_param_axes(self) -> bool:
        """Whether the factor map is made from the parameters' logical axes."""
        return self.hyper_params.logical_factor_rules is not None

    def set_param_axes(self, param_logical_axes: Any) -> None:
        """Makes the factor map from the parameters' logical axes, in place; does nothing without logical_factor_rules.

        Raises:
          ConfigError: naming every axis that logical_factor_rules lacks.
        """
        if self.needs_param_axes:
            factor_map = rules_from_axes(param_logical_axes, self.hyper_params.logical_factor_rules)
            self.hyper_params = self.hyper_params.replace(factor_map=factor_map)

    def with_param_axes(self, param_logical_axes: Any) -> 'Adafactor':
        """Returns a copy with the factor map that `set_param_axes` would make."""
        bound = copy.copy(self)
        bound.set_param_axes(param_logical_axes)
        return bound

    def _rule(self, path: str) -> FactorRule:
        if not self.hyper_params.factored:
            return None
        factor_map = self.hyper_params.factor_map
        return factor_map[path] if factor_map else HEURISTIC_RULE

    def _parse_rule(
        self, rule: FactorRule, shape: tuple[int, ...], path: str, fallback_to_heuristics: bool = True
    ) -> Factoring:
        """Returns the dims to average over, and (row dims, column dims) or None if not factored."""
        fault = rule_fault(rule, shape)
        if fault:
            raise ConfigError(f'Cannot factor {path} {tuple(shape)}: {fault}. Give it one in factor_map.')
        if rule is None:
            return tuple(range(len(shape))), None
        if rule is HEURISTIC_RULE or (fallback_to_heuristics and is_ignored(rule)):
            return tuple(range(len(shape))), self._heuristic_dims(shape)
        return dims_of_rule(rule)

    def _heuristic_dims(self, shape: tuple[int, ...]) -> Any:
        return heuristic_dims(shape, self.hyper_params.min_dim_size_to_factor) if self.hyper_params.factored else None

    def _factoring(self, path: str, shape: tuple[int, ...]) -> Factoring:
        return self._parse_rule(self._rule(path), shape, path)

    def init_state(self, params: Any) -> OptimizerState:
        """Makes the state for `params`; a parameter that cannot be factored as its rule says is a ConfigError."""
        named = named_leaves(params)
        self._check_rules({path: np.shape(param) for path, param in named.items()})
        states = [self.init_param_state(param, path) for path, param in named.items()]
        return OptimizerState(jnp.zeros((), jnp.int32), jax.tree.unflatten(jax.tree.structure(params), states))

    def _check_rules(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        rules = {path: self._rule(path) for path in shapes}
        faults = {path: rule_fault(rule, shapes[path]) for path, rule in rules.items()}
        lines = [f'{path} {shapes[path]}: {fault}' for path, fault in faults.items() if fault]
        if lines:
            raise ConfigError(
                f'Cannot factor {len(lines)} of {len(shapes)} parameters. Give them rules in factor_map, or logical '
                f'axes and logical_factor_rules, or pass factored=False:\n{offenders(lines)}'
            )
        ignored = [path for path, rule in rules.items() if is_ignored(rule)]
        if ignored:
            _log.debug('The heuristic decides for up to two dims, not the rules of:\n%s', offenders(ignored))

    def init_param_state(self, param: Any, path: str) -> _AdafactorParamState:
        """Makes one parameter's state."""
        shape = np.shape(param)
        _, factored_dims = self._factoring(path, shape)
        momentum = (1,) if self.hyper_params.beta1 is None else shape
        v_row = v_col = v = (1,)
        if factored_dims is None:
            v = shape
        else:
            rows, columns = factored_dims
            v_row, v_col = _without(shape, columns), _without(shape, rows)
        return _AdafactorParamState(*map(jnp.zeros, (v_row, v_col, v)), jnp.zeros(momentum, self.dtype_momentum))

    def apply_gradient(
        self, hyper_params: _AdafactorHyperParams, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        """Makes one update; `grads` may be in other containers than `params`."""
        if hyper_params.learning_rate is None:
            raise ConfigError(
                'Cannot update parameters with learning_rate=None. Pass a rate to apply_gradient or to Adafactor.'
            )
        self._warn_if_too_early(state.step)
        hyper_params = hyper_params.replace(weight_decay_rate=_weight_decay(hyper_params))
        named, named_grads = (
            named_leaves(params),
            _clipped(named_leaves(grads), hyper_params.global_norm_clip_threshold),
        )
        states = named_leaves(state.param_states, is_leaf=lambda x: isinstance(x, _AdafactorParamState))
        updated = [
            self.apply_param_gradient(state.step, hyper_params, param, states[path], named_grads[path], path)
            for path, param in named.items()
        ]
        structure = jax.tree.structure(params)
        new_params, new_states = ([pair[i] for pair in updated] for i in (0, 1))
        new_state = OptimizerState(state.step + 1, jax.tree.unflatten(structure, new_states))
        return jax.tree.unflatten(structure, new_params), new_state

    def apply_param_gradient(
        self,
        step: Any,
        hyper_params: _AdafactorHyperParams,
        param: Any,
        state: _AdafactorParamState,
        grad: Any,
        path: str,
    ) -> tuple[Any, _AdafactorParamState]:
        """Updates one parameter; the names of the paper are G for `squared` and U for `update` (its algorithm 4)."""
        averaged, factored_dims = self._factoring(path, np.shape(param))
        grad = jnp.asarray(grad, jnp.float32)
        decay = 1.0 - jnp.asarray(step - hyper_params.step_offset + 1, jnp.float32) ** -hyper_params.decay_rate
        squared = grad * grad + hyper_params.epsilon1
        if factored_dims is None:
            v = decay * state.v + (1.0 - decay) * squared
            update, new = grad * v**-0.5, state.replace(v=v)
        else:
            v_row, v_col = (
                decay * old + (1.0 - decay) * jnp.mean(squared, axis=dims)
                for old, dims in ((state.v_row, factored_dims[1]), (state.v_col, factored_dims[0]))
            )
            update, new = _factored(grad, v_row, v_col, *factored_dims), state.replace(v_row=v_row, v_col=v_col)
        if hyper_params.clipping_threshold is not None:
            update /= jnp.maximum(1.0, _rms(update, averaged) / hyper_params.clipping_threshold)
        update *= _step_size(hyper_params, param, averaged, path)
        if hyper_params.beta1 is not None:
            update = hyper_params.beta1 * state.m + (1.0 - hyper_params.beta1) * update
            new = new.replace(m=update.astype(self.dtype_momentum))
        decay_rate = hyper_params.weight_decay_rate
        new_param = (param if decay_rate is None else (1.0 - decay_rate) * param) - update
        if hyper_params.skip_nan_updates:
            new, new_param = jax.tree.map(_unless_nan, (new, new_param), (state, param))
        return new_param.astype(jnp.result_type(param)), new

    def check_first_step(self, step: int) -> None:
        """Checks that training can start at `step`.

        Raises:
          ConfigError: if step_offset lies beyond it, as the second moment's decay would be NaN.
        """
        if self.hyper_params.step_offset > step:
            raise ConfigError(self._too_early(step))

    def _warn_if_too_early(self, step: Any) -> None:
        if self._warned or self.hyper_params.step_offset <= 0 or isinstance(step, jax.core.Tracer):
            return
        if self.hyper_params.step_offset > int(step):
            self._warned = True
            warnings.warn(self._too_early(int(step)), UserWarning, stacklevel=4)

    def _too_early(self, step: int) -> str:
        offset = self.hyper_params.step_offset
        return (
            f'Cannot decay the second moment at step {step} with step_offset={offset}: (step - step_offset + 1)^-d is '
            f'not a number for {step - offset + 1}. Set step_offset to at most the step that training starts at.'
        )

    def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: Any) -> Optimizer:
        """Returns `optimizer` with logical axes in place of arrays, None for step and placeholders.

        Factors have None too, or with `shard_factored_slots` the axes of the dims that they keep.
        """
        target = specs_like(optimizer.target, param_logical_axes)
        structure = jax.tree.structure(optimizer.target)
        named = named_leaves(optimizer.target)
        states = [
            self._param_state_axes(path, np.shape(param), axes)
            for (path, param), axes in zip(named.items(), structure.flatten_up_to(target), strict=True)
        ]
        return Optimizer(self, OptimizerState(None, jax.tree.unflatten(structure, states)), target)

    def _param_state_axes(self, path: str, shape: tuple[int, ...], axes: Any) -> _AdafactorParamState:
        _, factored_dims = self._factoring(path, shape)
        v_row = v_col = None
        if factored_dims is not None and self.shard_factored_slots:
            rows, columns = factored_dims
            every = tuple(range(len(shape)))
            v_row, v_col = (kept_axes(axes, _without(every, dims)) for dims in (columns, rows))
        return _AdafactorParamState(
            v_row=v_row,
            v_col=v_col,
            v=axes if factored_dims is None else None,
            m=None if self.hyper_params.beta1 is None else axes,
        )


def _weight_decay(hyper_params: _AdafactorHyperParams) -> Any:
    exponent = hyper_params.weight_decay_rate_lr_exponent
    if not exponent:
        return hyper_params.weight_decay_rate
    return (hyper_params.weight_decay_rate or 1.0) * hyper_params.learning_rate**exponent


def _clipped(grads: dict[str, Any], threshold: float | None) -> dict[str, Any]:
    """Scales all gradients so that their common norm is at most `threshold`."""
    if not threshold:
        return grads
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(grad)) for grad in grads.values()))
    scale = threshold * jnp.minimum(1.0 / threshold, 1.0 / norm)
    return {path: grad * scale for path, grad in grads.items()}


def _without(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for dim, size in enumerate(shape) if dim not in dims)


def _rms(x: Any, dims: tuple[int, ...]) -> Any:
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=dims, keepdims=True))


def _step_size(hyper_params: _AdafactorHyperParams, param: Any, averaged: tuple[int, ...], path: str) -> Any:
    scaled = hyper_params.multiply_by_parameter_scale
    if not (scaled[path] if isinstance(scaled, HParamMap) else scaled):
        return hyper_params.learning_rate
    scale = jnp.maximum(_rms(jnp.asarray(param), averaged), hyper_params.epsilon2)
    if hyper_params.max_parameter_scale:
        scale = jnp.minimum(scale, hyper_params.max_parameter_scale)
    return hyper_params.learning_rate * scale


def _factored(grad: Any, v_row: Any, v_col: Any, rows: tuple[int, ...], columns: tuple[int, ...]) -> Any:
    """Returns G V^-1/2 for V = R C / mean(R), which rebuilds the second moment from its factors."""
    rows_in_v_row = tuple(row - sum(column < row for column in columns) for row in rows)
    ratio = v_row / jnp.mean(v_row, axis=rows_in_v_row, keepdims=True)
    return grad * jnp.expand_dims(ratio**-0.5, columns) * jnp.expand_dims(v_col**-0.5, rows)


def _unless_nan(new: Any, old: Any) -> Any:
    return jnp.where(jnp.isnan(new), old, new)
