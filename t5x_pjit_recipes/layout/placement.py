"""Placing, the only module that moves arrays; and what can be said of arrays that lie somewhere."""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_pjit_recipes.errors import PlacementError, offenders
from t5x_pjit_recipes.layout.meshes import describe_sizes
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.layout.plan import Plan, Row, aligned, format_bytes, grouped, spec_text


def place(tree: Any, plan: Plan) -> Any:
    """Lays a tree of arrays out as planned.

    Args:
      tree: numpy arrays, Python scalars or JAX arrays, wherever they are: another device, mesh or layout. Its leaves
        must have the plan's names; its containers come back as they are.
      plan: a plan on a mesh that has devices.

    Returns:
      The tree with every leaf laid out; a leaf that lies right already is the same object.

    Raises:
      PlanError: if the plan has faults.
      PlacementError: if the tree's leaves are not those of the plan, or one was donated or deleted.

    >>> from t5x_pjit_recipes.layout.meshes import make_mesh
    >>> params = {'w': np.ones((8, 4))}
    >>> placed = place(params, Plan(params, PartitionSpec('data'), make_mesh(data=-1)))
    >>> placed['w'].sharding.spec == PartitionSpec('data')
    True
    """
    check_alive(tree, 'place')
    plan.check()
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    names = list(named_leaves(tree))
    planned = [row.name for row in plan.rows]
    if names != planned:
        raise PlacementError(
            f'Cannot place {len(names)} arrays by a plan for {len(planned)}: '
            f'{", ".join(sorted(set(names) ^ set(planned))[:5])} in one of them only. Plan for this tree.'
        )
    shardings = [NamedSharding(plan.mesh, row.spec) for row in plan.rows]
    placed = map(_unshared, leaves, place_leaves(leaves, shardings))
    return jax.tree_util.tree_unflatten(treedef, placed)


def _unshared(source: Any, placed: jax.Array) -> jax.Array:
    """Copies an array that may share memory with where it came from: donating one would take it from the other."""
    if placed is source or not isinstance(source, jax.Array) or source.sharding.device_set.isdisjoint(placed.devices()):
        return placed
    return jnp.copy(placed)


def place_leaves(leaves: list[Any], shardings: list[NamedSharding | None]) -> list[Any]:
    """Moves those leaves that do not lie as their sharding says; tracers and leaves that do are left alone.

    A leaf whose sharding is None may lie in any way on devices of the mesh that the others are on.
    """
    mesh = next((sharding.mesh for sharding in shardings if sharding is not None), None)
    wanted = [_anywhere(leaf, mesh) if s is None else s for leaf, s in zip(leaves, shardings, strict=True)]
    moving = [i for i, s in enumerate(wanted) if s is not None and not lies_as(leaves[i], s)]
    moved = jax.device_put([leaves[i] for i in moving], [wanted[i] for i in moving])
    placed = list(leaves)
    for i, leaf in zip(moving, moved, strict=True):
        placed[i] = leaf
    return placed


def _anywhere(leaf: Any, mesh: Mesh | None) -> NamedSharding | None:
    """Returns where to move a leaf that may lie in any way: nowhere, unless it is committed to other devices."""
    if mesh is None or any_tracer([leaf]) or not isinstance(leaf, jax.Array) or not leaf.committed:
        return None
    here = leaf.sharding.device_set == set(mesh.devices.flat)
    return None if here else NamedSharding(mesh, PartitionSpec())


