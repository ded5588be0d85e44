"""Logical axes of a model's variables: which collection names whose, checked against the arrays, completed by patterns.

Flax puts the axes of a collection `params` into a collection `params_axes`, under the array's name with `_axes` behind.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import flax.core
import jax
import numpy as np
from flax.core import FrozenDict
from jax.sharding import PartitionSpec

from t5x_pjit_recipes.errors import StateError, near_misses, offenders, warn
from t5x_pjit_recipes.layout.axes import AxisMetadata, axis_names, is_axes_leaf
from t5x_pjit_recipes.layout.paths import SEPARATOR, named_leaves

AXES_SUFFIX = '_axes'
PARAMS_AXES = 'params_axes'

AXES_REMEDY = (
    "Make the parameters with flax.linen.partitioning.param_with_axes, or put a tree of AxisMetadata into the model's "
    "variables under 'params_axes', or name them by patterns with override_params_axes_names."
)


def split_variables(variables: Mapping[str, Any]) -> tuple[Any, Any, FrozenDict, FrozenDict]:
    """Returns params, params_axes or None, mutables and mutables_axes; axes are checked against their arrays.

    A collection `<name>_axes` holds the axes of `<name>` if there is such a collection, else it is a mutable itself.
    """
    if 'params' not in variables:
        raise StateError(f"Cannot make a train state: there is no collection 'params' in {sorted(variables)}.")
    axes = {
        name.removesuffix(AXES_SUFFIX): collection
        for name, collection in variables.items()
        if name.endswith(AXES_SUFFIX) and name.removesuffix(AXES_SUFFIX) in variables and collection is not None
    }
    arrays = {
        name: collection
        for name, collection in variables.items()
        if not (name.endswith(AXES_SUFFIX) and name.removesuffix(AXES_SUFFIX) in variables)
    }
    for name, collection in axes.items():
        check_axes(name, arrays[name], collection)
    params, params_axes = arrays.pop('params'), axes.pop('params', None)
    return params, params_axes, flax.core.freeze(arrays), flax.core.freeze(axes)


def axes_lookup(axes: Any) -> dict[str, Any]:
    """Maps array paths to their entry in a collection of axes, whose keys may end in `_axes` or not."""
    named = named_leaves(axes, is_leaf=is_axes_leaf)
    return named | {
        path.removesuffix(AXES_SUFFIX): entry for path, entry in named.items() if path.endswith(AXES_SUFFIX)
    }


def check_axes(collection: str, arrays: Any, axes: Any) -> None:
    """Raises StateError naming each array that has not one axis name for each dim, nor none for all."""
    _check_axes(collection, named_leaves(arrays), axes_lookup(axes))


def _check_axes(collection: str, named: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    faults = [fault for path, array in named.items() if (fault := _axes_fault(path, np.shape(array), known))]
    if faults:
        raise StateError(
            f'Cannot lay out {len(faults)} of {len(named)} arrays in {collection!r} by {collection + AXES_SUFFIX!r}. '
            f'Name one axis for each of their dims:\n{offenders(faults)}'
        )


def _axes_fault(path: str, shape: tuple[int, ...], known: Mapping[str, Any]) -> str:
    if path not in known:
        return f'{path} {shape}: no axes'
    if not is_axes_leaf(known[path]):
        return f'{path} {shape}: a {type(known[path]).__name__} where its axis names belong'
    names = axis_names(known[path])
    if names is not None and not all(name is None or isinstance(name, str) for name in names):
        return f'{path} {shape}: {names} are not names'
    if not names or len(names) == len(shape):  # No names at all say that it is replicated.
        return ''
    return f'{path} {shape}: {len(names)} axes {names} for {len(shape)} dims'


def names_like(arrays: Any, axes: Any, collection: str = 'params') -> Any:
    """Returns a tree like `arrays` with each one's logical axes as a PartitionSpec, or None; checks them first."""
    named, known = named_leaves(arrays), axes_lookup(axes)
    _check_axes(collection, named, known)
    names = map(axis_names, map(known.get, named))
    specs = [None if given is None else PartitionSpec(*given) for given in names]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(arrays), specs)


