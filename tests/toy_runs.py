"""A linear model and made-up data, for runs that compile in a moment."""

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from flax.core import freeze
from flax.linen.partitioning import AxisMetadata

from t5x_pjit_recipes import metrics, optimizers, trainer
from t5x_pjit_recipes.checkpoints import CheckpointConfig, SaveCheckpointConfig
from t5x_pjit_recipes.models import BaseModel
from t5x_pjit_recipes.partitioning import PjitPartitioner
from t5x_pjit_recipes.progress import LOSS
from t5x_pjit_recipes.train import train

BATCH = 8


class LinearModel(BaseModel):
    """Fits y = w · x; its loss is no number from step `nan_from` on, counted by the batches' own numbers."""

    FEATURE_CONVERTER_CLS = None

    def __init__(self, nan_from=None):
        super().__init__(optimizers.adam(0.1))
        self.nan_from = nan_from

    def get_initial_variables(self, rng, input_shapes, input_types=None):
        params = {'w': jax.random.normal(rng, (4, 2))}
        return freeze({'params': params, 'params_axes': {'w_axes': AxisMetadata(names=('embed', 'mlp'))}})

    def loss_fn(self, params, batch, dropout_rng):
        loss = jnp.sum(jnp.square(batch['x'] @ params['w'] - batch['y']))
        if self.nan_from is not None:
            loss = jnp.where(batch['number'][0] >= self.nan_from, jnp.nan, loss)
        return loss, {
            'loss': metrics.Sum(loss),
            LOSS: metrics.Average(total=loss, count=jnp.float32(BATCH)),
        }

    def score_batch(self, params, batch, return_intermediates=False):
        return batch['x'] @ params['w']


class Numbered:
    """Batches made from their own numbers, which are the position too."""

    def __init__(self):
        self.number = 0
        self.element_spec = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in self.batch(0).items()}

    @staticmethod
    def batch(number):
        x = np.random.default_rng(number).normal(size=(BATCH, 4)).astype(np.float32)
        return {'x': x, 'y': x[:, :2] * 3, 'number': np.full((BATCH,), number, np.int32)}

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return self.batch(self.number - 1)

    def get_state(self):
        return {'number': self.number}

    def set_state(self, state):
        self.number = state['number']


class Config:
    batch_size = BATCH


def run(model_dir, total_steps=6, *, model=None, save=None, **kwargs):
    """Trains the linear model; keyword arguments are those of `train`."""
    arguments = {
        'model': LinearModel() if model is None else model,
        'train_dataset_cfg': Config(),
        'train_eval_dataset_cfg': Config(),
        'infer_eval_dataset_cfg': None,
        'checkpoint_cfg': CheckpointConfig(
            save=SaveCheckpointConfig(period=2, save_dataset=True) if save is None else save
        ),
        'partitioner': PjitPartitioner(2),
        'trainer_cls': lambda **kw: trainer.Trainer(learning_rate_fn=lambda step: 0.1, num_microbatches=None, **kw),
        'model_dir': str(model_dir),
        'total_steps': total_steps,
        'eval_steps': 2,
        'eval_period': 3,
        'stats_period': 1,
        'random_seed': 0,
        'summarize_config_fn': lambda model_dir, writer, step: None,
        'get_dataset_fn': lambda cfg, shard_id, num_shards, converter: Numbered(),
        'train_eval_get_dataset_fn': lambda *args: {'held_out': [Numbered.batch(1000), Numbered.batch(1001)]},
    }
    return train(**{**arguments, **kwargs})


def printed(capsys):
    return rich.console.Console().render_str(capsys.readouterr().out).plain
