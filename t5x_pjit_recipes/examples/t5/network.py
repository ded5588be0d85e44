"""The T5 encoder-decoder (arXiv:1910.10683): versions 1.0 and 1.1 and their kin are configurations of it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from t5x_pjit_recipes.errors import ConfigError, RecipeError, did_you_mean
from t5x_pjit_recipes.examples.t5 import layers

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The sizes and choices that make one T5.

    Attributes:
      vocab_size: number of ids, padded as the checkpoint has it.
      dtype: what layers compute in; parameters and logits are float32 always.
      emb_dim: width of the residual stream.
      num_heads: attention heads.
      num_encoder_layers: blocks of the encoder.
      num_decoder_layers: blocks of the decoder.
      head_dim: width of a head.
      mlp_dim: width of the feed-forward block.
      mlp_activations: one for a plain block, two for a gated one; names in `flax.linen`, or 'linear'.
      dropout_rate: the share of activations that training drops.
      logits_via_embedding: whether logits use the embedding table (1.0) or a matrix of their own (1.1).
      float32_attention_logits: whether attention weights are computed in float32 whatever `dtype` is.
      scale_logits: whether logits are divided by sqrt(emb_dim); None divides those that use the embedding table.
    """

    vocab_size: int
    dtype: Any = jnp.float32
    emb_dim: int = 512
    num_heads: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    head_dim: int = 64
    mlp_dim: int = 2048
    mlp_activations: Sequence[str] = ('relu',)
    dropout_rate: float = 0.1
    logits_via_embedding: bool = False
    float32_attention_logits: bool = False
    scale_logits: bool | None = None

    def __post_init__(self):
        object.__setattr__(self, 'mlp_activations', tuple(self.mlp_activations))
        for name in self.mlp_activations:
            if name != 'linear' and not callable(getattr(nn, name, None)):
                near = did_you_mean(name, ('linear', 'relu', 'gelu', 'silu', 'swish', 'sigmoid', 'tanh'))
                raise ConfigError(
                    f'Cannot make a T5 with mlp_activations={self.mlp_activations}: flax.linen has no activation '
                    f'{name!r}{near}. Name one that it has, or linear.'
                )

    @property
    def logits_are_scaled(self) -> bool:
        """Whether logits are divided by sqrt(emb_dim)."""
        return self.logits_via_embedding if self.scale_logits is None else self.scale_logits

    def norm(self, name: str) -> layers.LayerNorm:
        """Makes a layer norm of this configuration."""
        return layers.LayerNorm(dtype=self.dtype, name=name)

    def attention(self, name: str) -> layers.MultiHeadDotProductAttention:
        """Makes an attention layer of this configuration."""
        return layers.MultiHeadDotProductAttention(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            dropout_rate=self.dropout_rate,
            float32_logits=self.float32_attention_logits,
            name=name,
        )

    def mlp(self, name: str) -> layers.MlpBlock:
        """Makes a feed-forward block of this configuration."""
        return layers.MlpBlock(
            intermediate_dim=self.mlp_dim,
            activations=self.mlp_activations,
            dropout_rate=self.dropout_rate,
            dtype=self.dtype,
            name=name,
        )

    def relative_position_biases(self, name: str) -> layers.RelativePositionBiases:
        """Makes the biases that all layers of a stack share."""
        return layers.RelativePositionBiases(num_heads=self.num_heads, dtype=self.dtype, name=name)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward block, each normalised before and added to the stream."""

    config: T5Config

    @nn.compact
    def __call__(self, x: Array, mask: Array | None, bias: Array, *, deterministic: bool) -> Array:
        """Maps (batch, length, embed) to the same shape."""
        cfg = self.config
        drop = layers.dropout(cfg.dropout_rate, deterministic)
        y = cfg.norm('pre_attention_layer_norm')(x)
        x = x + drop(cfg.attention('attention')(y, y, mask, bias, deterministic=deterministic))
        y = cfg.norm('pre_mlp_layer_norm')(x)
        return x + drop(cfg.mlp('mlp')(y, deterministic=deterministic))


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder and a feed-forward block."""

    config: T5Config

    @nn.compact
    def __call__(
        self,
        x: Array,
        encoded: Array,
        mask: Array | None,
        cross_mask: Array | None,
        bias: Array,
        *,
        deterministic: bool,
        decode: bool,
    ) -> Array:
        """Maps (batch, length, embed) to the same shape."""
        cfg = self.config
        drop = layers.dropout(cfg.dropout_rate, deterministic)
        y = cfg.norm('pre_self_attention_layer_norm')(x)
        attention = cfg.attention('self_attention')
        x = x + drop(attention(y, y, mask, bias, decode=decode, deterministic=deterministic))
        y = cfg.norm('pre_cross_attention_layer_norm')(x)
        attention = cfg.attention('encoder_decoder_attention')
        x = x + drop(attention(y, encoded, cross_mask, deterministic=deterministic))
        y = cfg.norm('pre_mlp_layer_norm')(x)
        return x + drop(cfg.mlp('mlp')(y, deterministic=deterministic))


