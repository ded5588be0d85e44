"""Metrics merge as if everything had been seen at once, and refuse to guess what was never set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_pjit_recipes import metrics
from t5x_pjit_recipes.errors import RecipeError


def finished(metric, num_steps=4, duration=2.0):
    metric = metrics.set_time_metrics_duration(metric, duration)
    return float(metrics.set_step_metrics_num_steps(metric, num_steps).compute_value().value)


@pytest.mark.parametrize(
    ('make', 'expected'),
    [
        (lambda x: metrics.Average.from_model_output(x), 4.0),
        (lambda x: metrics.Average.from_model_output(x, mask=x > 2), 16 / 3),
        (lambda x: metrics.Average.from_model_output(x, mask=x / 2), 88 / 16),
        (lambda x: metrics.LastValue.from_model_output(x[-1]), 6.0),
        (lambda x: metrics.Sum.from_model_output(x), 16.0),
        (lambda x: metrics.Step(steps=1), 4.0),
        (lambda x: metrics.AveragePerStep.from_model_output(x), 4.0),
        (lambda x: metrics.TimeRate.from_model_output(x.sum()), 8.0),
        (lambda x: metrics.StepsPerTime.from_model_output(), 2.0),
        (lambda x: metrics.Time(), 2.0),
    ],
)
def test_parts_merge_to_the_whole(make, expected):
    parts = [jnp.array([4.0, 6.0]), jnp.array([0.0, 6.0])]
    merged = jax.jit(lambda a, b: make(a).merge(make(b)))(*parts)
    assert finished(merged) == pytest.approx(expected)


def test_masked_values_do_not_count_even_when_they_are_nan():
    average = metrics.Average.from_model_output(jnp.array([1.0, jnp.nan]), mask=jnp.array([1.0, 0.0]))
    assert float(average.compute()) == 1.0


def test_each_microbatch_counts_as_a_step_until_the_number_is_set():
    merged = metrics.AveragePerStep(total=3.0).merge(metrics.AveragePerStep(total=5.0))
    assert float(merged.compute()) == 4.0
    assert float(merged.replace_steps(1).compute()) == 8.0


@pytest.mark.parametrize(
    ('metric', 'field'),
    [
        (metrics.Step(steps=None), 'steps=None'),
        (metrics.AveragePerStep(total=1.0, steps=None), 'steps=None'),
        (metrics.Time(), 'duration=None'),
        (metrics.TimeRate(numerator=1.0), 'duration=None'),
        (metrics.StepsPerTime(steps=None), 'steps=None'),
        (metrics.StepsPerTime(steps=1), 'duration=None'),
    ],
)
def test_what_was_never_set_is_not_computed(metric, field):
    with pytest.raises(RecipeError, match=f'{type(metric).__name__} with {field}.*Call set_'):
        metric.compute()


@pytest.mark.parametrize(
    'metric', [metrics.Time(), metrics.TimeRate(numerator=1.0), metrics.StepsPerTime()], ids=lambda m: type(m).__name__
)
def test_durations_are_not_merged(metric):
    with pytest.raises(RecipeError, match='durations 2.5 and None'):
        metric.replace_duration(2.5).merge(metric)


def test_a_shape_becomes_a_neutral_start():
    def step(x):
        return metrics.create_metrics_dict({'loss': x.sum()}) | {'last': metrics.LastValue(x[0])}

    def merge(a, b):
        return jax.tree.map(lambda x, y: x.merge(y), a, b, is_leaf=metrics.is_metric_obj)

    x = jnp.array([1.0, 2.0])
    shapes = jax.eval_shape(step, x)
    start = jax.tree.map(metrics.shape_obj_to_defined_obj, shapes, is_leaf=metrics.is_metric_obj)
    result = jax.lax.fori_loop(0, 3, lambda _, m: merge(m, step(x)), start)
    assert float(result['loss'].compute()) == 3.0
    assert float(result['last'].compute()) == 1.0


def test_setters_reach_only_the_metrics_that_wait():
    tree = {'a': metrics.Sum(total=np.float32(1)), 'b': {'c': metrics.Time()}, 'd': metrics.AveragePerStep(total=1.0)}
    timed = metrics.set_time_metrics_duration(tree, 3.0)
    assert timed == {**tree, 'b': {'c': metrics.Time(duration=3.0)}}
    assert metrics.set_step_metrics_num_steps(tree, 5) == {**tree, 'd': tree['d'].replace(steps=5)}
    told_apart = [metrics.is_time_metric(m) for m in (tree['a'], tree['b']['c'], metrics.StepsPerTime())]
    assert told_apart == [False, True, True]
