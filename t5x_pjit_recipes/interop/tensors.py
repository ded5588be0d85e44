"""How arrays of ours correspond to the tensors of a file: which one, its dims split and put in another order.

A tree of `Weight` and `Stack`, like the parameters it stands for, is read in both directions.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from t5x_pjit_recipes.errors import CheckpointError

Index: TypeAlias = tuple[slice, ...]
Shape: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Weight:
    """One tensor of a file, as one array of ours.

    Attributes:
      name: the tensor's name.
      split: the sizes that each of its dims is split into, a tuple or a single int for each; None splits none.
      order: which of the dims, after splitting, comes where; None leaves them.

    >>> Weight('query_key_value.weight', split=((4, 3, 8), 32), order=(3, 0, 1, 2)).shape((96, 32))
    (32, 4, 3, 8)
    """

    name: str
    split: tuple[int | tuple[int, ...], ...] | None = None
    order: tuple[int, ...] | None = None

    @property
    def weights(self) -> tuple['Weight', ...]:
        """All tensors that the array is made of: this one."""
        return (self,)

    def shape(self, stored: Shape) -> Shape:
        """Returns the array's shape for a tensor of shape `stored`.

        Raises:
          CheckpointError: if the tensor cannot be split so.
        """
        sizes = [size for group in self._groups(stored) for size in group]
        return tuple(sizes[dim] for dim in self._order(len(sizes)))

    def read(self, read: Callable[[str, Index], np.ndarray], stored: Shape, index: Index) -> np.ndarray:
        """Reads a part of the array.

        Args:
          read: returns the part of a tensor that slices, one for each dim, say.
          stored: the tensor's shape.
          index: the part of the array, a slice with a start and a stop for each dim.
        """
        groups = self._groups(stored)
        order = self._order(len(index))
        wanted = [index[order.index(dim)] for dim in range(len(index))]
        rows, shape, rest, dim = [], [], [], 0
        for group in groups:
            # The outermost of a dim's parts is cut out of the file, the others out of what was read.
            first, inner = wanted[dim], math.prod(group[1:])
            rows.append(slice(first.start * inner, first.stop * inner))
            shape += [first.stop - first.start, *group[1:]]
            rest += [slice(None), *wanted[dim + 1 : dim + len(group)]]
            dim += len(group)
        return read(self.name, tuple(rows)).reshape(shape)[tuple(rest)].transpose(order)

    def stored(self, array: np.ndarray) -> np.ndarray:
        """Turns the array back into the tensor."""
        order = self._order(array.ndim)
        split = array.transpose(np.argsort(order)) if order else array
        if self.split is None:
            return split
        return split.reshape([math.prod(_sizes(group)) for group in self.split])

    def _groups(self, stored: Shape) -> list[Shape]:
        groups = [(size,) for size in stored] if self.split is None else [_sizes(group) for group in self.split]
        if tuple(math.prod(group) for group in groups) != tuple(stored):
            raise CheckpointError(f'its shape is {tuple(stored)}, and {self.split} is wanted')
        return groups

    def _order(self, rank: int) -> tuple[int, ...]:
        return tuple(range(rank)) if self.order is None else self.order


@dataclasses.dataclass(frozen=True)
class Stack:
    """Tensors alike, one for each layer, as one array with a new first dim."""

    weights: tuple[Weight, ...]

    def shape(self, stored: Shape) -> Shape:
        """Returns the array's shape for tensors of shape `stored`."""
        return len(self.weights), *self.weights[0].shape(stored)

    def read(self, read: Callable[[str, Index], np.ndarray], stored: Shape, index: Index) -> np.ndarray:
        """Reads a part of the array, see `Weight.read`."""
        parts = (layer.read(read, stored, index[1:]) for layer in self.weights[index[0]])
        return _stacked(parts, index[0].stop - index[0].start)


def _stacked(parts: Iterator[np.ndarray], count: int) -> np.ndarray:
    """Stacks arrays of which only one at a time exists beside the stack."""
    first = next(parts)
    stack = np.empty((count, *first.shape), first.dtype)
    for number, part in enumerate(itertools.chain([first], parts)):
        stack[number] = part
    return stack


Source: TypeAlias = Weight | Stack


def is_source(x: Any) -> bool:
    """Tells whether `x` stands for an array; as `is_leaf` it keeps the parts of a source together."""
    return isinstance(x, Weight | Stack)


def linear(name: str) -> Weight:
    """Returns the kernel, (in, out), of a linear layer whose weight is stored as PyTorch has it, (out, in)."""
    return Weight(name, order=(1, 0))


def stack(make: Callable[[int], Weight], layers: int) -> Stack:
    """Stacks what `make` returns for each number of a layer.

    >>> stack(lambda i: linear(f'h.{i}.dense.weight'), 2).shape((6, 4))
    (2, 4, 6)
    """
    return Stack(tuple(make(layer) for layer in range(layers)))


def _sizes(group: int | Sequence[int]) -> Shape:
    return (group,) if isinstance(group, int) else tuple(group)
