"""Beam search finds what trying all sequences finds, and keeps prompts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_pjit_recipes import decoding
from t5x_pjit_recipes.errors import ConfigError

EOS, LENGTH = 3, 3
TABLE = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
LOG_PROBS = np.asarray(jax.nn.log_softmax(TABLE))


def chain(state):
    """A Markov chain that also checks its cache: logits are wrong where a row's cache is not that of its sequence."""
    remembered, token = state.cache['read'][1, :, 0], state.cur_token[:, 0]
    before = jnp.where(jnp.arange(state.sequences.shape[1])[None] < state.cur_index[:, None], state.sequences, 0)
    is_wrong = remembered != jnp.sum(before, axis=1)
    logits = jnp.where(is_wrong[:, None], jnp.asarray([[9.0, 0.0, 0.0, 0.0]]), jnp.asarray(TABLE)[token])
    return logits, {'read': state.cache['read'] + token[None, :, None]}


def search(inputs, num_decodes, **kwargs):
    cache = {'read': jnp.zeros((2, len(inputs), 1), jnp.int32)}
    return decoding.beam_search(inputs, cache, chain, EOS, num_decodes, cache_offset=1, **kwargs)


def all_finished(prompt, alpha):
    """Tries all sequences that go on from the prompt and end: [(score, tokens)], the best last."""
    results = []
    for free in range(1, LENGTH - len(prompt) + 1):
        for tokens in itertools.product(range(4), repeat=free):
            if tokens[-1] == EOS and EOS not in tokens[:-1]:
                path = (0, *prompt, *tokens)
                pairs = list(itertools.pairwise(path))[len(prompt) :]
                score = sum(LOG_PROBS[pair] for pair in pairs) / ((5 + free) / 6) ** alpha
                results.append((score, (path + (0,) * LENGTH)[1 : LENGTH + 1]))
    return sorted(results)


@jax.jit
def search_wide(inputs, alpha):
    return search(inputs, 27, alpha=alpha)


@pytest.mark.parametrize('alpha', [0.0, 0.6, 2.0])
def test_wide_beams_find_what_trying_all_finds(alpha):
    prompts = np.array([[0, 0, 0], [0, 2, 0], [0, 3, 0], [0, 1, 3]])
    sequences, scores = search_wide(prompts, alpha)
    assert sequences.shape == (4, 27, LENGTH)
    for row, prompt in enumerate(prompts):
        expected = all_finished([int(t) for t in prompt[1:] if t], alpha)
        count = len(expected)
        assert [tuple(tokens) for tokens in sequences[row, -count:].tolist()] == [tokens for _, tokens in expected]
        np.testing.assert_allclose(scores[row, -count:], [score for score, _ in expected], rtol=1e-5)
        assert np.all(scores[row, :-count] == decoding.NEG_INF)


def test_narrow_beams_stop_when_no_live_one_can_win():
    steps = []

    def tokens_to_logits(state):
        jax.debug.callback(lambda: steps.append(1))
        return jnp.log(jnp.asarray([[0.001, 0.001, 0.001, 0.997]])), state.cache

    inputs = jnp.zeros((1, 20), jnp.int32)
    sequences, scores = jax.jit(lambda inputs: decoding.beam_search(inputs, {}, tokens_to_logits, EOS, 1))(inputs)
    jax.effects_barrier()
    assert sequences.tolist() == [[[EOS] + [0] * 19]]
    np.testing.assert_allclose(scores, np.log([[0.997]]), rtol=1e-4)
    assert len(steps) == 1


def test_lengths_are_limited():
    wide = jax.jit(lambda inputs: search(inputs, 2, max_decode_len=5, max_decode_step=2))
    sequences, _ = wide(np.array([[0, 2, 0], [0, 1, 2]]))
    assert sequences.shape == (2, 2, 5)
    assert sequences[0, :, :1].tolist() == [[2], [2]] and sequences[1, :, :2].tolist() == [[1, 2], [1, 2]]
    assert not sequences[0, :, 3:].any() and not sequences[1, :, 4:].any()


def test_a_cache_offset_that_does_not_lead_to_the_batch_is_an_error():
    with pytest.raises(ConfigError, match=r'cache_offset=0: dim 0 must be the batch, 3'):
        decoding.beam_search(np.zeros((3, 2)), {'read': jnp.zeros((2, 3, 1))}, chain, EOS)
