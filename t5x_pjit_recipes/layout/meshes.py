"""Meshes: from sizes to devices in a grid with named sides. Axis types are always Auto.

What decides (`resolve_sizes`, the grids) touches no device; a `Mesh` is built in the last line of each function.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from t5x_pjit_recipes.errors import MeshError, warn
from t5x_pjit_recipes.layout import tiles

DATA, MODEL, REPLICA = 'data', 'model', 'replica'


def resolve_sizes(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Fills in the one size given as -1, so that all sizes multiply to `num_devices`.

    Args:
      sizes: mesh axis name to number of devices along it, outermost first.
      num_devices: how many devices the mesh must cover.

    Raises:
      MeshError: if the sizes cannot cover exactly `num_devices` devices.

    >>> resolve_sizes({"data": -1, "model": 2}, num_devices=8)
    {'data': 4, 'model': 2}
    """
    asked = describe_sizes(sizes)
    open_axes = [name for name, size in sizes.items() if size == -1]
    wrong = [f'{name}={size!r}' for name, size in sizes.items() if type(size) is not int or (size < 1 and size != -1)]
    if wrong or len(open_axes) > 1:
        raise MeshError(
            f'Cannot make a mesh of {asked}: {", ".join(wrong or open_axes)} cannot be resolved. Give each axis a '
            'positive whole number of devices, and at most one of them -1 for the rest.'
        )
    known = math.prod(size for size in sizes.values() if size != -1)
    if num_devices % known or (not open_axes and known != num_devices):
        raise MeshError(
            f'Cannot make a mesh of {asked} from {num_devices} devices: the sizes given multiply to {known}, which '
            f'{"does not divide" if open_axes else "is not"} {num_devices}. Use sizes that multiply to {num_devices}, '
            'or one size of -1 for the rest.'
        )
    return {name: num_devices // known if size == -1 else size for name, size in sizes.items()}


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """Spells out mesh sizes.

    >>> describe_sizes({'data': 4, 'model': 2})
    'data=4, model=2'
    """
    return ', '.join(f'{name}={size}' for name, size in sizes.items())


def make_mesh(*, devices: Sequence[Any] | None = None, **sizes: int) -> Mesh:
    """Builds a mesh with the given sizes, one of which may be -1 for the rest; all axes are Auto.

    Args:
      devices: the devices to use, in order; all of them by default, arranged for the hardware by JAX.
      **sizes: number of devices along each axis, outermost first.

    Raises:
      MeshError: if the sizes do not multiply to the number of devices.

    >>> make_mesh(data=-1, model=2, devices=jax.devices()[:2]).axis_names
    ('data', 'model')
    """
    chosen = list(jax.devices() if devices is None else devices)
    resolved = resolve_sizes(sizes, len(chosen))
    if devices is None:
        return _mesh(mesh_utils.create_device_mesh(tuple(resolved.values()), chosen), tuple(resolved))
    return _mesh(np.array(chosen, dtype=object).reshape(tuple(resolved.values())), tuple(resolved))


def abstract_mesh(**sizes: int) -> AbstractMesh:
    """Builds a mesh without devices, to plan for machines that are not here; all axes are Auto.

    >>> abstract_mesh(data=64, model=64).size
    4096
    """
    resolve_sizes(sizes, math.prod(sizes.values()))
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def check_auto(mesh: Mesh | AbstractMesh) -> None:
    """Raises MeshError for a mesh whose axes are not all Auto, saying how to convert it."""
    others = [f'{n} ({t.name})' for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t != AxisType.Auto]
    if others:
        raise MeshError(
            f'Cannot lay out arrays on a mesh whose axes {", ".join(others)} are not Auto: under Explicit axes a '
            'sharding constraint is an assertion and stock Flax models stop at it. Convert it with '
            'jax.sharding.Mesh(mesh.devices, mesh.axis_names), or build it with layout.make_mesh(...).'
        )


def describe_mesh(mesh: Mesh | AbstractMesh) -> str:
    """Says in one line which mesh this is, of how many devices, of which kind."""
    devices = f'{mesh.size} device{"s" if mesh.size > 1 else ""}'
    if isinstance(mesh, Mesh):
        first = mesh.devices.flat[0]
        kind = 'CPU' if first.platform == 'cpu' else first.device_kind
        devices = devices.replace(' ', f' {kind} ', 1)
        processes = len({d.process_index for d in mesh.devices.flat})
        devices += f' in {processes} processes' if processes > 1 else ''
    return f'mesh {describe_sizes(dict(mesh.shape))} on {devices}'


def _mesh(grid: np.ndarray, names: Sequence[str]) -> Mesh:
    return Mesh(grid, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def tiled_mesh(
    tile: Sequence[int], devices: Sequence[Any], local_devices: Sequence[Any] = (), *, by_host: bool = True
) -> Mesh:
    """Builds a ('data', 'model') mesh whose rows are tiles of neighbouring devices.

    Args:
      tile: devices of one model-parallel group along x, y, z and core (T5X's model parallel submesh).
      devices: all devices.
      local_devices: the devices of one host; those of the lowest process by default.
      by_host: whether tiles keep to hosts where they can.

    Raises:
      MeshError: if the tile does not divide the machine.
    """
    sizes = tuple(tile)
    if not sizes or any(not _is_count(s) for s in sizes):
        raise MeshError(
            f'Cannot tile a mesh by the submesh {tile!r}: its entries must be positive whole numbers. Give four of '
            'them, for x, y, z and core, such as (1, 1, 1, 1).'
        )
    first = min(d.process_index for d in devices)
    local = list(local_devices) or [d for d in devices if d.process_index == first]
    host = tiles.bounds(_from_origin(tiles.coordinates(local)))
    return _mesh(tiles.tile_grid(list(devices), sizes, host, by_host=by_host), (DATA, MODEL))


def _from_origin(coords: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    corner = np.min(np.array(coords), axis=0)
    return [tuple(int(c) for c in np.array(at) - corner) for at in coords]


def cpu_mesh(num_partitions: int, devices: Sequence[Any]) -> Mesh:
    """Builds a ('data', 'model') mesh of consecutive devices, 'model' of size `num_partitions`.

    On a single device any number gives a 1×1 mesh, with a warning: configurations for pods are tried on laptops.

    Raises:
      MeshError: if `num_partitions` does not divide the number of devices.
    """
    if len(devices) == 1 and num_partitions > 1:
        warn(
            f'There is one CPU device, so num_partitions={num_partitions} gives a 1x1 mesh. To emulate devices, '
            f'set jax_num_cpu_devices (of a script, --cpu_devices) to {num_partitions} or a multiple of it.'
        )
        num_partitions = 1
    check_partitions(num_partitions, len(devices))
    ordered = sorted(devices, key=lambda d: (d.process_index, d.id))
    return _mesh(np.array(ordered, dtype=object).reshape(-1, num_partitions), (DATA, MODEL))


def check_partitions(num_partitions: int, num_devices: int) -> None:
    """Raises MeshError unless `num_partitions` model partitions divide `num_devices`, naming the legal values."""
    if not _is_count(num_partitions) or num_devices % num_partitions:
        raise MeshError(
            f'Cannot split {num_devices} devices into num_partitions={num_partitions!r} model partitions: '
            f'{num_partitions!r} does not divide {num_devices}. Use one of {tiles.divisors(num_devices)}.'
        )


def _is_count(number: Any) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool) and number > 0


def gpu_mesh(num_partitions: int, devices: Sequence[Any]) -> Mesh:
    """Builds a ('data', 'model') mesh that keeps 'model' within hosts where it can, as T5X does on GPUs.

    Raises:
      MeshError: if `num_partitions` splits neither a host's devices nor whole hosts evenly.
    """
    check_partitions(num_partitions, len(devices))
    processes = sorted({d.process_index for d in devices})
    per_host = len(devices) // len(processes)
    model_local = min(num_partitions, per_host)
    if per_host % model_local or num_partitions % model_local or len(processes) % (num_partitions // model_local):
        raise MeshError(
            f'Cannot split {len(processes)} hosts of {per_host} devices into num_partitions={num_partitions} model '
            f'partitions: {num_partitions} neither divides {per_host} nor is a multiple of it that divides '
            f'{len(devices)}. Use one of {_legal_gpu_partitions(per_host, len(processes))}.'
        )
    model_hosts = num_partitions // model_local
    ici = (per_host // model_local, model_local)
    dcn = (len(processes) // model_hosts, model_hosts)
    return _mesh(_hybrid_grid(ici, dcn, _blocks_by_process(devices)), (DATA, MODEL))


def _legal_gpu_partitions(per_host: int, hosts: int) -> list[int]:
    return tiles.divisors(per_host) + [per_host * h for h in tiles.divisors(hosts)[1:]]


def _blocks_by_process(devices: Sequence[Any]) -> np.ndarray:
    processes = sorted({d.process_index for d in devices})
    ordered = sorted(devices, key=lambda d: (d.process_index, d.id))
    return np.array(ordered, dtype=object).reshape(len(processes), -1)


def _hybrid_grid(ici: Sequence[int], dcn: Sequence[int], blocks: np.ndarray) -> np.ndarray:
    """Arranges blocks of well-connected devices: along each axis blocks are outer, devices within a block inner."""
    n = len(ici)
    split = blocks.reshape(*dcn, *ici)
    order = [i for axis in range(n) for i in (axis, n + axis)]
    return split.transpose(order).reshape([d * i for d, i in zip(dcn, ici, strict=True)])


def hybrid_mesh(ici_mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int], devices: Sequence[Any]) -> Mesh:
    """Builds a ('replica', 'data', 'model') mesh over slices: ICI sizes within a slice times DCN sizes across slices.

    Devices that name no slice (CPU, emulation) are cut into consecutive blocks of equal size.

    Raises:
      MeshError: if the sizes do not multiply to the number of devices.
    """
    ici, dcn = tuple(ici_mesh_shape), tuple(dcn_mesh_shape)
    names = (REPLICA, DATA, MODEL)
    if len(ici) != 3 or len(dcn) != 3 or math.prod(ici) * math.prod(dcn) != len(devices):
        raise MeshError(
            f'Cannot make a mesh of ici_mesh_shape={ici} times dcn_mesh_shape={dcn} from {len(devices)} devices: they '
            f'multiply to {math.prod(ici)} x {math.prod(dcn)} = {math.prod(ici) * math.prod(dcn)}. Give three sizes '
            f'each, for {", ".join(names)}, that multiply to {len(devices)} in all.'
        )
    slices = {getattr(d, 'slice_index', None) for d in devices}
    if len(slices) == math.prod(dcn) and None not in slices and len(slices) > 1:
        return _mesh(mesh_utils.create_hybrid_device_mesh(ici, dcn, devices), names)
    if devices[0].platform == 'tpu' and math.prod(dcn) == 1:
        return _mesh(mesh_utils.create_device_mesh(ici, devices), names)
    if devices[0].platform == 'tpu':
        raise MeshError(
            f'Cannot spread a mesh over dcn_mesh_shape={dcn}: it asks for {math.prod(dcn)} slices, but the devices are '
            f'in {len(slices)}. Use a dcn_mesh_shape that multiplies to {len(slices)}.'
        )
    ordered = sorted(devices, key=lambda d: (d.process_index, d.id))
    blocks = np.array(ordered, dtype=object).reshape(math.prod(dcn), -1)
    return _mesh(_hybrid_grid(ici, dcn, blocks), names)


def default_mesh(
    num_partitions: int | None,
    model_parallel_submesh: Sequence[int] | None = None,
    ici_mesh_shape: Sequence[int] | None = None,
    dcn_mesh_shape: Sequence[int] | None = None,
    *,
    devices: Sequence[Any],
) -> Mesh:
    """Builds the mesh that T5X's partitioner arguments ask for, on any platform.

    A pair of ICI and DCN shapes wins over a submesh, a submesh over `num_partitions`.

    Raises:
      MeshError: if only one of the two shapes is given, or what was asked for does not fit the devices.
    """
    if (ici_mesh_shape is None) != (dcn_mesh_shape is None):
        raise MeshError(
            f'Cannot make a hybrid mesh of ici_mesh_shape={ici_mesh_shape} and dcn_mesh_shape={dcn_mesh_shape}: one of '
            'them is missing. Give both, or neither.'
        )
    if ici_mesh_shape is not None and dcn_mesh_shape is not None:
        return hybrid_mesh(ici_mesh_shape, dcn_mesh_shape, devices)
    if model_parallel_submesh:
        return tiled_mesh(model_parallel_submesh, devices)
    if not num_partitions:
        raise MeshError('Cannot make a mesh: neither num_partitions nor model_parallel_submesh is given. Give one.')
    platform = devices[-1].platform
    if platform == 'tpu':
        check_partitions(num_partitions, len(devices))
        machine = tiles.bounds(tiles.coordinates(devices))
        return tiled_mesh(tiles.default_tile(devices[-1].device_kind, num_partitions, machine), devices)
    if platform == 'cpu':
        return cpu_mesh(num_partitions, devices)
    return gpu_mesh(num_partitions, devices)
