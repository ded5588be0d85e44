"""The plan: specs checked against shapes and a mesh, as data, before any array is moved.

A plan finds every fault at once, knows what each device will hold, and prints itself as a table.
"""

import dataclasses
import functools
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from t5x_pjit_recipes.errors import PlanError, did_you_mean, offenders
from t5x_pjit_recipes.layout.axes import canonical, spec_axes, specs_by_name
from t5x_pjit_recipes.layout.meshes import check_auto, describe_sizes
from t5x_pjit_recipes.layout.paths import named_leaves


@dataclasses.dataclass(frozen=True)
class Row:
    """One array of a plan: what it is, how it lies, what a device holds of it."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    num_bytes: int
    bytes_per_device: int
    rule: str = ''

    @property
    def replicated(self) -> bool:
        """Whether every device holds the whole array."""
        return not any(spec_axes(entry) for entry in self.spec)


class Plan:
    """Specs for a tree of arrays on a mesh, checked.

    Args:
      shapes: a tree of arrays or of anything with `shape` and `dtype`; Python scalars count as scalars.
      specs: a tree of PartitionSpec like `shapes` in names, not necessarily in containers; None means replicated.
      mesh: a Mesh, or an AbstractMesh to plan for machines that are not here; its axes must be Auto.
      rules: what decided each leaf's spec, for the table: its name to a text, or what has `reasons(shapes)`, as
        `RegexRules` and `Derivation` do. Of the latter two `explain` can say more.

    Raises:
      PlanError: if arrays have no spec, or specs no array.
      MeshError: if an axis of the mesh is not Auto.

    >>> from t5x_pjit_recipes.layout.meshes import abstract_mesh
    >>> plan = Plan({'w': np.zeros((8, 6))}, {'w': PartitionSpec('data')}, abstract_mesh(data=4, model=2))
    >>> plan.bytes_per_device
    48
    """

    def __init__(self, shapes: Any, specs: Any, mesh: Mesh | AbstractMesh, *, rules: Any = None):
        check_auto(mesh)
        self.mesh = mesh
        self.shapes = shapes
        self.rules = rules or {}
        leaves = named_leaves(shapes)
        _check_arrays(leaves)
        self._specs = specs_by_name(specs, shapes)
        sizes = dict(mesh.shape)
        reasons = self.rules if isinstance(self.rules, Mapping) else self.rules.reasons(shapes)
        self.faults: tuple[str, ...] = tuple(
            f'{name} {_shape_of(leaf)}: {fault}'
            for name, leaf in leaves.items()
            for fault in spec_faults(_shape_of(leaf), self._specs[name], sizes)
        )
        self.rows: tuple[Row, ...] = tuple(
            _row(name, leaf, self._specs[name], sizes, reasons.get(name, '')) for name, leaf in leaves.items()
        )

    def __repr__(self) -> str:
        return f'Plan({len(self.rows)} arrays on {describe_sizes(dict(self.mesh.shape))}, {len(self.faults)} faults)'

    def check(self) -> None:
        """Raises PlanError listing every fault, if there is one."""
        if self.faults:
            arrays = len({fault.partition(' (')[0] for fault in self.faults})
            raise PlanError(
                f'Cannot shard {arrays} of {len(self.rows)} arrays on mesh {describe_sizes(dict(self.mesh.shape))}. '
                f'Change the rules that match them, or pad the dim:\n{offenders(self.faults)}'
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays together, each counted once."""
        return sum(row.num_bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that each device holds."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def replicated(self) -> tuple[Row, ...]:
        """The arrays, scalars left out, of which every device holds the whole."""
        return tuple(row for row in self.rows if row.replicated and math.prod(row.shape) > 1)

    @property
    def specs(self) -> Any:
        """A tree of canonical PartitionSpecs, like `shapes`."""
        treedef = jax.tree_util.tree_structure(self.shapes)
        return jax.tree_util.tree_unflatten(treedef, [row.spec for row in self.rows])

    @functools.cached_property
    def shardings(self) -> Any:
        """A tree of NamedShardings like `shapes`; the mesh must have devices, and the plan no fault."""
        self.check()
        treedef = jax.tree_util.tree_structure(self.shapes)
        return jax.tree_util.tree_unflatten(treedef, [NamedSharding(self.mesh, row.spec) for row in self.rows])

    def table(self, width: int | None = None) -> str:
        """Lists the arrays, those alike but for a layer number in one line, and the totals.

        Args:
          width: columns that the lines may take; names are cut at their front where they must be. None for no limit.
        """
        return '\n'.join([*aligned([_HEADINGS, *group_lines(self.rows)], width), *self.totals()])

    def totals(self) -> list[str]:
        """Says in a line or two what a device holds and what is replicated."""
        whole, device, copies = self.num_bytes, self.bytes_per_device, sum(r.num_bytes for r in self.replicated)
        lines = [f'{len(self.rows)} arrays, {format_bytes(whole)}; each device holds {format_bytes(device)}']
        if self.replicated:
            lines.append(f'replicated: {len(self.replicated)} arrays, {format_bytes(copies)} on every device')
        return lines


def spec_faults(shape: Sequence[int], spec: PartitionSpec | None, sizes: Mapping[str, int]) -> list[str]:
    """Lists what keeps a spec from being applied to a shape on a mesh of these sizes.

    >>> spec_faults((512, 1023), PartitionSpec(None, 'model'), {'data': 4, 'model': 2})
    ["dim 1 is 1023, which ('model',) splits 2 ways; 1024 would fit"]
    """
    entries = tuple(spec or ())
    if len(canonical(spec)) > len(shape):
        return [f'spec {spec_text(spec)} has {len(entries)} entries for {len(shape)} dims']
    used = [axis for entry in entries for axis in spec_axes(entry)]
    faults = [f'no mesh axis {axis!r}{did_you_mean(axis, sizes)}' for axis in used if axis not in sizes]
    faults += [f'mesh axis {a!r} splits two dims of spec {spec_text(spec)}' for a in sizes if used.count(a) > 1]
    for dim, (size, entry) in enumerate(zip(shape, entries, strict=False)):
        axes = spec_axes(entry)
        ways = math.prod(sizes.get(axis, 1) for axis in axes)
        if size % ways:
            fit = -(-size // ways) * ways
            faults.append(f'dim {dim} is {size}, which {axes} splits {ways} ways; {fit} would fit')
    return faults


def _row(name: str, leaf: Any, spec: PartitionSpec | None, sizes: Mapping[str, int], rule: str) -> Row:
    shape, dtype = _shape_of(leaf), _dtype_of(leaf)
    entries = tuple(canonical(spec))
    ways = [math.prod(sizes.get(a, 1) for a in spec_axes(e)) for e in entries] + [1] * len(shape)
    held = math.prod(-(-size // w) for size, w in zip(shape, ways, strict=False))
    return Row(
        name=name,
        shape=shape,
        dtype=dtype,
        spec=PartitionSpec(*entries),
        num_bytes=math.prod(shape) * dtype.itemsize,
        bytes_per_device=held * dtype.itemsize,
        rule=rule,
    )


def _shape_of(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if hasattr(leaf, 'shape') else np.shape(leaf)


def _dtype_of(leaf: Any) -> Any:
    """Returns the dtype that JAX gives the leaf: float64 of numpy becomes float32 where 64 bits are off."""
    if hasattr(leaf, 'dtype') and not isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype
    return jax.dtypes.canonicalize_dtype(np.result_type(leaf))


def _check_arrays(leaves: Mapping[str, Any]) -> None:
    others = [
        f'{name or "(the whole)"}: {type(leaf).__name__}'
        for name, leaf in leaves.items()
        if not (hasattr(leaf, 'shape') and hasattr(leaf, 'dtype')) and not isinstance(leaf, numbers.Number | bool)
    ]
    if others:
        raise PlanError(
            f'Cannot plan for {len(others)} of {len(leaves)} leaves: they are neither arrays nor numbers. '
            f'Take them out of the tree, or make them static:\n{offenders(others)}'
        )


_HEADINGS = ('arrays', 'shape', 'dtype', 'spec', 'per device', 'decided by')
_LAYER_NUMBER = re.compile(r'\d+(?=/|$)')


def group_lines(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Puts rows that are alike but for numbers in their names into one line of cells each."""
    return [
        (title, str(first.shape), str(first.dtype), spec_text(first.spec), format_bytes(held), first.rule)
        for title, (first, *others) in grouped(rows, lambda row: (row.shape, str(row.dtype), tuple(row.spec), row.rule))
        for held in [sum(row.bytes_per_device for row in (first, *others))]
    ]


def grouped(rows: Iterable[Any], key: Callable[[Any], Any]) -> list[tuple[str, list[Any]]]:
    """Groups what has a name: what is alike by `key` and but for numbers in its name; gives each group a title.

    >>> from types import SimpleNamespace as Named
    >>> rows = [Named(name='layers_0/w'), Named(name='layers_1/w'), Named(name='v')]
    >>> [title for title, _ in grouped(rows, key=lambda row: 0)]
    ['layers_*/w x2', 'v']
    """
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        groups.setdefault((_LAYER_NUMBER.sub('*', row.name), key(row)), []).append(row)
    return [
        (f'{pattern} x{len(members)}' if len(members) > 1 else members[0].name, members)
        for (pattern, _), members in groups.items()
    ]


def spec_text(spec: PartitionSpec | None) -> str:
    """Spells a spec as a tuple.

    >>> spec_text(PartitionSpec(None, 'model')), spec_text(None)
    ("(None, 'model')", '()')
    """
    entries = tuple(spec or ())
    return '(' + ', '.join(repr(e) for e in entries) + (',)' if len(entries) == 1 else ')')


def aligned(lines: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Puts cells, headings first, into columns; leaves out columns without a cell, cuts the first to keep to `width`.

    >>> aligned([('name', 'rule', 'bytes'), ('w', '', '8'), ('long', '', '16')])
    ['name  bytes', 'w     8', 'long  16']
    """
    kept = [i for i in range(len(lines[0])) if any(line[i] for line in lines[1:])] or [0]
    widths = [max(len(line[i]) for line in lines) for i in kept]
    if width is not None:
        widths[0] = min(widths[0], max(16, width - sum(widths[1:]) - 2 * len(widths[1:])))
        lines = [(_cut_front(line[0], widths[0]), *line[1:]) for line in lines]
    return ['  '.join(line[i].ljust(w) for i, w in zip(kept, widths, strict=True)).rstrip() for line in lines]


def _cut_front(text: str, width: int) -> str:
    return text if len(text) <= width else '…' + text[len(text) - width + 1 :]


def format_bytes(count: int) -> str:
    """Spells out a number of bytes.

    >>> format_bytes(1536), format_bytes(7), format_bytes(3 << 30)
    ('1.5 KiB', '7 B', '3.0 GiB')
    """
    value, units = float(count), ['B', 'KiB', 'MiB', 'GiB', 'TiB']
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f'{count} B' if units[0] == 'B' else f'{value:.1f} {units[0]}'
