"""The layers of a BLOOM, with logical axis names on every parameter and on the activations that are worth dividing.

Kernels are matrices with the heads joined (`joined_kv`), of whatever floating dtype they were loaded in; a layer
computes in its `dtype`, and attention weights and norms in float32.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import param_with_axes, with_sharding_constraint
from jax import lax

from t5x_pjit_recipes.examples.t5.layers import MASKED, DenseGeneral

Array = jax.Array
Dtype = Any
Cache = Mapping[str, Array]

CACHED = ('cached_key', 'cached_value')
CACHE_AXES = ('layers', 'batch', 'heads', 'kv', 'length')
INITIALIZER = nn.initializers.normal(stddev=0.02)


class Dense(DenseGeneral):
    """A linear map as `DenseGeneral`, and a bias with an entry for each column of the kernel."""

    kernel_init: Any = INITIALIZER

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Maps (..., *input dims) to (..., *features)."""
        y = super().__call__(inputs)
        size = math.prod(self.features)
        bias = param_with_axes('bias', nn.initializers.zeros, (size,), jnp.float32, axes=self.kernel_axes[1:])
        bias = bias.astype(self.dtype).reshape((1,) * (y.ndim - len(self.features)) + tuple(self.features))
        return y + bias


class Embed(nn.Module):
    """A table of embeddings that also turns vectors into logits."""

    num_embeddings: int
    features: int
    dtype: Dtype = jnp.float32

    def setup(self) -> None:
        """Makes the table."""
        shape = (self.num_embeddings, self.features)
        self.embedding = param_with_axes('embedding', INITIALIZER, shape, jnp.float32, axes=('vocab', 'embed'))

    def __call__(self, ids: Array) -> Array:
        """Maps ids (batch, length) to embeddings (batch, length, features); ids outside the table to zeros."""
        # A product with one-hot vectors would be larger than the model: there are 250880 words.
        return jnp.take(self.embedding, ids, axis=0, mode='fill', fill_value=0).astype(self.dtype)

    def attend(self, query: Array) -> Array:
        """Maps (batch, length, features) to float32 logits (batch, length, num_embeddings)."""
        table = self.embedding.astype(self.dtype)
        return jnp.einsum('ble,ve->blv', query.astype(self.dtype), table, preferred_element_type=jnp.float32)


class LayerNorm(nn.Module):
    """Normalisation to mean 0 and variance 1, with scale and bias (arXiv:1607.06450)."""

    epsilon: float = 1e-5
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalises the last dim, in float32."""
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        scale, bias = (
            param_with_axes(name, init, (x.shape[-1],), jnp.float32, axes=('embed',)).astype(jnp.float32)
            for name, init in (('scale', nn.initializers.ones), ('bias', nn.initializers.zeros))
        )
        leading = (1,) * (x.ndim - 1)
        return (x * scale.reshape(*leading, -1) + bias.reshape(*leading, -1)).astype(self.dtype)


def alibi_slopes(num_heads: int) -> list[float]:
    """Lists how fast each head's attention falls with distance (ALiBi, arXiv:2108.12409, section 3).

    Heads whose number is a power of two share a geometric sequence that ends with 1/256; further heads, up to the next
    power, take every other term of the sequence for that one.

    >>> alibi_slopes(4), alibi_slopes(6)[4:]
    ([0.25, 0.0625, 0.015625, 0.00390625], [0.5, 0.125])
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]


def alibi_biases(num_heads: int, distance: Array) -> Array:
    """Makes biases for attention weights, (batch, heads, query length, key length), in float32.

    Args:
      num_heads: number of heads.
      distance: (batch, query length, key length), position of the key less that of the query; keys that lie ahead
        are masked.
    """
    slopes = jnp.array(alibi_slopes(num_heads), jnp.float32).reshape(1, -1, 1, 1)
    distance = distance[:, None]
    return jnp.where(distance > 0, MASKED, slopes * distance)


