"""Training and evaluating a laid-out train state, step after step, on a device that is never kept waiting."""

import abc
import concurrent.futures
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from threading import RLock
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils

from t5x_pjit_recipes.actions import ActionMode, BaseAction, EarlyStoppingAction, TerminateOnNanAction, check_finite
from t5x_pjit_recipes.errors import TrainingError, did_you_mean
from t5x_pjit_recipes.layout.feeding import global_batch
from t5x_pjit_recipes.metrics import LastValue, MetricsMap
from t5x_pjit_recipes.summaries import MetricsManager, Summary
from t5x_pjit_recipes.train_steps import (
    BatchType,
    Rng,
    TrainState,
    accumulate_grads_microbatched,
    apply_grads,
    eval_step,
    merge_metrics,
    train_with_lr,
)
from t5x_pjit_recipes.weight_metrics import WeightMetricsComputer

__all__ = [
    'ActionMode',
    'BaseAction',
    'BaseTrainer',
    'EarlyStoppingAction',
    'MetricsManager',
    'PreemptionError',
    'TerminateOnNanAction',
    'Trainer',
    'WeightMetricsComputer',
    'accumulate_grads_microbatched',
    'apply_grads',
    'check_finite',
    'eval_step',
    'merge_metrics',
    'train_with_lr',
]

LearningRateCallable: TypeAlias = Callable[[jax.Array], jax.Array]
PartitionedTrainCallable: TypeAlias = Callable[[TrainState, BatchType], tuple[TrainState, MetricsMap]]
PartitionedEvalCallable: TypeAlias = Callable[[TrainState, BatchType], MetricsMap]
MetricValueMapFuture: TypeAlias = concurrent.futures.Future
ArrayMapFuture: TypeAlias = concurrent.futures.Future
TimeFuture: TypeAlias = concurrent.futures.Future
BaseTrainerConstructor: TypeAlias = Callable[..., 'BaseTrainer']

# File systems take names of 255 bytes at most, of which the event files need some.
_MAX_EVAL_NAME = 113


class PreemptionError(Exception):
    """Raised by a trainer that is about to be stopped from outside, to ask for a checkpoint at once."""


