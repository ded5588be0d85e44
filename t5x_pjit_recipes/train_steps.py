"""One train step and one eval step, as plain functions of a state and a batch, for a partitioner to lay out."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from t5x_pjit_recipes.errors import TrainingError
from t5x_pjit_recipes.metrics import Average, LastValue, MetricsMap, is_metric_obj, shape_obj_to_defined_obj
from t5x_pjit_recipes.weight_metrics import WeightMetricsComputer

BatchType: TypeAlias = Mapping[str, Any]
Rng: TypeAlias = jax.Array
TrainState: TypeAlias = Any
# Gradients, metrics, and the new mutables or None.
Gradients: TypeAlias = tuple[Any, MetricsMap, Any]

BATCH_SPEC = PartitionSpec('data')


def _merge(a: MetricsMap, b: MetricsMap) -> MetricsMap:
    return jax.tree.map(lambda x, y: x.merge(y), a, b, is_leaf=is_metric_obj)


@jax.jit
def merge_metrics(a: MetricsMap, b: MetricsMap) -> MetricsMap:
    """Merges two mappings of metrics, `a` the earlier, on the device and without waiting for it."""
    return _merge(a, b)


def _gradients(model: Any, params: Any, mutables: Any, batch: BatchType, rng: Rng | None) -> Gradients:
    """Returns gradients, metrics, and mutables as the model left them (None where it has none)."""
    gradient_fn = jax.grad(model.loss_fn, has_aux=True)
    if not mutables:
        return *gradient_fn(params, batch, rng), None
    grads, (metrics, mutables) = gradient_fn(params, batch, rng, mutables)
    return grads, metrics, mutables


def accumulate_grads_microbatched(
    model: Any,
    train_state: TrainState,
    batch: BatchType,
    dropout_rng: Rng | None,
    num_microbatches: int | None,
    data_partition_spec: Any = BATCH_SPEC,
) -> Gradients:
    """Computes the gradients of one batch, a microbatch at a time where it is given how many.

    Args:
      model: has `loss_fn(params, batch, dropout_rng)` → (loss, metrics); with mutables
        `loss_fn(params, batch, dropout_rng, flax_mutables)` → (loss, (metrics, mutables)). The loss is a sum over
        examples: a mean would make the gradients grow with the number of microbatches.
      train_state: has `params` and `flax_mutables`.
      batch: name to array of shape (batch, ...).
      dropout_rng: key for dropout; each microbatch gets one of its own.
      num_microbatches: None, 0 or 1 computes the whole batch at once.
      data_partition_spec: how each microbatch is laid out: a spec for all of it, or a tree of specs.

    Returns:
      Gradients (summed over microbatches in float32; of the params' dtype without microbatches), metrics, and the new
      mutables or None.

    Raises:
      TrainingError: if the batch does not divide into microbatches.
    """
    params, mutables = train_state.params, train_state.flax_mutables or None
    if num_microbatches is None or num_microbatches <= 1:
        return _gradients(model, params, mutables, batch, dropout_rng)
    size = _microbatch_size(batch, num_microbatches)

    def gradients(i: jax.Array, mutables: Any) -> Gradients:
        microbatch = _constrain(jax.tree.map(lambda x: _rows(x, i * size, size), batch), data_partition_spec)
        rng = None if dropout_rng is None else jax.random.fold_in(dropout_rng, i)
        return _gradients(model, params, mutables, microbatch, rng)

    def accumulate(i: jax.Array, so_far: Gradients) -> Gradients:
        grads, metrics, mutables = gradients(i, so_far[2])
        return jax.tree.map(jnp.add, so_far[0], grads), _merge(so_far[1], metrics), mutables

    _, metrics_shapes, _ = jax.eval_shape(gradients, 0, mutables)
    zero_grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    zero_metrics = jax.tree.map(shape_obj_to_defined_obj, metrics_shapes, is_leaf=is_metric_obj)
    return jax.lax.fori_loop(0, num_microbatches, accumulate, (zero_grads, zero_metrics, mutables))


def _microbatch_size(batch: BatchType, num_microbatches: int) -> int:
    batch_size = jax.tree.leaves(batch)[0].shape[0]
    if batch_size % num_microbatches:
        raise TrainingError(
            f'Cannot split a batch of {batch_size} into {num_microbatches} microbatches: {num_microbatches} does not '
            f'divide {batch_size}. Change one of the two.'
        )
    return batch_size // num_microbatches


def _rows(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size)


def _constrain(batch: BatchType, specs: Any) -> BatchType:
    # Without a mesh in scope there is nothing to lay out: a step function called outside a partitioner.
    return batch if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(batch, specs)


def apply_grads(
    train_state: TrainState,
    grad_accum: Any,
    metrics: MetricsMap,
    learning_rate: jax.Array,
    weight_metrics_computer: WeightMetricsComputer | None,
    other_state_variables: Mapping[str, Any] | None = None,
) -> tuple[TrainState, MetricsMap]:
    """Applies gradients to the state and completes the step's metrics.

    The learning rate is reported where the optimizer goes by it, and left out where it has a schedule of its own.

    Args:
      train_state: the state before the step.
      grad_accum: its gradients.
      metrics: the metrics so far.
      learning_rate: this step's learning rate, a scalar.
      weight_metrics_computer: computes metrics of weights and gradients; None computes none.
      other_state_variables: what else `apply_gradient` takes, such as `flax_mutables`.

    Returns:
      The new state and all metrics.
    """
    new_state = train_state.apply_gradient(grad_accum, learning_rate=learning_rate, **(other_state_variables or {}))
    metrics = dict(metrics)
    if _uses_learning_rate(train_state):
        metrics['learning_rate'] = Average.from_model_output(jnp.asarray([learning_rate]))
        metrics['learning_rate/current'] = LastValue.from_model_output(jnp.asarray(learning_rate))
    if weight_metrics_computer is not None:
        metrics |= weight_metrics_computer.compute_metrics(grad_accum, train_state, new_state)
    return new_state, metrics


def _uses_learning_rate(train_state: TrainState) -> bool:
    # A state of another make cannot be asked, and is taken at T5X's word.
    optimizer = getattr(train_state, '_optimizer', None)
    ask = getattr(getattr(optimizer, 'optimizer_def', None), 'uses_learning_rate', None)
    return ask is None or ask(optimizer.state)


def eval_step(model: Any, train_state: TrainState, batch: BatchType) -> MetricsMap:
    """Computes a batch's metrics, dropout off."""
    mutables = (train_state.flax_mutables,) if train_state.flax_mutables else ()
    _, metrics = model.eval_fn(train_state.params, batch, *mutables)
    return metrics


def train_with_lr(
    train_state: TrainState,
    batch: BatchType,
    learning_rate: jax.Array,
    dropout_rng: Rng | None,
    model: Any,
    num_microbatches: int | None,
    weight_metrics_computer: WeightMetricsComputer | None = None,
    data_partition_spec: Any = BATCH_SPEC,
) -> tuple[TrainState, MetricsMap]:
    """Trains one step: gradients of the batch, applied with a learning rate.

    The arguments are those of `accumulate_grads_microbatched` and `apply_grads`.

    Returns:
      The new state and the step's metrics.
    """
    grads, metrics, mutables = accumulate_grads_microbatched(
        model, train_state, batch, dropout_rng, num_microbatches, data_partition_spec
    )
    other = {'flax_mutables': mutables} if mutables else None
    return apply_grads(train_state, grads, metrics, learning_rate, weight_metrics_computer, other)
