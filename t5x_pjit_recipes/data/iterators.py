"""Iterators over batches: one that can be saved and put back to any place, one that can be read again and again."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import grain
import jax
import numpy as np

from t5x_pjit_recipes import errors

PREFETCH_BATCHES = 2

Batch = dict[str, np.ndarray]
ElementSpec = Mapping[str, jax.ShapeDtypeStruct]


class DatasetIterator(Iterator[Batch]):
    """Batches of one process, with a state that says exactly which of them were handed out.

    Batches are made ahead in a thread; the state does not count them before they are handed out.

    Args:
      build: makes a Grain data set of batches from a seed.
      seed: the seed to begin with.
      element_spec: shapes and dtypes of a batch.
      identity: what must be the same, in values that JSON has, where a state is saved and where it is restored.

    Attributes:
      element_spec: shapes and dtypes of a batch.
      close: stops reading ahead, after which there are no batches; happens by itself when the iterator is dropped.
    """

    def __init__(
        self,
        build: Callable[[int], grain.IterDataset],
        seed: int,
        element_spec: ElementSpec,
        identity: Mapping[str, Any],
    ):
        self._build, self._identity = build, dict(identity)
        self.element_spec = dict(element_spec)
        self._start(seed)

    def _start(self, seed: int) -> None:
        self._seed, self._num_batches = seed, 0
        ahead = grain.experimental.ThreadPrefetchIterDataset(self._build(seed), prefetch_buffer_size=PREFETCH_BATCHES)
        self._running = [iter(ahead)]
        # Called at the interpreter's exit too: a thread that is still in Grain's C++ then would abort the process.
        self.close = weakref.finalize(self, _close, self._running)

    @property
    def _batches(self) -> grain.DatasetIterator:
        if not self._running:
            raise errors.DataError(
                f'Cannot read on after {self._num_batches} batches: the iterator was closed. Make another one.'
            )
        return self._running[0]

    def __next__(self) -> Batch:
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._num_batches:
                raise errors.DataError(
                    f'Cannot make a batch of {self._identity}: the data end before the first one is full. '
                    'Make batch_size smaller, or num_epochs larger.'
                ) from None
            raise
        self._num_batches += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns where the iterator stands: a small dict of what JSON has."""
        return {
            'identity': self._identity,
            'seed': self._seed,
            'num_batches': self._num_batches,
            'position': self._batches.get_state(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to where `get_state` was called, here or in another run; a seed drawn from the clock comes with it.

        Raises:
          DataError: if the state belongs to other data, or to a process that reads another share of them.
        """
        theirs = state['identity']
        names = [name for name in {**self._identity, **theirs} if theirs.get(name) != self._identity.get(name)]
        if names:
            raise errors.DataError(
                f'Cannot restore the position in the data after batch {state["num_batches"]}: it was saved with other '
                'settings. Set them as they were, or start without the saved position:\n'
                + errors.offenders(f'{n}: saved {theirs.get(n)!r}, now {self._identity.get(n)!r}' for n in names)
            )
        if state['seed'] != self._seed:
            self.close()
            self._start(state['seed'])
        self._batches.set_state(state['position'])
        self._num_batches = state['num_batches']


def _close(running: list[grain.DatasetIterator]) -> None:
    while running:
        running.pop().close()


class EvalDataset:
    """The first batches of a data set, the same ones in every pass.

    Args:
      dataset: a Grain data set of batches without end.
      num_batches: how many of them make a pass.
      element_spec: shapes and dtypes of a batch.
      cache: whether to keep them in memory after the first pass.
    """

    def __init__(self, dataset: grain.IterDataset, num_batches: int, element_spec: ElementSpec, cache: bool):
        self.element_spec = dict(element_spec)
        self._dataset, self._num_batches = dataset, num_batches
        self._cache: list[Batch] | None = None
        self._keep = cache

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        batches = self._cache or islice(self._dataset, self._num_batches)
        if not self._keep:
            return iter(batches)
        self._cache = list(batches)
        return iter(self._cache)
