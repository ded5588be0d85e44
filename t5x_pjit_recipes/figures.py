"""Draws what each device holds, with matplotlib where it is installed."""

import collections
import re
from collections.abc import Mapping, Set
from typing import Any

from t5x_pjit_recipes.errors import ConfigError
from t5x_pjit_recipes.layout.meshes import describe_mesh
from t5x_pjit_recipes.layout.plan import Plan, format_bytes

MOST_GROUPS = 8
LEAST_SHARE = 0.005
OTHERS = 'others'
_NUMBERED = re.compile(r'(.*\D)?\d+')


def save_parts(parts: Mapping[str, Plan], path: str) -> None:
    """Draws a state's parts into a file; see `draw_parts`.

    Raises:
      ConfigError: if matplotlib is not installed, or the file cannot be written.
    """
    figure = draw_parts(parts)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f'Cannot write the figure to {path!r}: {error}. Give a path such as plan.png, in a folder that is there.'
        ) from error


def draw_parts(parts: Mapping[str, Plan]) -> Any:
    """Draws a bar for each part of what a device holds, cut by groups of parameters.

    Args:
      parts: parameters, gradients, optimizer state and others, each with its plan.

    Returns:
      A matplotlib Figure.

    Raises:
      ConfigError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "Cannot draw a figure: matplotlib is not installed. pip install 't5x_pjit_recipes[notebooks]' brings it."
        ) from error
    heights = group_bytes(parts)
    figure = Figure(figsize=(9, 1.6 + 0.5 * len(parts)), layout='constrained')
    axes = figure.subplots()
    unit, name = _unit(max(plan.bytes_per_device for plan in parts.values()))
    starts = [0.0] * len(parts)
    for group, held in heights.items():
        sizes = [held.get(title, 0) / unit for title in parts]
        axes.barh(list(parts), sizes, left=starts, label=group, edgecolor='white', linewidth=0.5)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    for row, (start, plan) in enumerate(zip(starts, parts.values(), strict=True)):
        axes.text(start, row, f' {format_bytes(plan.bytes_per_device)}', va='center')
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.spines[['top', 'right']].set_visible(False)
    axes.set_xlabel(f'{name} on each device, activations not counted')
    axes.set_title(describe_mesh(parts['params'].mesh), loc='left')
    figure.legend(loc='outside right upper', frameon=False)
    return figure


def group_bytes(parts: Mapping[str, Plan]) -> dict[str, dict[str, int]]:
    """Sums what a device holds of each group of arrays: group to part to bytes, the largest group first."""
    names = {row.name for row in parts['params'].rows}
    held: dict[str, dict[str, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    for title, plan in parts.items():
        for row in plan.rows:
            held[_group_of(row.name, names)][title] += row.bytes_per_device
    sums = {group: sum(by_part.values()) for group, by_part in held.items() if group != OTHERS}
    ranked = sorted(sums, key=lambda group: -sums[group])
    shown = [group for group in ranked[:MOST_GROUPS] if sums[group] >= LEAST_SHARE * sum(sums.values())]
    for group in ranked[len(shown) :]:
        for title, count in held.pop(group).items():
            held[OTHERS][title] += count
    return {group: dict(held[group]) for group in [*shown, OTHERS] if group in held}


def _group_of(name: str, params: Set[str]) -> str:
    """Names the group of an array: of the parameter in its path, the first component and the module around it."""
    parts = name.split('/')
    cuts = ('/'.join(parts[i:j]) for i in range(len(parts)) for j in range(len(parts), i, -1))
    owner = next((cut for cut in cuts if cut in params), None)
    if owner is None:
        return OTHERS
    modules = [part for part in owner.split('/')[:-1] if not _NUMBERED.fullmatch(part)] or [owner]
    return ' '.join(dict.fromkeys((modules[0], modules[-2] if len(modules) > 2 else modules[-1])))


def _unit(most: int) -> tuple[int, str]:
    return next(
        ((1 << shift, name) for shift, name in ((30, 'GiB'), (20, 'MiB'), (10, 'KiB')) if most >> shift), (1, 'B')
    )
