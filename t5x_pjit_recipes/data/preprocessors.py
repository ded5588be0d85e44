"""Preprocessors: steps from raw examples to token features, each a function of a whole data set.

A preprocessor is called as `preprocessor(dataset, output_features, lengths)` and returns another `grain.MapDataset`;
`lengths` are `DatasetConfig.task_feature_lengths`. `dataset.random_map` draws by the seed and the example's index.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import grain
import numpy as np

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.data.span_corruption import SpanCorruption, check_room
from t5x_pjit_recipes.data.tasks import Feature, Preprocessor

Example = dict[str, Any]
Features = Mapping[str, Feature]
Lengths = Mapping[str, int]


def map_examples(fn: Callable[[Example], Example]) -> Preprocessor:
    """Makes a preprocessor that applies `fn` to every example."""
    return lambda dataset, output_features, lengths: dataset.map(fn)


def rekey(**sources: str) -> Preprocessor:
    """Makes a preprocessor that renames: `rekey(targets='text')` keeps the feature text alone and calls it targets."""
    return map_examples(lambda example: {new: example[old] for new, old in sources.items()})


def tokenize(dataset: grain.MapDataset, output_features: Features, lengths: Lengths) -> grain.MapDataset:
    """Turns the text of every output feature into int32 ids; ids stay as they are, other features are dropped."""

    def ids(name: str, value: Any) -> np.ndarray:
        value = output_features[name].vocabulary.encode(value) if isinstance(value, str) else value
        return np.asarray(value, np.int32)

    def fn(example: Example) -> Example:
        found = {name: ids(name, example[name]) for name in output_features if name in example}
        if not found:
            raise errors.DataError(
                f'Cannot tokenize an example that has {", ".join(example)}: the features of the task are '
                f'{", ".join(output_features)}. Put rekey({next(iter(output_features))}=...) before tokenize.'
            )
        return found

    return dataset.map(fn)


def append_eos(dataset: grain.MapDataset, output_features: Features, lengths: Lengths) -> grain.MapDataset:
    """Appends EOS to every feature that wants one."""
    return dataset.map(lambda example: _with_eos(example, output_features, {}))


def append_eos_after_trim(dataset: grain.MapDataset, output_features: Features, lengths: Lengths) -> grain.MapDataset:
    """Shortens every feature that wants EOS so that it fits with EOS, and appends that."""
    return dataset.map(lambda example: _with_eos(example, output_features, lengths))


def _with_eos(example: Example, output_features: Features, lengths: Lengths) -> Example:
    def fn(name: str, ids: np.ndarray) -> np.ndarray:
        if name not in output_features or not output_features[name].add_eos:
            return ids
        most = lengths[name] - 1 if name in lengths else None
        return np.append(ids[:most], np.int32(output_features[name].vocabulary.eos_id))

    return {name: fn(name, ids) for name, ids in example.items()}


def split_targets(dataset: grain.MapDataset, output_features: Features, lengths: Lengths) -> grain.MapDataset:
    """Joins the targets of all examples and cuts them into rows of exactly the targets' length."""
    return TokenChunks(dataset, 'targets', lengths['targets'], output_features['targets'].vocabulary.vocab_size)


def span_corruption(noise_density: float = 0.15, mean_noise_span_length: float = 3.0) -> Preprocessor:
    """Makes T5's pre-training step: targets are joined, cut into chunks, and spans of each chunk are corrupted.

    Chunks are as long as makes the inputs, with EOS, exactly as long as asked for; only the last one may be shorter.

    Raises:
      DataError: when applied, if the targets do not fit their length or the vocabulary has too few sentinels.
    """
    corruption = SpanCorruption(noise_density, mean_noise_span_length)

    def apply(dataset: grain.MapDataset, output_features: Features, lengths: Lengths) -> grain.MapDataset:
        eos = {name: int(output_features[name].add_eos) for name in ('inputs', 'targets')}
        vocabulary = output_features['targets'].vocabulary
        raw_length = corruption.raw_length(lengths['inputs'], eos=eos['inputs'])
        room = {name: lengths[name] - eos[name] for name in eos}
        check_room(corruption, raw_length, room, vocabulary.extra_ids)
        chunks = TokenChunks(dataset, 'targets', raw_length, vocabulary.vocab_size)
        first_sentinel = vocabulary.vocab_size - 1
        return chunks.random_map(lambda example, rng: corruption.corrupt(example['targets'], rng, first_sentinel))

    return apply


class TokenChunks(grain.MapDataset):
    """One feature of all examples, joined and cut into chunks of one length; the last may be shorter.

    The joined tokens are kept in memory (2 bytes each for up to 65,536 ids), which lets chunks be shuffled globally.

    Args:
      parent: examples with token ids.
      feature: which feature to join.
      length: tokens in a chunk.
      vocab_size: one more than the largest id.
    """

    def __init__(self, parent: grain.MapDataset, feature: str, length: int, vocab_size: int):
        super().__init__(parent)
        self._feature, self._length = feature, length
        self._dtype = np.min_scalar_type(vocab_size - 1)

    @functools.cached_property
    def _tokens(self) -> np.ndarray:
        examples = (self._parent[i] for i in range(len(self._parent)))
        parts = [e[self._feature].astype(self._dtype) for e in examples if e is not None]
        return np.concatenate([np.zeros(0, self._dtype), *parts])

    def __len__(self) -> int:
        return -(-len(self._tokens) // self._length)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        start = index % len(self) * self._length
        return {self._feature: self._tokens[start : start + self._length].astype(np.int32)}


# Text to text, for examples that have inputs and targets.
TEXT_TO_TEXT = (tokenize, append_eos_after_trim)
# T5's pre-training on plain text.
SPAN_CORRUPTION = (rekey(targets='text'), tokenize, span_corruption(), append_eos_after_trim)
# Language modelling on plain text: EOS ends each example, rows are full.
LANGUAGE_MODEL = (rekey(targets='text'), tokenize, append_eos, split_targets)
