"""What changes from one plan to another: the leaves that lie otherwise, and what a device holds."""

import dataclasses
from collections.abc import Iterator

from t5x_pjit_recipes.layout.meshes import describe_mesh
from t5x_pjit_recipes.layout.plan import Plan, Row, aligned, format_bytes, grouped, spec_text


@dataclasses.dataclass(frozen=True)
class Change:
    """One leaf in two plans; None where a plan lacks it."""

    name: str
    before: Row | None
    after: Row | None

    @property
    def bytes_per_device(self) -> int:
        """How many bytes more a device holds of it."""
        return _held(self.after) - _held(self.before)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of two plans; `str` of it is made to be read.

    Attributes:
      meshes: the two meshes, in words.
      changed: the leaves of both whose shape, dtype or spec differs, or what a device holds of them.
      only_before: the leaves of the first plan alone.
      only_after: the leaves of the second plan alone.
      unchanged: how many leaves are alike.
      bytes_per_device: what a device holds, by the first plan and by the second.
    """

    meshes: tuple[str, str]
    changed: tuple[Change, ...]
    only_before: tuple[Change, ...]
    only_after: tuple[Change, ...]
    unchanged: int
    bytes_per_device: tuple[int, int]

    def __bool__(self) -> bool:
        return bool(self.changed or self.only_before or self.only_after)

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Lists the changes, those alike but for a layer number in one line, and the totals.

        Args:
          width: columns that the lines may take; None for no limit.
        """
        return '\n'.join(self._lines(width))

    def _lines(self, width: int | None) -> Iterator[str]:
        before, after = self.meshes
        yield before if before == after else f'{before} -> {after}'
        changes = [*self.changed, *self.only_before, *self.only_after]
        if changes:
            yield from aligned([_HEADINGS, *_change_lines(changes)], width)
        count = len(changes)
        yield f'{count or "no"} array{"" if count == 1 else "s"} changed, {self.unchanged} alike'
        held, then = self.bytes_per_device
        yield f'each device holds {format_bytes(held)} -> {format_bytes(then)} ({_signed(then - held)})'


_HEADINGS = ('arrays', 'shape', 'before', 'after', 'per device', 'change')


def diff(plan_a: Plan, plan_b: Plan) -> Difference:
    """Compares two plans, leaf by leaf.

    >>> import numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> from t5x_pjit_recipes.layout.meshes import abstract_mesh
    >>> mesh, shapes = abstract_mesh(data=4, model=2), {'w': np.zeros((8, 4), np.float32), 'b': np.zeros(8, np.float32)}
    >>> print(diff(Plan(shapes, {'w': P('data'), 'b': P()}, mesh), Plan(shapes, {'w': P('model'), 'b': P()}, mesh)))
    mesh data=4, model=2 on 8 devices
    arrays  shape   before     after       per device    change
    w       (8, 4)  ('data',)  ('model',)  32 B -> 64 B  +32 B
    1 array changed, 1 alike
    each device holds 64 B -> 96 B (+32 B)
    """
    before, after = ({row.name: row for row in plan.rows} for plan in (plan_a, plan_b))
    both = [Change(name, row, after[name]) for name, row in before.items() if name in after]
    changed = tuple(change for change in both if _differs(change))
    return Difference(
        meshes=(describe_mesh(plan_a.mesh), describe_mesh(plan_b.mesh)),
        changed=changed,
        only_before=tuple(Change(name, row, None) for name, row in before.items() if name not in after),
        only_after=tuple(Change(name, None, row) for name, row in after.items() if name not in before),
        unchanged=len(both) - len(changed),
        bytes_per_device=(plan_a.bytes_per_device, plan_b.bytes_per_device),
    )


def _differs(change: Change) -> bool:
    return _what(change.before) != _what(change.after)


def _what(row: Row | None) -> tuple:
    return () if row is None else (row.shape, str(row.dtype), tuple(row.spec), row.bytes_per_device)


def _change_lines(changes: list[Change]) -> Iterator[tuple[str, ...]]:
    for title, members in grouped(changes, lambda change: (_what(change.before), _what(change.after))):
        before, after = members[0].before, members[0].after
        shapes = dict.fromkeys(f'{row.shape}' for row in (before, after) if row is not None)
        held = sum(_held(member.before) for member in members)
        then = sum(_held(member.after) for member in members)
        yield (
            title,
            ' -> '.join(shapes),
            'absent' if before is None else spec_text(before.spec),
            'absent' if after is None else spec_text(after.spec),
            f'{format_bytes(held)} -> {format_bytes(then)}',
            _signed(then - held),
        )


def _held(row: Row | None) -> int:
    return 0 if row is None else row.bytes_per_device


def _signed(count: int) -> str:
    return f'{"-" if count < 0 else "+"}{format_bytes(abs(count))}'
