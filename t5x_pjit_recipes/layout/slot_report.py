"""What an optimizer's layout comes to: which slots lie as their parameters, which by some dims, what is replicated."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from t5x_pjit_recipes.layout.axes import PartitionSpec, axis_names, is_axes_leaf, spec_axes
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.layout.plan import Row, format_bytes, group_lines
from t5x_pjit_recipes.layout.provenance import Slot, resolve_slots

_AS_PARAMETER = 'as their parameter'
_BY_DIMS = 'by the dims they keep'
_OTHERWISE = 'divided further'
_REPLICATED = 'replicated'

Entry = tuple[Any, ...]


def describe_slots(slots: Any, slots_specs: Any, params: Any, params_specs: Any) -> str:
    """Lists the slots of an optimizer's state that do not lie as their parameters, below the counts of all.

    Args:
      slots: the state, as arrays or shape structs.
      slots_specs: for each leaf of it a spec, logical axes or None.
      params: the parameters, as arrays or shape structs.
      params_specs: for each parameter its entry, likewise.
    """
    kinds = _sorted(slots, slots_specs, params, params_specs)
    lines = [_counts(kinds)]
    for kind in (_BY_DIMS, _OTHERWISE, _REPLICATED):
        if kinds[kind]:
            lines += ['', f'{kind}:']
            lines += map(_line, group_lines(kinds[kind]))
    return '\n'.join(lines)


def count_slots(slots: Any, slots_specs: Any, params: Any, params_specs: Any) -> str:
    """Says in one line how many slots lie as their parameter and what is replicated; see `describe_slots`.

    >>> params, specs = {'w': np.zeros((4, 2), np.float32)}, {'w': PartitionSpec('data')}
    >>> count_slots({'mu': params, 'count': np.zeros((), np.int32)}, {'mu': specs, 'count': None}, params, specs)
    '2 slots: 1 as their parameter, 1 replicated (4 B)'
    """
    return _counts(_sorted(slots, slots_specs, params, params_specs))


def _counts(kinds: Mapping[str, Sequence[Row]]) -> str:
    total = sum(map(len, kinds.values()))
    parts = [f'{len(rows)} {kind}' for kind, rows in kinds.items() if rows]
    if kinds[_REPLICATED]:
        parts[-1] += f' ({format_bytes(sum(row.num_bytes for row in kinds[_REPLICATED]))})'
    return f'{total} slots: {", ".join(parts)}' if total else 'no slots'


def _line(cells: tuple[str, ...]) -> str:
    title, shape, _, spec, held, note = cells
    return '  ' + '  '.join(cell for cell in (title, shape, '' if spec == '()' else spec, held, note) if cell)


def _sorted(slots: Any, slots_specs: Any, params: Any, params_specs: Any) -> dict[str, list[Row]]:
    entries = _entries(slots_specs)
    by_param = list(_entries(params_specs, params).values())
    shapes = [np.shape(leaf) for leaf in jax.tree_util.tree_leaves(params)]
    kinds: dict[str, list[Row]] = {kind: [] for kind in (_AS_PARAMETER, _BY_DIMS, _OTHERWISE, _REPLICATED)}
    for slot, leaf in zip(resolve_slots(slots, params), jax.tree_util.tree_leaves(slots), strict=True):
        entry, owner = entries.get(slot.name, ()), slot.origins[0].param if slot.origins else None
        same_shape = owner is not None and shapes[owner] == slot.shape
        kind = _kind(entry, None if owner is None else by_param[owner], same_shape)
        kinds[kind].append(_row(slot, leaf, entry, _note(kind, slot, entry, by_param, shapes)))
    return kinds


def _entries(specs: Any, tree: Any = None) -> dict[str, Entry]:
    """Maps names to axes, without trailing Nones; those of `tree`, in its order, if it is given."""
    named = named_leaves(specs, is_leaf=is_axes_leaf)
    if tree is not None:
        named = {name: named.get(name) for name in named_leaves(tree)}
    return {name: _trimmed(axis_names(leaf) or ()) for name, leaf in named.items()}


def _trimmed(names: Entry) -> Entry:
    while names and not spec_axes(names[-1]):
        names = names[:-1]
    return tuple(names)


def _axes(entry: Entry) -> set[str]:
    return {axis for names in entry for axis in spec_axes(names)}


def _kind(entry: Entry, param: Entry | None, same_shape: bool) -> str:
    if same_shape and entry == param:
        return _AS_PARAMETER
    if not _axes(entry):
        return _REPLICATED
    return _BY_DIMS if param is not None and _axes(entry) <= _axes(param) else _OTHERWISE


def _note(kind: str, slot: Slot, entry: Entry, by_param: Sequence[Entry], shapes: Sequence[tuple[int, ...]]) -> str:
    if kind == _BY_DIMS and slot.origins:
        owner = slot.origins[0].param
        kept = [by_param[owner].index(names) for names in entry if names is not None and names in by_param[owner]]
        return f'dims {tuple(kept)} of {shapes[owner]}'
    if kind == _REPLICATED and slot.origins and math.prod(slot.shape) > 1:
        ways = ' or '.join(str(tuple(d for d in origin.dims if d is not None)) for origin in slot.origins)
        return f'has dims {ways} of {shapes[slot.origins[0].param]}'
    return ''


def _row(slot: Slot, leaf: Any, entry: Entry, note: str) -> Row:
    dtype = leaf.dtype if hasattr(leaf, 'dtype') else np.result_type(leaf)
    count = math.prod(slot.shape) * dtype.itemsize
    return Row(slot.name, slot.shape, dtype, PartitionSpec(*entry), count, count, note)