def lies_as(leaf: Any, sharding: NamedSharding) -> bool:
    """Tells whether a leaf needs no moving: a tracer, or a JAX array laid out so on this mesh."""
    if isinstance(leaf, jax.core.Tracer):
        return True
    if not isinstance(leaf, jax.Array) or not leaf.committed:
        return False
    if isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh != sharding.mesh:
        return False
    return leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def place_parts(read: Callable[[str, tuple[slice, ...]], np.ndarray], plan: Plan) -> Any:
    """Lays out a tree as planned whose arrays are read part by part, as from files, so none need be whole anywhere.

    Args:
      read: called with a leaf's name and a slice, with a start and a stop, for each of its dims; returns that part.
        Each part is asked for once, however many devices hold it, and one array after the other.
      plan: a plan on a mesh that has devices.

    Returns:
      A tree like the plan's.

    Raises:
      PlanError: if the plan has faults.

    >>> from t5x_pjit_recipes.layout.meshes import make_mesh
    >>> whole = {'w': np.arange(32.0).reshape(8, 4)}
    >>> plan = Plan(whole, PartitionSpec('data'), make_mesh(data=-1))
    >>> bool((place_parts(lambda name, index: whole[name][index], plan)['w'] == whole['w']).all())
    True
    """
    plan.check()
    leaves = [_place_parts(functools.partial(read, row.name), row, plan.mesh) for row in plan.rows]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(plan.shapes), leaves)


