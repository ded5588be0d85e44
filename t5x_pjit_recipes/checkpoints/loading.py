"""Loading: the leaves of a train state, out of a checkpoint and a fallback, checked before an array is read."""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.checkpoints import matching, stored
from t5x_pjit_recipes.layout import axes, paths


def wanted_leaves(train_state: Any, partitioner: Any, restore_dtype: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Says of every leaf of a train state which shape, dtype and sharding it shall have.

    Args:
      train_state: the template, with global shapes.
      partitioner: has `mesh` and `get_mesh_axes(train_state)`, whose None means replicated.
      restore_dtype: the dtype of floats under `target`; None for the template's.
    """
    specs = paths.named_leaves(partitioner.get_mesh_axes(train_state).state_dict(), is_leaf=axes.is_spec_leaf)

    def want(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = restore_dtype if restore_dtype is not None and is_castable(name, leaf) else jax.dtypes.result_type(leaf)
        sharding = NamedSharding(partitioner.mesh, specs.get(name) or PartitionSpec())
        return jax.ShapeDtypeStruct(jnp.shape(leaf), dtype, sharding=sharding)

    return {name: want(name, leaf) for name, leaf in paths.named_leaves(train_state.state_dict()).items()}


def is_castable(name: str, leaf: Any) -> bool:
    """Tells whether `save_dtype` and `restore_dtype` mean a leaf: a float under `target`."""
    return name.startswith('target/') and jnp.issubdtype(jax.dtypes.result_type(leaf), jnp.floating)


def load_leaves(
    directory: epath.Path,
    tree: Mapping[str, Any],
    offered: Mapping[str, Any],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    fallback_state: Mapping[str, Any] | None = None,
) -> dict[str, jax.Array]:
    """Loads every wanted leaf.

    Args:
      directory: the directory of one step.
      tree: what it holds, as `stored.read_tree` says.
      offered: the same after transformations, keyed like the train state; its leaves are StoredLeaf or arrays.
      wanted: leaf name to shape, dtype and sharding.
      fallback_state: where leaves come from that are not offered; None if all must be.

    Raises:
      CheckpointError: if offered and wanted leaves differ in a way that the fallback does not mend.
    """
    leaves = paths.named_leaves(offered)
    fallback = {} if fallback_state is None else paths.named_leaves(fallback_state)
    _check(directory, leaves, wanted, fallback if fallback_state is not None else None)
    leaves = {name: leaves.get(name, fallback.get(name)) for name in wanted}
    read = _read(directory, tree, leaves, wanted)
    return {name: read[name] if name in read else _place(leaves[name], wanted[name]) for name in wanted}


def _read(directory: epath.Path, tree: Any, leaves: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the stored ones of `leaves`; one that is wanted under several names is read once for each of them."""
    read: dict[str, Any] = {}
    remaining = {name: leaf.name for name, leaf in leaves.items() if isinstance(leaf, stored.StoredLeaf)}
    while remaining:
        names = {source: name for name, source in remaining.items()}
        arrays = stored.read_arrays(directory, tree, {source: wanted[name] for source, name in names.items()})
        read |= {name: arrays[source] for source, name in names.items()}
        remaining = {name: source for name, source in remaining.items() if name not in read}
    return read


def _place(leaf: Any, want: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(jnp.asarray(leaf, want.dtype), want.sharding)


def _check(directory: epath.Path, leaves: Any, wanted: Any, fallback: Mapping[str, Any] | None) -> None:
    differences = matching.compare(leaves, wanted)
    if not differences:
        return
    if fallback is None or differences.conflicts or not wanted.keys() <= leaves.keys() | fallback.keys():
        raise errors.CheckpointError(
            f'Cannot restore {directory} into this train state: its leaves are those of another model or optimizer. '
            f'Use the configuration that saved it, or state_transformation_fns and a fallback_state.\n{differences}'
        )
    warnings.warn(
        f'{directory} is restored in part: what it lacks comes from the fallback state, what it has too many is left '
        f'out.\n{differences}',
        UserWarning,
        stacklevel=4,
    )
