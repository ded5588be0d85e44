"""Models: a network together with its vocabularies, its optimizer, its loss and the metrics that it reports."""

import abc
import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import flax.core
import jax
import jax.numpy as jnp
from flax import linen as nn

from t5x_pjit_recipes import losses, metrics
from t5x_pjit_recipes.data import feature_converters

Array: TypeAlias = jax.Array
Batch: TypeAlias = Mapping[str, Array]
PyTree: TypeAlias = Any
LossAndMetrics: TypeAlias = tuple[Array, dict[str, metrics.Metric]]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Types: TypeAlias = Mapping[str, Any]
LossNormalizingFactor: TypeAlias = float | int | str | losses.SpecialLossNormalizingFactor | None


class BaseModel(abc.ABC):
    """What a trainer needs of a model.

    Attributes:
      FEATURE_CONVERTER_CLS: turns the features of a task into batches that the model takes.
      optimizer_def: the definition of the optimizer that trains it.
    """

    FEATURE_CONVERTER_CLS: Any = None

    def __init__(self, optimizer_def: Any):
        self.optimizer_def = optimizer_def

    @abc.abstractmethod
    def loss_fn(self, params: PyTree, batch: Batch, dropout_rng: Array | None) -> LossAndMetrics:
        """Computes the loss of `batch`, a scalar, and its metrics; without dropout where `dropout_rng` is None."""

    def eval_fn(self, params: PyTree, batch: Batch) -> LossAndMetrics:
        """Computes the loss and the metrics without dropout."""
        return self.loss_fn(params, batch, dropout_rng=None)

    @abc.abstractmethod
    def score_batch(self, params: PyTree, batch: Batch, return_intermediates: bool = False) -> Any:
        """Computes how likely each target of `batch` is: log likelihoods (batch,)."""

    @abc.abstractmethod
    def get_initial_variables(
        self, rng: Array, input_shapes: Shapes, input_types: Types | None = None
    ) -> flax.core.FrozenDict:
        """Initialises all variables: 'params', 'params_axes' and what else the network keeps."""


