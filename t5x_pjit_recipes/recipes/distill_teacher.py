"""The teacher of a distillation: frozen on a mesh of its own, it turns batches into lessons for the student's mesh.

A lesson is large: batch · length · vocabulary · 4 bytes, which is 1.9 GB for 128 targets of 114 tokens over 32,128
words. It is never whole on a device: its rows are divided over the data axes and its words over those that the rules
give 'vocab', where they divide.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_pjit_recipes import models
from t5x_pjit_recipes.checkpoints import RestoreCheckpointConfig
from t5x_pjit_recipes.errors import MeshError, PlacementError, RecipeError, offenders
from t5x_pjit_recipes.initialization import TrainStateInitializer
from t5x_pjit_recipes.layout import LogicalRules, Plan, describe_mesh, global_batch
from t5x_pjit_recipes.layout.axes import spec_axes
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.reports import describe_parts

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
        logits = program(teacher.params, batch)
        return settled(Lesson(batch, jax.device_put(logits, sharding)), partitioner.mesh)

    return teach


def settled(arrays: Any, mesh: Mesh) -> Any:
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
