"""Every error that this package raises on purpose, and how its messages are put together.

A message reads *Cannot DO THING with VALUES: WHY with VALUES. REMEDY.* and lists every offender on a line of its own.
"""

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence

MAX_LISTED = 10


class RecipeError(ValueError):
    """The root of all errors raised on purpose by this package."""


class MeshError(RecipeError):
    """Sizes, devices and tiles that cannot make the mesh that was asked for."""


class RuleError(RecipeError):
    """Rules that cannot say how a leaf lies on the mesh."""


class PlanError(RecipeError):
    """Specs that do not fit the shapes or the mesh."""


class PlacementError(RecipeError):
    """Arrays that cannot be moved, or that are gone already."""


class StateError(RecipeError):
    """A train state whose parts do not belong together."""


class ConfigError(RecipeError):
    """A configuration that cannot mean what it says."""


class DataError(RecipeError):
    """A data set that cannot be found, read or divided."""


class CheckpointError(RecipeError):
    """A checkpoint that is absent or belongs to another model."""


class TrainingError(RecipeError):
    """A training run that must not go on."""


def offenders(lines: Iterable[str], most: int = MAX_LISTED) -> str:
    """Lists offenders, one indented line each, `most` at most.

    >>> print(offenders(['a (3,)', 'b (4,)', 'c (5,)'], most=2))
      a (3,)
      b (4,)
      and 1 more
    """
    lines = list(lines)
    shown = [f'  {line}' for line in lines[:most]]
    if len(lines) > most:
        shown.append(f'  and {len(lines) - most} more')
    return '\n'.join(shown)


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Offers the nearest known name in brackets, or nothing where none is near.

    >>> did_you_mean('embedd', ['vocab', 'embed'])
    " (did you mean 'embed'?)"
    >>> did_you_mean('q', ['vocab'])
    ''
    """
    near = near_misses(name, known, most=1)
    return f' (did you mean {near[0]!r}?)' if near else ''


def near_misses(name: object, known: Iterable[object], most: int = 3) -> list[str]:
    """Returns the known names nearest to `name`, best first."""
    candidates: Sequence[str] = sorted({str(k) for k in known})
    return difflib.get_close_matches(str(name), candidates, n=most, cutoff=0.6)


def warn_or_raise(message: str, *, strict: bool, error: type[RecipeError] = RecipeError) -> None:
    """Raises `error` when strict, else says the same in one UserWarning."""
    if strict:
        raise error(message)
    warn(message)


def warn(message: str) -> None:
    """Warns whoever called into this package, at the line of the call."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get('__name__', '').startswith(__package__):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