class BaseTransformerModel(BaseModel):
    """A model that predicts the tokens of a target one by one."""

    def __init__(
        self,
        module: nn.Module,
        input_vocabulary: Any,
        output_vocabulary: Any,
        optimizer_def: Any,
        decode_fn: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: LossNormalizingFactor = None,
        *,
        feature_converter_cls: Any = None,
    ):
        """Puts a model together.

        Args:
          module: the network.
          input_vocabulary: what turns the ids of inputs into text and back.
          output_vocabulary: likewise for targets.
          optimizer_def: the definition of the optimizer.
          decode_fn: the search that turns logits into tokens.
          label_smoothing: the share of probability that targets give to the wrong classes.
          z_loss: the weight of log(Z)^2 in the loss.
          loss_normalizing_factor: what the loss is divided by, see `losses`.
          feature_converter_cls: what to use in place of the class's own FEATURE_CONVERTER_CLS.
        """
        super().__init__(optimizer_def)
        self.module = module
        self._input_vocabulary = input_vocabulary
        self._output_vocabulary = output_vocabulary
        self._decode_fn = decode_fn
        self._label_smoothing = label_smoothing
        self._z_loss = z_loss
        self._loss_normalizing_factor = loss_normalizing_factor
        if feature_converter_cls is not None:
            self.FEATURE_CONVERTER_CLS = feature_converter_cls

    @property
    def input_vocabulary(self) -> Any:
        """The vocabulary of inputs."""
        return self._input_vocabulary

    @property
    def output_vocabulary(self) -> Any:
        """The vocabulary of targets."""
        return self._output_vocabulary

    @property
    def decode_fn(self) -> Any:
        """The search that turns logits into tokens."""
        return self._decode_fn

    @abc.abstractmethod
    def _compute_logits(self, params, batch, dropout_rng=None, mutable=False, other_variables=None):
        """Returns logits (batch, length, vocabulary), and the mutated variables too where `mutable` is set."""

    def loss_fn(self, params: PyTree, batch: Batch, dropout_rng: Array | None) -> LossAndMetrics:
        """Computes the weighted cross entropy of `batch['decoder_target_tokens']` and its metrics."""
        return self._loss_of_logits(self._compute_logits(params, batch, dropout_rng), batch)

    def _loss_of_logits(self, logits: Array, batch: Batch) -> LossAndMetrics:
        targets = batch['decoder_target_tokens']
        factor, weights = losses.get_loss_normalizing_factor_and_weights(self._loss_normalizing_factor, batch)
        loss, z_loss, _ = losses.compute_weighted_cross_entropy(
            logits,
            targets,
            weights,
            label_smoothing=self._label_smoothing,
            z_loss=self._z_loss,
            loss_normalizing_factor=factor,
        )
        return loss, compute_base_metrics(logits, targets, weights, loss, z_loss, _segment_ids(batch))

    def score_batch(self, params: PyTree, batch: Batch, return_intermediates: bool = False) -> Any:
        """Computes the log likelihood of each target, weighted by `batch['decoder_loss_weights']` where there are any.

        Args:
          params: the network's parameters.
          batch: as for `loss_fn`.
          return_intermediates: whether to return what the network sowed into 'intermediates' as well.

        Returns:
          (batch,), or a tuple of that and the intermediates.
        """
        intermediates = None
        if return_intermediates:
            logits, state = self._compute_logits(params, batch, mutable=['intermediates'])
            intermediates = state.get('intermediates', {})
        else:
            logits = self._compute_logits(params, batch)
        targets = jax.nn.one_hot(batch['decoder_target_tokens'], logits.shape[-1], dtype=jnp.float32)
        scores = -losses.cross_entropy_with_logits(logits, targets, 0.0)[0]
        weights = batch.get('decoder_loss_weights')
        scores = jnp.sum(scores if weights is None else scores * weights, axis=-1)
        return (scores, intermediates) if return_intermediates else scores

    def _apply(self, params, *args, dropout_rng, mutable, other_variables, **kwargs):
        return self.module.apply(
            {'params': params, **(other_variables or {})},
            *args,
            decode=False,
            enable_dropout=dropout_rng is not None,
            rngs=None if dropout_rng is None else {'dropout': dropout_rng},
            mutable=mutable,
            **kwargs,
        )


class EncoderDecoderModel(BaseTransformerModel):
    """A model that encodes an input and decodes a target from it, such as T5."""

    FEATURE_CONVERTER_CLS = feature_converters.EncDecFeatureConverter

    def __init__(
        self,
        module: nn.Module,
        input_vocabulary: Any,
        output_vocabulary: Any,
        optimizer_def: Any,
        decode_fn: Any = None,
        feature_converter_cls: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: LossNormalizingFactor = None,
    ):
        """Puts a model together, see `BaseTransformerModel`."""
        super().__init__(
            module,
            input_vocabulary,
            output_vocabulary,
            optimizer_def,
            decode_fn=decode_fn,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            loss_normalizing_factor=loss_normalizing_factor,
            feature_converter_cls=feature_converter_cls,
        )

    def get_initial_variables(
        self, rng: Array, input_shapes: Shapes, input_types: Types | None = None
    ) -> flax.core.FrozenDict:
        """Initialises the network's variables.

        Args:
          rng: a key.
          input_shapes: shapes by feature: `encoder_input_tokens` and `decoder_input_tokens`, and where examples are
            packed the positions and segment ids of both.
          input_types: dtypes by feature; tokens are float32 and the others int32 where they are not given.

        Returns:
          A FrozenDict with 'params' and 'params_axes'.
        """
        inputs = _ones('encoder_input_tokens', input_shapes, input_types, jnp.float32)
        targets = _ones('decoder_input_tokens', input_shapes, input_types, jnp.float32)
        packing = ('encoder_positions', 'decoder_positions', 'encoder_segment_ids', 'decoder_segment_ids')
        packed = {name: _ones(name, input_shapes, input_types, jnp.int32) for name in packing if name in input_shapes}
        variables = self.module.init(rng, inputs, targets, targets, decode=False, enable_dropout=False, **packed)
        return flax.core.freeze(variables)

    def _compute_logits(self, params, batch, dropout_rng=None, mutable=False, other_variables=None):
        return self._apply(
            params,
            batch['encoder_input_tokens'],
            batch['decoder_input_tokens'],
            batch['decoder_target_tokens'],
            encoder_segment_ids=batch.get('encoder_segment_ids'),
            decoder_segment_ids=batch.get('decoder_segment_ids'),
            encoder_positions=batch.get('encoder_positions'),
            decoder_positions=batch.get('decoder_positions'),
            dropout_rng=dropout_rng,
            mutable=mutable,
            other_variables=other_variables,
        )


