"""Models turn batches into losses and into metrics under T5X's names."""

import dataclasses
import json
from pathlib import Path

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.linen.partitioning import param_with_axes
from flax.traverse_util import unflatten_dict

from t5x_pjit_recipes import losses, metrics, models
from t5x_pjit_recipes.data import feature_converters
from t5x_pjit_recipes.errors import RecipeError
from t5x_pjit_recipes.examples.t5.network import T5Config, Transformer

GOLDENS = Path(__file__).parent / 'goldens'
TINY = T5Config(
    vocab_size=384,
    emb_dim=32,
    num_heads=4,
    head_dim=8,
    num_encoder_layers=2,
    num_decoder_layers=2,
    mlp_dim=64,
    mlp_activations=('gelu', 'linear'),
    dropout_rate=0.1,
)
BASE_NAMES = {
    'accuracy',
    'loss',
    'loss_per_nonpadding_target_token',
    'loss_per_all_target_tokens',
    'timing/seqs_per_second',
    'timing/steps_per_second',
    'timing/seconds',
    'timing/seqs',
    'timing/seqs_per_second_per_core',
    'timing/target_tokens_per_second',
    'timing/target_tokens_per_second_per_core',
    'non_padding_fraction/loss_weights',
    'z_loss',
    'z_loss_per_all_target_tokens',
    'cross_ent_loss',
    'cross_ent_loss_per_all_target_tokens',
}


class TinyDecoder(nn.Module):
    """The least network that a DecoderOnlyModel can drive; it notes what attention it was asked for."""

    @nn.compact
    def __call__(
        self,
        decoder_input_tokens,
        decoder_target_tokens,
        decoder_segment_ids=None,
        decoder_positions=None,
        decoder_causal_attention=None,
        *,
        enable_dropout=True,
        decode=False,
    ):
        self.sow('intermediates', 'is_prefix', decoder_causal_attention is not None)
        axes = ('vocab', 'embed')
        table = param_with_axes('table', nn.initializers.normal(), (7, 7), jnp.float32, axes=axes)
        logits = table[decoder_input_tokens.astype(jnp.int32)]
        return nn.Dropout(0.5)(logits, deterministic=not enable_dropout)


def encoder_decoder(**kwargs):
    return models.EncoderDecoderModel(Transformer(TINY), 'in', 'out', 'optimizer', **kwargs)


@pytest.fixture(scope='module')
def first_step():
    """Params and the first batch of the golden training runs, and the metrics that they had."""
    params = np.load(GOLDENS / 'network_t5_1_1.npz')
    params = {k.removeprefix('params/'): params[k] for k in params.files if k.startswith('params/')}
    golden = np.load(GOLDENS / 'trajectory.npz')
    batch = {k.removeprefix('batch0/'): golden[k] for k in golden.files if k.startswith('batch0/')}
    expected = json.loads((GOLDENS / 'trajectory.json').read_text())['adafactor_mbNone']['metrics'][0]
    return unflatten_dict(params, sep='/'), batch, expected


def computed(result, duration=2.0, num_steps=1):
    result = metrics.set_step_metrics_num_steps(metrics.set_time_metrics_duration(result, duration), num_steps)
    return {name: float(metric.compute_value().value) for name, metric in result.items()}


def test_loss_and_metrics_of_the_first_golden_training_step(first_step):
    params, batch, expected = first_step
    loss, result = jax.jit(encoder_decoder(z_loss=1e-4).eval_fn)(params, batch)
    values = computed(result)
    features = ['encoder_input_tokens', 'decoder_target_tokens']
    packing = {f'effective_batch_size/{f}' for f in features}
    packing |= {f'non_padding_fraction/{f}' for f in (*features, 'overall')}
    assert values.keys() == BASE_NAMES | packing
    assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert values['loss'] == float(loss)


@pytest.fixture(scope='module')
def nano():
    """A network of one layer on each side, its params and a batch."""
    module = Transformer(dataclasses.replace(TINY, num_encoder_layers=1, num_decoder_layers=1, dropout_rate=0.3))
    batch = {'encoder_input_tokens': jnp.array([[5, 6, 7, 0]]), 'decoder_target_tokens': jnp.array([[8, 9, 1]])}
    batch['decoder_input_tokens'] = jnp.array([[0, 8, 9]])
    shapes = {name: tokens.shape for name, tokens in batch.items()}
    init = jax.jit(lambda key: models.EncoderDecoderModel(module, *'iot').get_initial_variables(key, shapes)['params'])
    return module, init(jax.random.key(0)), batch


