"""Eight training steps, against what T5X computes from the same parameters and batches."""

import contextlib
import functools
import json
import pathlib

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_pjit_recipes import adafactor, optimizers
from t5x_pjit_recipes.examples.t5 import network
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.models import EncoderDecoderModel
from t5x_pjit_recipes.partitioning import PjitPartitioner
from t5x_pjit_recipes.schedules import create_learning_rate_scheduler
from t5x_pjit_recipes.train_state import FlaxOptimTrainState
from t5x_pjit_recipes.trainer import Trainer, WeightMetricsComputer

GOLDENS = pathlib.Path(__file__).parent / 'goldens'
NUM_STEPS = 8
FEATURES = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens', 'decoder_loss_weights')
OPTIMIZERS = {
    'adafactor': lambda: adafactor.Adafactor(
        decay_rate=0.8, step_offset=0, logical_factor_rules=adafactor.standard_logical_factor_rules()
    ),
    'adamw': lambda: optimizers.adamw(learning_rate=1e-3, weight_decay=0.01),
}


class GradientNorm(WeightMetricsComputer):
    """The one weight metric that there are golden values of; the others would take most of the time to compile."""

    def compute_metrics(self, gradients, old_train_state, new_train_state):
        metrics = super().compute_metrics(gradients, old_train_state, new_train_state)
        return {'weight_gradient_norm': metrics['weight_gradient_norm']}


@functools.cache
def goldens():
    return json.loads((GOLDENS / 'trajectory.json').read_text()), dict(np.load(GOLDENS / 'trajectory.npz'))


def read_batches():
    _, arrays = goldens()
    for step in range(NUM_STEPS):
        yield {feature: arrays[f'batch{step}/{feature}'] for feature in FEATURES}


def read_params():
    with np.load(GOLDENS / 'network_t5_1_1.npz') as arrays:
        params = {name.removeprefix('params/'): arrays[name] for name in arrays if name.startswith('params/')}
    return flax.traverse_util.unflatten_dict(params, sep='/')


def make_model(optimizer_def):
    config = network.T5Config(
        vocab_size=384,
        emb_dim=32,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        head_dim=8,
        mlp_dim=64,
        mlp_activations=('gelu', 'linear'),
        dropout_rate=0.0,
        logits_via_embedding=False,
    )
    return EncoderDecoderModel(network.Transformer(config), None, None, optimizer_def, z_loss=1e-4)


def make_state(model):
    shapes = {feature: (8, 24 if feature.startswith('encoder') else 16) for feature in FEATURES[:2]}
    variables = jax.eval_shape(lambda: model.get_initial_variables(jax.random.PRNGKey(0), shapes))
    variables = {'params': jax.tree.map(jnp.asarray, read_params()), 'params_axes': variables['params_axes']}
    return FlaxOptimTrainState.create(model.optimizer_def, variables)


@functools.cache
def trained(optimizer, num_microbatches):
    """Trains the eight steps on data=4, model=2; returns each step's summary, and the parameters at the end."""
    model = make_model(OPTIMIZERS[optimizer]())
    partitioner = PjitPartitioner(num_partitions=2)
    state = make_state(model)
    trainer = Trainer(
        model=model,
        train_state=state,
        partitioner=partitioner,
        eval_names=[],
        summary_dir=None,
        train_state_axes=partitioner.get_mesh_axes(state),
        rng=jax.random.PRNGKey(0),
        learning_rate_fn=create_learning_rate_scheduler('constant * rsqrt_decay', 1.0, warmup_steps=1000),
        num_microbatches=num_microbatches,
        weight_metrics_computer=GradientNorm(),
    )
    batches = read_batches()
    # AdamW has a rate of its own, and says so once.
    ignored = pytest.warns(UserWarning, match='learning_rate') if optimizer == 'adamw' else contextlib.nullcontext()
    with trainer, ignored:
        summaries = [trainer.train(batches, 1, start_step=step).result() for step in range(NUM_STEPS)]
        return summaries, jax.device_get(named_leaves(trainer.train_state.params))


# Both compute in float32 from the same numbers; only the order of sums differs, which costs some roundings of 1.2e-7.
TOLERANCE = 2e-6
CASES = pytest.mark.parametrize(
    ('optimizer', 'num_microbatches'), [(o, n) for o in ('adafactor', 'adamw') for n in (None, 2)]
)


@CASES
def test_metrics_of_every_step_equal_those_of_t5x(optimizer, num_microbatches):
    expected = goldens()[0][f'{optimizer}_mb{num_microbatches}']
    summaries, _ = trained(optimizer, num_microbatches)
    # The golden values were read before the number of steps was set, when each microbatch still counts as a step.
    parts = num_microbatches or 1
    for name in ('loss', 'z_loss', 'cross_ent_loss'):
        values = [summary[name].value for summary in summaries]
        np.testing.assert_allclose(values, [m[name] * parts for m in expected['metrics']], rtol=TOLERANCE, err_msg=name)
    accuracies = [summary['accuracy'].value for summary in summaries]
    np.testing.assert_allclose(accuracies, [m['accuracy'] for m in expected['metrics']], rtol=TOLERANCE)
    np.testing.assert_allclose(
        [s['weight_gradient_norm'].value for s in summaries], expected['grad_norm'], rtol=TOLERANCE
    )


@CASES
def test_the_reported_learning_rate_is_the_one_that_is_used(optimizer, num_microbatches):
    summaries, _ = trained(optimizer, num_microbatches)
    reported = [summary['learning_rate'].value for summary in summaries if 'learning_rate' in summary]
    if optimizer == 'adafactor':
        expected = goldens()[0][f'{optimizer}_mb{num_microbatches}']['lr']
        np.testing.assert_allclose(reported, expected, rtol=TOLERANCE)
    else:
        assert reported == []


@CASES
def test_the_final_params_equal_those_of_t5x(optimizer, num_microbatches):
    prefix = f'{optimizer}_mb{num_microbatches}/'
    expected = {name.removeprefix(prefix): x for name, x in goldens()[1].items() if name.startswith(prefix)}
    _, params = trained(optimizer, num_microbatches)
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=0, atol=TOLERANCE, err_msg=name)