def params_names(params: Any, params_axes: Any) -> Any:
    """Returns a tree like `params` with logical axes.

    Raises:
      StateError: if there are none at all.
    """
    if params_axes is None:
        raise StateError(
            f'Cannot tell the logical axes of {len(named_leaves(params))} parameters: params_axes is None. '
            f'{AXES_REMEDY} Or give the partitioner param_rules.'
        )
    return names_like(params, params_axes)


def mutables_names(mutables: Any, mutables_axes: Any) -> FrozenDict:
    """Returns a tree like `mutables` with logical axes, None (replicated) where none are known."""
    known = mutables_axes or {}
    return flax.core.freeze(
        {
            name: names_like(arrays, known[name], name) if name in known else jax.tree.map(lambda _: None, arrays)
            for name, arrays in (mutables or {}).items()
        }
    )


def override_params_axes_names(
    model_variables: Mapping[str, Any], params_axes_names_override: Sequence[tuple[str, Sequence[str | None]]] = ()
) -> FrozenDict:
    """Names the axes of parameters by patterns, in place of the model's own names or where it has none.

    Args:
      model_variables: has 'params' and 'params_axes', which may be empty.
      params_axes_names_override: (pattern, axis names) pairs; the first pattern that matches the whole of a
        parameter's name gives its names.

    Returns:
      The variables with `params_axes` completed.

    Raises:
      StateError: without 'params_axes'; or naming each parameter that has not one dim for each name. Patterns that no
        parameter matches are told of in a warning.

    >>> variables = {'params': {'w': np.ones((2, 3))}, 'params_axes': {}}
    >>> override_params_axes_names(variables, [('w', ('embed', 'mlp'))])['params_axes']['w_axes'].names
    ('embed', 'mlp')
    """
    if PARAMS_AXES not in model_variables:
        raise StateError(
            f"Cannot override axis names: there is no collection 'params_axes' in {sorted(model_variables)}. "
            "Add an empty one, 'params_axes': {}, to give every name by a pattern."
        )
    params = named_leaves(model_variables['params'])
    chosen = {
        path: next(((i, names) for i, (pattern, names) in enumerate(params_axes_names_override)
                    if re.fullmatch(pattern, path)), None)
        for path in params
    }  # fmt: skip
    given = {path: choice for path, choice in chosen.items() if choice is not None}
    _check_overrides(params, given, params_axes_names_override)
    _tell_idle(params, given, params_axes_names_override)
    axes = flax.core.unfreeze(model_variables[PARAMS_AXES])
    for path, (_, names) in given.items():
        *above, leaf = path.split(SEPARATOR)
        at = axes
        for part in above:
            at = at.setdefault(part, {})
        at[f'{leaf}{AXES_SUFFIX}'] = AxisMetadata(names=tuple(names))
    return flax.core.freeze({**model_variables, PARAMS_AXES: axes})


def _check_overrides(params: Mapping[str, Any], given: Mapping[str, Any], overrides: Sequence[Any]) -> None:
    faults = [
        f'{path} {np.shape(params[path])}: {len(names)} names {tuple(names)} from pattern {overrides[i][0]!r}'
        for path, (i, names) in given.items()
        if len(names) != np.ndim(params[path])
    ]
    if faults:
        raise StateError(
            f'Cannot override the axis names of {len(faults)} of {len(params)} parameters. '
            f'Give one name for each dim:\n{offenders(faults)}'
        )


def _tell_idle(params: Mapping[str, Any], given: Mapping[str, Any], overrides: Sequence[Any]) -> None:
    used = {i for i, _ in given.values()}
    idle = []
    for i, (pattern, _) in enumerate(overrides):
        if i not in used:
            near = near_misses(pattern, params, most=2)
            idle.append(f'{pattern!r}{f" (near it are {near})" if near else ""}')
    if idle:
        warn(
            f'Cannot override any axis names by {len(idle)} of {len(overrides)} patterns: no parameter is left for '
            f'them. A pattern must match a whole name, and the first that does counts:\n{offenders(idle)}'
        )
