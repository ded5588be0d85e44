"""Generation: from prompts of any lengths to further tokens, in one program whose key/value cache is divided as well.

Prompts are read in one go, then tokens are drawn one after the other, all rows side by side.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_pjit_recipes.decoding import DecodingState, check_cutoffs, temperature_sample
from t5x_pjit_recipes.decoding_states import last_positions
from t5x_pjit_recipes.errors import ConfigError, DataError, MeshError, offenders, warn
from t5x_pjit_recipes.examples.bloom.layers import CACHE_AXES
from t5x_pjit_recipes.layout import LogicalRules, Plan, describe_mesh
from t5x_pjit_recipes.layout.axes import spec_axes

Array = jax.Array
Tokens = Sequence[int]

# Prompts of similar lengths share a program: their padded length is a multiple of this.
LENGTH_MULTIPLE = 16
NO_EOS = -1


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      max_new_tokens: the most tokens after a prompt.
      temperature: what logits are divided by; 0 takes the likeliest token always (greedy).
      top_k: samples among so many likeliest tokens; 0 among all.
      top_p: samples among the fewest likeliest tokens whose probabilities add up to this; 0 among all.
      eos_id: the token that ends a text, 2 in BLOOM; None for none.
    """

    max_new_tokens: int = 32
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    eos_id: int | None = 2

    def __post_init__(self):
        self._check_types()
        check_cutoffs(self.top_k, self.top_p)
        if self.max_new_tokens < 1 or not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f'Cannot sample max_new_tokens={self.max_new_tokens} at temperature={self.temperature}: there must be '
                'at least 1 token, and the temperature is 0 (greedy) or above, and finite. Change the one that is not.'
            )
        if self.eos_id == 0:
            raise ConfigError('Cannot end texts with eos_id=0: places still empty hold 0. Set another id, or None.')
        if self.temperature == 0 and (self.top_k > 1 or self.top_p):
            warn(
                f'top_k={self.top_k} and top_p={self.top_p} change nothing at temperature=0.0, which takes the '
                'likeliest token always. Set a temperature above 0 to draw.'
            )

    def _check_types(self) -> None:
        wanted = {'max_new_tokens': numbers.Integral, 'top_k': numbers.Integral, 'eos_id': numbers.Integral}
        wanted |= {'temperature': numbers.Real, 'top_p': numbers.Real}
        values = {name: getattr(self, name) for name in wanted if (name, getattr(self, name)) != ('eos_id', None)}
        faults = [
            f'{name}={value!r}: a {"whole " if wanted[name] is numbers.Integral else ""}number is needed'
            for name, value in values.items()
            if not isinstance(value, wanted[name])
        ]
        if faults:
            raise ConfigError(
                f'Cannot sample with {len(faults)} settings that are no such numbers. Change them:\n{offenders(faults)}'
            )


def make_generate(
    module: Any, partitioner: Any, *, state: Any, sampling: Sampling = Sampling()
) -> Callable[..., list[list[int]]]:
    """Makes a function that continues prompts.

    All of it, from prompts to the last token, is one program. It is compiled for each number of rows and each length
    that it meets: rows are padded to a multiple of the devices along the data axes, prompts to one of
    `LENGTH_MULTIPLE`.

    Args:
      module: has `config`, `extend` and `empty_cache`, as `examples.bloom.network.Bloom`.
      partitioner: lays out parameters, prompts and the cache.
      state: the state that will be used, of arrays or shapes.
      sampling: how tokens are drawn.

    Returns:
      A function of (state, prompts, rng=None) that returns the new tokens of each prompt, with the end token if there
      was one. Nothing given to it is donated; `rng` is needed unless sampling is greedy. Its attribute `program` is
      what `partition` returned.

    Raises:
      ConfigError: if the end token is none of the model's.
      MeshError: if the heads do not divide.
    """
    check_heads(module.config.num_heads, partitioner)
    _check_end(sampling, module.config.vocab_size)
    rows = partitioner.data_partition_spec
    params_specs = partitioner.get_mesh_axes(state).params
    decode = make_decode(module, sampling)
    program = partitioner.partition(decode, (params_specs, rows, rows, rows, None), None)

    def generate(state: Any, prompts: Sequence[Tokens], rng: Array | None = None) -> list[list[int]]:
        check_prompts(prompts, module.config.vocab_size)
        tokens, lengths, ends = pad_prompts(prompts, sampling.max_new_tokens, partitioner.data_mesh_size)
        result = program(state.params, tokens, lengths, ends, _key(rng, sampling))
        return [_new_tokens(row, len(p), sampling) for row, p in zip(np.asarray(result), prompts, strict=False)]

    generate.program = program
    return generate


def make_decode(module: Any, sampling: Sampling) -> Callable[[Any, Array, Array, Array, Array], Array]:
    """Makes the function that is compiled.

    Returns:
      A function of parameters, prompts (rows, length), their lengths (rows,), the positions at which rows end at the
      latest (rows,) and a key. It returns ids (rows, length + max_new_tokens - 1) from position 1 on.
    """

    def decode(params: Any, tokens: Array, lengths: Array, ends: Array, rng: Array) -> Array:
        def extend(cache: Any, new: Array, start: Array) -> tuple[Array, Any]:
            return module.apply({'params': params}, cache, new, start, method='extend')

        def tokens_to_logits(state: DecodingState) -> tuple[Array, Any]:
            logits, cache = extend(state.cache, state.cur_token, state.cur_index)
            return logits[:, 0], cache

        inputs = jnp.pad(tokens, ((0, 0), (0, sampling.max_new_tokens - 1)))
        _, cache = extend(module.empty_cache(*inputs.shape), tokens, jnp.zeros_like(lengths))
        sequences, _ = temperature_sample(
            inputs,
            cache,
            tokens_to_logits,
            NO_EOS if sampling.eos_id is None else sampling.eos_id,
            rng,
            temperature=sampling.temperature,
            topk=sampling.top_k,
            topp=sampling.top_p,
            cache_offset=1,
            # The last token of a prompt is read again, for the logits of the first new one.
            initial_index=lengths - 1,
            # Counted from the last token that is not 0; ids of 0 may end a prompt.
            max_decode_steps=ends - last_positions(tokens),
        )
        return sequences[:, 0]

    return decode


