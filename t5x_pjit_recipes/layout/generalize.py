"""Few and readable patterns for many names: the shortest ends that tell apart what must be told apart."""

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from t5x_pjit_recipes.layout.paths import SEPARATOR

T = TypeVar('T', bound=Hashable)


def few_patterns(choices: Mapping[str, T]) -> list[tuple[str, T]]:
    r"""Finds patterns that give each name, matched as a whole, what it must get, in any order.

    Args:
      choices: name to what it must get.

    Returns:
      Pairs of a pattern and what it gives. Patterns tell names by their ends; layer numbers become `\d+`.

    >>> few_patterns({'h/0/q/kernel': 1, 'h/0/k/kernel': 1, 'h/1/q/kernel': 1, 'h/1/k/kernel': 1, 'h/0/o/kernel': 2})
    [('.*/(q|k)/kernel', 1), ('.*/o/kernel', 2)]
    >>> few_patterns({'h/0/attn/w': 1, 'h/1/attn/w': 1, 'mlp/attn/w': 2})
    [('.*/\\d+/attn/w', 1), ('mlp/attn/w', 2)]
    """
    merged: dict[tuple[T, str, bool], dict[str, list[str]]] = {}
    for (prefix, end), choice in _shortest_ends(choices).items():
        *stem, last = end.rsplit(SEPARATOR, 1)
        merged.setdefault((choice, prefix, bool(stem)), {}).setdefault(last, []).extend(stem)
    return [
        (_pattern(prefix, stems, lasts, {n for n, other in choices.items() if other == choice}, choices), choice)
        for (choice, prefix, _), by_last in merged.items()
        for stems, lasts in _by_stems(by_last)
    ]


def _by_stems(by_last: Mapping[str, list[str]]) -> list[tuple[tuple[str, ...], list[str]]]:
    """Puts last components that stand behind the same stems together."""
    together: dict[tuple[str, ...], list[str]] = {}
    for last, stems in by_last.items():
        together.setdefault(tuple(stems), []).append(last)
    return list(together.items())


def _pattern(prefix: str, stems: Sequence[str], lasts: Sequence[str], right: set[str], names: Iterable[str]) -> str:
    """Spells out the alternatives, or only the word that many end in, where all that it matches are right."""
    word = _common_end(stems).rpartition('_')[2]
    if len(stems) > 2 and len(word) > 3:
        short = f'.*{word}{SEPARATOR}{_either(lasts)}'
        if right.issuperset(name for name in names if re.fullmatch(short, name)):
            return short
    return prefix + (_either(stems) + SEPARATOR if stems else '') + _either(lasts)


def _shortest_ends(choices: Mapping[str, T]) -> dict[tuple[str, str], T]:
    """Finds for each name the shortest end, of two components or more, that tells what its array gets."""
    found: dict[tuple[str, str], T] = {}
    ends = {name: list(_ends(name)) for name in choices}
    still_open = set(choices)
    for level in range(max(map(len, ends.values()), default=0)):
        groups: dict[str, list[str]] = {}
        for name, known in ends.items():
            if level < len(known):
                groups.setdefault(known[level], []).append(name)
        for end, names in groups.items():
            if len({choices[name] for name in names}) == 1 and not still_open.isdisjoint(names):
                found[_prefix(end, names), end] = choices[names[0]]
                still_open.difference_update(names)
    return found


def _ends(name: str) -> Iterator[str]:
    """Yields patterns for ends of a name, from general to particular; numbers stand for any number first."""
    parts = [re.escape(part) for part in name.split(SEPARATOR)]
    loose = [re.sub(r'(?<![a-z])\d+$', r'\\d+', part) for part in parts]
    numbers = [r'\d+' if part.isdigit() else part for part in parts[-2:]]
    for tail in (numbers, parts[-2:]):
        spelled = [*loose[:-2], *tail]
        yield from (SEPARATOR.join(spelled[-count:]) for count in range(min(2, len(parts)), len(parts) + 1))
    yield SEPARATOR.join(parts)


def _prefix(end: str, names: Sequence[str]) -> str:
    longer = [name.count(SEPARATOR) > end.count(SEPARATOR) for name in names]
    return '.*/' if all(longer) else '(.*/)?' if any(longer) else ''


def _either(texts: Sequence[str]) -> str:
    texts = list(dict.fromkeys(texts))
    return texts[0] if len(texts) == 1 else f'({"|".join(texts)})'


def _common_end(texts: Sequence[str]) -> str:
    end = texts[0] if texts else ''
    while not all(text.endswith(end) for text in texts):
        end = end[1:]
    return end.rpartition(SEPARATOR)[2]
