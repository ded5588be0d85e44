"""The T5 network has T5X's numbers, parameter tree and logical axes; packed, decoded and sharded it stays the same."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.partitioning import axis_rules, get_axis_names
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes import losses
from t5x_pjit_recipes.errors import ConfigError, RecipeError
from t5x_pjit_recipes.examples.t5 import layers
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
CONFIGS = {
    't5_1_1': TINY,
    'swiglu': dataclasses.replace(TINY, mlp_activations=('swish', 'linear')),
    't5_1_0_tied_relu': dataclasses.replace(TINY, mlp_activations=('relu',), logits_via_embedding=True),
}


def subtree(golden, prefix):
    return {name.removeprefix(prefix): golden[name] for name in golden.files if name.startswith(prefix)}


def load(name):
    golden = np.load(GOLDENS / f'network_{name}.npz')
    return golden, unflatten_dict(subtree(golden, 'params/'), sep='/')


@pytest.fixture(scope='module')
def t5_1_1():
    golden, params = load('t5_1_1')
    return params, tuple(golden[k] for k in ('enc', 'dec', 'tgt'))


@pytest.mark.parametrize('name', CONFIGS)
def test_golden_logits_loss_and_gradients(name):
    golden, params = load(name)
    module = Transformer(CONFIGS[name])

    def loss_fn(params):
        logits = module.apply({'params': params}, golden['enc'], golden['dec'], golden['tgt'], enable_dropout=False)
        weights = (golden['tgt'] > 0).astype(np.float32)
        loss, z_loss, weight_sum = losses.compute_weighted_cross_entropy(logits, golden['tgt'], weights, 0.1, 1e-4)
        return loss, (logits, z_loss, weight_sum)

    (loss, (logits, z_loss, weight_sum)), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params)
    np.testing.assert_allclose(logits, golden['logits'], atol=1e-4, rtol=0)
    np.testing.assert_allclose(
        [loss, z_loss, weight_sum], [golden[k] for k in ('loss', 'z_loss', 'weight_sum')], rtol=1e-6
    )
    grads = flatten_dict(grads, sep='/')
    for path, expected in subtree(golden, 'grads/').items():  # left out of the file of swiglu, to keep it small
        np.testing.assert_allclose(grads[path], expected, rtol=1e-3, atol=1e-5, err_msg=path)


@pytest.mark.parametrize(
    ('name', 'scale', 'factor'), [('t5_1_1', True, 32**-0.5), ('t5_1_0_tied_relu', False, 32**0.5)]
)
def test_logits_can_be_scaled_otherwise_than_usual(name, scale, factor):
    golden, params = load(name)
    module = Transformer(dataclasses.replace(CONFIGS[name], scale_logits=scale))
    apply = jax.jit(functools.partial(module.apply, enable_dropout=False))
    logits = apply({'params': params}, golden['enc'], golden['dec'], golden['tgt'])
    np.testing.assert_allclose(logits, factor * golden['logits'], atol=1e-4 * factor, rtol=0)


@pytest.mark.parametrize('name', CONFIGS)
def test_golden_packed_logits(name):
    golden, params = load(name)
    features = ('enc', 'dec', 'tgt', 'enc_seg', 'dec_seg', 'enc_pos', 'dec_pos')
    args = [golden[f'packed/{feature}'] for feature in features]
    apply = jax.jit(lambda p, *args: Transformer(CONFIGS[name]).apply({'params': p}, *args, enable_dropout=False))
    np.testing.assert_allclose(apply(params, *args), golden['packed/logits'], atol=1e-4, rtol=0)


def test_golden_bfloat16_logits_are_float32(t5_1_1):
    params, tokens = t5_1_1
    module = Transformer(dataclasses.replace(TINY, dtype=jnp.bfloat16))
    logits = jax.jit(lambda p: module.apply({'params': p}, *tokens, enable_dropout=False))(params)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, np.load(GOLDENS / 'network_bf16.npz')['logits'], atol=0.03, rtol=0)


def initialise(config):
    tokens = jnp.ones((1, 2), jnp.int32)
    return Transformer(config).init(jax.random.key(0), tokens, tokens, tokens, enable_dropout=False)


def test_tree_shapes_and_logical_axes_are_t5x_s(t5_1_1):
    variables = jax.eval_shape(lambda: initialise(dataclasses.replace(TINY, dtype=jnp.bfloat16)))
    shapes, expected = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (variables['params'], t5_1_1[0]))
    assert shapes == expected
    axes = flatten_dict(get_axis_names(variables['params_axes']).unfreeze(), sep='/')
    golden = json.loads((GOLDENS / 'network_axes.json').read_text())
    assert {path: list(names) for path, names in axes.items()} == golden


@pytest.fixture(scope='module')
def initial():
    config = dataclasses.replace(TINY, num_encoder_layers=1, num_decoder_layers=1)
    return jax.jit(lambda: initialise(config)['params'])()


@pytest.mark.parametrize(
    ('path', 'stddev'),
    [
        ('token_embedder/embedding', 1.0),
        ('encoder/layers_0/attention/query/kernel', (32 * 8) ** -0.5),
        ('encoder/layers_0/attention/key/kernel', 32**-0.5),
        ('decoder/layers_0/encoder_decoder_attention/out/kernel', 32**-0.5),
        ('decoder/layers_0/mlp/wi_0/kernel', 32**-0.5),
        ('decoder/layers_0/mlp/wo/kernel', 64**-0.5),
        ('decoder/logits_dense/kernel', 32**-0.5),
    ],
)
def test_parameters_start_with_the_published_spread(initial, path, stddev):
    values = flatten_dict(initial, sep='/')[path]
    np.testing.assert_allclose(jnp.std(values), stddev, rtol=0.1)


@pytest.mark.parametrize('bidirectional', [True, False])
def test_distances_fall_into_the_buckets_of_exact_arithmetic(bidirectional):
    def exact(distance):
        buckets, start = (16, 16 if distance > 0 else 0) if bidirectional else (32, 0)
        n = abs(distance) if bidirectional else max(-distance, 0)
        half = buckets // 2
        if n < half:
            return start + n
        # floor(half * log(n / half) / log(128 / half)), in integers
        steps = max(k for k in range(half) if n**half * half**k >= 128**k * half**half)
        return start + half + steps

    distances = np.arange(-300, 301)
    result = layers.relative_position_bucket(distances, bidirectional)
    assert result.tolist() == [exact(int(d)) for d in distances]


def test_decoding_step_by_step_equals_teacher_forcing(t5_1_1):
    params, (enc, dec, tgt) = t5_1_1
    module, variables = Transformer(TINY), {'params': params}
    tgt = np.ones_like(tgt)  # no target is padding: decoding does not know the targets
    expected = jax.jit(lambda: module.apply(variables, enc, dec, tgt, enable_dropout=False))()
    encoded = module.apply(variables, enc, enable_dropout=False, method=module.encode)
    init = lambda: module.init(jax.random.key(0), enc, dec, tgt, enable_dropout=False, decode=True)
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(init)['cache'])
    assert cache['decoder']['layers_0']['self_attention']['cached_key'].shape == (4, 4, 8, 16)

    @jax.jit
    def step(cache, token):
        logits, state = module.apply(
            {**variables, 'cache': cache},
            encoded,
            enc,
            token,
            token,
            enable_dropout=False,
            decode=True,
            max_decode_length=dec.shape[1],
            mutable=['cache'],
            method=module.decode,
        )
        return state['cache'], logits[:, 0]

    logits = []
    for i in range(dec.shape[1]):
        cache, at_i = step(cache, dec[:, i : i + 1])
        logits.append(at_i)
    np.testing.assert_allclose(jnp.stack(logits, axis=1), expected, atol=1e-5)
    assert int(cache['decoder']['layers_1']['self_attention']['cache_index']) == 16


def test_decoding_two_tokens_at_once_is_refused(t5_1_1):
    attention = layers.MultiHeadDotProductAttention(num_heads=2, head_dim=3)
    x = jnp.ones((5, 4, 6))
    variables = attention.init(jax.random.key(0), x, x, decode=True, deterministic=True)
    with pytest.raises(RecipeError, match=r'shape \(5, 2, 2, 3\) with a cache for \(5, 1, 2, 3\)'):
        attention.apply(variables, x[:, :2], x[:, :2], decode=True, deterministic=True, mutable=['cache'])


def test_decoding_packed_examples_is_refused(t5_1_1):
    params, (enc, dec, tgt) = t5_1_1
    segments = {'encoder_segment_ids': np.ones_like(enc), 'decoder_segment_ids': np.ones_like(dec)}
    apply = functools.partial(Transformer(TINY).apply, enable_dropout=False, decode=True, **segments)
    with pytest.raises(RecipeError, match='decode=True and segment ids'):
        jax.eval_shape(apply, {'params': params}, enc, dec, tgt)


def test_dropout_spares_or_drops_a_feature_at_all_positions():
    dropped = layers.dropout(0.5, deterministic=False).apply(
        {}, jnp.ones((3, 7, 40)), rngs={'dropout': jax.random.key(0)}
    )
    assert {float(x) for x in np.unique(dropped)} == {0.0, 2.0}
    np.testing.assert_array_equal(dropped, jnp.broadcast_to(dropped[:, :1], dropped.shape))


def test_an_unknown_activation_is_told_the_nearest():
    with pytest.raises(ConfigError, match=r"mlp_activations=\('gleu', 'linear'\).*did you mean 'gelu'"):
        T5Config(vocab_size=8, mlp_activations=('gleu', 'linear'))


RULES = (
    ('batch', 'data'),
    ('vocab', 'model'),
    ('mlp', 'model'),
    ('heads', 'model'),
    ('joined_kv', 'model'),
    ('embed', None),
    ('kv', None),
    ('length', None),
    ('relpos_buckets', None),
)


@pytest.fixture(scope='module')
def sharded(t5_1_1):
    """The jitted network on 2 x 4 devices, with its placed arguments."""
    params, tokens = t5_1_1
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
    to_mesh_axis = dict(RULES)
    golden = json.loads((GOLDENS / 'network_axes.json').read_text())
    specs = {path: P(*(to_mesh_axis[name] for name in names)) for path, names in golden.items()}
    shardings = unflatten_dict({path: NamedSharding(mesh, spec) for path, spec in specs.items()}, sep='/')

    def apply(params, *tokens):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), axis_rules(RULES):
            return Transformer(TINY).apply({'params': params}, *tokens, enable_dropout=False)

    args = jax.device_put(params, shardings), *jax.device_put(tokens, NamedSharding(mesh, P('data')))
    return jax.jit(apply), args


def test_sharded_logits_equal_unsharded_ones(sharded, t5_1_1):
    apply, args = sharded
    params, tokens = t5_1_1
    expected = jax.jit(lambda p, *t: Transformer(TINY).apply({'params': p}, *t, enable_dropout=False))(params, *tokens)
    np.testing.assert_allclose(apply(*args), expected, atol=1e-5)


def test_activations_are_constrained_in_the_lowered_program(sharded):
    apply, args = sharded
    constraints = [line for line in apply.lower(*args).as_text().splitlines() if 'sharding_constraint' in line]
    heads = [line for line in constraints if '[{"data"}, {}, {"model"}, {}]' in line]
    mlp = [line for line in constraints if '[{"data"}, {}, {"model"}]' in line]
    assert (len(heads), len(mlp)) == (3 * 6, 4)  # query, key and value of six attentions; the hidden of four MLPs
