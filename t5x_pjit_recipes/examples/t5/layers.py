"""The layers of a T5, with logical axis names on every parameter and on the activations that are worth dividing.

Parameters are float32, and attention kernels are matrices with the heads joined (`joined_kv`). A layer computes in its
`dtype`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen.partitioning import param_with_axes, with_sharding_constraint
from jax import lax

from t5x_pjit_recipes.errors import RecipeError

Array = jax.Array
Dtype = Any
Initializer = Callable[..., Array]

HEAD_AXES = ('batch', 'length', 'heads', 'kv')
MASKED = -1e10


class DenseGeneral(nn.Module):
    """A linear map without bias from the last dims of its input to `features`.

    The kernel is stored as a matrix (product of the input dims, product of the features), so that its initialiser sees
    the true fan-in, and takes its full shape at use. Default initialiser: truncated normal by fan-in (Mesh TensorFlow).
    """

    features: tuple[int, ...]
    kernel_axes: tuple[str, str]
    num_input_dims: int = 1
    dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.initializers.variance_scaling(1.0, 'fan_in', 'truncated_normal')

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Maps (..., *input dims) to (..., *features)."""
        input_dims = inputs.shape[-self.num_input_dims :]
        shape = (int(np.prod(input_dims)), int(np.prod(self.features)))
        kernel = param_with_axes('kernel', self.kernel_init, shape, jnp.float32, axes=self.kernel_axes)
        kernel = kernel.astype(self.dtype).reshape(input_dims + self.features)
        return jnp.tensordot(inputs.astype(self.dtype), kernel, axes=self.num_input_dims)


class Embed(nn.Module):
    """A table of embeddings that can also turn vectors back into logits.

    Looking up is a product with one-hot vectors, which divides well when the vocabulary is spread over devices. The
    default initialiser is a normal distribution of standard deviation 1 (T5 paper's code, Mesh TensorFlow).
    """

    num_embeddings: int
    features: int
    dtype: Dtype = jnp.float32
    embedding_init: Initializer = nn.initializers.normal(stddev=1.0)

    def setup(self) -> None:
        """Makes the table."""
        shape = (self.num_embeddings, self.features)
        self.embedding = param_with_axes('embedding', self.embedding_init, shape, jnp.float32, axes=('vocab', 'embed'))

    def __call__(self, ids: Array) -> Array:
        """Maps ids (batch, length) to embeddings (batch, length, features); ids outside the table to zeros."""
        one_hot = jax.nn.one_hot(ids.astype(jnp.int32), self.num_embeddings, dtype=self.dtype)
        return jnp.dot(one_hot, self.embedding.astype(self.dtype))

    def attend(self, query: Array) -> Array:
        """Maps (batch, length, features) to float32 logits (batch, length, num_embeddings)."""
        return jnp.dot(query.astype(jnp.float32), self.embedding.T)


