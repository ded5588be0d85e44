"""Distillation: a student learns from a larger teacher's probabilities, each laid out by a partitioner of its own.

The teacher is frozen: parameters and no optimizer. It turns a batch into a `Lesson`, the batch with the teacher's
logits beside it, laid out for the student's mesh; the student's train step takes lessons as others take batches. Both
use the same devices, or each has its own.

A lesson is large: batch · length · vocabulary · 4 bytes, which is 1.9 GB for 128 targets of 114 tokens over 32,128
words. It is never whole on a device: its rows are divided over the data axes and its words over those that the rules
give 'vocab', where they divide.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_pjit_recipes import losses, metrics, models, trainer
from t5x_pjit_recipes.checkpoints import RestoreCheckpointConfig
from t5x_pjit_recipes.errors import ConfigError, MeshError, PlacementError, RecipeError, offenders
from t5x_pjit_recipes.initialization import TrainStateInitializer
from t5x_pjit_recipes.layout import LogicalRules, Plan, describe_mesh, global_batch
from t5x_pjit_recipes.layout.axes import spec_axes
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.layout.plan import format_bytes
from t5x_pjit_recipes.reports import describe_parts
from t5x_pjit_recipes.train_steps import train_with_lr

# For the shapes of a teacher's parameters, which do not depend on them.
_ROWS, _LENGTH = 8, 16


class Lesson(NamedTuple):
    """A batch with what the teacher says of it; given to functions in place of arrays, their specs.

    Attributes:
      batch: what the student would get without a teacher.
      teacher_logits: float32 (batch, length, vocabulary).
    """

    batch: Any
    teacher_logits: Any


def distillation_loss(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    *,
    temperature: float = 1.0,
    weights: jax.Array | None = None,
    loss_normalizing_factor: float | jax.Array | None = None,
) -> jax.Array:
    """Sums T² · KL(softmax(teacher / T) || softmax(student / T)) over all positions, in nats.

    Its gradients keep their size as the temperature T grows, thanks to the factor T² (Hinton et al. 2015,
    arXiv:1503.02531, section 2). The teacher gets none.

    Args:
      student_logits: (batch, length, vocabulary).
      teacher_logits: likewise; -inf rules a word out.
      temperature: T, above 0; the larger, the more the unlikely words count.
      weights: (batch, length), 0 for padding, or None where all positions count as one.
      loss_normalizing_factor: what the sum is divided by; see `losses.get_loss_normalizing_factor_and_weights`.

    Raises:
      ConfigError: if the temperature is not above 0.
      RecipeError: if the logits' shapes differ, as those of different vocabularies do.
    """
    _check_settings(temperature=temperature)
    if student_logits.shape != teacher_logits.shape:
        raise RecipeError(
            f'Cannot compare the logits of a student, {student_logits.shape}, with those of a teacher, '
            f'{teacher_logits.shape}: a student of {student_logits.shape[-1]} words learns from a teacher of as many, '
            f'not {teacher_logits.shape[-1]}, on the same batch. Give both one vocabulary.'
        )
    teacher_logits = jax.lax.stop_gradient(teacher_logits).astype(jnp.float32)
    log_taught = jax.nn.log_softmax(teacher_logits / temperature)
    log_learnt = jax.nn.log_softmax(student_logits.astype(jnp.float32) / temperature)
    taught = jnp.exp(log_taught)
    divergence = jnp.sum(jnp.where(taught > 0, taught * (log_taught - log_learnt), 0), axis=-1)
    total = temperature**2 * jnp.sum(divergence if weights is None else divergence * weights)
    return total if loss_normalizing_factor is None else total / loss_normalizing_factor


def _check_settings(temperature: float = 1.0, mixing: float = 0.0) -> None:
    faults = []
    if not 0 < temperature < math.inf:
        faults.append(f'temperature={temperature}: it divides logits, so it is a number above 0; 1 to 10 are usual')
    if not 0 <= mixing <= 1:
        faults.append(f"mixing={mixing}: it is the teacher's share of the loss, from 0 (no teacher) to 1 (no labels)")
    if faults:
        raise ConfigError(f'Cannot distil with {len(faults)} of these settings. Correct them:\n' + offenders(faults))


class DistilledModel(models.BaseTransformerModel):
    """A student: trained on lessons, evaluated on batches, where it is the model that it wraps."""

    def __init__(self, model: models.BaseTransformerModel, temperature: float = 2.0, mixing: float = 0.5):
        """Wraps the model to be trained.

        The loss is (1 - mixing) · the model's own + mixing · `distillation_loss`, divided and weighted as its own.

        Args:
          model: the student, with its optimizer.
          temperature: above 0, see `distillation_loss`.
          mixing: the teacher's share of the loss, 0 to 1.

        Raises:
          ConfigError: naming each of the settings that is out of its range.
        """
        _check_settings(temperature, mixing)
        super().__init__(
            model.module,
            model.input_vocabulary,
            model.output_vocabulary,
            model.optimizer_def,
            decode_fn=model.decode_fn,
            loss_normalizing_factor=model._loss_normalizing_factor,
            feature_converter_cls=model.FEATURE_CONVERTER_CLS,
        )
        self._student, self._temperature, self._mixing = model, temperature, mixing

    def loss_fn(self, params: Any, batch: Lesson, dropout_rng: jax.Array | None) -> models.LossAndMetrics:
        """Computes the mixed loss of a lesson.

        The metrics are those of the student's own loss, under their names, so that they compare with a training without
        a teacher; and 'distillation/loss', what is trained, 'distillation/soft_loss_per_nonpadding_target_token' and
        'distillation/agreement', the share of positions where student and teacher hold the same word likeliest.
        """
        if not isinstance(batch, Lesson):
            raise RecipeError(
                f"Cannot distil from a {type(batch).__name__} of {', '.join(sorted(batch))}: the teacher's logits are "
                'missing. Train with distill.DistillationTrainer, or on what distill.make_teacher_fn makes of batches.'
            )
        lesson = batch
        logits = self._compute_logits(params, lesson.batch, dropout_rng)
        hard_loss, found = self._student._loss_of_logits(logits, lesson.batch)
        factor, weights = losses.get_loss_normalizing_factor_and_weights(self._loss_normalizing_factor, lesson.batch)
        soft_loss = distillation_loss(
            logits,
            lesson.teacher_logits,
            temperature=self._temperature,
            weights=weights,
            loss_normalizing_factor=factor,
        )
        loss = (1 - self._mixing) * hard_loss + self._mixing * soft_loss
        return loss, {**found, **_distillation_metrics(loss, soft_loss, logits, lesson, weights)}

    def eval_fn(self, params: Any, batch: models.Batch) -> models.LossAndMetrics:
        """Computes the student's own loss and metrics of a batch, without a teacher."""
        return self._student.eval_fn(params, batch)

    def get_initial_variables(self, rng: Any, input_shapes: Any, input_types: Any = None) -> Any:
        """Initialises the student's variables."""
        return self._student.get_initial_variables(rng, input_shapes, input_types)

    def _compute_logits(self, *args, **kwargs):
        return self._student._compute_logits(*args, **kwargs)