def _place_parts(read: Callable[[tuple[slice, ...]], np.ndarray], row: Row, mesh: Mesh) -> jax.Array:
    sharding = NamedSharding(mesh, row.spec)
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(row.shape).items():
        bounds = tuple(dim.indices(size)[:2] for dim, size in zip(index, row.shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    placed: list[jax.Array] = []
    for bounds, devices in holders.items():
        part = read(tuple(slice(*pair) for pair in bounds)).astype(row.dtype, copy=False)
        # Before the next part is read, this one has been copied and can go.
        placed += jax.block_until_ready(jax.device_put([part] * len(devices), devices))
    return jax.make_array_from_single_device_arrays(row.shape, sharding, placed)


def gather(tree: Any) -> Any:
    """Copies a tree of arrays to this process as numpy arrays; each must be addressable from here."""
    return jax.tree.map(np.asarray, jax.device_get(tree))


@dataclasses.dataclass(frozen=True)
class _Placed:
    """One array as it lies: how, in words, what kind of lying that is, and what each of its devices holds."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    kind: str
    how: str
    devices: frozenset[Any] = frozenset()
    bytes_per_device: int = 0


def describe_placement(tree: Any, width: int | None = None) -> str:
    """Says how the arrays of a tree lie: a table, those alike in one line, and what each device holds.

    Args:
      tree: arrays, wherever they are: on devices, on the host, being traced, or donated.
      width: columns that the table may take; None for no limit.

    >>> print(describe_placement({'w': np.zeros((4, 2), np.float32), 'step': 3}))
    arrays  shape   dtype    lies         per device
    step    ()      int32    on the host  0 B
    w       (4, 2)  float32  on the host  0 B
    2 arrays: 2 on the host
    """
    placed = [_placed(name, leaf) for name, leaf in named_leaves(tree).items()]
    lines = [('arrays', 'shape', 'dtype', 'lies', 'per device')]
    for title, (first, *others) in grouped(placed, lambda leaf: (leaf.shape, str(leaf.dtype), leaf.how)):
        held = sum(leaf.bytes_per_device for leaf in (first, *others))
        lines.append((title, str(first.shape), str(first.dtype), first.how, format_bytes(held)))
    kinds = [leaf.kind for leaf in placed]
    counts = ', '.join(f'{kinds.count(kind)} {kind}' for kind in dict.fromkeys(kinds))
    total = f'{len(placed)} array{"" if len(placed) == 1 else "s"}: {counts or "nothing lies anywhere"}'
    return '\n'.join([*aligned(lines, width), total, *_device_lines(placed)])


def _placed(name: str, leaf: Any) -> _Placed:
    dtype = leaf.dtype if hasattr(leaf, 'dtype') else jax.dtypes.canonicalize_dtype(np.result_type(leaf))
    describe = functools.partial(_Placed, name, np.shape(leaf), dtype)
    if any_tracer([leaf]):
        return describe('being traced', 'being traced')
    if not isinstance(leaf, jax.Array):
        return describe('on the host', 'on the host')
    if leaf.is_deleted():
        return describe('gone', 'gone: donated or deleted')
    sharding = leaf.sharding
    held = math.prod(sharding.shard_shape(leaf.shape)) * dtype.itemsize
    return describe(*_how(leaf, sharding), frozenset(sharding.device_set), held)


def _how(leaf: jax.Array, sharding: Any) -> tuple[str, str]:
    """Returns the kind of a sharding, and the sharding in words."""
    free = '' if leaf.committed else ', uncommitted'
    if len(sharding.device_set) == 1:
        return 'on one device', f'whole on {_device_name(next(iter(sharding.device_set)))}{free}'
    if sharding.is_fully_replicated:
        return 'replicated', f'replicated on {len(sharding.device_set)} devices{free}'
    if isinstance(sharding, NamedSharding):
        return 'sharded', f'{spec_text(sharding.spec)} on {describe_sizes(dict(sharding.mesh.shape))}{free}'
    return 'sharded', f'{type(sharding).__name__} on {len(sharding.device_set)} devices{free}'


def _device_name(device: Any) -> str:
    return f'{device.platform.upper()} {device.id}'


def _device_lines(placed: list[_Placed]) -> Iterator[str]:
    """Says what each device holds, devices that hold equally much in one line."""
    by_devices: dict[frozenset[Any], int] = {}
    for leaf in placed:
        by_devices[leaf.devices] = by_devices.get(leaf.devices, 0) + leaf.bytes_per_device
    held: dict[Any, int] = {}
    for devices, count in by_devices.items():
        held |= {device: held.get(device, 0) + count for device in devices}
    for count in sorted(set(held.values()), reverse=True):
        alike = sorted((device for device, holds in held.items() if holds == count), key=lambda device: device.id)
        more = f' and {len(alike) - 8} more' if len(alike) > 8 else ''
        names = ', '.join(map(_device_name, alike[:8])) + more
        yield f'{names} {"holds" if len(alike) == 1 else "each hold"} {format_bytes(count)}'


def check_placement(tree: Any, plan: Plan) -> None:
    """Checks that the arrays of a tree lie as planned; whether they are committed, or by which mesh, is no matter.

    Args:
      tree: the arrays.
      plan: the plan; on an AbstractMesh it speaks of any mesh of its sizes.

    Raises:
      PlanError: if the plan has faults.
      PlacementError: listing every leaf that lies otherwise, has another shape or dtype, or is in one of the two only.

    >>> from t5x_pjit_recipes.layout.meshes import make_mesh
    >>> params = {'w': np.ones((8, 4), np.float32)}
    >>> plan = Plan(params, PartitionSpec('data'), make_mesh(data=-1))
    >>> check_placement(place(params, plan), plan)
    """
    plan.check()
    leaves, rows = named_leaves(tree), {row.name: row for row in plan.rows}
    faults = [f'{name} {np.shape(leaf)}: not in the plan' for name, leaf in leaves.items() if name not in rows]
    for name, row in rows.items():
        if name not in leaves:
            faults.append(f'{name} {row.shape}: planned, and not there')
        elif fault := _placement_fault(leaves[name], row, plan.mesh):
            faults.append(f'{name} {row.shape}: {fault}')
    if faults:
        raise PlacementError(
            f'Cannot take {len(faults)} of {len(leaves)} arrays to lie as planned on mesh '
            f'{describe_sizes(dict(plan.mesh.shape))}. Place them with layout.place(tree, plan), or change the plan:\n'
            f'{offenders(faults)}'
        )


def _placement_fault(leaf: Any, row: Row, mesh: Any) -> str:
    placed = _placed(row.name, leaf)
    if (placed.shape, placed.dtype) != (row.shape, row.dtype):
        return f'planned as {row.shape} {row.dtype}, is {placed.shape} {placed.dtype}'
    if placed.devices:
        there = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
        if not isinstance(mesh, Mesh) and there is not None and dict(there.shape) == dict(mesh.shape):
            mesh = there
        if isinstance(mesh, Mesh) and leaf.sharding.is_equivalent_to(NamedSharding(mesh, row.spec), leaf.ndim):
            return ''
    return f'planned {spec_text(row.spec)}, lies {placed.how}'


def check_alive(tree: Any, thing: str) -> None:
    """Raises PlacementError naming the first leaf that was donated or deleted; a deleted buffer must not be run on."""
    dead = next((name for name, leaf in named_leaves(tree).items() if any_dead([leaf])), None)
    if dead is not None:
        raise PlacementError(
            f'Cannot {thing} a tree whose leaf {dead!r} was donated or deleted: its memory belongs to the result of '
            'the call that it was given to. Use that result (state = step(state, batch)), or do not donate.'
        )


def check_given_once(tree: Any, donated: Collection[int]) -> None:
    """Raises PlacementError if a leaf to be donated is given twice: its memory cannot be both donated and used.

    Args:
      tree: the arguments of a call.
      donated: which of its leaves are to be donated, counted from 0.
    """
    first: dict[int, tuple[int, str]] = {}
    for index, (name, leaf) in enumerate(named_leaves(tree).items()):
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            continue
        before, other = first.setdefault(id(leaf), (index, name))
        if before != index and not {before, index}.isdisjoint(donated):
            raise PlacementError(
                f'Cannot donate memory that is given twice: leaves {other!r} and {name!r} are one array. '
                'Copy one of them (jax.numpy.copy), or do not donate.'
            )


def any_dead(leaves: list[Any]) -> bool:
    """Tells whether a leaf is a JAX array whose memory is gone; quick, since every call of a program asks."""
    kind = type(leaves[0]) if leaves else None
    if kind is not None and _has_memory(kind):
        # All of one kind, as a train state is: one pass without Python in between. Asked of another kind, the method of
        # arrays raises a TypeError, and that of keys, which is Python, an AttributeError.
        with contextlib.suppress(TypeError, AttributeError):
            return any(map(kind.is_deleted, leaves))
    return any(leaf.is_deleted() for leaf in leaves if _has_memory(type(leaf)))


def any_elsewhere(leaves: list[Any], devices: tuple[Any, ...]) -> bool:
    """Tells whether a JAX array lies on as many devices as these, but not on these in this order; quick, as `any_dead`.

    JAX (0.10 to 0.12 at least) takes an array on another mesh of the same sizes for one that lies right. It moves it
    the first time, and the next time runs on memory of the wrong device, which may end the process.
    """
    try:
        shardings = set(map(_sharding_of, leaves))
    except AttributeError:
        shardings = {leaf.sharding for leaf in leaves if _has_memory(type(leaf))}
    return any(len(s.device_set) == len(devices) and _devices_of(s) != devices for s in shardings)


def check_here(tree: Any, mesh: Mesh) -> None:
    """Raises PlacementError listing the leaves that lie on as many devices as the mesh has, but on others."""
    leaves, devices = named_leaves(tree), flat_devices(mesh)
    faults = [
        f'{name} {leaf.shape}: lies {_placed(name, leaf).how}, with {_device_name(_devices_of(leaf.sharding)[0])} first'
        for name, leaf in leaves.items()
        if any_elsewhere([leaf], devices)
    ]
    if faults:
        raise PlacementError(
            f'Cannot run a program compiled for mesh {describe_sizes(dict(mesh.shape))}, {_device_name(devices[0])} '
            f'first, on {len(faults)} of {len(leaves)} arrays that lie on other devices. Place them with '
            f'layout.place(tree, plan), or call the program that is not compiled ahead:\n{offenders(faults)}'
        )


_sharding_of = operator.attrgetter('sharding')


def _devices_of(sharding: Any) -> tuple[Any, ...]:
    return flat_devices(sharding.mesh) if isinstance(sharding, NamedSharding) else tuple(sharding.device_set)


@functools.cache
def flat_devices(mesh: Mesh) -> tuple[Any, ...]:
    """Lists the devices of a mesh in its order."""
    return tuple(mesh.devices.flat)


def any_tracer(leaves: list[Any]) -> bool:
    """Tells whether a leaf is being traced."""
    return any(map(_is_traced, set(map(type, leaves))))


@functools.cache
def _has_memory(kind: type) -> bool:
    return issubclass(kind, jax.Array) and not _is_traced(kind)


@functools.cache
def _is_traced(kind: type) -> bool:
    return issubclass(kind, jax.core.Tracer)
