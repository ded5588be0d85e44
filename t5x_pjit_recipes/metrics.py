"""Metrics that a step function returns, that merge over steps, and that turn into numbers only when a summary is due.

A metric is a small pytree of sums. What the device cannot know, how long the steps took and how many there were, is set
afterwards with `set_time_metrics_duration` and `set_step_metrics_num_steps`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from t5x_pjit_recipes.errors import RecipeError

Array: TypeAlias = jax.Array | np.ndarray | float | int


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A number that a metric came to, as a writer of summaries takes it."""

    value: Array


@flax.struct.dataclass
class Metric:
    """The base of all metrics: a pytree that knows how to merge with its like and what number it comes to."""

    def merge(self, other: 'Metric') -> 'Metric':
        """Returns the metric of both parts together; `self` is the earlier one."""
        raise NotImplementedError(f'{type(self).__name__} defines no merge')

    def compute(self) -> Array:
        """Returns the number that the metric comes to."""
        raise NotImplementedError(f'{type(self).__name__} defines no compute')

    def compute_value(self) -> Scalar:
        """Returns the number as a value that can be written to a summary."""
        return Scalar(self.compute())


MetricsMap: TypeAlias = Mapping[str, Metric]


@flax.struct.dataclass
class Average(Metric):
    """A weighted mean, kept as a total and the sum of the weights."""

    total: Array
    count: Array

    @classmethod
    def from_model_output(cls, values: Array, mask: Array | None = None) -> 'Average':
        """Averages `values`, weighted by `mask` of the same shape (booleans or weights; all ones where it is None)."""
        values = jnp.asarray(values, jnp.float32)
        mask = jnp.ones_like(values) if mask is None else jnp.asarray(mask, jnp.float32)
        return cls(total=jnp.sum(jnp.where(mask != 0, values * mask, 0)), count=jnp.sum(mask))

    def merge(self, other: 'Average') -> 'Average':
        """Adds totals and counts."""
        return self.replace(total=self.total + other.total, count=self.count + other.count)

    def compute(self) -> Array:
        """Returns total / count, NaN where nothing was counted."""
        return _ratio(self.total, self.count)


@flax.struct.dataclass
class LastValue(Metric):
    """The value seen last."""

    value: Array

    @classmethod
    def from_model_output(cls, value: Array) -> 'LastValue':
        """Takes the value itself."""
        return cls(value=value)

    def merge(self, other: 'LastValue') -> 'LastValue':
        """Keeps the later one."""
        return other

    def compute(self) -> Array:
        """Returns the value."""
        return self.value


@flax.struct.dataclass
class Sum(Metric):
    """A sum over everything seen."""

    total: Array

    @classmethod
    def from_model_output(cls, values: Array) -> 'Sum':
        """Adds up `values` of any shape."""
        return cls(total=jnp.sum(jnp.asarray(values)))

    def merge(self, other: 'Sum') -> 'Sum':
        """Adds totals."""
        return self.replace(total=self.total + other.total)

    def compute(self) -> Array:
        """Returns the total."""
        return self.total


@flax.struct.dataclass
class Step(Metric):
    """A number of steps. Each part counts as one, microbatches too, until the true number is set for the summary."""

    steps: Array | None = 1

    def replace_steps(self, steps: int) -> 'Step':
        """Sets the number of train steps that the metric covers."""
        return self.replace(steps=steps)

    def merge(self, other: 'Step') -> 'Step':
        """Adds steps."""
        return self.replace(steps=_known(self, 'steps') + _known(other, 'steps'))

    def compute(self) -> Array:
        """Returns the number of steps."""
        return _known(self, 'steps')


@flax.struct.dataclass
class AveragePerStep(Step):
    """A total per train step: parts of one step (its microbatches) add up, steps are averaged."""

    total: Array = dataclasses.field(kw_only=True)

    @classmethod
    def from_model_output(cls, values: Array, steps: int | None = 1) -> 'AveragePerStep':
        """Adds up `values` of any shape over `steps` steps."""
        return cls(total=jnp.sum(jnp.asarray(values)), steps=steps)

    def merge(self, other: 'AveragePerStep') -> 'AveragePerStep':
        """Adds totals and steps."""
        return self.replace(total=self.total + other.total, steps=_known(self, 'steps') + _known(other, 'steps'))

    def compute(self) -> Array:
        """Returns total / steps."""
        return _ratio(self.total, _known(self, 'steps'))


