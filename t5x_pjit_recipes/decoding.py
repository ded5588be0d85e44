"""Decoding: from a model's logits to sequences, by sampling or by search, in one compiled loop on any mesh."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from t5x_pjit_recipes.beams import beam_search, brevity_penalty
from t5x_pjit_recipes.decoding_states import (
    NEG_INF,
    Array,
    DecodingState,
    PyTree,
    TokensToLogits,
    cache_map,
    last_positions,
    pad_prompts,
    repeat_rows,
    token_at,
    up_to,
    with_token_at,
)
from t5x_pjit_recipes.errors import ConfigError, warn

__all__ = [
    'MIN_TEMPERATURE',
    'NEG_INF',
    'DecodingState',
    'SamplingLoopState',
    'beam_search',
    'brevity_penalty',
    'cache_map',
    'temperature_sample',
]

MIN_TEMPERATURE = 1e-4


@struct.dataclass
class SamplingLoopState:
    """All that sampling carries from step to step; rows are examples times decodes.

    Attributes:
      step: the number of steps done.
      cur_index: (rows,), the position of `cur_token` in its sequence.
      sequences: ids (rows, length + 1), zero where nothing has been written yet.
      cache: what the model keeps between steps.
      cur_token: ids (rows, 1), what the model reads next.
      ended: (rows,), which rows take no more tokens.
      rng: the key that later steps draw from.
      log_prob: (rows,), of the tokens that were sampled.
    """

    step: Array
    cur_index: Array
    sequences: Array
    cache: PyTree
    cur_token: Array
    ended: Array
    rng: Array
    log_prob: Array


def temperature_sample(
    inputs: Array,
    cache: PyTree,
    tokens_to_logits: TokensToLogits,
    eos_id: int,
    decode_rng: Array | None = None,
    num_decodes: int = 1,
    temperature: float | Array = 1.0,
    topk: int | Array = 1,
    topp: float | Array = 0.0,
    cache_offset: int = 0,
    initial_index: Array | None = None,
    max_decode_steps: int | Array | None = None,
    max_decode_steps_hard_limit: int | None = None,
    rescale_log_probs: bool = True,
    state_callback_fn: Callable[[SamplingLoopState], SamplingLoopState] | None = None,
    logit_callback_fn: Callable[[Array, SamplingLoopState], Array] | None = None,
) -> tuple[Array, Array]:
    """Samples sequences token by token; greedily by default, with `topk=1`, and at temperatures up to 1e-4.

    Position 0 is what the model reads first (T5 and T5X put 0 there) and is not part of the result, which is one
    position ahead of `inputs`. Non-zero inputs after it are a prompt: they are written as they are, and sampling fills
    in the zeros. A row ends with an `eos_id` beyond those of its prompt; zeros follow.

    Args:
      inputs: ids (batch, length).
      cache: what the model keeps between steps, for a batch of rows: (batch, ...), after `cache_offset` other dims.
      tokens_to_logits: takes a DecodingState of batch * num_decodes rows, returns logits (rows, vocabulary) of the
        token after `cur_token`, and the cache for the next step.
      eos_id: what ends a row.
      decode_rng: the key to draw with. Without one, every call draws the same.
      num_decodes: sequences for each example.
      temperature: what logits are divided by, a number or (batch,).
      topk: samples among so many likeliest tokens; 0 among all.
      topp: samples among the fewest likeliest tokens whose probabilities add up to this; 0 among all.
      cache_offset: dims of the cache's arrays before the batch, 1 where layers are scanned.
      initial_index: (batch,) or a number, where to start: the model has read the positions before it, and `cache` holds
        them. Without it, prompts are read from position 0, token by token.
      max_decode_steps: the most tokens after the prompt, a number or (batch,); without it, as many as `inputs` is long.
      max_decode_steps_hard_limit: the most that `max_decode_steps` can be.
      rescale_log_probs: whether log probabilities are those of what was drawn from, after temperature, `topk` and
        `topp` (so that greedy ones are 0), or the model's own.
      state_callback_fn: changes the state before each step.
      logit_callback_fn: changes the logits (rows, vocabulary) of each step; it sees the state as well.

    Returns:
      Ids (batch, num_decodes, length) and the log probabilities of what was sampled (batch, num_decodes), the likeliest
      of each example last.

    Raises:
      ConfigError: if both `topk` and `topp` are given, if one is out of range, or if `cache_offset` does not lead to
        the batch.
    """
    check_cutoffs(topk, topp)
    sampling = _Sampling(_by_rows(temperature, num_decodes), topk, topp, rescale_log_probs)
    prompts = _prompts(inputs, num_decodes, eos_id, _limit(max_decode_steps, max_decode_steps_hard_limit))
    start = jnp.broadcast_to(jnp.asarray(0 if initial_index is None else initial_index, jnp.int32), inputs.shape[:1])
    cache = repeat_rows(cache, len(inputs), num_decodes, offset=cache_offset, has_indices=initial_index is not None)

    def step(state):
        if state_callback_fn is not None:
            state = state_callback_fn(state)
        seen = DecodingState(state.cur_index, state.sequences, state.cur_token, state.cache)
        logits, cache = tokens_to_logits(seen)
        if logit_callback_fn is not None:
            logits = logit_callback_fn(logits, state)
        rng, key = jax.random.split(state.rng)
        tokens, log_probs = sampling.draw(logits.astype(jnp.float32), key)
        return _advance(state.replace(cache=cache, rng=rng), prompts, tokens, log_probs)

    initial = _initial_state(prompts, jnp.repeat(start, num_decodes), cache, _key(decode_rng, sampling))
    final = lax.while_loop(lambda state: ~jnp.all(state.ended), step, initial)
    return _likeliest_last(final.sequences[:, 1:], final.log_prob, num_decodes)


def check_cutoffs(topk: int | Array, topp: float | Array) -> None:
    """Checks numbers known before compilation; arrays pass.

    Raises:
      ConfigError: if both are given or one is out of range.
    """
    if _is_number(topk) and _is_number(topp) and topk and topp:
        raise ConfigError(
            f'Cannot sample with topk={topk} and topp={topp}: both cut the distribution off. Set topk=0 to sample by '
            'topp, or topp=0.0 to sample by topk.'
        )
    if _is_number(topk) and topk < 0:
        raise ConfigError(f'Cannot sample with topk={topk}: it counts tokens. Set 0 for no cutoff, or a count.')
    if _is_number(topp) and not 0 <= topp <= 1:
        raise ConfigError(f'Cannot sample with topp={topp}: it is a probability. Set it from 0.0 (no cutoff) to 1.0.')


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.number)


class _Prompts(NamedTuple):
    tokens: Array  # (rows, length + 1)
    end: Array  # (rows,), the last position that may be written
    num_eos: Array  # (rows,)
    eos_id: int


def _prompts(inputs: Array, num_decodes: int, eos_id: int, max_steps: int | Array | None) -> _Prompts:
    tokens = pad_prompts(jnp.asarray(inputs, jnp.int32), num_decodes)
    end = jnp.full(tokens.shape[:1], inputs.shape[1], jnp.int32)
    if max_steps is not None:
        end = jnp.minimum(end, last_positions(tokens) + _by_rows(max_steps, num_decodes))
    return _Prompts(tokens, end, jnp.sum(tokens == eos_id, axis=1), eos_id)


def _limit(steps: int | Array | None, hard_limit: int | None) -> int | Array | None:
    return jnp.minimum(steps, hard_limit) if steps is not None and hard_limit else steps


def _by_rows(x: Any, num_decodes: int) -> Any:
    """Repeats what is given by example (batch,) for each decode; numbers stay."""
    return x if jnp.ndim(x) == 0 else jnp.repeat(jnp.asarray(x), num_decodes, axis=0)


def _key(decode_rng: Array | None, sampling: '_Sampling') -> Array:
    if decode_rng is not None:
        return decode_rng
    if not sampling.is_greedy:
        warn(
            'Sampling draws with key 0, since decode_rng=None: every call gives the same. '
            'Pass decode_rng=jax.random.key(seed).'
        )
    return jax.random.key(0)


def _initial_state(prompts: _Prompts, start: Array, cache: PyTree, rng: Array) -> SamplingLoopState:
    return SamplingLoopState(
        step=jnp.zeros((), jnp.int32),
        cur_index=start,
        sequences=up_to(prompts.tokens, start),
        cache=cache,
        cur_token=token_at(prompts.tokens, start)[:, None],
        ended=start >= prompts.end,
        rng=rng,
        log_prob=jnp.zeros(start.shape, jnp.float32),
    )


def _advance(state: SamplingLoopState, prompts: _Prompts, sampled: Array, log_probs: Array) -> SamplingLoopState:
    """Writes the prompt's next token, or where it has none the sampled one, to each row that has not ended."""
    index = state.cur_index + 1
    given = token_at(prompts.tokens, index)
    tokens = jnp.where(state.ended, 0, jnp.where(given != 0, given, sampled))
    is_sampled = ~state.ended & (given == 0)
    sequences = jnp.where(state.ended[:, None], state.sequences, with_token_at(state.sequences, index, tokens))
    num_eos = jnp.sum(sequences == prompts.eos_id, axis=1)
    return state.replace(
        step=state.step + 1,
        cur_index=index,
        sequences=sequences,
        cur_token=tokens[:, None],
        ended=state.ended | (num_eos > prompts.num_eos) | (index >= prompts.end),
        log_prob=state.log_prob + jnp.where(is_sampled, log_probs, 0.0),
    )


