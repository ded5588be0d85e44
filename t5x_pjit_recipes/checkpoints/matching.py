"""Matching: whether the leaves of a checkpoint are those of a train state, with all differences at once."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from t5x_pjit_recipes import errors


@dataclasses.dataclass(frozen=True)
class Differences:
    """How a checkpoint differs from a train state; each line names one leaf."""

    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    conflicts: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.left_over or self.conflicts)

    def __str__(self) -> str:
        groups = {
            'missing in the checkpoint': self.missing,
            'left over in the checkpoint': self.left_over,
            'of another shape or kind': self.conflicts,
        }
        return '\n'.join(
            f'{len(lines)} {title}:\n{errors.offenders(lines)}' for title, lines in groups.items() if lines
        )


def compare(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> Differences:
    """Compares names, shapes and kinds of dtype of two sets of leaves.

    Args:
      stored: leaf name to what a checkpoint offers (anything with a shape and a dtype).
      wanted: leaf name to what a train state needs.

    Returns:
      The differences; falsy if there are none. Two floats of different width do not differ, a float and an integer do.
    """
    missing = [name for name in wanted if name not in stored]
    left_over = [name for name in stored if name not in wanted]
    hints = [errors.did_you_mean(name, left_over) for name in missing[: errors.MAX_LISTED]]
    hints += [''] * (len(missing) - len(hints))
    return Differences(
        tuple(_describe(name, wanted[name]) + hint for name, hint in zip(missing, hints, strict=True)),
        tuple(_describe(name, stored[name]) for name in left_over),
        tuple(
            f'{_describe(name, stored[name])} in the checkpoint, {_describe("", want).strip()} in the train state'
            for name, want in wanted.items()
            if name in stored and not _fits(stored[name], want)
        ),
    )


def _describe(name: str, leaf: Any) -> str:
    return f'{name} {tuple(leaf.shape)} {jnp.dtype(leaf.dtype).name}'


def _fits(stored: Any, want: Any) -> bool:
    kinds = {jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in (stored, want)}
    return tuple(stored.shape) == tuple(want.shape) and len(kinds) == 1