class LayerNorm(nn.Module):
    """Root mean square normalisation: no mean is taken off and no bias added (arXiv:1910.07467)."""

    epsilon: float = 1e-6
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalises the last dim, in float32, and scales it."""
        x = x.astype(jnp.float32)
        normalised = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        scale = param_with_axes('scale', nn.initializers.ones, (x.shape[-1],), jnp.float32, axes=('embed',))
        return normalised.astype(self.dtype) * jnp.broadcast_to(scale.astype(self.dtype), x.shape)


class MlpBlock(nn.Module):
    """The feed-forward block: one dense layer per activation, their product, dropout, and a dense layer back.

    With two activations, such as ('gelu', 'linear'), this is a gated unit (Shazeer 2020, arXiv:2002.05202).
    """

    intermediate_dim: int
    activations: Sequence[str]
    dropout_rate: float = 0.0
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, inputs: Array, *, deterministic: bool = False) -> Array:
        """Maps (batch, length, embed) to the same shape."""
        x = None
        for i, activation in enumerate(self.activations):
            name = 'wi' if len(self.activations) == 1 else f'wi_{i}'
            dense = DenseGeneral((self.intermediate_dim,), ('embed', 'mlp'), dtype=self.dtype, name=name)
            branch = activation_fn(activation)(dense(inputs))
            x = branch if x is None else x * branch
        x = dropout(self.dropout_rate, deterministic)(x)
        x = with_sharding_constraint(x, ('batch', 'length', 'mlp'))
        return DenseGeneral((inputs.shape[-1],), ('mlp', 'embed'), dtype=self.dtype, name='wo')(x)


def activation_fn(name: str) -> Callable[[Array], Array]:
    """Returns the activation that `flax.linen` has under that name; 'linear' is the identity."""
    return (lambda x: x) if name == 'linear' else getattr(nn, name)


def dropout(rate: float, deterministic: bool) -> Callable[[Array], Array]:
    """Returns dropout that draws one mask for all positions along dim -2, as T5 does to save memory and random bits."""
    return nn.Dropout(rate=rate, broadcast_dims=(-2,), deterministic=deterministic)


class RelativePositionBiases(nn.Module):
    """Learned biases of attention logits, one for each head and bucket of distances (T5 paper, section 2.1)."""

    num_heads: int
    num_buckets: int = 32
    max_distance: int = 128
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, query_length: int, key_length: int, bidirectional: bool) -> Array:
        """Returns the biases, shape (1, heads, query_length, key_length)."""
        initializer = nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform')
        shape, axes = (self.num_heads, self.num_buckets), ('heads', 'relpos_buckets')
        embedding = param_with_axes('rel_embedding', initializer, shape, jnp.float32, axes=axes)
        distance = np.arange(key_length)[None, :] - np.arange(query_length)[:, None]
        buckets = relative_position_bucket(distance, bidirectional, self.num_buckets, self.max_distance)
        one_hot = jax.nn.one_hot(buckets, self.num_buckets, dtype=self.dtype)
        return jnp.einsum('hb,qkb->hqk', embedding.astype(self.dtype), one_hot)[None]


def relative_position_bucket(
    distance: np.ndarray, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> np.ndarray:
    """Sorts distances (position of the key less that of the query) into buckets.

    Half of the buckets hold one small distance each; the others grow logarithmically up to `max_distance`, beyond which
    all share the last. Both directions get half of the buckets each; otherwise keys that lie ahead share bucket 0.

    >>> relative_position_bucket(np.array([0, -1, 1, -40, 40, -500]), bidirectional=True).tolist()
    [0, 1, 17, 12, 28, 15]
    """
    offset = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = np.where(distance > 0, num_buckets, 0)
        distance = -np.abs(distance)
    distance = np.maximum(-distance, 0)
    num_exact = num_buckets // 2
    growth = np.log(np.maximum(distance, 1) / num_exact) / np.log(max_distance / num_exact)
    # Distances on a bucket's edge must not fall below it by a rounding error.
    far = num_exact + np.floor(growth * (num_buckets - num_exact) + 1e-6).astype(np.int64)
    return offset + np.where(distance < num_exact, distance, np.minimum(far, num_buckets - 1))


class MultiHeadDotProductAttention(nn.Module):
    """Attention with several heads, for training and, with a cache, for decoding one position at a time.

    Initialisers are normal by fan-in; the query's is divided by sqrt(head_dim) once, in place of the logits at each use
    (Mesh TensorFlow).
    """

    num_heads: int
    head_dim: int
    dtype: Dtype = jnp.float32
    dropout_rate: float = 0.0
    float32_logits: bool = False

    @nn.compact
    def __call__(
        self,
        inputs_q: Array,
        inputs_kv: Array,
        mask: Array | None = None,
        bias: Array | None = None,
        *,
        decode: bool = False,
        deterministic: bool = False,
    ) -> Array:
        """Lets each query attend to the keys that `mask` allows.

        Args:
          inputs_q: (batch, query length, embed).
          inputs_kv: (batch, key length, embed).
          mask: (batch or 1, 1, query length, key length), above 0 where attention is allowed.
          bias: (1, heads, query length, key length), added to the logits; with `decode`, its lengths are
            those of the cache.
          decode: whether keys and values are kept in a cache that grows by one position with each call.
          deterministic: whether there is no dropout.

        Returns:
          (batch, query length, embed).

        Raises:
          RecipeError: if more than one position at a time is decoded.
        """
        kernel_init = nn.initializers.variance_scaling(1.0, 'fan_in', 'normal')
        query = self._heads('query', _scaled(kernel_init, self.head_dim**-0.5), inputs_q)
        key = self._heads('key', kernel_init, inputs_kv)
        value = self._heads('value', kernel_init, inputs_kv)
        if decode:
            key, value, mask, bias = self._extend_cache(key, value, mask, bias)
        weights = self._weights(query, key, mask, bias)
        weights = dropout(self.dropout_rate, deterministic)(weights)
        x = jnp.einsum('bhqk,bkhd->bqhd', weights, value)
        out = DenseGeneral(
            (inputs_q.shape[-1],),
            ('joined_kv', 'embed'),
            num_input_dims=2,
            dtype=self.dtype,
            kernel_init=kernel_init,
            name='out',
        )
        return out(x)

    def _heads(self, name: str, kernel_init: Initializer, inputs: Array) -> Array:
        features = (self.num_heads, self.head_dim)
        dense = DenseGeneral(features, ('embed', 'joined_kv'), dtype=self.dtype, kernel_init=kernel_init, name=name)
        return with_sharding_constraint(dense(inputs), HEAD_AXES)

    def _weights(self, query: Array, key: Array, mask: Array | None, bias: Array | None) -> Array:
        dtype = jnp.float32 if self.float32_logits else self.dtype
        logits = jnp.einsum('bqhd,bkhd->bhqk', query.astype(dtype), key.astype(dtype))
        if mask is not None:
            bias = combine_biases(jnp.where(mask > 0, 0.0, MASKED).astype(dtype), bias)
        if bias is not None:
            logits = logits + bias.astype(dtype)
        return jax.nn.softmax(logits).astype(self.dtype)

    def _extend_cache(self, key: Array, value: Array, mask: Array | None, bias: Array | None) -> tuple[Any, ...]:
        """Writes this position's key and value; the first call, at full length, only makes the cache."""
        is_ready = self.has_variable('cache', 'cached_key')
        # Keys and values lie (batch, heads, head_dim, length): TPUs read that order fastest.
        cached_key, cached_value = (
            self.variable('cache', name, lambda x: jnp.zeros_like(x.transpose(0, 2, 3, 1)), x)
            for name, x in (('cached_key', key), ('cached_value', value))
        )
        cache_index = self.variable('cache', 'cache_index', lambda: jnp.zeros((), jnp.int32))
        if not is_ready:
            return key, value, mask, bias
        batch, heads, head_dim, length = cached_key.value.shape
        if key.shape != (batch, 1, heads, head_dim):
            raise RecipeError(
                f'Cannot decode keys of shape {key.shape} with a cache for {(batch, 1, heads, head_dim)}: '
                'each call adds one position to each row of the cache. Pass one token for each row.'
            )
        index = cache_index.value
        for cached, x in ((cached_key, key), (cached_value, value)):
            cached.value = lax.dynamic_update_slice_in_dim(cached.value, x.transpose(0, 2, 3, 1), index, axis=3)
        cache_index.value = index + 1
        mask = combine_masks(mask, (jnp.arange(length) <= index)[None, None, None, :])
        bias = None if bias is None else lax.dynamic_slice_in_dim(bias, index, 1, axis=2)
        return *(cached.value.transpose(0, 3, 1, 2) for cached in (cached_key, cached_value)), mask, bias


def _scaled(initializer: Initializer, factor: float) -> Initializer:
    return lambda *args: factor * initializer(*args)


def make_attention_mask(query: Array, key: Array, compare: Callable[[Array, Array], Array] = jnp.logical_and) -> Array:
    """Compares each query position (batch, q) with each key position (batch, k): a boolean mask (batch, 1, q, k)."""
    return compare(query[:, None, :, None], key[:, None, None, :])


def make_causal_mask(length: int) -> Array:
    """Allows each position to see itself and those before it: a boolean mask (1, 1, length, length)."""
    return jnp.tril(jnp.ones((length, length), bool))[None, None]


def combine_masks(*masks: Array | None) -> Array | None:
    """Allows what all masks allow; None allows everything."""
    return _reduce(jnp.logical_and, masks)


def combine_biases(*biases: Array | None) -> Array | None:
    """Adds biases up; None adds nothing."""
    return _reduce(jnp.add, biases)


def _reduce(combine: Callable[[Array, Array], Array], arrays: Sequence[Array | None]) -> Array | None:
    result = None
    for array in arrays:
        if array is not None:
            result = array if result is None else combine(result, array)
    return result