class BaseTrainer(abc.ABC):
    """Holds the train state and runs partitioned steps on it; subclasses say what a step is.

    Attributes:
      stop_training: set by whoever wants the run to end after the current phase.
      train_metrics_manager: writes the summaries of training.
      eval_metrics_managers: name of an evaluation to the manager that writes its summaries.
    """

    def __init__(
        self,
        model: Any,
        train_state: TrainState,
        partitioner: Any,
        eval_names: Sequence[str],
        summary_dir: str | None,
        train_state_axes: TrainState,
        rng: Rng,
    ) -> None:
        """Takes everything a run needs.

        Args:
          model: has `loss_fn` and `eval_fn`.
          train_state: the state to train, laid out by the partitioner.
          partitioner: partitions and compiles the steps.
          eval_names: names of the evaluations that `eval` may be asked for.
          summary_dir: where summaries go; None writes none.
          train_state_axes: the state's specs, as the partitioner's `get_mesh_axes` gives them.
          rng: the key from which each step's dropout key is derived, by the step's number alone.
        """
        self._model = model
        self._train_state = train_state
        self._train_state_mutex = RLock()
        self._partitioner = partitioner
        self._train_state_axes = train_state_axes
        self._base_rng = rng
        self._born = time.time()
        self._compiled_train_step: PartitionedTrainCallable | None = None
        self._compiled_eval_steps: dict[Any, PartitionedEvalCallable] = {}
        self.stop_training = False
        self.train_metrics_manager = MetricsManager('train', summary_dir)
        self.eval_metrics_managers = {
            name: MetricsManager(f'training_eval/{name[:_MAX_EVAL_NAME]}', summary_dir) for name in eval_names
        }

    def __enter__(self) -> 'BaseTrainer':
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def close(self) -> None:
        """Waits for all summaries and closes their files."""
        for manager in (self.train_metrics_manager, *self.eval_metrics_managers.values()):
            manager.close()

    @property
    def train_state(self) -> TrainState:
        """The current state. The next train step donates it: keep no reference across one."""
        with self._train_state_mutex:
            return self._train_state

    @train_state.setter
    def train_state(self, train_state: TrainState) -> None:
        with self._train_state_mutex:
            self._train_state = train_state

    def _get_step_rng(self, step: int | jax.Array) -> Rng:
        return jax.random.fold_in(self._base_rng, step)

    def train(
        self, batch_iter: Iterator[BatchType], num_steps: int, start_step: int | None = None
    ) -> MetricValueMapFuture:
        """Trains, and returns as soon as the steps are under way.

        The state is donated to each step and replaced by its result, so `train_state` is good also after an error in
        the batch iterator.

        Args:
          batch_iter: yields batches: numpy arrays (this process's rows) or global JAX arrays.
          num_steps: how many steps to train; 0 gives an empty summary.
          start_step: the number of the first step; read from the state, which waits for it, where it is None.

        Returns:
          A future of metric name to `Scalar` over these steps, written at step `start_step + num_steps`.

        Raises:
          TrainingError: if the iterator ends before.
        """
        start_step = int(self.train_state.step) if start_step is None else start_step
        step_fn = self._compiled_train_step or self._partitioned_train_step
        self.train_metrics_manager.start_duration_timer()
        metrics: MetricsMap = {}
        for done in range(num_steps):
            batch = self._globalize(_next_batch(batch_iter, start_step, done, num_steps))
            self.train_state, step_metrics = step_fn(self.train_state, batch)
            metrics = merge_metrics(metrics, step_metrics) if metrics else step_metrics
        if metrics:
            metrics = {**metrics, 'timing/uptime': LastValue(time.time() - self._born)}
        return self.train_metrics_manager.write_metrics_summary(metrics, start_step + num_steps, num_steps)

    def compile_train(self, batch: BatchType) -> None:
        """Compiles the train step for batches like this one, and writes how long that took."""
        start = time.time()
        self._compiled_train_step = self._partitioner.compile(
            self._partitioned_train_step, self.train_state, self._globalize(batch)
        )
        self._write_compile_time(self.train_metrics_manager, time.time() - start)

    def eval(self, batch_iters: Mapping[str, Iterator[BatchType]]) -> Mapping[str, Summary]:
        """Evaluates the current state.

        Args:
          batch_iters: name of an evaluation to its batches, finitely many.

        Returns:
          Name of an evaluation to its summary, which is empty where there was no batch.

        Raises:
          TrainingError: if a name is not among those the trainer was made with.
        """
        self._check_eval_names(batch_iters)
        step = int(self.train_state.step)
        futures = {name: self._start_eval(name, batch_iter, step) for name, batch_iter in batch_iters.items()}
        return {name: future.result() for name, future in futures.items()}

    def _start_eval(self, name: str, batch_iter: Iterator[BatchType], step: int) -> MetricValueMapFuture:
        manager = self.eval_metrics_managers[name]
        manager.start_duration_timer(block_on=self.train_state)
        metrics: MetricsMap = {}
        num_steps = 0
        for batch in _in_lockstep(batch_iter, name):
            batch = self._globalize(batch)
            step_fn = self._compiled_eval_steps.get(_shapes(batch), self._partitioned_eval_step)
            step_metrics = step_fn(self.train_state, batch)
            metrics = merge_metrics(metrics, step_metrics) if metrics else step_metrics
            num_steps += 1
        return manager.write_metrics_summary(metrics, step, num_steps)

    def compile_eval(self, batches: Mapping[str, BatchType]) -> None:
        """Compiles the eval step for batches like these; evaluations with equal shapes share one compilation."""
        self._check_eval_names(batches)
        for name, batch in batches.items():
            start = time.time()
            batch = self._globalize(batch)
            if _shapes(batch) not in self._compiled_eval_steps:
                self._compiled_eval_steps[_shapes(batch)] = self._partitioner.compile(
                    self._partitioned_eval_step, self.train_state, batch
                )
            self._write_compile_time(self.eval_metrics_managers[name], time.time() - start)

    def _write_compile_time(self, manager: MetricsManager, seconds: float) -> None:
        manager.write_scalar('timing/compilation_seconds', seconds, int(self.train_state.step))

    def _check_eval_names(self, names: Mapping[str, Any]) -> None:
        known = list(self.eval_metrics_managers)
        for name in names:
            if name not in known:
                raise TrainingError(
                    f'Cannot evaluate {name!r}{did_you_mean(name, known)}: this trainer has the evaluations {known}. '
                    'Give it the name in eval_names.'
                )

    def _globalize(self, batch: BatchType) -> BatchType:
        if not all(isinstance(x, np.ndarray) for x in jax.tree.leaves(batch)):
            return batch
        return global_batch(batch, self._partitioner.mesh, self._partitioner.data_partition_spec)

    @property
    @abc.abstractmethod
    def _partitioned_train_step(self) -> PartitionedTrainCallable:
        """A partitioned function of (state, batch) that donates the state and returns (new state, metrics)."""

    @property
    @abc.abstractmethod
    def _partitioned_eval_step(self) -> PartitionedEvalCallable:
        """A partitioned function of (state, batch) that returns metrics."""


