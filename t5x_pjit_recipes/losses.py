"""The loss of a sequence model: cross entropy summed over positions.

It knows label smoothing, z-loss and the factors by which the sum is normalised.
"""

import enum
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from t5x_pjit_recipes.errors import ConfigError, RecipeError, did_you_mean


@jax.custom_vjp
def cross_entropy_with_logits(logits: jax.Array, targets: jax.Array, z_loss: float) -> tuple[jax.Array, jax.Array]:
    """Computes -sum(targets * log_softmax(logits)) + z_loss * log(Z)^2 at each position.

    Z is the softmax's denominator. The second term keeps log Z near zero, so that logits do not drift to where bfloat16
    rounds coarsely (Mesh TensorFlow).

    Args:
      logits: (..., classes).
      targets: (..., classes), the probability that each class should have.
      z_loss: the weight of the second term.

    Returns:
      The loss and the part of it that is z-loss, both (...). Only the loss has a gradient, and not
      in `z_loss`.
    """
    return _cross_entropy_forward(logits, targets, z_loss)[0]


def _cross_entropy_forward(logits, targets, z_loss):
    log_z = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    z_part = z_loss * jnp.square(log_z[..., 0])
    loss = -jnp.sum(targets * (logits - log_z), axis=-1) + z_part
    return (loss, z_part), (logits, targets, z_loss, log_z)


def _cross_entropy_backward(residuals, cotangents):
    logits, targets, z_loss, log_z = residuals
    g = cotangents[0][..., None]
    log_softmax = logits - log_z
    mass = jnp.sum(targets, axis=-1, keepdims=True)
    d_logits = g * ((mass + 2 * z_loss * log_z) * jnp.exp(log_softmax) - targets)
    return d_logits.astype(logits.dtype), (-g * log_softmax).astype(targets.dtype), None


cross_entropy_with_logits.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def compute_weighted_cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_normalizing_factor: float | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums the cross entropy of `logits` with `targets` over all positions.

    With label smoothing s the right class gets 1 - s and each other class s / (classes - 1) (Szegedy et al. 2015,
    arXiv:1512.00567, section 7); the entropy of these targets is taken off, so that a perfect model has loss zero.

    Args:
      logits: (batch, length, classes).
      targets: ids (batch, length).
      weights: (batch, length), or None where all positions count as one.
      label_smoothing: s above, at least 0 and below 1.
      z_loss: the weight of log(Z)^2.
      loss_normalizing_factor: what loss and z-loss are divided by, or None for plain sums.

    Returns:
      The loss, the part of it that is z-loss, and the sum of the weights.

    Raises:
      RecipeError: if the ranks of logits and targets do not belong together.
    """
    check_ranks(logits, targets)
    soft_targets, entropy = _smooth(targets, logits.shape[-1], label_smoothing)
    loss, z_part = cross_entropy_with_logits(logits, soft_targets, z_loss)
    weights = jnp.ones(targets.shape, loss.dtype) if weights is None else weights
    total = jnp.sum((loss - entropy) * weights)
    total_z = jnp.sum(z_part * weights)
    if loss_normalizing_factor is not None:
        total, total_z = total / loss_normalizing_factor, total_z / loss_normalizing_factor
    return total, total_z, jnp.sum(weights)


def _smooth(targets: jax.Array, num_classes: int, label_smoothing: float) -> tuple[jax.Array, float]:
    high = 1.0 - label_smoothing
    low = label_smoothing / max(num_classes - 1, 1)
    entropy = -(high * math.log(high) + (num_classes - 1) * low * math.log(low + 1e-20))
    soft_targets = jnp.where(jax.nn.one_hot(targets, num_classes, dtype=bool), high, low)
    return soft_targets.astype(jnp.float32), entropy


def check_ranks(logits: jax.Array, targets: jax.Array) -> None:
    """Raises RecipeError unless logits have the dims of the target ids and one more."""
    if logits.ndim != targets.ndim + 1:
        raise RecipeError(
            f'Cannot compare logits {logits.shape} with targets {targets.shape}: logits need one dim more, '
            'the classes. Pass targets as ids, not as one-hot vectors.'
        )


@enum.unique
class SpecialLossNormalizingFactor(enum.Enum):
    """A normalising factor that depends on the batch."""

    NUM_REAL_TARGET_TOKENS = 1
    NUM_TOTAL_TARGET_TOKENS = 2
    AVERAGE_PER_SEQUENCE = 3


def convert_special_loss_normalizing_factor_to_enum(x: str) -> SpecialLossNormalizingFactor:
    """Reads the name of a special normalising factor, in any case.

    Raises:
      ConfigError: if there is none of that name.

    >>> convert_special_loss_normalizing_factor_to_enum('average_per_sequence').value
    3
    """
    known = SpecialLossNormalizingFactor.__members__
    if x.upper() not in known:
        raise ConfigError(
            f'Cannot normalise the loss by {x!r}: there is no such factor{did_you_mean(x.upper(), known)}. '
            f'Give a number, None or one of {", ".join(known)}.'
        )
    return known[x.upper()]


def get_loss_normalizing_factor_and_weights(
    loss_normalizing_factor: float | int | str | SpecialLossNormalizingFactor | None,
    batch: Mapping[str, jax.Array],
) -> tuple[float | jax.Array | None, jax.Array | None]:
    """Finds what the loss of `batch` is divided by and how much each position counts.

    Numbers and None are returned as they are, with the batch's own `decoder_loss_weights` (or None). Special factors
    count positions whose target is above 0 where the batch has no weights.

    Args:
      loss_normalizing_factor: a number, None, a `SpecialLossNormalizingFactor` or its name.
      batch: `decoder_target_tokens` (batch, length) and, where there are any, `decoder_loss_weights` and, for packed
        examples, `decoder_segment_ids`, all of that shape.

    Raises:
      ConfigError: if a name is given that no special factor has.
    """
    weights = batch.get('decoder_loss_weights')
    if isinstance(loss_normalizing_factor, str):
        loss_normalizing_factor = convert_special_loss_normalizing_factor_to_enum(loss_normalizing_factor)
    if not isinstance(loss_normalizing_factor, SpecialLossNormalizingFactor):
        return loss_normalizing_factor, weights
    targets = batch['decoder_target_tokens']
    weights = jnp.asarray(targets > 0 if weights is None else weights, jnp.float32)
    if loss_normalizing_factor is SpecialLossNormalizingFactor.NUM_TOTAL_TARGET_TOKENS:
        return float(targets.size), weights
    if loss_normalizing_factor is SpecialLossNormalizingFactor.AVERAGE_PER_SEQUENCE:
        weights = _average_per_sequence(weights, batch.get('decoder_segment_ids'))
    return jnp.sum(weights), weights


def _average_per_sequence(weights: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Scales weights (batch, length) so that those of each sequence, or each packed segment, sum to one."""
    if segment_ids is None:
        segment_ids = jnp.zeros(weights.shape, jnp.int32)
    else:  # Segment 0 is padding, whatever its weights.
        weights = jnp.where(segment_ids > 0, weights, 0.0)
    most = weights.shape[1] + 1

    def row_totals(row, ids):
        return jax.ops.segment_sum(row, ids, num_segments=most)[ids]

    totals = jax.vmap(row_totals)(weights, segment_ids)
    return jnp.where(totals == 0, 0.0, weights / jnp.where(totals == 0, 1.0, totals))