@flax.struct.dataclass
class Time(Metric):
    """How long it took, in seconds."""

    duration: Array | None = None

    def replace_duration(self, duration: float) -> 'Time':
        """Sets the duration in seconds."""
        return self.replace(duration=duration)

    def merge(self, other: 'Time') -> 'Time':
        """Stays unmeasured: a duration is set once, after all merging."""
        return _unmeasured(self, other)

    def compute(self) -> Array:
        """Returns the duration in seconds."""
        return _known(self, 'duration')


@flax.struct.dataclass
class TimeRate(Time):
    """How much of something was done each second."""

    numerator: Array = dataclasses.field(kw_only=True)

    @classmethod
    def from_model_output(cls, numerator: Array) -> 'TimeRate':
        """Takes what is counted; the duration comes later."""
        return cls(numerator=numerator)

    def merge(self, other: 'TimeRate') -> 'TimeRate':
        """Adds numerators; neither part may have its duration yet."""
        return _unmeasured(self, other).replace(numerator=self.numerator + other.numerator)

    def compute(self) -> Array:
        """Returns numerator / duration."""
        return _ratio(self.numerator, _known(self, 'duration'))


@flax.struct.dataclass
class StepsPerTime(Step):
    """How many train steps were done each second."""

    duration: Array | None = None

    @classmethod
    def from_model_output(cls, steps: int = 1) -> 'StepsPerTime':
        """Takes the number of steps; the duration comes later."""
        return cls(steps=steps)

    def replace_duration(self, duration: float) -> 'StepsPerTime':
        """Sets the duration in seconds."""
        return self.replace(duration=duration)

    def merge(self, other: 'StepsPerTime') -> 'StepsPerTime':
        """Adds steps; neither part may have its duration yet."""
        return _unmeasured(self, other).replace(steps=_known(self, 'steps') + _known(other, 'steps'))

    def compute(self) -> Array:
        """Returns steps / duration."""
        return _ratio(_known(self, 'steps'), _known(self, 'duration'))


def _ratio(numerator: Array, denominator: Array) -> Array:
    """Divides where the values are: on the host, a summary asks nothing of a device that is training."""
    if isinstance(numerator, jax.Array) or isinstance(denominator, jax.Array):
        return jnp.divide(numerator, denominator)
    with np.errstate(divide='ignore', invalid='ignore'):
        return np.divide(numerator, denominator)


def is_metric_obj(obj: Any) -> bool:
    """Tells whether `obj` is a metric, ours or another library's; as `is_leaf` it keeps metrics whole."""
    return hasattr(obj, 'merge') and hasattr(obj, 'compute_value')


def is_time_metric(obj: Any) -> bool:
    """Tells whether `obj` is a metric that waits for a duration."""
    return isinstance(obj, Time | StepsPerTime)


def set_time_metrics_duration(metrics: Any, duration: float) -> Any:
    """Sets the duration in seconds on every metric of the tree that needs one."""
    return _map_metrics(lambda m: m.replace_duration(duration) if is_time_metric(m) else m, metrics)


def set_step_metrics_num_steps(metrics: Any, num_steps: int) -> Any:
    """Sets the number of train steps on every metric of the tree that needs it."""
    return _map_metrics(lambda m: m.replace_steps(num_steps) if isinstance(m, Step) else m, metrics)


def shape_obj_to_defined_obj(obj: Metric) -> Metric:
    """Turns a metric made by `jax.eval_shape` into one of zeros, from which a loop can start merging."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), obj)


def create_metrics_dict(float_metrics: Mapping[str, Array], num_steps: int | None = 1) -> dict[str, Metric]:
    """Makes averages per step from plain totals over `num_steps` steps."""
    return {name: AveragePerStep(total=total, steps=num_steps) for name, total in float_metrics.items()}


def _map_metrics(fn: Callable[[Any], Any], metrics: Any) -> Any:
    return jax.tree.map(fn, metrics, is_leaf=is_metric_obj)


_SETTERS = {'steps': 'set_step_metrics_num_steps', 'duration': 'set_time_metrics_duration'}


def _known(metric: Metric, field: str) -> Array:
    value = getattr(metric, field)
    if value is None:
        name = type(metric).__name__
        raise RecipeError(f'Cannot compute {name} with {field}=None: it was never set. Call {_SETTERS[field]} first.')
    return value


def _unmeasured(metric: Metric, other: Metric) -> Metric:
    if metric.duration is not None or other.duration is not None:
        raise RecipeError(
            f'Cannot merge {type(metric).__name__} with durations {metric.duration} and {other.duration}: '
            'a duration covers all parts together. Merge first, then call set_time_metrics_duration.'
        )
    return metric