class Trainer(BaseTrainer):
    """Trains with gradients of the model's loss, accumulated over microbatches, and a learning rate schedule."""

    def __init__(
        self,
        model: Any,
        train_state: TrainState,
        partitioner: Any,
        eval_names: Sequence[str],
        summary_dir: str | None,
        train_state_axes: TrainState,
        rng: Rng,
        learning_rate_fn: LearningRateCallable,
        num_microbatches: int | None,
        weight_metrics_computer: WeightMetricsComputer | None = None,
    ) -> None:
        """Takes what BaseTrainer takes, and how to train.

        Args:
          model: has `loss_fn` and `eval_fn`.
          train_state: the state to train, laid out by the partitioner.
          partitioner: partitions and compiles the steps.
          eval_names: names of the evaluations that `eval` may be asked for.
          summary_dir: where summaries go; None writes none.
          train_state_axes: the state's specs.
          rng: the key from which each step's dropout key is derived.
          learning_rate_fn: step to learning rate.
          num_microbatches: how many parts a batch is computed in; None, 0 or 1 for the whole at once.
          weight_metrics_computer: computes metrics of weights and gradients; None computes none.
        """
        super().__init__(model, train_state, partitioner, eval_names, summary_dir, train_state_axes, rng)
        self._learning_rate_fn = learning_rate_fn
        self._num_microbatches = num_microbatches
        self._weight_metrics_computer = weight_metrics_computer

    @property
    def _train_batch_specs(self) -> Any:
        """How what a train step takes lies on the mesh: a spec for all of it, or a tree of specs."""
        return self._partitioner.data_partition_spec

    @cached_property
    def _partitioned_train_step(self) -> PartitionedTrainCallable:
        def train_step(train_state: TrainState, batch: BatchType) -> tuple[TrainState, MetricsMap]:
            return train_with_lr(
                train_state,
                batch,
                learning_rate=self._learning_rate_fn(train_state.step),
                dropout_rng=self._get_step_rng(train_state.step),
                model=self._model,
                num_microbatches=self._num_microbatches,
                weight_metrics_computer=self._weight_metrics_computer,
                data_partition_spec=self._train_batch_specs,
            )

        return self._partitioner.partition(
            train_step,
            in_axis_resources=(self._train_state_axes, self._train_batch_specs),
            out_axis_resources=(self._train_state_axes, None),
            donate_argnums=(0,),
        )

    @cached_property
    def _partitioned_eval_step(self) -> PartitionedEvalCallable:
        def partitioned_eval_step(train_state: TrainState, batch: BatchType) -> MetricsMap:
            return eval_step(self._model, train_state, batch)

        return self._partitioner.partition(
            partitioned_eval_step,
            in_axis_resources=(self._train_state_axes, self._partitioner.data_partition_spec),
            out_axis_resources=None,
        )


def _next_batch(batch_iter: Iterator[BatchType], start_step: int, done: int, num_steps: int) -> BatchType:
    try:
        return next(batch_iter)
    except StopIteration as error:
        raise TrainingError(
            f'Cannot train {num_steps} steps from step {start_step}: the batches ended after {done}, at step '
            f'{start_step + done}, where the train state now stands. Repeat the data set, or train fewer steps.'
        ) from error


def _in_lockstep(batch_iter: Iterator[BatchType], name: str) -> Iterator[BatchType]:
    """Yields the batches, and checks between processes that all have one or none has."""
    if jax.process_count() == 1:
        yield from batch_iter
        return
    for batch in itertools.chain(batch_iter, [None]):
        multihost_utils.assert_equal(
            np.array(batch is None),
            f'Cannot evaluate {name!r} with different numbers of batches: one process has run out, another has not. '
            'Give every process as many.',
        )
        if batch is None:
            return
        yield batch


def _shapes(batch: BatchType) -> Any:
    """Returns a key that is equal for batches of equal shapes and types."""
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, tuple((x.shape, str(x.dtype)) for x in leaves)