def _likeliest_last(sequences: Array, log_prob: Array, num_decodes: int) -> tuple[Array, Array]:
    sequences = sequences.reshape(-1, num_decodes, sequences.shape[-1])
    log_prob = log_prob.reshape(-1, num_decodes)
    order = jnp.argsort(log_prob, axis=-1)
    return jnp.take_along_axis(sequences, order[:, :, None], axis=1), jnp.take_along_axis(log_prob, order, axis=1)


@dataclasses.dataclass(frozen=True)
class _Sampling:
    """How a token is drawn from logits; `temperature` is a number or (rows,)."""

    temperature: float | Array
    topk: int | Array
    topp: float | Array
    rescale_log_probs: bool

    @property
    def is_greedy(self) -> bool:
        """Whether it is known before compilation that nothing is random."""
        is_cold = _is_number(self.temperature) and self.temperature <= MIN_TEMPERATURE
        return is_cold or (_is_number(self.topk) and self.topk == 1)

    def draw(self, logits: Array, rng: Array) -> tuple[Array, Array]:
        """Draws a token for each row of float32 logits (rows, vocabulary): ids (rows,), log probabilities (rows,)."""
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        log_probs = jnp.zeros(tokens.shape, jnp.float32)
        if not self.is_greedy:
            is_cold = jnp.asarray(self.temperature) <= MIN_TEMPERATURE
            sampled, sampled_log_probs = self._sample(logits, rng)
            tokens = jnp.where(is_cold, tokens, sampled)
            log_probs = jnp.where(is_cold, log_probs, sampled_log_probs)
        if not self.rescale_log_probs:
            log_probs = _pick(jax.nn.log_softmax(logits), tokens)
        return tokens, log_probs

    def _sample(self, logits: Array, rng: Array) -> tuple[Array, Array]:
        temperature = jnp.asarray(self.temperature, jnp.float32)
        temperature = jnp.maximum(temperature, MIN_TEMPERATURE)
        logits, ids = candidates(
            logits / (temperature if temperature.ndim == 0 else temperature[:, None]), self.topk, self.topp
        )
        choice = jax.random.categorical(rng, logits)
        log_probs = _pick(jax.nn.log_softmax(logits), choice)
        return (choice if ids is None else _pick(ids, choice)).astype(jnp.int32), log_probs


def _pick(values: Array, index: Array) -> Array:
    return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]


def candidates(logits: Array, topk: int | Array, topp: float | Array) -> tuple[Array, Array | None]:
    """Selects the tokens that may be drawn.

    Among equal logits, tokens of lower ids count as likelier, so that `topk` tokens remain whatever the logits are.

    Args:
      logits: (rows, vocabulary).
      topk: how many likeliest tokens remain; 0 for all.
      topp: the fewest likeliest tokens remain whose probabilities add up to this; 0 for all.

    Returns:
      Logits (rows, candidates), likeliest first, NEG_INF for those that may not be drawn, and their ids, likewise;
      without a cutoff, the logits as they are and None.
    """
    if _is_number(topk) and _is_number(topp) and not topk and not topp:
        return logits, None
    size = logits.shape[-1]
    logits, ids = lax.top_k(logits, min(topk, size) if _is_number(topk) and topk else size)
    rank = jnp.arange(logits.shape[-1])[None, :]
    probabilities = jax.nn.softmax(logits)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    is_out = ((rank >= topk) & (topk != 0)) | ((before >= topp) & (topp != 0))
    return jnp.where(is_out & (rank > 0), NEG_INF, logits), ids
