import pytest

from t5x_pjit_recipes.errors import ConfigError
from t5x_pjit_recipes.stops import Stops


def walk(stops, step=0):
    seen = []
    while step < stops.total_steps:
        step = stops.after(step)
        seen.append(step)
    return seen


@pytest.mark.parametrize(
    ('stops', 'first', 'seen'),
    [
        (Stops(25), 0, [25]),
        (Stops(25, report=10), 0, [10, 20, 25]),
        (Stops(25, report=10, save=4), 0, [4, 8, 10, 12, 16, 20, 24, 25]),
        (Stops(25, report=10), 13, [20, 25]),
        (Stops(12, evaluate=6, save_steps=(3, 40)), 0, [3, 6, 12]),
    ],
)
def test_a_run_stops_at_these_steps(stops, first, seen):
    assert walk(stops, first) == seen


def test_the_last_step_does_all_that_is_done_at_all():
    stops = Stops(25, save=10, evaluate=None, collect=5)
    assert [s for s in range(26) if stops.saves(s)] == [0, 10, 20, 25]
    assert not any(stops.evaluates(s) for s in range(26))
    assert stops.collects(25)
    assert [s for s in range(1, 26) if Stops(25, save_steps=(3, 7)).saves(s)] == [3, 7, 25]


def test_steps_that_are_no_numbers_are_refused():
    with pytest.raises(ConfigError, match=r"report: '10'"):
        Stops(25, report='10')
    with pytest.raises(ConfigError, match=r'save: -1'):
        Stops(25, save=-1)
    with pytest.raises(ConfigError, match=r'total_steps: 2\.5'):
        Stops(2.5)
