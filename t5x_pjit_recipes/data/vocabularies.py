"""Vocabularies: text to token ids and back, with T5's special ids and sentinels."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np

from t5x_pjit_recipes import errors

NUM_BYTES = 256


class Vocabulary(Protocol):
    """What the data pipeline and the models ask of a vocabulary; SeqIO's vocabularies have it too.

    The last `extra_ids` of the `vocab_size` ids are sentinels.
    """

    pad_id: int
    eos_id: int
    unk_id: int
    extra_ids: int
    vocab_size: int

    def encode(self, text: str) -> Sequence[int]:
        """Turns text into ids, without EOS."""

    def decode(self, ids: Sequence[int]) -> str:
        """Turns ids into text, up to the first EOS."""


@dataclasses.dataclass(frozen=True)
class ByteVocabulary:
    """UTF-8 bytes as tokens, with the ids of ByT5: 0 pad, 1 EOS, 2 unknown, 3 to 258 the bytes, then the sentinels.

    Attributes:
      extra_ids: number of sentinels; 125 make the vocabulary 384 tokens large.

    >>> ByteVocabulary().encode('hi!')
    array([107, 108,  36], dtype=int32)
    >>> ByteVocabulary().decode([107, 108, 383, 36, 1, 99])
    'hi<extra_id_0>!'
    """

    pad_id: ClassVar[int] = 0
    eos_id: ClassVar[int] = 1
    unk_id: ClassVar[int] = 2
    first_byte_id: ClassVar[int] = 3

    extra_ids: int = 125

    def __post_init__(self) -> None:
        if self.extra_ids < 0:
            raise errors.DataError(
                f'Cannot make a ByteVocabulary with extra_ids={self.extra_ids}: a count is needed. Give 0 or more.'
            )

    @property
    def vocab_size(self) -> int:
        """The number of ids, sentinels included."""
        return self.first_byte_id + NUM_BYTES + self.extra_ids

    def encode(self, text: str) -> np.ndarray:
        """Turns text into one int32 id per UTF-8 byte, without EOS."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + np.int32(self.first_byte_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Turns ids into text up to the first EOS; pad and unknown ids vanish, bytes that are not UTF-8 give U+FFFD."""
        ids = [int(i) for i in ids]
        end = ids.index(self.eos_id) if self.eos_id in ids else len(ids)
        return b''.join(map(self._piece, ids[:end])).decode(errors='replace')

    def _piece(self, token: int) -> bytes:
        if 0 <= token - self.first_byte_id < NUM_BYTES:
            return bytes([token - self.first_byte_id])
        nth = self.vocab_size - 1 - token
        return f'<extra_id_{nth}>'.encode() if 0 <= nth < self.extra_ids else b''
