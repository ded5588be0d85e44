"""Where the dims of an optimizer's slots come from: which parameter, and which of its dims.

Paths tell the parameter. Sizes tell the dims where they are distinct; where they are not, the function that makes the
state is traced once more for parameters whose dims are symbols. A symbol is as large as the dim it stands for, so that
sizes compare as before (but two equal ones are not `==`), and yet each is told apart from every other.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np

from t5x_pjit_recipes.layout.paths import SEPARATOR, leaf_name

Path = tuple[str, ...]
Shape = tuple[int, ...]


class Origin(NamedTuple):
    """A parameter, by its place in the tree, and for each dim of a slot which of the parameter's dims it keeps."""

    param: int
    dims: tuple[int | None, ...]


class Slot(NamedTuple):
    """One array of an optimizer's state and where it can come from: one origin, none, or several that fit alike."""

    name: str
    shape: Shape
    origins: tuple[Origin, ...]


def resolve_slots(opt_state_shapes: Any, params_shapes: Any, *, init: Callable[[Any], Any] | None = None) -> list[Slot]:
    """Finds where each slot of an optimizer's state comes from, in the order of the state's leaves.

    Args:
      opt_state_shapes: the state, as arrays or shape structs.
      params_shapes: the parameters that it was made for, as arrays or shape structs.
      init: the function that makes the state of the parameters; it is traced, not run. Without it, slots that fit
        their parameter in more than one way have more than one origin.

    >>> resolve_slots({'rows': {'w': np.zeros(4)}}, {'w': np.zeros((4, 2))})[0].origins
    (Origin(param=0, dims=(0,)),)
    """
    params = _Params(params_shapes)
    leaves = [
        (_parts(path), np.shape(leaf)) for path, leaf in jax.tree_util.tree_flatten_with_path(opt_state_shapes)[0]
    ]
    owners = [params.owners(path, shape) for path, shape in leaves]
    reshaped = any(params.shapes[i] != shape for (_, shape), found in zip(leaves, owners, strict=True) for i in found)
    traced = _trace(init, params_shapes, opt_state_shapes) if init is not None and reshaped else None
    return [
        Slot(SEPARATOR.join(path), shape, tuple(params.origins(shape, found, traced and traced[index])))
        for index, ((path, shape), found) in enumerate(zip(leaves, owners, strict=True))
    ]


class _Params:
    """The parameters by their paths, by parts of these, and their shapes."""

    def __init__(self, params: Any) -> None:
        leaves, _ = jax.tree_util.tree_flatten_with_path(params)
        self.shapes: list[Shape] = [np.shape(leaf) for _, leaf in leaves]
        self._whole = {_parts(path): i for i, (path, _) in enumerate(leaves)}
        self._tails: dict[Path, list[int]] = {}
        for path, i in self._whole.items():
            for start in range(1, len(path)):
                self._tails.setdefault(path[start:], []).append(i)

    def owners(self, path: Path, shape: Shape) -> tuple[int, ...]:
        """Returns the parameters that a slot may belong to; mostly one, whose path ends the slot's path."""
        suffix = self._suffix(path)
        if suffix is not None and self.shapes[suffix] == shape:
            return (suffix,)
        if math.prod(shape) <= 1:  # A counter, or a placeholder.
            return ()
        inner = self._inner(path, numbered=suffix is not None)
        found = tuple(dict.fromkeys(i for i in (suffix, inner) if i is not None))
        return found or next((tuple(self._tails[tail]) for tail in _suffixes(path) if tail in self._tails), ())

    def _suffix(self, path: Path) -> int | None:
        return next((self._whole[suffix] for suffix in _suffixes(path) if suffix in self._whole), None)

    def _inner(self, path: Path, *, numbered: bool) -> int | None:
        """Finds a parameter that has several arrays: what stands behind its path tells which of them."""
        for stop in range(len(path) - 1, 0, -1):
            if numbered and not path[stop].isdigit():
                return None
            inside = self._suffix(path[:stop])
            if inside is not None:
                return inside
        return None

    def origins(self, shape: Shape, owners: Sequence[int], traced: '_Traced | None') -> Iterator[Origin]:
        """Yields the origins of a slot; a slot of its parameter's shape has all of its dims."""
        for i in owners:
            if self.shapes[i] == shape:
                yield Origin(i, tuple(range(len(shape))))
            elif traced is not None:
                yield from (Origin(i, dims) for dims in traced.dims(self.shapes[i]))
            else:
                yield from (Origin(i, dims) for dims in alignments(shape, self.shapes[i]))


