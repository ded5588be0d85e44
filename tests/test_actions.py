import math

import numpy as np
import pytest

from t5x_pjit_recipes.actions import ActionMode, EarlyStoppingAction, TerminateOnNanAction, check_finite
from t5x_pjit_recipes.errors import ConfigError, TrainingError
from t5x_pjit_recipes.metrics import Scalar


def test_modes_have_t5x_numbers():
    assert [(mode.name, mode.value) for mode in ActionMode] == [('TRAIN', 1), ('TRAIN_EVAL', 2), ('INFER_EVAL', 3)]


def decisions(action, values):
    return [action.run(None, {'task': {'loss': value}}) for value in values]


@pytest.mark.parametrize(
    ('settings', 'values', 'expected'),
    [
        ({'mode': 'min'}, [3.0, 2.0, 1.0], [False, False, False]),
        ({'mode': 'min'}, [1.0, 1.0, 1.0], [False, False, True]),
        ({'mode': 'min'}, [1.0, 2.0, 3.0], [False, False, True]),
        ({'mode': 'min'}, [1.0, 2.0, 1.5, 1.7, 1.8], [False, False, False, False, True]),
        ({'mode': 'max'}, [1.0, 2.0, 3.0], [False, False, False]),
        ({'mode': 'max'}, [3.0, 2.0, 1.0], [False, False, True]),
        ({'mode': 'min', 'patience': 2}, [1.0, 1.0], [False, True]),
        ({'mode': 'min', 'patience': 4}, [1.0, 1.0, 1.0], [False, False, False]),
        ({'mode': 'min', 'atol': 0.5}, [3.0, 2.5, 2.0], [False, False, True]),
        ({'mode': 'min', 'atol': 0.4}, [3.0, 2.5, 2.0], [False, False, False]),
        ({'mode': 'max', 'atol': 0.5}, [2.0, 2.5, 3.0], [False, False, True]),
        ({'mode': 'min', 'rtol': 0.5}, [4.0, 2.0, 1.0], [False, False, True]),
        ({'mode': 'min', 'rtol': 0.25, 'atol': 0.5}, [4.0, 2.4, 1.2], [False, False, False]),
        ({'mode': 'max', 'rtol': 0.5}, [-4.0, -2.5, -1.5], [False, False, True]),
        ({'mode': 'min', 'patience': 2}, [1.0, math.nan], [False, True]),
    ],
)
@pytest.mark.parametrize('spell', [float, Scalar, np.float32])
def test_early_stopping_sees_no_improvement_over_patience_values(settings, values, expected, spell):
    action = EarlyStoppingAction(metric=('task', 'loss'), **settings)
    assert decisions(action, map(spell, values)) == expected


@pytest.mark.parametrize('action', [EarlyStoppingAction(('task', 'loss'), 'min', 2), TerminateOnNanAction('task')])
@pytest.mark.parametrize(
    ('metrics', 'message'),
    [
        ({'other': {'loss': 1.0}}, r"no task 'task' among \['other'\]"),
        ({'task': {'accuracy': 1.0}}, r"no metric 'loss' among \['accuracy'\]"),
        ({'task': {'loss': 1}}, 'task/loss is 1, neither'),
    ],
)
def test_a_metric_that_cannot_be_read_warns_and_training_goes_on(action, metrics, message):
    for _ in range(3):
        with pytest.warns(UserWarning, match=message):
            assert not action.run(None, metrics)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'mode': 'lowest'}, "mode 'lowest'"),
        ({'mode': 'min', 'patience': 1}, 'patience 1'),
        ({'mode': 'min', 'atol': -0.1}, 'atol -0.1'),
        ({'mode': 'min', 'rtol': -2}, 'rtol -2'),
    ],
)
def test_early_stopping_checks_its_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        EarlyStoppingAction(metric=('task', 'loss'), **settings)


@pytest.mark.parametrize(('value', 'stops'), [(1.0, False), (math.nan, True), (math.inf, True), (-math.inf, True)])
def test_terminates_on_nan_and_infinity(value, stops):
    assert TerminateOnNanAction('task', metric='z').run(None, {'task': {'z': Scalar(value)}}) is stops


def test_a_nan_loss_stops_the_run_with_step_and_checkpoint():
    with pytest.raises(TrainingError, match='step 120: loss is nan .*checkpoint_100'):
        check_finite({'loss': Scalar(math.nan)}, 120, 'checkpoint_100')
    with pytest.raises(TrainingError, match='step 20: loss is inf .*no checkpoint yet'):
        check_finite({'loss': math.inf}, 20, None)


def test_a_finite_loss_lets_the_run_go_on():
    check_finite({'loss': Scalar(3.2)}, 120, None)
    check_finite({}, 120, None)
