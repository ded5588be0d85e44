"""What a search over tokens hands to a model at each step, and what it does to the model's key/value cache."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct

from t5x_pjit_recipes.errors import ConfigError, offenders
from t5x_pjit_recipes.layout import paths

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any

NEG_INF = -1.0e7
# Leaves that all rows share, by the last part of their names; `cache_index` counts for all rows unless prompts were
# prefilled.
SHARED = ('cached_bias', 'position_embedder_index')
INDEX = 'cache_index'


@struct.dataclass
class DecodingState:
    """What a model sees of one step; rows are examples times decodes, the decodes of an example side by side.

    Attributes:
      cur_index: (rows,), the position of `cur_token` in its sequence.
      sequences: ids (rows, length + 1), zero where nothing has been written yet.
      cur_token: ids (rows, 1), what the model reads now.
      cache: what the model keeps between steps.
    """

    cur_index: Array
    sequences: Array
    cur_token: Array
    cache: PyTree


TokensToLogits: TypeAlias = Callable[[DecodingState], tuple[Array, PyTree]]


def cache_map(fn: Callable[[Array], Any], cache: PyTree, apply_to_index: bool = False) -> PyTree:
    """Applies `fn` to the leaves of a cache that have a batch dim, by the last part of their names.

    Args:
      fn: what to apply.
      cache: a tree of arrays.
      apply_to_index: whether leaves named cache_index have a batch dim as well.
    """
    skipped = SHARED if apply_to_index else (*SHARED, INDEX)
    return paths.map_named(lambda name, x: x if name.rpartition('/')[2] in skipped else fn(x), cache)


def map_rows(fn: Callable[[Array], Array], cache: PyTree, rows: int, *, offset: int, has_indices: bool) -> PyTree:
    """Applies `fn` to the leaves of a cache that hold something for each row, after checking that they do.

    Args:
      fn: what to apply.
      cache: a tree of arrays.
      rows: how many there are.
      offset: the number of dims before that of rows, 1 where layers are scanned. Leaves of no more dims than that hold
        nothing by rows.
      has_indices: whether leaves named cache_index may have one entry for each row.

    Raises:
      ConfigError: if a leaf has another size there.
    """
    sizes = cache_map(lambda x: x.shape[offset] if x.ndim > offset else rows, cache, apply_to_index=has_indices)
    strangers = [
        f'{name} {x.shape}: dim {offset} is {size}'
        for (name, x), size in zip(paths.named_leaves(cache).items(), jax.tree.leaves(sizes), strict=True)
        if isinstance(size, int) and size != rows
    ]
    if strangers:
        raise ConfigError(
            f'Cannot rearrange {len(strangers)} arrays of the cache by rows with cache_offset={offset}: dim {offset} '
            f'must be the batch, {rows}. Set cache_offset to the number of dims before the batch:\n'
            + offenders(strangers)
        )
    return cache_map(lambda x: fn(x) if x.ndim > offset else x, cache, apply_to_index=has_indices)


def repeat_rows(cache: PyTree, rows: int, times: int, *, offset: int, has_indices: bool) -> PyTree:
    """Repeats every row of a cache `times` times, copies side by side, see `map_rows`."""
    if times == 1:
        return cache
    return map_rows(lambda x: jnp.repeat(x, times, axis=offset), cache, rows, offset=offset, has_indices=has_indices)


def pad_prompts(inputs: Array, times: int) -> Array:
    """Repeats prompts (batch, length) for each decode and adds a position: (batch * times, length + 1)."""
    return jnp.repeat(jnp.pad(inputs, ((0, 0), (0, 1))), times, axis=0)


def up_to(tokens: Array, index: Array) -> Array:
    """Zeroes tokens (rows, length) that lie behind the position `index` (rows,) of their row."""
    return jnp.where(_positions(tokens) <= index[:, None], tokens, 0)


def token_at(tokens: Array, index: Array) -> Array:
    """Reads the token at position `index` (rows,) of each row of (rows, length), 0 beyond the end."""
    # A comparison, not a gather: every device reads its own rows, however they are divided.
    return jnp.sum(jnp.where(_positions(tokens) == index[:, None], tokens, 0), axis=1)


def with_token_at(tokens: Array, index: Array, new: Array) -> Array:
    """Writes `new` (rows,) at position `index` (rows,) of each row of (rows, length), nothing beyond the end."""
    return jnp.where(_positions(tokens) == index[:, None], new[:, None], tokens)


def last_positions(tokens: Array) -> Array:
    """Finds the position of the last token of each row that is not zero, 0 where all are: (rows,)."""
    return jnp.max(jnp.where(tokens != 0, _positions(tokens), 0), axis=1)


def _positions(tokens: Array) -> Array:
    return jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