class Encoder(nn.Module):
    """The stack that reads the input."""

    config: T5Config
    shared_embedding: nn.Module

    @nn.compact
    def __call__(self, tokens: Array, mask: Array | None, *, deterministic: bool) -> Array:
        """Maps ids (batch, length) to (batch, length, embed)."""
        cfg = self.config
        length = tokens.shape[-1]
        bias = cfg.relative_position_biases('relpos_bias')(length, length, bidirectional=True)
        drop = layers.dropout(cfg.dropout_rate, deterministic)
        x = drop(self.shared_embedding(tokens)).astype(cfg.dtype)
        for i in range(cfg.num_encoder_layers):
            x = EncoderLayer(cfg, name=f'layers_{i}')(x, mask, bias, deterministic=deterministic)
        return drop(cfg.norm('encoder_norm')(x))


class Decoder(nn.Module):
    """The stack that writes the output and says how likely each next token is."""

    config: T5Config
    shared_embedding: nn.Module

    @nn.compact
    def __call__(
        self,
        encoded: Array,
        tokens: Array,
        mask: Array | None,
        cross_mask: Array | None,
        *,
        deterministic: bool,
        decode: bool,
        max_decode_length: int | None,
    ) -> Array:
        """Maps ids (batch, length) to float32 logits (batch, length, vocabulary)."""
        cfg = self.config
        length = max_decode_length if decode and max_decode_length else tokens.shape[-1]
        bias = cfg.relative_position_biases('relpos_bias')(length, length, bidirectional=False)
        drop = layers.dropout(cfg.dropout_rate, deterministic)
        x = drop(self.shared_embedding(tokens)).astype(cfg.dtype)
        for i in range(cfg.num_decoder_layers):
            layer = DecoderLayer(cfg, name=f'layers_{i}')
            x = layer(x, encoded, mask, cross_mask, bias, deterministic=deterministic, decode=decode)
        x = drop(cfg.norm('decoder_norm')(x))
        if cfg.logits_via_embedding:
            logits = self.shared_embedding.attend(x)
        else:
            head = layers.DenseGeneral((cfg.vocab_size,), ('embed', 'vocab'), dtype=jnp.float32, name='logits_dense')
            logits = head(x)
        # The table has unit variance, so its logits would be sqrt(emb_dim) too large.
        return logits / jnp.sqrt(cfg.emb_dim) if cfg.logits_are_scaled else logits