def make_cache(shape: tuple[int, int, int, int, int], dtype: Dtype) -> dict[str, Array]:
    """Makes an empty cache, dims as in `CACHE_AXES`; the position comes last, as TPUs read it best."""
    return {name: with_sharding_constraint(jnp.zeros(shape, dtype), CACHE_AXES) for name in CACHED}


def extend_cache(cache: Cache, layer: Array, start: Array, key: Array, value: Array) -> tuple[Cache, Array, Array]:
    """Writes keys and values of one layer into a cache.

    Args:
      cache: the cache of all layers.
      layer: which layer's part of it to write.
      start: (batch,), the position that each row's tokens begin at.
      key: (batch, length, heads, kv).
      value: likewise.

    Returns:
      The cache, and this layer's keys and values from the first position on, (batch, heads, kv, cache length).
    """

    def write(row: Array, new: Array, position: Array) -> Array:
        return lax.dynamic_update_slice(row, new[None], (layer, 0, 0, position))

    write_rows = jax.vmap(write, in_axes=(1, 0, 0), out_axes=1)
    cache = {
        name: with_sharding_constraint(write_rows(cache[name], x.transpose(0, 2, 3, 1), start), CACHE_AXES)
        for name, x in zip(CACHED, (key, value), strict=True)
    }
    key, value = (lax.dynamic_index_in_dim(cache[name], layer, axis=0, keepdims=False) for name in CACHED)
    return cache, key, value


class SelfAttention(nn.Module):
    """Causal attention whose weights fall with distance, for whole texts and, with a cache, for further tokens."""

    num_heads: int
    head_dim: int
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array, start: Array, layer: Array, cache: Cache | None) -> tuple[Array, Cache | None]:
        """Lets each token attend to itself and those before it.

        Args:
          x: (batch, length, embed).
          start: (batch,), the position that each row begins at.
          layer: which layer of the cache this is.
          cache: keys and values of the tokens before `start`, or None if there are none.

        Returns:
          (batch, length, embed), and the cache with these tokens in it.
        """
        qkv = Dense(
            (self.num_heads, 3, self.head_dim), ('embed', 'joined_kv'), dtype=self.dtype, name='query_key_value'
        )
        qkv = with_sharding_constraint(qkv(x), ('batch', 'length', 'heads', 'stack', 'kv'))
        query, key, value = (qkv[:, :, :, i] for i in range(3))
        if cache is None:
            key, value = (y.transpose(0, 2, 3, 1) for y in (key, value))
        else:
            cache, key, value = extend_cache(cache, layer, start, key, value)
        weights = self._weights(query, key, start)
        context = jnp.einsum('bhqk,bhdk->bqhd', weights, value)
        context = with_sharding_constraint(context, ('batch', 'length', 'heads', 'kv'))
        dense = Dense((x.shape[-1],), ('joined_kv', 'embed'), num_input_dims=2, dtype=self.dtype, name='dense')
        return dense(context), cache

    def _weights(self, query: Array, key: Array, start: Array) -> Array:
        logits = jnp.einsum('bqhd,bhdk->bhqk', query, key, preferred_element_type=jnp.float32)
        positions = start[:, None, None] + jnp.arange(query.shape[1])[None, :, None]
        distance = jnp.arange(key.shape[-1])[None, None, :] - positions
        logits = logits * self.head_dim**-0.5 + alibi_biases(self.num_heads, distance)
        return jax.nn.softmax(logits).astype(self.dtype)


class Mlp(nn.Module):
    """The feed-forward block: four times as wide as the model, GELU by tanh, and back."""

    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps (batch, length, embed) to the same shape."""
        width = x.shape[-1]
        y = Dense((4 * width,), ('embed', 'mlp'), dtype=self.dtype, name='dense_h_to_4h')(x)
        y = with_sharding_constraint(nn.gelu(y, approximate=True), ('batch', 'length', 'mlp'))
        return Dense((width,), ('mlp', 'embed'), dtype=self.dtype, name='dense_4h_to_h')(y)