def _distillation_metrics(loss, soft_loss, logits, lesson, weights) -> dict[str, metrics.Metric]:
    agree = jnp.argmax(logits, axis=-1) == jnp.argmax(lesson.teacher_logits, axis=-1)
    count = float(agree.size) if weights is None else jnp.sum(weights, dtype=jnp.float32)
    return {
        'distillation/loss': metrics.AveragePerStep(total=loss),
        'distillation/soft_loss_per_nonpadding_target_token': metrics.Average(total=soft_loss, count=count),
        'distillation/agreement': metrics.Average.from_model_output(agree, mask=weights),
    }


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """A model that is not trained, placed on the mesh of its partitioner.

    Attributes:
      model: the model.
      params: its parameters, placed on that mesh.
      partitioner: whose mesh it is.
      vocab_size: over how many words its logits are.
    """

    model: models.BaseTransformerModel
    params: Any
    partitioner: Any
    vocab_size: int

    def __post_init__(self):
        mesh = self.partitioner.mesh
        astray = [
            f'{name} {jnp.shape(leaf)}'
            for name, leaf in named_leaves(self.params).items()
            if not isinstance(getattr(leaf, 'sharding', None), NamedSharding) or leaf.sharding.mesh != mesh
        ]
        if astray:
            raise PlacementError(
                f'Cannot teach with {len(astray)} arrays that do not lie on the {describe_mesh(mesh)} of the teacher. '
                f'Place them with layout.place(params, plan):\n{offenders(astray)}'
            )

    @property
    def plan(self) -> Plan:
        """How the parameters lie."""
        return Plan(self.params, self._specs, self.partitioner.mesh)

    @property
    def _specs(self) -> Any:
        return jax.tree.map(lambda leaf: leaf.sharding.spec, self.params)


def load_teacher(
    model: models.BaseTransformerModel,
    partitioner: Any,
    *,
    path: str,
    batch_shapes: Mapping[str, jax.ShapeDtypeStruct] | None = None,
) -> Teacher:
    """Restores a teacher from a checkpoint, each array straight onto its devices; an optimizer's state is not read.

    Args:
      model: the model that was trained.
      partitioner: lays it out.
      path: the directory of one step, as 'runs/pydoc/checkpoint_300'.
      batch_shapes: shape and dtype of each feature of some batch; those of the model's feature converter by default.

    Raises:
      CheckpointError: if there is no checkpoint, or it is one of another model.
    """
    shapes = _batch_shapes(model) if batch_shapes is None else batch_shapes
    initializer = TrainStateInitializer(
        optimizer_def=None,
        init_fn=model.get_initial_variables,
        input_shapes={name: x.shape for name, x in shapes.items()},
        input_types={name: x.dtype for name, x in shapes.items()},
        partitioner=partitioner,
    )
    state = initializer.from_checkpoint([RestoreCheckpointConfig(path=path, mode='specific')])
    vocab_size = jax.eval_shape(model._compute_logits, state.params, shapes).shape[-1]
    return Teacher(model, state.params, partitioner, vocab_size)