class Transformer(nn.Module):
    """The whole T5. Id 0 is padding and is never attended to."""

    config: T5Config

    def setup(self) -> None:
        """Makes the parts; encoder and decoder share one table of embeddings."""
        cfg = self.config
        self.token_embedder = layers.Embed(cfg.vocab_size, cfg.emb_dim, dtype=cfg.dtype)
        self.encoder = Encoder(cfg, self.token_embedder)
        self.decoder = Decoder(cfg, self.token_embedder)

    def encode(
        self,
        encoder_input_tokens: Array,
        encoder_segment_ids: Array | None = None,
        enable_dropout: bool = True,
    ) -> Array:
        """Encodes ids (batch, length), each segment by itself, to (batch, length, embed)."""
        is_token = encoder_input_tokens > 0
        mask = layers.combine_masks(
            layers.make_attention_mask(is_token, is_token),
            _same_segment(encoder_segment_ids, encoder_segment_ids),
        )
        return self.encoder(encoder_input_tokens, mask, deterministic=not enable_dropout)

    def decode(
        self,
        encoded: Array,
        encoder_input_tokens: Array,
        decoder_input_tokens: Array,
        decoder_target_tokens: Array,
        encoder_segment_ids: Array | None = None,
        decoder_segment_ids: Array | None = None,
        decoder_positions: Array | None = None,
        enable_dropout: bool = True,
        decode: bool = False,
        max_decode_length: int | None = None,
    ) -> Array:
        """Computes logits for the token after each of `decoder_input_tokens`.

        Args:
          encoded: (batch, input length, embed), what `encode` returned.
          encoder_input_tokens: ids (batch, input length), for their padding.
          decoder_input_tokens: ids (batch, target length).
          decoder_target_tokens: ids (batch, target length), for their padding.
          encoder_segment_ids: (batch, input length), from 1 where examples are packed.
          decoder_segment_ids: (batch, target length), likewise.
          decoder_positions: accepted and not needed: relative positions do not change with packing.
          enable_dropout: whether dropout is on; it needs the random stream 'dropout'.
          decode: whether one position at a time is decoded with the 'cache' collection.
          max_decode_length: the length of the cache.

        Returns:
          float32 logits (batch, target length, vocabulary).

        Raises:
          RecipeError: if packed examples are decoded.
        """
        del decoder_positions
        if decode and (encoder_segment_ids is not None or decoder_segment_ids is not None):
            raise RecipeError(
                'Cannot decode packed examples, with decode=True and segment ids: the cache holds one example in each '
                'row. Leave the segment ids out.'
            )
        is_target = jnp.ones_like(decoder_target_tokens, bool) if decode else decoder_target_tokens > 0
        cross_mask = layers.combine_masks(
            layers.make_attention_mask(is_target, encoder_input_tokens > 0),
            _same_segment(decoder_segment_ids, encoder_segment_ids),
        )
        return self.decoder(
            encoded,
            decoder_input_tokens,
            None if decode else _decoder_mask(is_target, decoder_segment_ids),
            cross_mask,
            deterministic=not enable_dropout,
            decode=decode,
            max_decode_length=max_decode_length,
        )

    def __call__(
        self,
        encoder_input_tokens: Array,
        decoder_input_tokens: Array,
        decoder_target_tokens: Array,
        encoder_segment_ids: Array | None = None,
        decoder_segment_ids: Array | None = None,
        encoder_positions: Array | None = None,
        decoder_positions: Array | None = None,
        *,
        enable_dropout: bool = True,
        decode: bool = False,
    ) -> Array:
        """Encodes and decodes: float32 logits (batch, target length, vocabulary). See `encode` and `decode`."""
        del encoder_positions
        encoded = self.encode(encoder_input_tokens, encoder_segment_ids, enable_dropout)
        return self.decode(
            encoded,
            encoder_input_tokens,
            decoder_input_tokens,
            decoder_target_tokens,
            encoder_segment_ids,
            decoder_segment_ids,
            decoder_positions,
            enable_dropout,
            decode,
        )


def _decoder_mask(is_target: Array, segment_ids: Array | None) -> Array:
    return layers.combine_masks(
        layers.make_causal_mask(is_target.shape[-1]),
        layers.make_attention_mask(is_target, is_target),
        _same_segment(segment_ids, segment_ids),
    )


def _same_segment(query_ids: Array | None, key_ids: Array | None) -> Array | None:
    return None if query_ids is None or key_ids is None else layers.make_attention_mask(query_ids, key_ids, jnp.equal)
