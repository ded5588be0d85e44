"""Logical axis names and specs in every spelling that is met, and one canonical form of each.

Models spell a leaf's logical axes as `AxisNames`, `AxisMetadata`, `PartitionSpec` or a plain tuple of names; all of them
mean the same thing here.
"""

from typing import Any

from flax.linen.partitioning import AxisMetadata
from jax.sharding import PartitionSpec

__all__ = [
    'AxisMetadata',
    'AxisNames',
    'PartitionSpec',
    'axis_names',
    'canonical',
    'is_axes_leaf',
    'is_spec_leaf',
    'spec_axes',
]


class AxisNames(tuple):
    """Names of an array's logical axes, one for each dim; a pytree leaf, unlike a plain tuple.

    >>> AxisNames('embed', None)
    AxisNames('embed', None)
    """

    def __new__(cls, *names: str | None) -> 'AxisNames':
        """Takes the names one by one, not as a sequence."""
        return tuple.__new__(cls, names)

    def __repr__(self) -> str:
        return f'AxisNames{tuple.__repr__(self)}'


def is_axes_leaf(x: Any) -> bool:
    """Tells whether `x` holds one leaf's logical axes (None included, which means that it has none)."""
    if x is None or isinstance(x, AxisNames | AxisMetadata | PartitionSpec):
        return True
    return type(x) is tuple and all(name is None or isinstance(name, str) for name in x)


def is_spec_leaf(x: Any) -> bool:
    """Tells whether `x` is a leaf of a tree of specs: a PartitionSpec, or None for replicated."""
    return x is None or isinstance(x, PartitionSpec)


def axis_names(leaf: Any) -> tuple[Any, ...] | None:
    """Reads one leaf's logical axes, however they are spelled.

    >>> axis_names(AxisMetadata(names=('vocab', 'embed')))
    ('vocab', 'embed')
    >>> axis_names(PartitionSpec('embed'))
    ('embed',)
    """
    if leaf is None:
        return None
    names = leaf.names if isinstance(leaf, AxisMetadata) else leaf
    return None if names is None else tuple(names)


def canonical(spec: PartitionSpec | None) -> PartitionSpec:
    """Drops what does not change a spec's meaning: trailing Nones, empty tuples, tuples of one.

    >>> canonical(PartitionSpec(('data',), None, (), None)) == PartitionSpec('data')
    True
    >>> canonical(None) == PartitionSpec()
    True
    """
    entries = [_canonical_entry(entry) for entry in (() if spec is None else spec)]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _canonical_entry(entry: Any) -> Any:
    if isinstance(entry, tuple | list):
        return None if not entry else entry[0] if len(entry) == 1 else tuple(entry)
    return entry


def spec_axes(entry: Any) -> tuple[str, ...]:
    """Lists the mesh axes that one entry of a spec names.

    >>> spec_axes(None), spec_axes('data'), spec_axes(('replica', 'data'))
    ((), ('data',), ('replica', 'data'))
    """
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
