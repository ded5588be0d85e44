"""Learning rates as functions of the step."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from t5x_pjit_recipes.errors import ConfigError, did_you_mean, offenders

__all__ = ['create_learning_rate_scheduler']

_DIVISORS = {
    'linear_warmup': 'warmup_steps',
    'linear_decay': 'warmup_steps',
    'rsqrt_decay': 'warmup_steps',
    'rsqrt_normalized_decay': 'warmup_steps',
    'decay_every': 'steps_per_decay',
    'cosine_decay': 'steps_per_cycle',
}


def create_learning_rate_scheduler(
    factors: str = 'constant * linear_warmup * rsqrt_decay',
    base_learning_rate: float = 0.5,
    warmup_steps: int = 1000,
    decay_factor: float = 0.5,
    steps_per_decay: int = 20000,
    steps_per_cycle: int = 100000,
    step_offset: int = 0,
    min_learning_rate: float = 1e-8,
) -> Callable[[Any], jax.Array]:
    """Makes a schedule as a product of factors.

    With s steps since `step_offset`, the factors are:
      constant: base_learning_rate.
      linear_warmup: min(1, s / warmup_steps).
      linear_decay: base_learning_rate * min(s / warmup_steps, 1 + decay_factor * (warmup_steps - s)).
      rsqrt_decay: 1 / sqrt(max(s, warmup_steps)).
      rsqrt_normalized_decay: sqrt(warmup_steps) / sqrt(max(s, warmup_steps)).
      decay_every: decay_factor ^ floor(s / steps_per_decay).
      cosine_decay: half a cosine over steps_per_cycle steps after the warmup, again and again.

    Args:
      factors: names of factors, joined by '*'.
      base_learning_rate: the rate that other factors scale.
      warmup_steps: steps until the rate is at its highest.
      decay_factor: see the factors.
      steps_per_decay: see decay_every.
      steps_per_cycle: see cosine_decay.
      step_offset: step at which the schedule begins.
      min_learning_rate: the least rate.

    Returns:
      A function of the step (a number, or an integer array of any shape) to the rate (float32).

    Raises:
      ConfigError: for a factor that is not known, or that would divide by zero.

    >>> schedule = create_learning_rate_scheduler('constant * rsqrt_decay', base_learning_rate=1.0, warmup_steps=100)
    >>> round(float(schedule(0)), 6), round(float(schedule(400)), 6)
    (0.1, 0.05)
    """

    def cosine(s: jax.Array) -> jax.Array:
        progress = jnp.maximum(0.0, (s - warmup_steps) / steps_per_cycle)
        return jnp.maximum(0.0, 0.5 * (1.0 + jnp.cos(math.pi * (progress % 1.0))))

    known = {
        'constant': lambda s: base_learning_rate,
        'linear_warmup': lambda s: jnp.minimum(1.0, s / warmup_steps),
        'linear_decay': lambda s: (
            base_learning_rate * jnp.minimum(s / warmup_steps, 1.0 + decay_factor * (warmup_steps - s))
        ),
        'rsqrt_decay': lambda s: 1.0 / jnp.sqrt(jnp.maximum(s, warmup_steps)),
        'rsqrt_normalized_decay': lambda s: math.sqrt(warmup_steps) / jnp.sqrt(jnp.maximum(s, warmup_steps)),
        'decay_every': lambda s: decay_factor ** (s // steps_per_decay),
        'cosine_decay': cosine,
    }
    names = [name.strip() for name in factors.split('*')]
    divisors = {'warmup_steps': warmup_steps, 'steps_per_decay': steps_per_decay, 'steps_per_cycle': steps_per_cycle}
    _check_factors(factors, names, known, divisors)

    def schedule(step: Any) -> jax.Array:
        s = jnp.maximum(0, jnp.asarray(step) - step_offset)
        rate = jnp.float32(1.0)
        for name in names:
            rate = rate * known[name](s)
        return jnp.maximum(rate, min_learning_rate).astype(jnp.float32)

    return schedule


def _check_factors(factors: str, names: list[str], known: dict[str, Any], divisors: dict[str, int]) -> None:
    faults = [f'{name!r} is no factor{did_you_mean(name, known)}' for name in names if name not in known]
    for name in names:
        divisor = _DIVISORS.get(name)
        if divisor and not divisors[divisor] > 0:
            faults.append(f'{name!r} divides by {divisor}, which is {divisors[divisor]}')
    if faults:
        raise ConfigError(
            f'Cannot make a schedule of {factors!r}. Join some of {sorted(known)} by "*", and give positive steps:\n'
            f'{offenders(faults)}'
        )
