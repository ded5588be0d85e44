"""Adafactor's hyperparameters, and what they may be."""

from collections.abc import Mapping
from typing import Any

import flax.struct

from t5x_pjit_recipes.errors import ConfigError, offenders
from t5x_pjit_recipes.factor_rules import FactorDim, FactorRule, HParamMap


class ArgumentTypeError(ConfigError, TypeError):
    """An argument of a type that cannot be read."""


@flax.struct.dataclass
class _AdafactorHyperParams:
    """Adafactor's arguments; the order of the fields is T5X's."""

    learning_rate: Any
    factored: bool
    multiply_by_parameter_scale: bool | HParamMap
    beta1: float | None
    decay_rate: float
    step_offset: int
    clipping_threshold: float | None
    weight_decay_rate: float | None
    min_dim_size_to_factor: int
    epsilon1: float
    epsilon2: float
    factor_map: HParamMap | Mapping[str, FactorRule] | None = None
    logical_factor_rules: Mapping[str, FactorDim] | None = None
    weight_decay_rate_lr_exponent: float | None = None
    global_norm_clip_threshold: float | None = None
    max_parameter_scale: float | None = None
    skip_nan_updates: bool | None = False


def check_hyper_params(hyper_params: _AdafactorHyperParams) -> None:
    """Checks Adafactor's arguments.

    Raises:
      ConfigError: naming every argument out of its range; it is a TypeError too where a type is at fault.
    """
    _check_types(hyper_params)
    _check_ranges(hyper_params)


def _check_types(hyper_params: _AdafactorHyperParams) -> None:
    scale, factor_map = hyper_params.multiply_by_parameter_scale, hyper_params.factor_map
    if not isinstance(scale, bool | HParamMap):
        raise ArgumentTypeError(
            f'Cannot read multiply_by_parameter_scale={scale!r} of type {type(scale).__name__}. '
            'Pass a bool or an HParamMap.'
        )
    if not isinstance(factor_map, HParamMap | None):
        raise ArgumentTypeError(
            f'Cannot read factor_map={factor_map!r} of type {type(factor_map).__name__}. Pass None or an HParamMap.'
        )


def _check_ranges(hyper_params: _AdafactorHyperParams) -> None:
    beta1, clip = hyper_params.beta1, hyper_params.clipping_threshold
    wrong = {
        'factor_map, with factored=False': hyper_params.factor_map is not None and not hyper_params.factored,
        f'beta1={beta1}, outside of [0, 1)': beta1 is not None and not 0 <= beta1 < 1,
        f'clipping_threshold={clip}, not above 0': clip is not None and not clip > 0,
        f'step_offset={hyper_params.step_offset}, not whole': hyper_params.step_offset != int(hyper_params.step_offset),
        f'epsilon1={hyper_params.epsilon1}, below 0': hyper_params.epsilon1 < 0,
        f'epsilon2={hyper_params.epsilon2}, below 0': hyper_params.epsilon2 < 0,
    }
    lines = [line for line, is_wrong in wrong.items() if is_wrong]
    if lines:
        raise ConfigError(f'Cannot build Adafactor with {len(lines)} of its arguments. Mend:\n{offenders(lines)}')
