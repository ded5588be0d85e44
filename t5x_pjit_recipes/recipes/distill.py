"""Distillation: a student learns from a larger teacher's probabilities, each laid out by a partitioner of its own.

The teacher is frozen: parameters and no optimizer. It turns a batch into a `Lesson`, the batch with the teacher's
logits beside it, laid out for the student's mesh; the student's train step takes lessons as others take batches. Both
use the same devices, or each has its own.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax

from t5x_pjit_recipes import metrics, trainer
from t5x_pjit_recipes.errors import ConfigError
from t5x_pjit_recipes.layout.plan import format_bytes
from t5x_pjit_recipes.recipes.distill_student import DistilledModel, distillation_loss
from t5x_pjit_recipes.recipes.distill_teacher import (
    Lesson,
    Teacher,
    describe_teacher,
    first_half_of_devices,
    load_teacher,
    make_lesson_specs,
    make_teacher_fn,
    second_half_of_devices,
    settled,
)
from t5x_pjit_recipes.train_steps import train_with_lr

__all__ = [
    'DistillationTrainer',
    'DistilledModel',
    'Lesson',
    'Teacher',
    'describe_teacher',
    'distillation_loss',
    'first_half_of_devices',
    'load_teacher',
    'make_distill_step',
    'make_lesson_specs',
    'make_teacher_fn',
    'second_half_of_devices',
]


def make_distill_step(
    model: DistilledModel,
    partitioner: Any,
    *,
    state_axes: Any,
    vocab_size: int,
    learning_rate_fn: Callable[[jax.Array], jax.Array] | None = None,
    num_microbatches: int | None = None,
) -> Callable[..., tuple[Any, metrics.MetricsMap]]:
    """Makes the student's train step, a partitioned function that donates the state.

    Args:
      model: the student.
      partitioner: the student's.
      state_axes: the specs of its train state, from `partitioner.get_mesh_axes(state)`.
      vocab_size: over how many words the logits are.
      learning_rate_fn: step to learning rate; None where the optimizer has a rate of its own.
      num_microbatches: how many parts a lesson is computed in; None for the whole at once.

    Returns:
      A function of (state, lesson, key for dropout or None) that returns the new state and the metrics.
    """
    specs = make_lesson_specs(partitioner, vocab_size)

    def distill_step(state: Any, lesson: Lesson, dropout_rng: jax.Array | None = None) -> Any:
        rate = None if learning_rate_fn is None else learning_rate_fn(state.step)
        return train_with_lr(state, lesson, rate, dropout_rng, model, num_microbatches, data_partition_spec=specs)

    program = partitioner.partition(
        distill_step,
        in_axis_resources=(state_axes, specs, None),
        out_axis_resources=(state_axes, None),
        donate_argnums=(0,),
    )
    return functools.wraps(program)(lambda *args: settled(program(*args), partitioner.mesh))


class DistillationTrainer(trainer.Trainer):
    """A trainer that has a teacher say its part on every batch before the student's step."""

    def __init__(
        self,
        *,
        teacher: Teacher,
        learning_rate_fn: trainer.LearningRateCallable,
        num_microbatches: int | None = None,
        weight_metrics_computer: Any = None,
        **base: Any,
    ) -> None:
        """Takes what `trainer.Trainer` takes, its model a `DistilledModel`, and the teacher; says how that lies.

        Raises:
          ConfigError: if the model is none that learns from lessons.
          MeshError: if teacher and student share some devices only.
        """
        if not isinstance(base['model'], DistilledModel):
            raise ConfigError(
                f'Cannot distil to a {type(base["model"]).__name__}: it has no use for a teacher. Train '
                'distill.DistilledModel(model).'
            )
        super().__init__(
            learning_rate_fn=learning_rate_fn,
            num_microbatches=num_microbatches,
            weight_metrics_computer=weight_metrics_computer,
            **base,
        )
        self._teach = make_teacher_fn(teacher, self._partitioner)
        self._lesson_specs = make_lesson_specs(self._partitioner, teacher.vocab_size)
        _say(f'\nthe teacher, which is not trained, on {describe_teacher(teacher)}')

    @property
    def _train_batch_specs(self) -> Lesson:
        return self._lesson_specs

    def train(self, batch_iter: Any, num_steps: int, start_step: int | None = None) -> trainer.MetricValueMapFuture:
        """Trains on lessons made of the batches; see `trainer.BaseTrainer.train`."""
        return super().train(map(self._make_lesson, batch_iter), num_steps, start_step)

    def _make_lesson(self, batch: Any) -> Lesson:
        settled(self.train_state, self._partitioner.mesh)
        return self._teach(batch)

    def compile_train(self, batch: Any) -> None:
        """Compiles the train step for lessons made of batches like this one, and says what a lesson takes."""
        lesson = self._teach(batch)
        logits = lesson.teacher_logits
        held = math.prod(logits.sharding.shard_shape(logits.shape)) * logits.dtype.itemsize
        _say(f'{"its logits":<16}{format_bytes(held):>10} per device, {logits.shape} for each batch\n')
        super().compile_train(lesson)


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text)