def _parts(path: tuple[Any, ...]) -> Path:
    return tuple(leaf_name((key,)) for key in path)


def _suffixes(path: Path) -> Iterator[Path]:
    return (path[start:] for start in range(len(path) + 1))


def alignments(slot: Shape, param: Shape) -> list[tuple[int | None, ...]]:
    """Lists the ways to match as many dims of a slot as possible with a parameter's, in order and of equal sizes.

    >>> alignments((10, 4), (4, 3)), alignments((4,), (4, 4))
    ([(None, 0)], [(0,), (1,)])
    """

    @functools.cache
    def longest(at: int, start: int) -> tuple[int, frozenset[tuple[int | None, ...]]]:
        if at == len(slot):
            return 0, frozenset({()})
        kept, ways = longest(at + 1, start)
        found = {kept: {(None, *way) for way in ways}}
        for dim in range(start, len(param)):
            if param[dim] == slot[at]:
                kept, ways = longest(at + 1, dim + 1)
                found.setdefault(kept + 1, set()).update((dim, *way) for way in ways)
        return max(found), frozenset(found[max(found)])

    kept, ways = longest(0, 0)
    return sorted(ways, key=str) if kept else []


class _Traced(NamedTuple):
    """A slot's dims as traced: for each the (dim, size) that its symbol stands for, or None for a mere number."""

    symbols: tuple[tuple[int, int] | None, ...]

    def dims(self, param: Shape) -> list[tuple[int | None, ...]]:
        """Returns the one way in which the slot keeps dims of this parameter, or none if it keeps none."""
        known = set(enumerate(param))
        if not any(self.symbols) or not all(symbol is None or symbol in known for symbol in self.symbols):
            return []
        return [tuple(symbol and symbol[0] for symbol in self.symbols)]


def _trace(init: Callable[[Any], Any], params: Any, state: Any) -> list[_Traced | None] | None:
    """Traces `init` for parameters with symbols for dims; None for what does not come out like `state` then."""
    symbols, symbolic = _symbolic(params)
    try:
        traced = jax.eval_shape(init, symbolic)
    except Exception:  # What computes with the sizes, as with numbers, may raise anything when given symbols.
        return None
    if jax.tree_util.tree_structure(traced) != jax.tree_util.tree_structure(state):
        return None
    shapes = map(np.shape, jax.tree_util.tree_leaves(state))
    return [
        _read(leaf.shape, shape, symbols) for leaf, shape in zip(jax.tree_util.tree_leaves(traced), shapes, strict=True)
    ]


def _symbolic(params: Any) -> tuple[dict[str, tuple[int, int]], Any]:
    """Gives each dim of the parameters a symbol, the same for all that are as large and in the same place."""
    leaves, treedef = jax.tree_util.tree_flatten(params)
    shapes = [np.shape(leaf) for leaf in leaves]
    # Arrays of size 1 broadcast, and JAX has no symbols for 0: these dims stay numbers, and cannot be divided anyway.
    known = {f'd{dim}_{size}': (dim, size) for shape in shapes for dim, size in enumerate(shape) if size > 1}
    bounds = [bound for name, (_, size) in known.items() for bound in (f'{name} >= {size}', f'{name} <= {size}')]
    dims = jax.export.symbolic_shape(','.join(known), scope=jax.export.SymbolicScope(bounds)) if known else ()
    by_place = dict(zip(known.values(), dims, strict=True))
    symbolic = [
        jax.ShapeDtypeStruct(tuple(by_place.get(place, place[1]) for place in enumerate(shape)), _dtype(leaf))
        for leaf, shape in zip(leaves, shapes, strict=True)
    ]
    return known, treedef.unflatten(symbolic)


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, 'dtype') else jax.dtypes.canonicalize_dtype(np.result_type(leaf))


def _read(traced: Sequence[Any], shape: Shape, symbols: dict[str, tuple[int, int]]) -> _Traced | None:
    """Reads one traced shape; None if it does not say the same as the slot's shape."""
    found = tuple(None if isinstance(dim, int) else symbols.get(str(dim)) for dim in traced)
    sizes = [dim if isinstance(dim, int) else symbol and symbol[1] for dim, symbol in zip(traced, found, strict=True)]
    # A dim computed from symbols, such as a product, has no size here, and comes from no dim alone.
    same = len(sizes) == len(shape) and all(s is None or s == n for s, n in zip(sizes, shape, strict=True))
    return _Traced(found) if same else None
