"""Placing: the only module that moves arrays."""

import contextlib
import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_pjit_recipes.errors import PlacementError
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.layout.plan import Plan


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


def gather(tree: Any) -> Any:
    """Copies a tree of arrays to this process as numpy arrays; each must be addressable from here."""
    return jax.tree.map(np.asarray, jax.device_get(tree))


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
        # All of one kind, as a train state is: one pass without Python in between.
        with contextlib.suppress(TypeError):
            return any(map(kind.is_deleted, leaves))
    return any(leaf.is_deleted() for leaf in leaves if _has_memory(type(leaf)))


def any_tracer(leaves: list[Any]) -> bool:
    """Tells whether a leaf is being traced."""
    return any(map(_is_traced, set(map(type, leaves))))


@functools.cache
def _has_memory(kind: type) -> bool:
    return issubclass(kind, jax.Array) and not _is_traced(kind)


@functools.cache
def _is_traced(kind: type) -> bool:
    return issubclass(kind, jax.core.Tracer)
