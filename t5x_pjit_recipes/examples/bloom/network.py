"""BLOOM (arXiv:2211.05100): a decoder with ALiBi, whose layers are scanned: compiling takes no longer for more of them.

Parameters have the names that Hugging Face's checkpoints give them; those of the layers, under `h`, are stacked along a
first dim.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import scan_with_axes, with_sharding_constraint

from t5x_pjit_recipes.errors import ConfigError
from t5x_pjit_recipes.examples.bloom import layers
from t5x_pjit_recipes.examples.bloom.layers import Cache

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class BloomConfig:
    """The sizes and choices that make one BLOOM.

    Attributes:
      vocab_size: number of ids.
      emb_dim: width of the residual stream.
      num_heads: attention heads; they share `emb_dim`.
      num_layers: blocks.
      layer_norm_epsilon: added to variances.
      residual_post_layernorm: whether the residual stream goes on from the normalised inputs of a block's halves.
      dtype: what layers compute in, and the cache holds; parameters keep theirs, and logits are float32 always.
    """

    vocab_size: int
    emb_dim: int
    num_heads: int
    num_layers: int
    layer_norm_epsilon: float = 1e-5
    residual_post_layernorm: bool = False
    dtype: Any = jnp.float32

    def __post_init__(self):
        if self.emb_dim % self.num_heads:
            raise ConfigError(
                f'Cannot make a BLOOM of emb_dim={self.emb_dim} with num_heads={self.num_heads}: the heads share '
                'emb_dim equally. Use a number of heads that divides it.'
            )

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.emb_dim // self.num_heads

    def norm(self, name: str) -> layers.LayerNorm:
        """Makes a layer norm of this configuration."""
        return layers.LayerNorm(self.layer_norm_epsilon, dtype=self.dtype, name=name)


class Block(nn.Module):
    """Attention and a feed-forward block, each normalised before and added to the stream."""

    config: BloomConfig

    @nn.compact
    def __call__(
        self, carry: tuple[Array, Cache | None], layer: Array, start: Array
    ) -> tuple[tuple[Array, Cache | None], None]:
        """Maps (batch, length, embed) to the same shape, and writes this layer's part of the cache."""
        cfg = self.config
        x, cache = carry
        y = cfg.norm('input_layernorm')(x)
        attention = layers.SelfAttention(cfg.num_heads, cfg.head_dim, dtype=cfg.dtype, name='self_attention')
        out, cache = attention(y, start, layer, cache)
        x = out + (y if cfg.residual_post_layernorm else x)
        y = cfg.norm('post_attention_layernorm')(x)
        x = layers.Mlp(dtype=cfg.dtype, name='mlp')(y) + (y if cfg.residual_post_layernorm else x)
        return (with_sharding_constraint(x, ('batch', 'length', 'embed')), cache), None


ScannedBlocks = scan_with_axes(
    Block, variable_axes={'params': 0}, split_rngs={'params': True}, in_axes=(0, nn.broadcast), axis_name='layers'
)


class Bloom(nn.Module):
    """The whole BLOOM. No id is special: rows are padded at their end, where nothing before it looks."""

    config: BloomConfig

    def setup(self) -> None:
        """Makes the parts; one table serves both ends."""
        cfg = self.config
        self.word_embeddings = layers.Embed(cfg.vocab_size, cfg.emb_dim, dtype=cfg.dtype)
        self.word_embeddings_layernorm = layers.LayerNorm(cfg.layer_norm_epsilon, dtype=cfg.dtype)
        self.h = ScannedBlocks(cfg)
        self.ln_f = layers.LayerNorm(cfg.layer_norm_epsilon, dtype=cfg.dtype)

    def __call__(self, tokens: Array) -> Array:
        """Maps ids (batch, length) to float32 logits (batch, length, vocabulary) for the token after each."""
        return self._run(tokens, jnp.zeros(tokens.shape[:1], jnp.int32), None)[0]

    def extend(self, cache: Cache, tokens: Array, start: Array) -> tuple[Array, Cache]:
        """Reads further tokens, and puts their keys and values into the cache.

        Args:
          cache: what was read before, or what `empty_cache` returns.
          tokens: ids (batch, length), of a whole prompt or of one token. The padding of a prompt's end may be
            overwritten by later calls, and is never looked at before.
          start: (batch,), the position of each row's first token; with the length at most the cache's length.

        Returns:
          float32 logits (batch, length, vocabulary) for the token after each, and the cache.
        """
        return self._run(tokens, start, cache)

    def empty_cache(self, batch: int, length: int) -> dict[str, Array]:
        """Makes a cache of `length` positions for `batch` rows, dims as in `layers.CACHE_AXES`."""
        cfg = self.config
        return layers.make_cache((cfg.num_layers, batch, cfg.num_heads, cfg.head_dim, length), cfg.dtype)

    def _run(self, tokens: Array, start: Array, cache: Cache | None) -> tuple[Array, Cache | None]:
        x = self.word_embeddings_layernorm(self.word_embeddings(tokens))
        x = with_sharding_constraint(x, ('batch', 'length', 'embed'))
        (x, cache), _ = self.h((x, cache), jnp.arange(self.config.num_layers), start)
        logits = self.word_embeddings.attend(self.ln_f(x))
        return with_sharding_constraint(logits, ('batch', 'length', 'vocab')), cache
