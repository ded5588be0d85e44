"""Sampling draws from the distribution that it was asked for, keeps prompts, and is the same on any mesh."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes import decoding, layout, partitioning
from t5x_pjit_recipes.errors import ConfigError
from t5x_pjit_recipes.examples.t5.network import T5Config, Transformer
from tests import t5_models

GOLDENS = Path(__file__).parent / 'goldens'
EOS = 6
# From each of eight tokens to the next: logits of a Markov chain.
TABLE = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
LOG_PROBS = np.asarray(jax.nn.log_softmax(TABLE))
FIRST = np.exp(LOG_PROBS[0])  # the distribution of what follows token 0
LENGTH = 6


def chain(table):
    """A model that knows no more than the token it reads; its cache is empty."""
    return lambda state: (jnp.asarray(table)[state.cur_token[:, 0]], state.cache)


def counting(state):
    """Says t + 1 after t, 2 at the start, and 1 after 7."""
    follower = jnp.asarray([2, 2, 3, 4, 5, 6, 7, 1])[state.cur_token[:, 0]]
    return jax.nn.one_hot(follower, 8), state.cache


def adding(state):
    """Says the sum of all that it has read, modulo 8, which two scanned layers keep; 0 where its index is wrong."""
    layers = state.cache['layers']
    total = layers['total'] + state.cur_token[:, 0][None, :, None]
    logits = jax.nn.one_hot(total[1, :, 0] % 8, 8)
    is_right = jnp.broadcast_to(layers['cache_index'][1], state.cur_index.shape) == state.cur_index
    cache = {'layers': {'total': total, 'cache_index': layers['cache_index'] + 1}}
    return jnp.where(is_right[:, None], logits, jax.nn.one_hot(jnp.asarray([0]), 8)), cache


def total_cache(totals):
    totals = jnp.asarray(totals, jnp.int32)
    return {'layers': {'total': jnp.stack([totals, totals])[:, :, None], 'cache_index': jnp.zeros(2, jnp.int32)}}


@jax.jit
def count_on(inputs, max_decode_steps):
    return decoding.temperature_sample(inputs, {}, counting, EOS, max_decode_steps=max_decode_steps)


@pytest.mark.parametrize(
    ('inputs', 'max_decode_steps', 'expected'),
    [
        ([0, 0, 0, 0, 0, 0], LENGTH, [2, 3, 4, 5, 6, 0]),  # ends with eos
        ([0, 1, 1, 0, 0, 0], LENGTH, [1, 1, 2, 3, 4, 5]),  # ends with the inputs
        ([3, 0, 0, 0, 0, 0], LENGTH, [4, 5, 6, 0, 0, 0]),  # reads the first input, whatever it is
        ([0, 6, 2, 0, 0, 0], LENGTH, [6, 2, 3, 4, 5, 6]),  # an eos in the prompt ends nothing
        ([0, 6, 4, 0, 0, 0], LENGTH, [6, 4, 5, 6, 0, 0]),
        ([0, 0, 4, 0, 1, 0], LENGTH, [2, 4, 5, 1, 2, 3]),  # fills holes
        ([0, 5, 0, 0, 3, 0], LENGTH, [5, 6, 0, 0, 0, 0]),  # nothing follows the end
        ([0, 1, 2, 0, 0, 0], 2, [1, 2, 3, 4, 0, 0]),
        ([0, 1, 2, 0, 0, 0], 0, [1, 2, 0, 0, 0, 0]),
    ],
)
def test_prompts_are_kept_and_rows_end(inputs, max_decode_steps, expected):
    sequences, log_probs = count_on(jnp.asarray([inputs]), max_decode_steps)
    assert sequences.tolist() == [[expected]]
    assert log_probs.tolist() == [[0.0]]  # greedy: of all that could be drawn, this was


def test_each_row_has_its_own_limit_below_the_hard_one():
    sample = jax.jit(
        lambda inputs, steps: decoding.temperature_sample(
            inputs, {}, counting, EOS, max_decode_steps=steps, max_decode_steps_hard_limit=3
        )
    )
    sequences, _ = sample(jnp.zeros((3, LENGTH), jnp.int32), jnp.asarray([1, 3, 5]))
    assert sequences[:, 0].tolist() == [[2, 0, 0, 0, 0, 0], [2, 3, 4, 0, 0, 0], [2, 3, 4, 0, 0, 0]]


def test_prompts_of_different_lengths_go_on_from_a_prefilled_cache():
    inputs = jnp.asarray([[0, 1, 2, 0, 0, 0], [0, 3, 0, 0, 0, 0], [0, 1, 1, 1, 5, 0]])

    def sample(inputs, cache, initial_index=None):
        return decoding.temperature_sample(
            inputs, cache, adding, eos_id=7, num_decodes=2, cache_offset=1, initial_index=initial_index
        )[0]

    # From here on the cache's index counts by rows.
    indices = {'cache_index': jnp.broadcast_to(jnp.asarray([2, 1, 4]), (2, 3))}
    prefilled = {'layers': total_cache([0 + 1, 0, 0 + 1 + 1 + 1])['layers'] | indices}
    expected = jax.jit(sample)(inputs, total_cache([0, 0, 0]))
    np.testing.assert_array_equal(jax.jit(sample)(inputs, prefilled, jnp.asarray([2, 1, 4])), expected)
    assert expected[:, 1].tolist() == [[1, 2, 3, 6, 4, 0], [3, 3, 6, 4, 0, 0], [1, 1, 1, 5, 0, 0]]


def test_a_cache_offset_that_does_not_lead_to_the_batch_is_an_error():
    inputs = jnp.zeros((3, LENGTH), jnp.int32)
    with pytest.raises(
        ConfigError, match=r'(?s)cache_offset=0: dim 0 must be the batch, 3.*total \(2, 3, 1\): dim 0 is 2'
    ):
        decoding.temperature_sample(inputs, total_cache([0, 0, 0]), adding, EOS, num_decodes=2)


def draw(key, num_decodes, **kwargs):
    """Draws what follows token 0: tokens and log probabilities (num_decodes,)."""
    inputs = jnp.zeros((1, 1), jnp.int32)
    sequences, log_probs = decoding.temperature_sample(inputs, {}, chain(TABLE), EOS, key, num_decodes, **kwargs)
    return sequences[0, :, 0], log_probs[0]


@functools.partial(jax.jit, static_argnums=1)
def draw_traced(key, num_decodes, temperature, topk, topp):
    return draw(key, num_decodes, temperature=temperature, topk=topk, topp=topp)


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw_static(key, num_decodes, kwargs):
    return draw(key, num_decodes, **dict(kwargs))


def cut(probabilities, topk=0, topp=0.0, temperature=1.0):
    """The distribution after temperature, topk and topp, one token at a time."""
    probabilities = probabilities ** (1 / temperature)
    probabilities /= probabilities.sum()
    kept, total = [], 0.0
    for token in np.argsort(-probabilities):
        if (topk and len(kept) == topk) or (topp and total >= topp):
            break
        kept.append(token)
        total += probabilities[token]
    return np.where(np.isin(np.arange(len(probabilities)), kept), probabilities, 0) / total


@pytest.mark.parametrize('is_traced', [False, True], ids=['static', 'traced'])
@pytest.mark.parametrize(
    ('temperature', 'topk', 'topp'), [(1.0, 0, 0.0), (0.5, 0, 0.0), (1.0, 3, 0.0), (2.0, 3, 0.0), (1.0, 0, 0.6)]
)
def test_sampled_frequencies_are_the_distribution(temperature, topk, topp, is_traced):
    draws = 20_000
    cutoffs = {'temperature': temperature, 'topk': topk, 'topp': topp}
    if is_traced:
        tokens, log_probs = draw_traced(jax.random.key(0), draws, *cutoffs.values())
    else:
        tokens, log_probs = draw_static(jax.random.key(0), draws, tuple(cutoffs.items()))
    expected = cut(FIRST, **cutoffs)
    frequencies = np.bincount(tokens, minlength=8) / draws
    assert np.all(frequencies[expected == 0] == 0)
    assert np.all(np.abs(frequencies - expected) <= 4 * np.sqrt(expected * (1 - expected) / draws))
    np.testing.assert_allclose(np.exp(log_probs), expected[tokens], rtol=1e-5)


@pytest.mark.parametrize(('temperature', 'topk'), [(1.0, 3), (1.0, 1), (0.0, 0)])
def test_log_probabilities_are_the_model_s_own_if_asked_for(temperature, topk):
    options = (('temperature', temperature), ('topk', topk), ('rescale_log_probs', False))
    tokens, log_probs = draw_static(jax.random.key(0), 50, options)
    np.testing.assert_allclose(log_probs, LOG_PROBS[0][tokens], rtol=1e-6)


@pytest.mark.parametrize(
    ('topk', 'topp', 'kept'),
    [
        (2, 0.0, [1, 3]),
        (3, 0.0, [1, 3, 0]),  # among equals, lower ids first
        (9, 0.0, [1, 3, 0, 2]),
        (0, 0.49, [1]),
        (0, 0.5, [1]),
        (0, 0.51, [1, 3]),
        (0, 0.8, [1, 3, 0]),
        (0, 1e-9, [1]),
        (0, 1.0, [1, 3, 0, 2]),
    ],
)
def test_cutoffs_keep_exactly_the_likeliest(topk, topp, kept):
    logits = jnp.log(jnp.asarray([[0.125, 0.5, 0.125, 0.25]]))
    for cutoffs in ((topk, topp), (jnp.asarray(topk), jnp.asarray(topp))):
        values, ids = decoding.candidates(logits, *cutoffs)
        remaining = values[0] > decoding.NEG_INF
        assert ids[0][remaining].tolist() == kept
        np.testing.assert_array_equal(values[0][remaining], logits[0, np.array(kept)])


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'topk': 5, 'topp': 0.9}, r'topk=5 and topp=0.9: both cut'),
        ({'topp': 0.9}, r'topk=1 and topp=0.9.*Set topk=0'),
        ({'topk': -2}, r'topk=-2: it counts'),
        ({'topk': 0, 'topp': 1.5}, r'topp=1.5: it is a probability'),
    ],
)
def test_cutoffs_that_cannot_be_are_errors(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        decoding.temperature_sample(jnp.zeros((1, 1), jnp.int32), {}, chain(TABLE), EOS, **kwargs)


def test_drawing_without_a_key_is_told():
    def sample(inputs):
        return decoding.temperature_sample(inputs, {}, chain(TABLE), EOS, topk=0)

    with pytest.warns(UserWarning, match=r'decode_rng=None: every call gives the same'):
        jax.eval_shape(sample, jnp.zeros((1, 1), jnp.int32))


def test_temperatures_may_differ_by_example():
    sample = jax.jit(
        lambda temperature: decoding.temperature_sample(
            jnp.zeros((2, 3), jnp.int32), {}, chain(TABLE), EOS, jax.random.key(0), 50, temperature, topk=0
        )
    )
    sequences, log_probs = sample(jnp.asarray([decoding.MIN_TEMPERATURE, 1.0]))
    greedy, _ = sample(jnp.zeros(2))
    assert np.all(sequences[0] == greedy[0]) and np.all(log_probs[0] == 0)
    assert len(np.unique(sequences[1], axis=0)) > 10


def test_decodes_come_likeliest_last_each_with_its_own_log_probability():
    inputs = np.array([[0, 0, 0, 0], [0, 3, 0, 0], [0, 6, 1, 0]])
    sequences, log_probs = jax.jit(
        lambda inputs: decoding.temperature_sample(inputs, {}, chain(TABLE), EOS, jax.random.key(1), 7, topk=0)
    )(inputs)
    assert sequences.shape == (3, 7, 4)
    assert np.all(np.diff(log_probs, axis=1) >= 0) and np.any(np.diff(log_probs, axis=1) > 0)
    for row, prompt, decodes in zip(range(3), inputs, np.asarray(sequences), strict=True):
        for tokens, log_prob in zip(decodes, log_probs[row], strict=True):
            total, before, num_eos = 0.0, 0, 0
            for given, token in zip([*prompt[1:], 0], tokens, strict=True):
                if num_eos > np.sum(prompt == EOS):
                    assert token == 0
                elif given:
                    assert token == given
                else:
                    total += LOG_PROBS[before, token]
                before, num_eos = token, num_eos + (token == EOS)
            np.testing.assert_allclose(log_prob, total, rtol=1e-5, atol=1e-6)


def test_callbacks_change_logits_and_state():
    def forbid(logits, state):
        # Token 3 may not be written at position 2.
        banned = (jnp.arange(8) == 3)[None] & (state.cur_index == 1)[:, None]
        return jnp.where(banned, decoding.NEG_INF, logits)

    def stop(state):
        return state.replace(ended=state.ended | (state.step >= 3))

    @jax.jit
    def sample(inputs):
        callbacks = {'logit_callback_fn': forbid, 'state_callback_fn': stop}
        return decoding.temperature_sample(inputs, {}, counting, EOS, **callbacks)[0]

    assert sample(jnp.zeros((1, LENGTH), jnp.int32)).tolist() == [[[2, 0, 2, 0, 0, 0]]]


def test_sharded_sampling_equals_unsharded_and_compiles_once():
    rng = np.random.default_rng(0)
    params = {'embed': rng.normal(size=(16, 8)), 'out': 3 * rng.normal(size=(8, 16))}
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    traces = []

    def sample(params, inputs, cache, key):
        traces.append(inputs.shape)

        def tokens_to_logits(state):
            memory = 0.5 * state.cache['memory'] + params['embed'][state.cur_token[:, 0]][None]
            return jnp.tanh(memory[-1]) @ params['out'], {'memory': memory}

        return decoding.temperature_sample(inputs, cache, tokens_to_logits, 1, key, 2, topk=5, cache_offset=1)

    inputs = rng.integers(0, 2, (8, LENGTH), dtype=np.int32) * rng.integers(2, 16, (8, LENGTH), dtype=np.int32)
    args = params, inputs, {'memory': np.zeros((3, 8, 8), np.float32)}, jax.random.key(0)
    expected = jax.jit(sample)(*args)
    partitioner = partitioning.PjitPartitioner(num_partitions=2)
    specs = ({'embed': P('model'), 'out': P(None, 'model')}, P('data'), {'memory': P(None, 'data', 'model')}, None)
    sharded = partitioner.partition(sample, specs, (P('data'), P('data')))
    traces.clear()
    sequences, log_probs = sharded(*args)
    sharded(*args[:3], jax.random.key(1))
    assert len(traces) == 1
    assert sequences.sharding.spec == P('data') and sequences.sharding.num_devices == 8
    np.testing.assert_array_equal(sequences, expected[0])
    np.testing.assert_allclose(log_probs, expected[1], rtol=1e-5)


DECODES = {
    'greedy': (decoding.temperature_sample, {}),
    'beam1': (decoding.beam_search, {'num_decodes': 1}),
    'beam4': (decoding.beam_search, {'num_decodes': 4}),
}


@pytest.mark.parametrize('name', DECODES)
def test_sharded_t5_decodes_t5x_s_tokens_with_its_scores(name):
    golden = np.load(GOLDENS / 'decoding.npz')
    stored = np.load(GOLDENS / 'network_t5_1_1.npz')
    params = {n.removeprefix('params/'): stored[n] for n in stored.files if n.startswith('params/')}
    params = unflatten_dict({n: x * golden['scale'] for n, x in params.items()}, sep='/')
    decode_fn, kwargs = DECODES[name]
    module, length = Transformer(T5Config(**t5_models.TINY)), 10

    def decode(params, tokens):
        inputs = jnp.zeros((len(tokens), length), jnp.int32)
        options = {'enable_dropout': False, 'decode': True, 'mutable': ['cache']}
        encoded = module.apply({'params': params}, tokens, enable_dropout=False, method=module.encode)
        _, variables = module.apply({'params': params}, tokens, inputs, inputs, **options)
        rows = [jnp.repeat(x, kwargs.get('num_decodes', 1), axis=0) for x in (encoded, tokens)]

        def tokens_to_logits(state):
            variables = {'params': params, 'cache': state.cache}
            tokens = (state.cur_token, state.cur_token)
            step = {'max_decode_length': length, 'method': module.decode}
            logits, variables = module.apply(variables, *rows, *tokens, **options, **step)
            return logits[:, 0], variables['cache']

        return decode_fn(inputs, variables['cache'], tokens_to_logits, eos_id=1, **kwargs)

    axes = json.loads((GOLDENS / 'network_axes.json').read_text())
    axes = unflatten_dict({n: tuple(names) for n, names in axes.items()}, sep='/')
    partitioner = partitioning.PjitPartitioner(num_partitions=2)
    specs = layout.LogicalRules(partitioning.standard_logical_axis_rules()).specs(axes)
    tokens, scores = partitioner.partition(decode, (specs, P('data')), (P('data'), P('data')))(params, golden['enc'])
    np.testing.assert_array_equal(tokens, golden[f'{name}/tokens'])
    # With parameters times four, half a unit in their last place moves a score by up to 5e-3.
    np.testing.assert_allclose(scores, golden[f'{name}/scores'], atol=1e-2, rtol=0)
