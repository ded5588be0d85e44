"""How an optimizer's state lies on the mesh: each of its slots as the parameter that it belongs to.

An optimizer keeps most of its state in slots shaped like the parameters, in trees shaped like theirs. So the parameter
whose path ends a slot's path tells how the slot lies, whatever transformations are wrapped around it.
"""

from typing import Any

import jax
import numpy as np

from t5x_pjit_recipes.errors import PlanError, offenders
from t5x_pjit_recipes.layout.axes import is_axes_leaf
from t5x_pjit_recipes.layout.paths import leaf_name, named_leaves

__all__ = ['slot_specs', 'specs_like']

Path = tuple[str, ...]


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


def slot_specs(opt_state_shapes: Any, params_shapes: Any, params_specs: Any) -> Any:
    """Gives each slot of an optimizer's state the entry of its parameter, and all other leaves None (replicated).

    A leaf's parameter is the one whose path is the longest suffix of the leaf's path. The leaf is its slot if the
    shapes agree.

    Args:
      opt_state_shapes: the state of any optax transformation, as arrays or shape structs.
      params_shapes: the parameters that it was made for, as arrays or shape structs.
      params_specs: for each parameter its entry: a spec over mesh axes, or logical axes, or None.

    Returns:
      A tree built as `opt_state_shapes`, with an entry of `params_specs` or None for each leaf.

    Raises:
      PlanError: if a parameter has no entry in `params_specs`.

    >>> params, params_axes = {'w': np.zeros((4, 2))}, {'w': ('vocab', 'embed')}
    >>> slot_specs({'count': np.zeros(()), 'mu': params}, params, params_axes)
    {'count': None, 'mu': {'w': ('vocab', 'embed')}}
    """
    params, treedef = jax.tree_util.tree_flatten_with_path(params_shapes)
    specs = treedef.flatten_up_to(specs_like(params_shapes, params_specs))
    by_path = {_parts(path): (np.shape(param), spec) for (path, param), spec in zip(params, specs, strict=True)}
    slots, treedef = jax.tree_util.tree_flatten_with_path(opt_state_shapes)
    return treedef.unflatten([_slot_spec(np.shape(slot), _owner(_parts(path), by_path)) for path, slot in slots])


def _parts(path: tuple[Any, ...]) -> Path:
    return tuple(leaf_name((key,)) for key in path)


def _owner(path: Path, by_path: dict[Path, Any]) -> Any | None:
    suffixes = (path[start:] for start in range(len(path) + 1))
    return next((by_path[suffix] for suffix in suffixes if suffix in by_path), None)


def _slot_spec(slot_shape: tuple[int, ...], owner: tuple[tuple[int, ...], Any] | None) -> Any:
    if owner is None:
        return None
    param_shape, spec = owner
    return spec if slot_shape == param_shape else None