def check_prompts(prompts: Sequence[Tokens], vocab_size: int) -> None:
    """Raises DataError naming each prompt that is empty or has ids outside the vocabulary."""
    faults = list(_prompt_faults(prompts, vocab_size))
    if faults or not len(prompts):
        raise DataError(
            f'Cannot continue {len(faults)} of {len(prompts)} prompts. Give lists of ids from 0 to {vocab_size - 1}, '
            f'at least one in each:\n{offenders(faults) or "  there are none"}'
        )


def _prompt_faults(prompts: Sequence[Tokens], vocab_size: int) -> Iterator[str]:
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not np.iterable(prompt):
            yield f'prompt {number}: {prompt!r} is no list of ids'
        elif not len(prompt):
            yield f'prompt {number}: it is empty'
        elif strangers := [token for token in np.asarray(prompt, object).flat if not _is_id(token, vocab_size)]:
            yield f'prompt {number}: no ids are {", ".join(map(repr, strangers[:5]))}'
        elif np.ndim(prompt) != 1:
            yield f'prompt {number}: it is of {np.ndim(prompt)} dims'


def _is_id(token: Any, vocab_size: int) -> bool:
    is_whole = isinstance(token, numbers.Integral) and not isinstance(token, bool)
    return is_whole and 0 <= token < vocab_size


def _check_end(sampling: Sampling, vocab_size: int) -> None:
    if sampling.eos_id is not None and not 0 < sampling.eos_id < vocab_size:
        raise ConfigError(
            f'Cannot end texts with eos_id={sampling.eos_id}: ids are from 0 to {vocab_size - 1}, so that none would '
            'ever end. Set the id that ends texts in this vocabulary, or None.'
        )


def pad_prompts(prompts: Sequence[Tokens], max_new_tokens: int, row_multiple: int) -> tuple[np.ndarray, ...]:
    """Puts prompts into one array, and adds rows that end at once.

    Returns:
      Ids (rows, length), zeros behind each prompt; lengths (rows,); and the positions (rows,) at which rows end.

    >>> tokens, lengths, ends = pad_prompts([[5, 6, 7], [8]], max_new_tokens=4, row_multiple=4)
    >>> tokens.shape, lengths.tolist(), ends.tolist()
    ((4, 16), [3, 1, 1, 1], [6, 4, 0, 0])
    """
    longest = max(map(len, prompts))
    shape = [math.ceil(n / m) * m for n, m in ((len(prompts), row_multiple), (longest, LENGTH_MULTIPLE))]
    tokens, lengths, ends = np.zeros(shape, np.int32), np.ones(shape[0], np.int32), np.zeros(shape[0], np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
        ends[row] = len(prompt) - 1 + max_new_tokens
    return tokens, lengths, ends


def _key(rng: Array | None, sampling: Sampling) -> Array:
    if rng is None and sampling.temperature > 0:
        raise ConfigError(
            f'Cannot sample at temperature={sampling.temperature} without a key: every call would give the same. Pass '
            'rng=jax.random.key(seed), or set temperature=0.0.'
        )
    return jax.random.key(0) if rng is None else rng


def _new_tokens(row: np.ndarray, length: int, sampling: Sampling) -> list[int]:
    """Cuts a row of the result, which begins at position 1, to what came after the prompt, the end token included."""
    new = row[length - 1 : length - 1 + sampling.max_new_tokens].tolist()
    return new[: new.index(sampling.eos_id) + 1] if sampling.eos_id in new else new


def check_heads(num_heads: int, partitioner: Any) -> None:
    """Raises MeshError if the mesh axes that heads are split over do not divide them."""
    rules = LogicalRules(partitioner.logical_axis_rules)
    axes = [axis for entry in rules.spec(('heads',)) or () for axis in spec_axes(entry)]
    ways = math.prod(partitioner.mesh.shape[axis] for axis in axes)
    if num_heads % ways:
        devices = partitioner.mesh.size
        fitting = ', '.join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0 and devices % n == 0)
        raise MeshError(
            f'Cannot split {num_heads} attention heads {ways} ways over {tuple(axes)} of '
            f'{describe_mesh(partitioner.mesh)}: {ways} does not divide {num_heads}. Use num_partitions from {fitting}.'
        )


def plan_cache(module: Any, partitioner: Any, *, rows: int, length: int) -> Plan:
    """Plans the key/value cache.

    Args:
      module: the model.
      partitioner: lays it out.
      rows: texts that are written at a time, padded as `make_generate` says.
      length: positions that it holds.
    """
    shapes = jax.eval_shape(lambda: module.empty_cache(rows, length))
    spec = LogicalRules(partitioner.logical_axis_rules).spec(CACHE_AXES)
    return Plan(shapes, dict.fromkeys(shapes, spec), partitioner.mesh)
