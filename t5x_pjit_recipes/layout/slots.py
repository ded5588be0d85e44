"""How an optimizer's state lies on the mesh: each of its slots as the parameter that it belongs to.

An optimizer keeps most of its state in slots shaped like the parameters, in trees shaped like theirs. So the parameter
whose path ends a slot's path tells how the slot lies, whatever transformations are wrapped around it; and of a slot of
another shape, the dims that it keeps of its parameter's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from t5x_pjit_recipes.errors import PlanError, offenders
from t5x_pjit_recipes.layout.axes import AxisMetadata, AxisNames, PartitionSpec, axis_names, is_axes_leaf, spec_axes
from t5x_pjit_recipes.layout.paths import leaf_name, named_leaves
from t5x_pjit_recipes.layout.provenance import Slot, resolve_slots

__all__ = ['divide_further', 'kept_axes', 'slot_specs', 'specs_like']


def specs_like(tree: Any, specs: Any) -> Any:
    """Arranges `specs` in the containers of `tree`, leaf name by leaf name.

    Args:
      tree: arrays or shape structs, in any containers.
      specs: for each leaf of `tree` a spec, logical axes or None; its containers may differ (dict against FrozenDict).

    Raises:
      PlanError: if a leaf of `tree` has no entry in `specs`.

    >>> specs_like([1, 2], {'1': None, '0': ('embed',)})
    [('embed',), None]
    """
    entries = named_leaves(specs, is_leaf=is_axes_leaf)
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [leaf_name(path) for path, _ in paths]
    absent = [name for name in names if name not in entries]
    if absent:
        raise PlanError(
            f'Cannot lay out {len(absent)} of {len(names)} arrays: specs has no entry for them. '
            f'Add one for each, None where it is replicated:\n{offenders(absent)}'
        )
    return treedef.unflatten([entries[name] for name in names])


def slot_specs(
    opt_state_shapes: Any, params_shapes: Any, params_specs: Any, *, init: Callable[[Any], Any] | None = None
) -> Any:
    """Lays out the state of any optax transformation: a slot has the axes of those dims that it has of its parameter.

    A slot's parameter is the one whose path is the longest suffix of the slot's path. A slot of the same shape has the
    parameter's entry. One with dims dropped or added has an entry of its own, with the axes of the dims that it kept.
    Counters, keys and placeholders have None, which means replicated; so have slots that fit their parameter in
    several ways which would lie differently, such as the row means of a square matrix, if `init` does not tell.

    Args:
      opt_state_shapes: the state, as arrays or shape structs.
      params_shapes: the parameters that it was made for, as arrays or shape structs.
      params_specs: for each parameter its entry: a spec over mesh axes, or logical axes, or None.
      init: the transformation's `init`, which settles what shapes alone do not tell; it is traced, not run.

    Returns:
      A tree built as `opt_state_shapes`, with an entry or None for each leaf.

    Raises:
      PlanError: if a parameter has no entry in `params_specs`.

    >>> params, params_axes = {'w': np.zeros((4, 2))}, {'w': ('vocab', 'embed')}
    >>> slot_specs({'count': np.zeros(()), 'mu': params, 'rows': {'w': np.zeros(4)}}, params, params_axes)
    {'count': None, 'mu': {'w': ('vocab', 'embed')}, 'rows': {'w': ('vocab',)}}
    """
    treedef = jax.tree_util.tree_structure(params_shapes)
    specs = treedef.flatten_up_to(specs_like(params_shapes, params_specs))
    ranks = [np.ndim(leaf) for leaf in jax.tree_util.tree_leaves(params_shapes)]
    slots = resolve_slots(opt_state_shapes, params_shapes, init=init)
    return jax.tree_util.tree_structure(opt_state_shapes).unflatten([_entry(slot, specs, ranks) for slot in slots])


def _entry(slot: Slot, specs: Sequence[Any], ranks: Sequence[int]) -> Any:
    entries = [
        specs[param] if dims == tuple(range(ranks[param])) else kept_axes(specs[param], dims)
        for param, dims in slot.origins
    ]
    return entries[0] if entries and all(entry == entries[0] for entry in entries) else None


def kept_axes(entry: Any, dims: Sequence[int | None]) -> Any:
    """Returns the entry of an array that has some dims of another, in the other's spelling; None if no axis is left.

    Args:
      entry: the other's spec or logical axes, or None.
      dims: for each dim of the array which of the other's it is, or None for one that the other does not have.

    >>> kept_axes(PartitionSpec('data', None, 'model'), (None, 2)) == PartitionSpec(None, 'model')
    True
    """
    if isinstance(entry, NamedSharding):
        return NamedSharding(entry.mesh, kept_axes(entry.spec, dims) or PartitionSpec())
    names = axis_names(entry) or ()
    # A dim that is there twice is divided once: an axis cannot divide two dims.
    firsts = [None if dim is None or dim in dims[:at] or dim >= len(names) else dim for at, dim in enumerate(dims)]
    kept = tuple(None if dim is None else names[dim] for dim in firsts)
    if not any(name is not None for name in kept):
        return None
    if isinstance(entry, AxisMetadata):
        return AxisMetadata(names=kept)
    return type(entry)(*kept) if isinstance(entry, PartitionSpec | AxisNames) else kept


def divide_further(
    spec: PartitionSpec | None, shape: Sequence[int], axes: Sequence[str], sizes: Mapping[str, int]
) -> PartitionSpec | None:
    """Divides an array over more mesh axes, along the first dim that is undivided yet and a multiple of their size.

    Args:
      spec: how the array lies; None means replicated.
      shape: its shape.
      axes: the mesh axes; those that divide the array already are left out.
      sizes: mesh axis to its size.

    Returns:
      The new spec, or `spec` itself if no dim is free and divides.

    >>> tuple(divide_further(PartitionSpec(None, 'model'), (12, 8), ('data',), {'data': 4, 'model': 2}))
    ('data', 'model')
    """
    entries = [*(spec or ()), *[None] * len(shape)][: len(shape)]
    used = {axis for entry in entries for axis in spec_axes(entry)}
    free = tuple(axis for axis in axes if axis not in used)
    ways = math.prod(sizes[axis] for axis in free)
    fitting = (dim for dim, size in enumerate(shape) if entries[dim] is None and size and size % ways == 0)
    dim = next(fitting, None)
    if ways == 1 or dim is None:
        return spec
    entries[dim] = free[0] if len(free) == 1 else free
    return PartitionSpec(*entries)
