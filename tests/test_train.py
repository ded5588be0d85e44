import json

import jax
import numpy as np
import pytest

from t5x_pjit_recipes import checkpoints
from t5x_pjit_recipes.actions import BaseAction, EarlyStoppingAction
from t5x_pjit_recipes.checkpoints import CheckpointConfig, RestoreCheckpointConfig, SaveCheckpointConfig
from t5x_pjit_recipes.errors import ConfigError, TrainingError
from tests import toy_runs

pytestmark = pytest.mark.filterwarnings('ignore:.*learning_rate.*:UserWarning')


@pytest.fixture(scope='module')
def whole_run(tmp_path_factory):
    """A run of six steps, uninterrupted."""
    folder = tmp_path_factory.mktemp('whole')
    return folder, *toy_runs.run(folder)


def weights(state):
    return np.asarray(state.params['w'])


def test_a_run_trains_saves_evaluates_and_says_so(whole_run, tmp_path, capsys):
    _, step, state = whole_run
    toy_runs.run(tmp_path, total_steps=2)
    said = capsys.readouterr().out
    assert step == 6
    assert int(state.step) == 6
    assert 'mesh data=4, model=2 on 8 CPU devices' in said
    assert "w       (4, 2)  float32  (None, 'model')  16 B" in said
    assert 'step 1/2  loss' in said
    assert 'held-out loss' in said
    assert f'checkpoint: {tmp_path}/checkpoint_2' in said


def test_a_run_leaves_these_files(whole_run):
    folder, *_ = whole_run
    assert checkpoints.all_steps(folder) == [0, 2, 4, 6]
    lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    steps = [line['step'] for line in lines if line['collection'] == 'train' and 'loss' in line]
    assert steps == [1, 2, 3, 4, 5, 6]
    held_out = [line['step'] for line in lines if line['collection'] == 'training_eval/held_out']
    assert held_out == [3, 6]
    assert 'Total number of parameters: 8' in (folder / 'model-info.txt').read_text()
    assert list((folder / 'train').glob('events.out.tfevents*'))


def test_a_run_in_pieces_ends_bit_identical(whole_run, tmp_path):
    toy_runs.run(tmp_path, total_steps=1)
    toy_runs.run(tmp_path, total_steps=4)
    _, state = toy_runs.run(tmp_path, total_steps=6)
    np.testing.assert_array_equal(weights(state), weights(whole_run[2]))


def test_a_finished_run_is_not_trained_on(whole_run, capsys):
    folder, *_ = whole_run
    step, state = toy_runs.run(folder)
    assert step == 6
    np.testing.assert_array_equal(weights(state), weights(whole_run[2]))
    assert checkpoints.all_steps(folder) == [0, 2, 4, 6]
    assert f'continuing from {folder}/checkpoint_6' in capsys.readouterr().out


def test_fewer_steps_than_the_checkpoint_has_are_refused(whole_run):
    with pytest.raises(ConfigError, match=r'to step 3: the checkpoint in .* is at step 6.*TRAIN_STEPS above 6'):
        toy_runs.run(whole_run[0], total_steps=3)


def test_relative_steps_count_from_where_the_run_starts(whole_run, tmp_path):
    restore = RestoreCheckpointConfig(path=str(whole_run[0] / 'checkpoint_4'), mode='specific')
    config = CheckpointConfig(save=SaveCheckpointConfig(period=10), restore=restore)
    step, _ = toy_runs.run(tmp_path, relative_steps=3, checkpoint_cfg=config)
    assert step == 7
    assert checkpoints.all_steps(tmp_path) == [4, 7]


def test_a_loss_that_is_no_number_stops_the_run_and_is_not_saved(tmp_path):
    with pytest.raises(TrainingError, match=r'step 4: .*loss.* is nan.*last good checkpoint is checkpoint_2'):
        toy_runs.run(tmp_path, model=toy_runs.LinearModel(nan_from=3))
    assert checkpoints.all_steps(tmp_path) == [0, 2]


class StopAt(BaseAction):
    def __init__(self, step):
        self.step = step

    def run(self, train_state, metrics_by_task):
        return int(train_state.step) >= self.step


def test_an_action_ends_the_run_and_its_state_is_saved(tmp_path):
    step, _ = toy_runs.run(tmp_path, total_steps=50, actions={'TRAIN': [StopAt(5)]})
    assert 5 <= step <= 6
    assert checkpoints.latest_step(tmp_path) == step


def test_one_action_does_not_take_back_anothers_stop(tmp_path):
    never = EarlyStoppingAction(('held_out', 'loss'), mode='min', patience=50)
    actions = {'TRAIN_EVAL': [StopAt(3), never]}
    step, _ = toy_runs.run(tmp_path, total_steps=50, actions=actions)
    assert step == 3


@pytest.mark.parametrize(
    ('kwargs', 'says'),
    [
        ({'infer_eval_dataset_cfg': toy_runs.Config()}, 'infer_eval_dataset_cfg=.*Set it to None'),
        ({'actions': {'TRIAN': []}}, r"'TRIAN' \(did you mean 'TRAIN'\?\)"),
        (
            {'checkpoint_cfg': CheckpointConfig(restore=RestoreCheckpointConfig(path='/nowhere', mode='all'))},
            "path='/nowhere' with mode='all'",
        ),
        ({'use_orbax': False}, 'use_orbax=False'),
    ],
)
def test_what_is_not_supported_is_refused(kwargs, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        toy_runs.run(tmp_path, **kwargs)


def test_evaluation_before_training_and_no_saving(tmp_path, capsys):
    toy_runs.run(
        tmp_path, total_steps=1, run_eval_before_training=True, save=SaveCheckpointConfig(), gc_period=1,
        use_hardware_rng=True,
    )  # fmt: skip
    assert capsys.readouterr().out.count('held-out loss') == 2
    assert checkpoints.all_steps(tmp_path) == []
    assert jax.config.jax_default_prng_impl == 'threefry2x32'
