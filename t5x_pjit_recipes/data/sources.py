"""Sources: where raw examples come from, split by split, each split a random-access sequence.

An example is a dict of features, or a string, which stands for `{'text': string}`.
"""

import abc
import glob
import mmap
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x_pjit_recipes import errors

Patterns = str | Sequence[str]

# A line that is not blank; what ends it is not part of it.
_LINE = rb'[^\S\r\n]*+\S[^\r\n]*+'
UNITS = {'line': _LINE, 'paragraph': _LINE + rb'(?:\r?\n' + _LINE + rb')*+', 'file': rb'(?s:.+)'}


def is_held_out(key: str | bytes, fraction: float) -> bool:
    """Says, by a stable hash of `key`, whether it belongs to the `fraction` that is held out of training.

    >>> [is_held_out(name, 0.5) for name in ('a', 'b', 'c')]
    [False, True, True]
    """
    return zlib.crc32(key.encode() if isinstance(key, str) else key) < fraction * 2**32


class Source(abc.ABC):
    """Named splits of raw examples; nothing is read before a split is asked for."""

    def __init__(self, splits: Sequence[str]):
        self.splits = tuple(splits)
        self._loaded: dict[str, Sequence[Any]] = {}

    @abc.abstractmethod
    def load(self, split: str) -> Sequence[Any]:
        """Opens one split, whose name is known to exist."""

    def examples(self, split: str) -> Sequence[Any]:
        """Returns the examples of a split, for random access.

        Raises:
          DataError: if there is no such split, or nothing is in it.
        """
        names = ', '.join(self.splits)
        if split not in self.splits:
            hint = errors.did_you_mean(split, self.splits)
            raise errors.DataError(f'Cannot read split {split!r}{hint}: the source has {names}. Name one of these.')
        if split not in self._loaded:
            self._loaded[split] = self.load(split)
        if not len(self._loaded[split]):
            raise errors.DataError(
                f'Cannot read split {split!r}: 0 examples are in it (splits: {names}). Add examples to it.'
            )
        return self._loaded[split]


class SequenceSource(Source):
    """Examples from anything with `len` and `[]`: lists, arrays of structs, datasets of other libraries.

    Args:
      splits: split name to its examples, or to a function that returns them, called when first needed.
    """

    def __init__(self, splits: Mapping[str, Sequence[Any] | Callable[[], Sequence[Any]]]):
        super().__init__(tuple(splits))
        self._given = dict(splits)

    def load(self, split: str) -> Sequence[Any]:
        """Returns what was given for the split, or calls it."""
        given = self._given[split]
        return given() if callable(given) else given


class TextFileSource(Source):
    """Examples from UTF-8 text files, found by glob and read where they lie.

    Args:
      patterns: globs (`**` reaches into folders) of the split 'train', or split name to its globs.
      unit: what one example is: a 'line', a 'paragraph' (lines between blank ones) or a whole 'file'. Blank ones are
        left out.
      held_out: fraction of examples that form a split 'validation', chosen by a hash of their text, so that equal ones
        stay on one side.
    """

    def __init__(self, patterns: Patterns | Mapping[str, Patterns], *, unit: str = 'line', held_out: float = 0.0):
        named = patterns if isinstance(patterns, Mapping) else {'train': patterns}
        _check_text_files(named, unit, held_out)
        super().__init__((*named, 'validation') if held_out else tuple(named))
        self._patterns = {split: (p,) if isinstance(p, str) else tuple(p) for split, p in named.items()}
        self._unit, self._held_out = unit, held_out

    def load(self, split: str) -> Sequence[str]:
        """Finds the split's files and indexes them."""
        patterns = self._patterns['train' if self._held_out else split]
        files = [file for pattern in patterns for file in _find(pattern)]
        texts = TextSpans(files, UNITS[self._unit])
        if not self._held_out:
            return texts
        return texts.select(lambda text: is_held_out(text, self._held_out) == (split == 'validation'))


def _check_text_files(patterns: Mapping[str, Patterns], unit: str, held_out: float) -> None:
    if unit not in UNITS:
        raise errors.DataError(
            f'Cannot read text files by unit={unit!r}{errors.did_you_mean(unit, UNITS)}: units are {", ".join(UNITS)}.'
        )
    if not 0 <= held_out < 1:
        raise errors.DataError(f'Cannot hold out {held_out} of the examples: a fraction is needed. Give 0 <= x < 1.')
    if held_out and set(patterns) != {'train'}:
        raise errors.DataError(
            f"Cannot hold out {held_out} with the splits {', '.join(patterns)}: held_out makes 'validation' from "
            "'train'. Leave held_out away, or give the patterns of train alone."
        )


def _find(pattern: str) -> list[str]:
    files = sorted(filter(os.path.isfile, glob.glob(os.path.expanduser(pattern), recursive=True)))
    if not files:
        raise errors.DataError(
            f'Cannot read text files {pattern!r}: 0 files match (in {os.getcwd()!r}). Correct the pattern.'
        )
    return files


class TextSpans(Sequence[str]):
    """The parts of text files that match a pattern of bytes; files are mapped into memory, never read whole."""

    def __init__(self, files: Sequence[str], pattern: bytes):
        self._files = [file for file in files if os.path.getsize(file)]
        self._bytes = [_map_file(file) for file in self._files]
        found = [_spans(number, content, pattern) for number, content in enumerate(self._bytes)]
        self._index = np.concatenate([np.zeros((0, 3), np.int64), *found])

    def select(self, keep: Callable[[bytes], bool]) -> 'TextSpans':
        """Returns the spans whose bytes `keep` says yes to."""
        chosen = object.__new__(TextSpans)
        chosen._files, chosen._bytes = self._files, self._bytes
        mask = [keep(self._bytes[number][start:stop]) for number, start, stop in self._index]
        chosen._index = self._index[np.asarray(mask, bool)]
        return chosen

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> str:
        number, start, stop = self._index[index]
        try:
            return self._bytes[number][start:stop].decode()
        except UnicodeDecodeError as error:
            raise errors.DataError(
                f'Cannot read {self._files[number]!r} as UTF-8: byte {start + error.start} is '
                f'0x{error.object[error.start]:02x} ({error.reason}). Convert the file to UTF-8.'
            ) from error


def _map_file(file: str) -> mmap.mmap:
    with open(file, 'rb') as f:
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


def _spans(number: int, content: mmap.mmap, pattern: bytes) -> np.ndarray:
    edges = np.fromiter((edge for match in re.finditer(pattern, content) for edge in match.span()), np.int64)
    return np.insert(edges.reshape(-1, 2), 0, number, axis=1)
