"""Feeding: which part of a global array each process holds, and global arrays from local parts."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_pjit_recipes.errors import DataError, MeshError, did_you_mean, offenders
from t5x_pjit_recipes.layout.axes import spec_axes


@dataclasses.dataclass
class DataLayout:
    """How a global batch is divided among processes.

    Attributes:
      batch_size: global batch size.
      shard_id: which of the shards this process feeds.
      num_shards: number of distinct shards.
      is_first_host_in_replica_set: whether this is the first of the processes that feed the same shard.
    """

    batch_size: int
    shard_id: int
    num_shards: int
    is_first_host_in_replica_set: bool


@dataclasses.dataclass
class LocalChunkInfo:
    """One process's part of a global array: its slices, and its rank among the processes that hold the same part."""

    slice: tuple[slice, ...]
    replica_id: int


class LocalChunker:
    """Knows which chunk of the mesh, and so of any global array, one process holds.

    Attributes:
      global_mesh: the mesh.
      mesh_axes: its axis names.
      num_chunks: mesh axis to the number of processes along it.
      chunk_ids: mesh axis to the place of this process along it.
    """

    def __init__(self, global_mesh: Mesh, *, process_index: int | None = None):
        self.global_mesh = global_mesh
        self.mesh_axes: list[str] = list(global_mesh.axis_names)
        start, size = _local_box(global_mesh, process_index)
        shape = global_mesh.devices.shape
        self.num_chunks: dict[str, int] = {a: g // n for a, g, n in zip(self.mesh_axes, shape, size, strict=True)}
        self.chunk_ids: dict[str, int] = {a: s // n for a, s, n in zip(self.mesh_axes, start, size, strict=True)}

    def get_shard_id(self, axes: str | Iterable[str]) -> int:
        """Numbers this process's chunk along the given mesh axes, the first the most significant."""
        return self._mixed_radix([axes] if isinstance(axes, str) else list(axes))

    def get_replica_id(self, axes: str | Iterable[str]) -> int:
        """Numbers this process among those that have the same chunk along the given mesh axes."""
        used = {axes} if isinstance(axes, str) else set(axes)
        return self._mixed_radix([axis for axis in self.mesh_axes if axis not in used])

    def get_local_chunk_info(self, global_shape: Sequence[int], mesh_axes: Sequence[Any]) -> LocalChunkInfo:
        """Returns this process's part of an array of `global_shape` that is laid out by `mesh_axes`.

        Args:
          global_shape: the whole array's shape.
          mesh_axes: for each dim a mesh axis, a tuple of them, or None; may be shorter than the shape.

        Raises:
          DataError: if a dim does not divide by the number of chunks, or a mesh axis does not exist.
        """
        entries = [spec_axes(entry) for entry in mesh_axes] + [()] * len(global_shape)
        faults = [
            f'dim {dim} is {size}, which {axes} splits into {self._num_chunks(axes)} chunks'
            for dim, (size, axes) in enumerate(zip(global_shape, entries, strict=False))
            if size % self._num_chunks(axes)
        ]
        if faults:
            raise DataError(
                f'Cannot give each process an equal part of an array of shape {tuple(global_shape)}. '
                f'Pad these dims:\n{offenders(faults)}'
            )
        slices = tuple(self._slice(size, axes) for size, axes in zip(global_shape, entries, strict=False))
        return LocalChunkInfo(slices, self.get_replica_id([axis for axes in entries for axis in axes]))

    def _num_chunks(self, axes: Sequence[str]) -> int:
        for axis in axes:
            if axis not in self.num_chunks:
                known = ', '.join(self.mesh_axes)
                raise MeshError(
                    f'Cannot chunk along mesh axis {axis!r}{did_you_mean(axis, self.mesh_axes)}: the mesh has {known}. '
                    'Use one of these.'
                )
        return math.prod(self.num_chunks[axis] for axis in axes)

    def _slice(self, size: int, axes: Sequence[str]) -> slice:
        if not axes:
            return slice(None)
        length = size // self._num_chunks(axes)
        start = length * self._mixed_radix(axes)
        return slice(start, start + length)

    def _mixed_radix(self, axes: Sequence[str]) -> int:
        index = 0
        for axis in axes:
            index = index * self.num_chunks[axis] + self.chunk_ids[axis]
        return index


def _local_box(mesh: Mesh, process_index: int | None) -> tuple[list[int], list[int]]:
    """Returns the first index and the size of the box of devices that one process holds."""
    process = jax.process_index() if process_index is None else process_index
    owners = np.vectorize(lambda d: d.process_index, otypes=[int])(mesh.devices)
    places = np.argwhere(owners == process)
    if not len(places):
        raise MeshError(
            f'Cannot tell which part of the mesh process {process} holds: none of its {mesh.size} devices are there. '
            f'Build the mesh from devices of every process; it has those of {sorted({int(p) for p in owners.flat})}.'
        )
    start, size = places.min(0), np.ptp(places, axis=0) + 1
    if math.prod(size) != len(places):
        raise MeshError(
            f'Cannot chunk the mesh by processes: the {len(places)} devices of process {process} are spread over a box '
            f'of {tuple(int(s) for s in size)}. Order the devices so that each process holds a box.'
        )
    return [int(s) for s in start], [int(s) for s in size]


def get_data_layout(chunker: LocalChunker, data_axes: Sequence[str], batch_size: int | None = None) -> DataLayout:
    """Divides a global batch among the processes along the data axes.

    Args:
      chunker: the chunks of this process's mesh.
      data_axes: the mesh axes that split the batch; none means that every process feeds the whole.
      batch_size: global batch size; the number of devices along the data axes by default.

    Raises:
      DataError: if the batch does not divide among the devices along the data axes.
    """
    data_size = math.prod(chunker.global_mesh.shape[axis] for axis in data_axes)
    batch_size = batch_size or data_size
    if batch_size % data_size:
        lower = batch_size // data_size * data_size
        options = [n for n in (lower, lower + data_size) if n]
        raise DataError(
            f'Cannot split a batch of {batch_size} over {data_size} devices along {tuple(data_axes)}: {data_size} does '
            f'not divide {batch_size}. Use a batch size of {" or ".join(map(str, options))}.'
        )
    return DataLayout(
        batch_size=int(batch_size),
        shard_id=chunker.get_shard_id(data_axes),
        num_shards=math.prod(chunker.num_chunks[axis] for axis in data_axes),
        is_first_host_in_replica_set=chunker.get_replica_id(data_axes) == 0,
    )


def global_batch(local_batch: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Builds global arrays from what this process read.

    Args:
      local_batch: a tree of numpy arrays, this process's rows of the batch.
      mesh: the mesh.
      spec: how a batch lies on it, the same for every leaf.

    Returns:
      A tree of global arrays; nothing of it is on one device whole unless the spec says so.
    """
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local_batch)
