"""Learning rates as T5X computes them."""

import json
import pathlib

import jax
import numpy as np
import pytest

from t5x_pjit_recipes.errors import ConfigError
from t5x_pjit_recipes.schedules import create_learning_rate_scheduler

GOLDENS = json.loads((pathlib.Path(__file__).parent / 'goldens/schedules.json').read_text())
STEPS = [0, 1, 100, 1000, 5000, 20000, 100000, 150000]


@pytest.mark.parametrize('case', GOLDENS, ids=lambda case: case['kwargs'].get('factors', 'default'))
def test_values_are_t5x_s(case: dict) -> None:
    schedule = create_learning_rate_scheduler(**case['kwargs'])
    values = [schedule(step) for step in case['steps']]
    np.testing.assert_allclose(values, case['values'], rtol=1e-6, atol=0)
    np.testing.assert_allclose(jax.jit(schedule)(np.array(case['steps'])), case['values'], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ('kwargs', 'values'),
    [
        (
            {'factors': 'linear_decay', 'base_learning_rate': 1.0, 'decay_factor': 1e-5},
            [1e-8, 0.001, 0.1, 1, 0.96, 0.81, 0.01000005, 1e-8],
        ),
        (
            {'factors': 'constant * decay_every', 'base_learning_rate': 1.0},
            [1, 1, 1, 1, 1, 0.5, 0.03125, 0.0078125],
        ),
        (
            {'factors': 'constant * cosine_decay', 'base_learning_rate': 1.0},
            [1, 1, 1, 1, 0.9960574, 0.9135402, 0.0002467334, 0.5157053],
        ),
    ],
)
def test_values_of_long_runs(kwargs: dict, values: list[float]) -> None:
    np.testing.assert_allclose(create_learning_rate_scheduler(**kwargs)(np.array(STEPS)), values, rtol=3e-5)


@pytest.mark.parametrize('step', [3, np.int64(3), np.float32(3), np.array(3)])
def test_any_kind_of_step_gives_a_float32_scalar(step: object) -> None:
    rate = create_learning_rate_scheduler()(step)
    assert (rate.shape, rate.dtype) == ((), np.float32)
    np.testing.assert_allclose(rate, 0.5 * 0.003 / np.sqrt(1000), rtol=1e-6)


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'factors': 'constant * rsqrt_decya'}, r"'rsqrt_decya' is no factor \(did you mean 'rsqrt_decay'\?\)"),
        ({'factors': 'constant, linear_warmup'}, "'constant, linear_warmup' is no factor"),
        ({'warmup_steps': 0}, "'linear_warmup' divides by warmup_steps, which is 0\n  'rsqrt_decay' divides by"),
        ({'factors': 'decay_every', 'steps_per_decay': 0}, "'decay_every' divides by steps_per_decay, which is 0"),
    ],
)
def test_a_schedule_without_meaning_is_refused_at_construction(kwargs: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_learning_rate_scheduler(**kwargs)


def test_no_warmup_is_fine_where_no_factor_needs_it() -> None:
    schedule = create_learning_rate_scheduler('constant * cosine_decay', warmup_steps=0, base_learning_rate=2.0)
    assert float(schedule(0)) == 2.0