def test_dropout_follows_its_key_and_is_off_without_one(nano):
    module, params, batch = nano
    model = models.EncoderDecoderModel(module, *'iot')

    @jax.jit
    def losses_of(keys):
        dropped = jax.vmap(lambda key: model.loss_fn(params, batch, key)[0])(keys)
        return dropped, model.loss_fn(params, batch, None)[0], model.eval_fn(params, batch)[0]

    keys = jax.random.split(jax.random.key(0))
    (first, again, other), plain, evaluated = losses_of(keys[jnp.array([0, 0, 1])])
    assert float(first) == float(again)
    assert len({float(first), float(other), float(plain)}) == 3
    assert float(plain) == float(evaluated)


def test_the_normalizing_factor_divides_the_loss(nano):
    module, params, batch = nano
    total, mean = (models.EncoderDecoderModel(module, *'iot', loss_normalizing_factor=f) for f in (None, 2.0))
    total, mean = jax.jit(lambda: (total.eval_fn(params, batch)[0], mean.eval_fn(params, batch)[0]))()
    assert float(mean) == pytest.approx(float(total) / 2)


def test_golden_scores():
    golden = np.load(GOLDENS / 'network_t5_1_1.npz')
    params = {k.removeprefix('params/'): 4 * golden[k] for k in golden.files if k.startswith('params/')}
    batch = {
        'encoder_input_tokens': golden['enc'],
        'decoder_input_tokens': golden['dec'],
        'decoder_target_tokens': golden['tgt'],
        'decoder_loss_weights': (golden['tgt'] > 0).astype(np.int32),
    }
    model = encoder_decoder(label_smoothing=0.1, z_loss=0.1)  # neither has a part in scores
    scores = jax.jit(model.score_batch)(unflatten_dict(params, sep='/'), batch)
    np.testing.assert_allclose(scores, [-176.45102, -212.16428, -80.575516, -185.56708], rtol=1e-5)


def test_base_metrics_by_hand():
    targets = jnp.array([[1, 2, 0], [2, 2, 1]])
    logits = jax.nn.one_hot(jnp.array([[1, 1, 0], [2, 2, 2]]), 3)
    segment_ids = {'encoder': jnp.array([[1, 2], [1, 1]]), 'decoder': jnp.array([[1, 1, 0], [1, 2, 3]])}
    weights = jnp.array([[1, 1, 0], [1, 0.5, 0.5]])
    result = models.compute_base_metrics(logits, targets, weights, jnp.array(12.0), jnp.array(3.0), segment_ids)
    expected = {
        'accuracy': 2.5 / 4,
        'loss': 12 / 4,
        'loss_per_nonpadding_target_token': 12 / 4,
        'loss_per_all_target_tokens': 12 / 6,
        'z_loss': 3 / 4,
        'z_loss_per_all_target_tokens': 3 / 6,
        'cross_ent_loss': 9 / 4,
        'cross_ent_loss_per_all_target_tokens': 9 / 6,
        'timing/seconds': 0.5,
        'timing/seqs': 2,
        'timing/steps_per_second': 8,
        'timing/seqs_per_second': 4,
        'timing/seqs_per_second_per_core': 0.5,
        'timing/target_tokens_per_second': 12,
        'timing/target_tokens_per_second_per_core': 1.5,
        'non_padding_fraction/loss_weights': 4 / 6,
        'non_padding_fraction/encoder': 1,
        'non_padding_fraction/decoder': 5 / 6,
        'non_padding_fraction/overall': 9 / 10,
        'effective_batch_size/encoder': 3 / 4,
        'effective_batch_size/decoder': 4 / 4,
    }
    assert computed(result, duration=0.5, num_steps=4) == pytest.approx(expected)


def test_base_metrics_know_what_is_absent():
    result = models.compute_base_metrics(jnp.zeros((2, 3, 5)), jnp.zeros((2, 3), jnp.int32), None, jnp.array(12.0))
    assert result.keys() == {name for name in BASE_NAMES if not name.startswith(('z_loss', 'cross_ent'))}
    assert computed(result)['loss_per_nonpadding_target_token'] == 2.0


@pytest.mark.parametrize(
    ('segment_ids', 'expected'),
    [
        ([[1, 1, 2, 3], [1, 1, 1, 1]], 4),
        ([[1, 1, 2, 0], [0, 0, 0, 0]], 2),
        ([[True, True, False, False], [True, True, True, True]], 2),
    ],
)
def test_packed_examples_are_counted(segment_ids, expected):
    assert int(models.count_packed_examples(jnp.array(segment_ids))) == expected


