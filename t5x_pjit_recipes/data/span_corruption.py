"""Span corruption, the pre-training objective of T5 (Raffel et al. 2020, section 3.1.4), on numpy arrays.

Spans of tokens are cut out and a sentinel marks each place; the targets are the sentinels, each followed by what was
cut out there. Spans have random lengths, but their number and the number of cut tokens depend on the length alone.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from t5x_pjit_recipes import errors


@dataclasses.dataclass(frozen=True)
class SpanCorruption:
    """How much is cut out, and in what pieces.

    Attributes:
      noise_density: fraction of the tokens to cut out.
      mean_noise_span_length: mean number of tokens in a span.

    >>> noise = SpanCorruption()
    >>> noise.raw_length(512, eos=1), noise.lengths(568)
    (568, {'inputs': 511, 'targets': 113})
    """

    noise_density: float = 0.15
    mean_noise_span_length: float = 3.0

    def __post_init__(self) -> None:
        if not (0 < self.noise_density < 1 and self.mean_noise_span_length > 0):
            raise errors.DataError(
                f'Cannot corrupt spans with noise_density={self.noise_density}, mean_noise_span_length='
                f'{self.mean_noise_span_length}: the first must lie between 0 and 1, the second above 0. Change them.'
            )

    def counts(self, length: int) -> tuple[int, int]:
        """Returns how many of `length` tokens are cut out, and in how many spans."""
        if length < 2:
            return 0, 0
        num_noise = min(max(round(length * self.noise_density), 1), length - 1)
        num_spans = max(round(num_noise / self.mean_noise_span_length), 1)
        return num_noise, min(num_spans, num_noise, length - num_noise)

    def lengths(self, length: int) -> dict[str, int]:
        """Returns how many inputs and targets `length` raw tokens give, EOS not counted."""
        num_noise, num_spans = self.counts(length)
        return {'inputs': length - num_noise + num_spans, 'targets': num_noise + max(num_spans, 1)}

    def raw_length(self, inputs_length: int, *, eos: int = 0) -> int:
        """Returns the most raw tokens whose inputs fit `inputs_length`, of which EOS takes `eos`.

        Raises:
          DataError: if not even two raw tokens fit.
        """
        room = inputs_length - eos
        if room < self.lengths(2)['inputs']:
            raise errors.DataError(
                f'Cannot corrupt spans to inputs of {inputs_length} tokens: one token, one sentinel and {eos} EOS need '
                f'{self.lengths(2)["inputs"] + eos}. Make the inputs longer.'
            )
        length = room
        while self.lengths(length + 1)['inputs'] <= room:
            length += 1
        return length

    def mask(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Draws which of `length` tokens are cut out: a bool array that starts kept and ends cut out."""
        num_noise, num_spans = self.counts(length)
        if not num_spans:
            return np.zeros(length, bool)
        kept = random_parts(length - num_noise, num_spans, rng)
        cut = random_parts(num_noise, num_spans, rng)
        return np.repeat(np.tile([False, True], num_spans), np.stack([kept, cut], axis=1).ravel())

    def corrupt(self, tokens: np.ndarray, rng: np.random.Generator, first_sentinel: int) -> dict[str, np.ndarray]:
        """Cuts random spans out of `tokens` (length,), with sentinels that count down from `first_sentinel`."""
        mask = self.mask(len(tokens), rng)
        return {
            'inputs': replace_spans(tokens, mask, first_sentinel),
            'targets': replace_spans(tokens, ~mask, first_sentinel),
        }


def random_parts(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Divides `total` into `parts` positive numbers, every way equally likely."""
    edges = np.full(parts + 1, total)
    edges[0] = 0
    edges[1:-1] = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
    return edges[1:] - edges[:-1]


def replace_spans(tokens: np.ndarray, mask: np.ndarray, first_sentinel: int) -> np.ndarray:
    """Puts one sentinel in place of each run of True in `mask`, counting down.

    >>> replace_spans(np.array([5, 6, 7, 8, 9]), np.array([False, True, True, False, True]), 383)
    array([  5, 383,   8, 382])
    """
    starts = mask & ~np.concatenate([[False], mask[:-1]])
    sentinels = first_sentinel + 1 - np.cumsum(starts)
    return np.where(starts, sentinels, tokens)[starts | ~mask].astype(tokens.dtype)


def check_room(corruption: SpanCorruption, length: int, room: Mapping[str, int], num_sentinels: int) -> None:
    """Raises DataError if the targets of `length` raw tokens do not fit, or sentinels run out.

    Args:
      corruption: the noise.
      length: raw tokens in an example.
      room: tokens that fit without EOS, by feature.
      num_sentinels: sentinels in the vocabulary.
    """
    needed, num_spans = corruption.lengths(length)['targets'], corruption.counts(length)[1]
    if needed > room['targets']:
        raise errors.DataError(
            f'Cannot corrupt spans of {length} raw tokens into {room["inputs"]} inputs and {room["targets"]} targets '
            f'(EOS not counted): the targets need {needed}. Lengthen the targets, or shorten the inputs.'
        )
    if num_spans > num_sentinels:
        raise errors.DataError(
            f'Cannot corrupt {num_spans} spans of {length} raw tokens: the vocabulary has {num_sentinels} sentinels '
            '(extra_ids). Shorten the inputs, lengthen the spans, or take a vocabulary with more.'
        )