def _batch_shapes(model: models.BaseTransformerModel) -> Mapping[str, jax.ShapeDtypeStruct]:
    converter = model.FEATURE_CONVERTER_CLS()
    return converter.element_spec(_ROWS, dict.fromkeys(converter.TASK_FEATURES, _LENGTH))


def first_half_of_devices() -> Sequence[jax.Device]:
    """Returns the first half of all devices, for `PjitPartitioner(..., devices=...)`.

    Raises:
      MeshError: if their number is odd.
    """
    return _halves()[0]


def second_half_of_devices() -> Sequence[jax.Device]:
    """Returns the other half; see `first_half_of_devices`."""
    return _halves()[1]


def _halves() -> tuple[Sequence[jax.Device], Sequence[jax.Device]]:
    devices = jax.devices()
    middle = len(devices) // 2
    if 2 * middle != len(devices):
        raise MeshError(
            f'Cannot halve {len(devices)} devices: that is odd. Give devices to the partitioners by hand, or none: '
            'student and teacher then share them all.'
        )
    return devices[:middle], devices[middle:]


def describe_teacher(teacher: Teacher) -> str:
    """Describes how a teacher lies: its mesh, a table of its parameters, and what a device holds."""
    return describe_parts({'params': teacher.plan})


def make_lesson_specs(partitioner: Any, vocab_size: int) -> Lesson:
    """Says how lessons lie on the student's mesh: rows over the data axes, words over those of 'vocab' if they divide.

    Args:
      partitioner: the student's.
      vocab_size: over how many words the logits are.
    """
    data = partitioner.data_partition_spec
    return Lesson(data, _logits_spec(partitioner, vocab_size))


def _logits_spec(partitioner: Any, vocab_size: int) -> PartitionSpec:
    (rows,) = partitioner.data_partition_spec
    rules = LogicalRules(getattr(partitioner, 'logical_axis_rules', ()))
    words = tuple(rules.spec(('batch', None, 'vocab')))[2]
    ways = math.prod(partitioner.mesh.shape[axis] for axis in spec_axes(words))
    return PartitionSpec(rows, None, words if vocab_size % ways == 0 else None)


def make_teacher_fn(teacher: Teacher, partitioner: Any) -> Callable[[Any], Lesson]:
    """Makes the function that turns a batch into a lesson.

    The teacher computes on its own mesh; its logits are then moved to the student's. On accelerators it returns before
    they are there, so a teacher with devices of its own can work on the next batch while the student learns from this
    one; on a CPU it waits.

    Args:
      teacher: the teacher.
      partitioner: the student's, whose mesh has the teacher's devices or none of them.

    Returns:
      A function of a batch: numpy arrays (this process's rows) or global JAX arrays.

    Raises:
      MeshError: if the two meshes share some devices only.
    """
    _check_devices(teacher.partitioner.mesh, partitioner.mesh)
    specs = make_lesson_specs(partitioner, teacher.vocab_size)
    sharding = NamedSharding(partitioner.mesh, specs.teacher_logits)
    their_sharding = NamedSharding(teacher.partitioner.mesh, teacher.partitioner.data_partition_spec)

    def compute_logits(params: Any, batch: Any) -> jax.Array:
        logits = teacher.model._compute_logits(params, batch)
        if logits.shape[-1] != teacher.vocab_size:
            raise RecipeError(
                f'Cannot teach with vocab_size={teacher.vocab_size}: the logits of the teacher are {logits.shape}. '
                f'Make it with vocab_size={logits.shape[-1]}.'
            )
        return logits.astype(jnp.float32)

    program = teacher.partitioner.partition(
        compute_logits,
        in_axis_resources=(teacher._specs, teacher.partitioner.data_partition_spec),
        out_axis_resources=_logits_spec(teacher.partitioner, teacher.vocab_size),
    )

    def teach(batch: Any) -> Lesson:
        if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(batch)):
            batch = global_batch(batch, partitioner.mesh, specs.batch)
        logits = program(teacher.params, jax.device_put(batch, their_sharding))
        return _settled(Lesson(batch, jax.device_put(logits, sharding)), partitioner.mesh)

    return teach


def _settled(arrays: Any, mesh: Mesh) -> Any:
    """Waits for arrays on a CPU: two programs at once there wait for each other's threads, and for ever."""
    return jax.block_until_ready(arrays) if mesh.devices.flat[0].platform == 'cpu' else arrays


def _check_devices(teacher_mesh: Mesh, student_mesh: Mesh) -> None:
    teacher, student = set(teacher_mesh.devices.flat), set(student_mesh.devices.flat)
    shared = len(teacher & student)
    if shared and teacher != student:
        raise MeshError(
            f'Cannot distil from a teacher on {len(teacher)} devices to a student on {len(student)}: they share '
            f'{shared}, which would hold both while others hold one. Give their partitioners the same devices, or '
            'devices=distill.first_half_of_devices() and second_half_of_devices().'
        )


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
    return functools.wraps(program)(lambda *args: _settled(program(*args), partitioner.mesh))


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
        _settled(self.train_state, self._partitioner.mesh)
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
