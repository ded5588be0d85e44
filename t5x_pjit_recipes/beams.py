"""Beam search: keeps the likeliest beginnings of each sequence side by side until none can still win."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from t5x_pjit_recipes.decoding_states import (
    NEG_INF,
    Array,
    DecodingState,
    PyTree,
    TokensToLogits,
    last_positions,
    map_rows,
    repeat_rows,
    token_at,
    up_to,
    with_token_at,
)


def brevity_penalty(alpha: float, length: Array | float) -> Array | float:
    """Computes what log probabilities are divided by, so that long ones may win (arXiv:1609.08144, equation 14)."""
    return ((5.0 + length) / 6.0) ** alpha


class _Beams(NamedTuple):
    """Sequences (batch, beams, length + 1) with a score each (batch, beams), best first."""

    sequences: Array
    scores: Array


@struct.dataclass
class _SearchState:
    index: Array  # (batch,), the position that is read now
    live: _Beams  # scores are log probabilities
    finished: _Beams  # scores are log probabilities over the penalty, NEG_INF where there is no sequence yet
    is_done: Array  # (batch,)
    cache: PyTree


class _Search(NamedTuple):
    prompts: Array  # (batch, length + 1)
    prompt_end: Array  # (batch,), the last position of the prompt
    end: Array  # (batch,), the last position that may be written
    num_beams: int
    eos_id: int
    alpha: float
    min_log_prob: float


def beam_search(
    inputs: Array,
    cache: PyTree,
    tokens_to_logits: TokensToLogits,
    eos_id: int,
    num_decodes: int = 4,
    alpha: float = 0.6,
    max_decode_len: int | None = None,
    max_decode_step: int = -1,
    min_log_prob: float = NEG_INF,
    decode_rng: Array | None = None,
    cache_offset: int = 0,
    initial_index: Array | None = None,
) -> tuple[Array, Array]:
    """Searches for the likeliest sequences, `num_decodes` beams for each example.

    Prompts, positions and the cache are as for `decoding.temperature_sample`. Where no beam has ended with `eos_id`,
    the live ones are returned, scored by their log probabilities alone.

    Args:
      inputs: ids (batch, length).
      cache: what the model keeps between steps, for a batch of rows: (batch, ...), after `cache_offset` other dims.
      tokens_to_logits: takes a DecodingState of batch * num_decodes rows, returns logits (rows, vocabulary) and
        the cache for the next step.
      eos_id: what ends a sequence.
      num_decodes: beams for each example.
      alpha: how far long sequences are favoured, see `brevity_penalty`.
      max_decode_len: how long sequences may get, prompts included; as long as `inputs` by default.
      max_decode_step: the most tokens after the prompt; as many as fit where it is not above 0.
      min_log_prob: beams less likely than that are dropped.
      decode_rng: accepted and not needed.
      cache_offset: dims of the cache's arrays before the batch, 1 where layers are scanned.
      initial_index: (batch,) or a number, where to start when prompts are in the cache already.

    Returns:
      Ids (batch, num_decodes, max_decode_len) and scores (batch, num_decodes), the best of each example last.

    Raises:
      ConfigError: if `cache_offset` does not lead to the batch.
    """
    del decode_rng
    prompts, prompt_end, end = _lengths(inputs, max_decode_len, max_decode_step)
    search = _Search(prompts, prompt_end, end, num_decodes, eos_id, alpha, min_log_prob)
    start = jnp.broadcast_to(jnp.asarray(0 if initial_index is None else initial_index, jnp.int32), inputs.shape[:1])
    layout = {'offset': cache_offset, 'has_indices': initial_index is not None}
    cache = repeat_rows(cache, len(inputs), num_decodes, **layout)

    def step(state):
        logits, cache = tokens_to_logits(_seen(state, num_decodes))
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32)).reshape(len(inputs), num_decodes, -1)
        new, origins = _extend(search, state, log_probs)
        take = functools.partial(_take_beams, origins=origins, offset=cache_offset)
        return new.replace(cache=map_rows(take, cache, origins.size, **layout))

    final = lax.while_loop(lambda state: ~jnp.all(state.is_done), step, _initial_state(search, start, cache))
    return _best_last(final)


def _lengths(inputs: Array, max_length: int | None, max_step: int) -> tuple[Array, Array, Array]:
    """Fits prompts to the length of the result; returns them, their last positions and the last that may be written."""
    length = inputs.shape[1] if max_length is None else max_length
    prompts = jnp.asarray(inputs, jnp.int32)[:, : length + 1]
    prompts = jnp.pad(prompts, ((0, 0), (0, length + 1 - prompts.shape[1])))
    prompt_end = last_positions(prompts)
    end = jnp.minimum(prompt_end + max_step, length) if max_step > 0 else jnp.full_like(prompt_end, length)
    return prompts, prompt_end, end


def _initial_state(search: _Search, start: Array, cache: PyTree) -> _SearchState:
    shape = (len(start), search.num_beams)
    sequences = up_to(search.prompts, start)[:, None].repeat(search.num_beams, axis=1)
    # All beams begin alike: only the first counts, or they would stay alike.
    scores = jnp.broadcast_to(jnp.where(jnp.arange(search.num_beams) == 0, 0.0, NEG_INF)[None], shape)
    finished = _Beams(jnp.zeros_like(sequences), jnp.full(shape, NEG_INF))
    return _SearchState(start, _Beams(sequences, scores), finished, start >= search.end, cache)


def _seen(state: _SearchState, num_beams: int) -> DecodingState:
    sequences = _flat(state.live.sequences)
    index = jnp.repeat(state.index, num_beams)
    return DecodingState(index, sequences, token_at(sequences, index)[:, None], state.cache)


def _flat(x: Array) -> Array:
    return x.reshape(-1, *x.shape[2:])


def _take_beams(x: Array, origins: Array, offset: int) -> Array:
    """Reorders the rows of a cache's array by the beam (batch, beams) that each continues."""
    grouped = x.reshape(*x.shape[:offset], *origins.shape, *x.shape[offset + 1 :])
    # Mapped over the batch, so that devices which hold different examples exchange nothing.
    take = jax.vmap(lambda x, origins: jnp.take(x, origins, axis=offset), (offset, 0), offset)
    return take(grouped, origins).reshape(x.shape)