class DecoderOnlyModel(BaseTransformerModel):
    """A language model; with `inputs_bidirectional_attention` a prefix language model."""

    FEATURE_CONVERTER_CLS = feature_converters.LMFeatureConverter

    def __init__(
        self,
        module: nn.Module,
        vocabulary: Any,
        optimizer_def: Any,
        decode_fn: Any = None,
        inputs_bidirectional_attention: bool = False,
        feature_converter_cls: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: LossNormalizingFactor = None,
    ):
        """Puts a model together, see `BaseTransformerModel`.

        Positions of the input see all of the input where `inputs_bidirectional_attention` is set, according to
        `batch['decoder_causal_attention']`.
        """
        if inputs_bidirectional_attention and feature_converter_cls is None:
            feature_converter_cls = feature_converters.PrefixLMFeatureConverter
        super().__init__(
            module,
            vocabulary,
            vocabulary,
            optimizer_def,
            decode_fn=decode_fn,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            loss_normalizing_factor=loss_normalizing_factor,
            feature_converter_cls=feature_converter_cls,
        )
        self._inputs_bidirectional_attention = inputs_bidirectional_attention

    def get_initial_variables(
        self, rng: Array, input_shapes: Shapes, input_types: Types | None = None
    ) -> flax.core.FrozenDict:
        """Initialises the network's variables from the shape of `decoder_input_tokens`, float32 by default."""
        tokens = _ones('decoder_input_tokens', input_shapes, input_types, jnp.float32)
        return flax.core.freeze(self.module.init(rng, tokens, tokens, decode=False, enable_dropout=False))

    def _compute_logits(self, params, batch, dropout_rng=None, mutable=False, other_variables=None):
        is_prefix = self._inputs_bidirectional_attention
        return self._apply(
            params,
            batch['decoder_input_tokens'],
            batch['decoder_target_tokens'],
            decoder_segment_ids=batch.get('decoder_segment_ids'),
            decoder_positions=batch.get('decoder_positions'),
            decoder_causal_attention=batch['decoder_causal_attention'] if is_prefix else None,
            dropout_rng=dropout_rng,
            mutable=mutable,
            other_variables=other_variables,
        )


def _ones(name: str, shapes: Shapes, types: Types | None, default_type: Any) -> Array:
    return jnp.ones(shapes[name], (types or {}).get(name, default_type))


def _segment_ids(batch: Batch) -> dict[str, Array]:
    """Finds each feature's segment ids, or where there are none which of its tokens are not padding."""
    suffix = '_segment_ids'
    packed = {name.removesuffix(suffix): ids for name, ids in batch.items() if name.endswith(suffix)}
    tokens = ('encoder_input_tokens', 'decoder_target_tokens')
    return packed or {name: batch[name] != 0 for name in tokens if name in batch}


