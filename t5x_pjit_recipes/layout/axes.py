"""Logical axis names and specs in every spelling that is met, and one canonical form of each.

Models spell a leaf's logical axes as `AxisNames`, `AxisMetadata`, `PartitionSpec` or a plain tuple of names; all of
them mean the same thing here.
"""

from typing import Any

from flax.linen.partitioning import AxisMetadata
from flax.linen.partitioning import axis_rules as constraint_rules
from jax.sharding import NamedSharding, PartitionSpec

from t5x_pjit_recipes.errors import PlanError, offenders
from t5x_pjit_recipes.layout.paths import SEPARATOR, named_leaves

__all__ = [
    'AxisMetadata',
    'AxisNames',
    'PartitionSpec',
    'axis_names',
    'canonical',
    'constraint_rules',
    'is_axes_leaf',
    'is_spec_leaf',
    'spec_axes',
    'specs_by_name',
]


class AxisNames(tuple):
    """Names of an array's logical axes, one for each dim; a pytree leaf, unlike a plain tuple.

    >>> AxisNames('embed', None)
    AxisNames('embed', None)
    """

    def __new__(cls, *names: str | None) -> 'AxisNames':
        """Takes the names one by one, not as a sequence."""
        return tuple.__new__(cls, names)

    def __getnewargs__(self) -> tuple[str | None, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f'AxisNames{tuple.__repr__(self)}'


def is_axes_leaf(x: Any) -> bool:
    """Tells whether `x` holds one leaf's logical axes (None included, which means that it has none)."""
    if x is None or isinstance(x, AxisNames | AxisMetadata | PartitionSpec):
        return True
    return type(x) is tuple and all(name is None or isinstance(name, str) for name in x)


def is_spec_leaf(x: Any) -> bool:
    """Tells whether `x` is a leaf of a tree of specs: a PartitionSpec, a sharding, or None for replicated."""
    return x is None or isinstance(x, PartitionSpec | NamedSharding)


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
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


_WHOLE = '(the whole)'


_WHOLE = '(the whole)'


def specs_by_name(specs: Any, tree: Any) -> dict[str, PartitionSpec | None]:
    """Finds each leaf's spec by name, whatever containers the two trees are made of.

    Args:
      specs: a tree of specs; one that stands above a sub-tree holds for all of it, None means replicated.
      tree: the tree whose leaves want a spec.

    Returns:
      Leaf name to spec, in the order of `tree`.

    Raises:
      PlanError: naming every leaf without a spec and every spec without a leaf.

    >>> specs_by_name({'a': PartitionSpec('data')}, {'a': {'b': 1, 'c': 2}}) == dict.fromkeys(
    ...     ['a/b', 'a/c'], PartitionSpec('data'))
    True
    """
    given = named_leaves(specs, is_leaf=lambda x: is_spec_leaf(x) or isinstance(x, AxisMetadata | AxisNames))
    _check_specs(given)
    wanted = named_leaves(tree)
    sources = {name: _spec_above(name, given) for name in wanted}
    missing = [f'{name or _WHOLE}: no spec' for name, source in sources.items() if source is None]
    idle = {name for name, spec in given.items() if spec is not None} - set(sources.values())
    left_over = [f'{name or _WHOLE}: a spec without an array' for name in given if name in idle]
    if missing or left_over:
        raise PlanError(
            f'Cannot match specs with arrays: of {len(wanted)} arrays {len(missing)} have no spec, and of {len(given)} '
            f'specs {len(left_over)} have no array. Give each array one spec:\n{offenders(missing + left_over)}'
        )
    return {name: _spec_of(given[source]) for name, source in sources.items() if source is not None}


def _check_specs(given: dict[str, Any]) -> None:
    """Raises PlanError for leaves of a tree of specs that are none, with what to write instead."""
    faults = []
    for name, spec in given.items():
        if isinstance(spec, AxisMetadata | AxisNames):
            faults.append(f'{name or _WHOLE}: {spec!r} names logical axes; get_mesh_axes makes specs of them')
        elif not is_spec_leaf(spec):
            faults.append(f'{name or _WHOLE}: {spec!r} is a {type(spec).__name__}; write PartitionSpec(...)')
    if faults:
        raise PlanError(
            f'Cannot read {len(faults)} of {len(given)} specs: they are neither PartitionSpecs nor None. '
            f'Correct them:\n{offenders(faults)}'
        )


def _spec_of(spec: Any) -> PartitionSpec | None:
    return spec.spec if isinstance(spec, NamedSharding) else spec


def _spec_above(name: str, given: dict[str, Any]) -> str | None:
    """Returns the longest of the given names that is `name` or stands above it."""
    while name not in given:
        if not name:
            return None
        name = name.rpartition(SEPARATOR)[0]
    return name
