"""Only finished directories named `checkpoint_<step>` are steps."""

import doctest

import pytest

from t5x_pjit_recipes import checkpoints, errors
from t5x_pjit_recipes.checkpoints import steps


def test_steps_are_ascending_and_nothing_else_counts(tmp_path):
    unfinished = ('checkpoint_11.orbax-checkpoint-tmp-7', 'checkpoint_12.tmp-1700000000')
    others = ('checkpoint_x', 'my_checkpoint_13', 'checkpoint_014', 'checkpoint_1_0', 'state')
    for name in ('checkpoint_10', 'checkpoint_9', 'checkpoint_0', *unfinished, *others):
        (tmp_path / name).mkdir()
    (tmp_path / 'checkpoint_15').write_text('a file')
    assert checkpoints.all_steps(tmp_path) == [0, 9, 10]
    assert checkpoints.latest_step(tmp_path) == 10


def test_a_directory_without_steps_has_no_latest(tmp_path):
    assert checkpoints.latest_step(tmp_path) is None
    assert checkpoints.latest_step(tmp_path / 'none') is None


def test_names_and_steps_correspond():
    assert checkpoints.get_checkpoint_dir('/m', 12) == '/m/checkpoint_12'
    assert checkpoints.get_checkpoint_dir('/m', 12, step_format_fixed_length=5) == '/m/checkpoint_00012'
    assert checkpoints.get_step_from_checkpoint_dir('/m/checkpoint_00012/') == ('/m', 12)
    with pytest.raises(errors.CheckpointError, match="its last part 'model' is not checkpoint_<step>"):
        checkpoints.get_step_from_checkpoint_dir('/m/model')


def test_examples_in_the_documentation_run():
    assert doctest.testmod(steps) == doctest.TestResults(failed=0, attempted=3)