def _extend(search: _Search, state: _SearchState, log_probs: Array) -> tuple[_SearchState, Array]:
    """Takes one step with log probabilities (batch, beams, vocabulary); also says which beam each live beam came from.

    Examples that are done keep their beams.
    """
    index = state.index + 1
    given = token_at(search.prompts, index)
    tokens, scores, origins = _candidates(search, state.live.scores, log_probs, given)
    sequences = _append(state.live.sequences, origins, index, tokens)
    is_end = (tokens == search.eos_id) & (given == 0)[:, None]
    live, chosen = _top(_Beams(sequences, jnp.where(is_end, NEG_INF, scores)), search.num_beams)
    penalty = brevity_penalty(search.alpha, jnp.maximum(index - search.prompt_end, 1))[:, None]
    ended = _Beams(sequences, jnp.where(is_end & (scores > NEG_INF), scores / penalty, NEG_INF))
    finished, _ = _top(_joined(state.finished, ended), search.num_beams)
    new = state.replace(index=index, live=live, finished=finished)
    new = new.replace(is_done=_is_done(search, new))
    return _where_done(state, new), jnp.take_along_axis(origins, chosen, axis=1)


def _append(sequences: Array, origins: Array, index: Array, tokens: Array) -> Array:
    """Copies the sequence of each candidate's beam and writes its token (batch, candidates) at `index` (batch,)."""
    sequences = jnp.take_along_axis(sequences, origins[:, :, None], axis=1)
    flat = with_token_at(_flat(sequences), jnp.repeat(index, tokens.shape[1]), tokens.reshape(-1))
    return flat.reshape(sequences.shape)


def _joined(one: _Beams, other: _Beams) -> _Beams:
    return jax.tree.map(lambda a, b: jnp.concatenate((a, b), axis=1), one, other)


def _where_done(old: _SearchState, new: _SearchState) -> _SearchState:
    """Takes `old` for examples that are done in it, `new` for the others; without a cache."""

    def choose(a, b):
        return jnp.where(old.is_done.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, old.replace(cache=None), new.replace(cache=None))


def _candidates(search: _Search, live: Array, log_probs: Array, given: Array) -> tuple[Array, Array, Array]:
    """Finds the best extensions of the live beams: tokens, log probabilities and beams (batch, 2 * beams).

    Twice as many as beams, so that enough stay live if half of them end. A prompt's token is the only extension there
    is, and costs nothing.
    """
    vocabulary = log_probs.shape[-1]
    is_given = jnp.arange(vocabulary)[None] == given[:, None]
    forced = jnp.where(is_given, 0.0, NEG_INF)[:, None]
    totals = live[:, :, None] + jnp.where((given != 0)[:, None, None], forced, log_probs)
    totals = jnp.maximum(jnp.where(totals < search.min_log_prob, NEG_INF, totals), NEG_INF)
    scores, chosen = lax.top_k(
        totals.reshape(len(totals), -1), min(2 * search.num_beams, search.num_beams * vocabulary)
    )
    return (chosen % vocabulary).astype(jnp.int32), scores, chosen // vocabulary


def _top(beams: _Beams, count: int) -> tuple[_Beams, Array]:
    scores, chosen = lax.top_k(beams.scores, count)
    return _Beams(jnp.take_along_axis(beams.sequences, chosen[:, :, None], axis=1), scores), chosen


def _is_done(search: _Search, state: _SearchState) -> Array:
    """Tells which examples are at their end, or have finished beams that no live one can overtake any more."""
    longest = jnp.maximum(search.end - search.prompt_end, 1)
    best_live = state.live.scores[:, 0] / brevity_penalty(search.alpha, longest)
    worst_finished = state.finished.scores[:, -1]
    return (state.index >= search.end) | (worst_finished > best_live)


def _best_last(state: _SearchState) -> tuple[Array, Array]:
    has_finished = (state.finished.scores > NEG_INF).any(axis=1)
    sequences = jnp.where(has_finished[:, None, None], state.finished.sequences, state.live.sequences)
    scores = jnp.where(has_finished[:, None], state.finished.scores, state.live.scores)
    return sequences[:, ::-1, 1:], scores[:, ::-1]
