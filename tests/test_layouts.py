"""One run on many meshes: the layout changes where arrays lie, and nothing else."""

import functools
import json

import jax
import numpy as np
import pytest

from t5x_pjit_recipes import data, partitioning, train, trainer
from t5x_pjit_recipes.checkpoints import CheckpointConfig
from t5x_pjit_recipes.progress import LOSS
from t5x_pjit_recipes.schedules import create_learning_rate_scheduler
from tests import t5_models

STEPS = 10
LENGTHS = {'inputs': 32, 'targets': 16}


def dataset(split):
    return data.DatasetConfig('pydoc_span_corruption', LENGTHS, split, batch_size=8, shuffle=True, seed=0, pack=True)


def losses(partitioner, model_dir):
    """Trains ten steps on real text and returns each step's loss per target token, in nats."""
    train.train(
        model=t5_models.make_model(num_heads=8, head_dim=4, num_encoder_layers=1, num_decoder_layers=1),
        train_dataset_cfg=dataset('train'),
        train_eval_dataset_cfg=None,
        infer_eval_dataset_cfg=None,
        checkpoint_cfg=CheckpointConfig(),
        partitioner=partitioner,
        trainer_cls=functools.partial(
            trainer.Trainer, learning_rate_fn=create_learning_rate_scheduler('constant', 0.03), num_microbatches=None
        ),
        model_dir=str(model_dir),
        total_steps=STEPS,
        eval_steps=0,
        eval_period=0,
        stats_period=1,
        random_seed=0,
        summarize_config_fn=lambda *args: None,
    )
    lines = [json.loads(line) for line in (model_dir / 'metrics.jsonl').read_text().splitlines()]
    return np.array([line[LOSS] for line in lines if LOSS in line])


@pytest.fixture(scope='module')
def on_one_device(tmp_path_factory):
    partitioner = partitioning.PjitPartitioner(1, devices=jax.devices()[:1])
    return losses(partitioner, tmp_path_factory.mktemp('one'))


@pytest.mark.parametrize(('data_size', 'model_size'), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_losses_are_those_of_a_single_device(data_size, model_size, on_one_device, tmp_path):
    partitioner = partitioning.PjitPartitioner(model_size)
    assert dict(partitioner.mesh.shape) == {'data': data_size, 'model': model_size}
    found = losses(partitioner, tmp_path)
    assert len(found) == STEPS
    assert found[-1] < found[0]
    np.testing.assert_allclose(found, on_one_device, rtol=0, atol=1e-4)


def test_a_divided_optimizer_state_changes_no_loss(on_one_device, tmp_path):
    found = losses(partitioning.PjitPartitioner(1, optimizer_rules='zero1', strict=True), tmp_path)
    np.testing.assert_allclose(found, on_one_device, rtol=0, atol=1e-4)


def test_fully_sharded_parameters_change_no_loss(on_one_device, tmp_path):
    rules = partitioning.standard_logical_axis_rules(2, 2)
    found = losses(partitioning.PjitPartitioner(2, logical_axis_rules=rules, strict=True), tmp_path)
    np.testing.assert_allclose(found, on_one_device, rtol=0, atol=1e-4)
