"""Placing: the only module that moves arrays."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_pjit_recipes.errors import PlacementError
from t5x_pjit_recipes.layout.axes import is_spec_leaf
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
    return jax.tree_util.tree_unflatten(treedef, place_leaves(leaves, shardings))


def place_leaves(leaves: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    """Moves those leaves that do not lie as their sharding says; tracers and leaves that do are left alone."""
    moving = [
        i for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)) if not lies_as(leaf, sharding)
    ]
    moved = jax.device_put([leaves[i] for i in moving], [shardings[i] for i in moving])
    placed = list(leaves)
    for i, leaf in zip(moving, moved, strict=True):
        placed[i] = leaf
    return placed


def lies_as(leaf: Any, sharding: NamedSharding) -> bool:
    """Tells whether a leaf needs no moving: a tracer, or a JAX array laid out equivalently."""
    if isinstance(leaf, jax.core.Tracer):
        return True
    return isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def to_shardings(specs: Any, mesh: Mesh) -> Any:
    """Binds a tree of specs to a mesh; None, as a leaf or for a whole sub-tree, means replicated.

    >>> from t5x_pjit_recipes.layout.meshes import make_mesh
    >>> to_shardings({'a': None}, make_mesh(data=-1))['a'].spec == PartitionSpec()
    True
    """
    return jax.tree.map(lambda s: NamedSharding(mesh, s or PartitionSpec()), specs, is_leaf=is_spec_leaf)


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


def check_given_once(tree: Any) -> None:
    """Raises PlacementError if two leaves are one JAX array: its memory cannot be both donated and used."""
    first: dict[int, str] = {}
    for name, leaf in named_leaves(tree).items():
        if isinstance(leaf, jax.Array) and first.setdefault(id(leaf), name) != name:
            raise PlacementError(
                f'Cannot donate memory that is given twice: leaves {first[id(leaf)]!r} and {name!r} are one array. '
                'Copy one of them (jax.numpy.copy), or do not donate.'
            )


def any_dead(leaves: list[Any]) -> bool:
    """Tells whether a leaf is a JAX array whose memory is gone; quick, since every call of a program asks."""
    return any(
        any(map(kind.is_deleted, [leaf for leaf in leaves if type(leaf) is kind]))
        for kind in set(map(type, leaves))
        if _has_memory(kind)
    )


@functools.cache
def _has_memory(kind: type) -> bool:
    return issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer)