def compute_base_metrics(
    logits: Array,
    targets: Array,
    mask: Array | None,
    loss: Array,
    z_loss: Array | None = None,
    segment_ids: Mapping[str, Array] | None = None,
) -> dict[str, metrics.Metric]:
    """Makes the metrics that every transformer reports, under T5X's names.

    Args:
      logits: (batch, length, vocabulary).
      targets: ids (batch, length).
      mask: the weights of positions (batch, length), booleans or fractions, or None where all count as one.
      loss: the loss, a scalar, with z-loss and divided by its factor.
      z_loss: the part of it that is z-loss, or None where there is none.
      segment_ids: by feature, (batch, length) with 0 for padding.
    """
    weights = jnp.ones(targets.shape, jnp.float32) if mask is None else mask
    # Counts of tokens are floats: as int32 they would overflow within some thousand large steps.
    num_tokens, num_real = float(targets.size), jnp.sum(weights, dtype=jnp.float32)
    result = {
        'accuracy': metrics.Average.from_model_output(jnp.argmax(logits, axis=-1) == targets, mask=weights),
        'loss': metrics.AveragePerStep(total=loss),
        'loss_per_nonpadding_target_token': metrics.Average(total=loss, count=num_real),
        'loss_per_all_target_tokens': metrics.Average(total=loss, count=num_tokens),
        'non_padding_fraction/loss_weights': metrics.Average(total=num_real, count=num_tokens),
    }
    result |= _timing_metrics(num_sequences=targets.shape[0], num_tokens=num_tokens)
    if z_loss is not None:
        for name, total in (('z_loss', z_loss), ('cross_ent_loss', loss - z_loss)):
            result[name] = metrics.AveragePerStep(total=total)
            result[f'{name}_per_all_target_tokens'] = metrics.Average(total=total, count=num_tokens)
    return result | _packing_metrics(segment_ids or {})


def _timing_metrics(num_sequences: int, num_tokens: int) -> dict[str, metrics.Metric]:
    num_devices = jax.device_count()
    return {
        'timing/seconds': metrics.Time(),
        'timing/seqs': metrics.Sum(total=num_sequences),
        'timing/steps_per_second': metrics.StepsPerTime(),
        'timing/seqs_per_second': metrics.TimeRate(numerator=num_sequences),
        'timing/seqs_per_second_per_core': metrics.TimeRate(numerator=num_sequences / num_devices),
        'timing/target_tokens_per_second': metrics.TimeRate(numerator=num_tokens),
        'timing/target_tokens_per_second_per_core': metrics.TimeRate(numerator=num_tokens / num_devices),
    }


def _packing_metrics(segment_ids: Mapping[str, Array]) -> dict[str, metrics.Metric]:
    fractions = {feature: metrics.Average.from_model_output(ids != 0) for feature, ids in segment_ids.items()}
    if fractions:
        fractions['overall'] = functools.reduce(metrics.Average.merge, fractions.values())
    result = {f'non_padding_fraction/{feature}': fraction for feature, fraction in fractions.items()}
    for feature, ids in segment_ids.items():
        result[f'effective_batch_size/{feature}'] = metrics.AveragePerStep(total=count_packed_examples(ids))
    return result


def count_packed_examples(segment_ids: Array) -> Array:
    """Counts the examples of a packed batch (batch, length): positions, padding aside, where a segment begins."""
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    return jnp.sum((segment_ids != 0) & (segment_ids != before))


def compute_weighted_accuracy(logits: Array, targets: Array, weights: Array | None = None) -> tuple[Array, Array]:
    """Counts, with weights, where the likeliest class is the target.

    Args:
      logits: (batch, length, classes).
      targets: ids (batch, length).
      weights: (batch, length), or None where all positions count as one.

    Returns:
      The weighted number of hits, and the sum of the weights.

    Raises:
      RecipeError: if the ranks of logits and targets do not belong together.
    """
    losses.check_ranks(logits, targets)
    average = metrics.Average.from_model_output(jnp.argmax(logits, axis=-1) == targets, mask=weights)
    return average.total, average.count


def get_input_vocabulary(model: BaseTransformerModel) -> Any:
    """Returns the model's vocabulary of inputs, for configurations that refer to it."""
    return model.input_vocabulary


def get_output_vocabulary(model: BaseTransformerModel) -> Any:
    """Returns the model's vocabulary of targets, for configurations that refer to it."""
    return model.output_vocabulary