def test_weighted_accuracy():
    logits, targets = jnp.array([[[0.0, 1.0], [1.0, 0.0]]]), jnp.array([[1, 1]])
    weights = jnp.array([[0.5, 0.25]])
    assert [float(x) for x in models.compute_weighted_accuracy(logits, targets)] == [1.0, 2.0]
    assert [float(x) for x in models.compute_weighted_accuracy(logits, targets, weights)] == [0.5, 0.75]
    with pytest.raises(RecipeError, match=r'logits \(1, 2\) with targets \(1, 2\)'):
        models.compute_weighted_accuracy(logits[..., 0], targets)


@pytest.mark.parametrize('packed', [False, True])
def test_initial_variables_of_an_encoder_decoder(packed):
    shapes = {'encoder_input_tokens': (2, 6), 'decoder_input_tokens': (2, 4)}
    if packed:
        shapes |= {f'encoder_{what}': (2, 6) for what in ('positions', 'segment_ids')}
        shapes |= {f'decoder_{what}': (2, 4) for what in ('positions', 'segment_ids')}
    types = dict.fromkeys(shapes, jnp.int32)
    init = lambda rng: encoder_decoder().get_initial_variables(rng, shapes, types)
    variables = jax.eval_shape(init, jax.random.key(0))
    assert isinstance(variables, flax.core.FrozenDict)
    assert variables.keys() == {'params', 'params_axes'}
    assert variables['params']['token_embedder']['embedding'].shape == (384, 32)


def test_a_decoder_only_model_trains_and_scores():
    model = models.DecoderOnlyModel(TinyDecoder(), 'vocabulary', 'optimizer', z_loss=0.1)
    variables = model.get_initial_variables(jax.random.key(0), {'decoder_input_tokens': (2, 3)})
    params = variables['params']
    targets = jnp.array([[3, 4, 1], [5, 1, 0]])
    batch = {'decoder_input_tokens': jnp.array([[0, 3, 4], [0, 5, 1]]), 'decoder_target_tokens': targets}
    logits = params['table'][batch['decoder_input_tokens']]
    loss, result = model.eval_fn(params, batch)
    expected, z_loss, _ = losses.compute_weighted_cross_entropy(logits, targets, z_loss=0.1)
    assert float(loss) == pytest.approx(float(expected))
    assert {'loss', 'effective_batch_size/decoder_target_tokens'} <= result.keys()
    assert float(jnp.sum(model.score_batch(params, batch))) == pytest.approx(float(z_loss - expected))
    assert float(model.loss_fn(params, batch, jax.random.key(0))[0]) != pytest.approx(float(loss))


@pytest.mark.parametrize('is_prefix', [False, True])
def test_inputs_see_each_other_only_in_a_prefix_model(is_prefix):
    model = models.DecoderOnlyModel(TinyDecoder(), 'v', 'o', inputs_bidirectional_attention=is_prefix)
    tokens = jnp.ones((1, 2), jnp.int32)
    names = ('decoder_input_tokens', 'decoder_target_tokens', 'decoder_causal_attention')
    params = {'table': jnp.zeros((7, 7))}
    _, intermediates = model.score_batch(params, dict.fromkeys(names, tokens), return_intermediates=True)
    assert intermediates['is_prefix'] == (is_prefix,)


@pytest.mark.parametrize(
    ('model', 'expected'),
    [
        (encoder_decoder(), feature_converters.EncDecFeatureConverter),
        (encoder_decoder(feature_converter_cls=dict), dict),
        (models.DecoderOnlyModel(None, 'v', 'o'), feature_converters.LMFeatureConverter),
        (
            models.DecoderOnlyModel(None, 'v', 'o', inputs_bidirectional_attention=True),
            feature_converters.PrefixLMFeatureConverter,
        ),
        (models.DecoderOnlyModel(None, 'v', 'o', feature_converter_cls=dict), dict),
    ],
)
def test_feature_converters(model, expected):
    assert model.FEATURE_CONVERTER_CLS is expected


def test_vocabularies_and_optimizer_can_be_asked_for():
    model = encoder_decoder(decode_fn='search')
    assert (models.get_input_vocabulary(model), models.get_output_vocabulary(model)) == ('in', 'out')
    assert (model.optimizer_def, model.decode_fn) == ('optimizer', 'search')
    model = models.DecoderOnlyModel(None, 'v', 'o')
    assert (model.input_vocabulary, model.output_vocabulary) == ('v', 'v')
