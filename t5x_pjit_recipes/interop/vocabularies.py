"""Vocabularies out of Hugging Face's folders, so that a T5 is fine-tuned with its own tokens."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from t5x_pjit_recipes.data import Task, TaskRegistry, Vocabulary
from t5x_pjit_recipes.errors import DataError, offenders
from t5x_pjit_recipes.interop import hugging_face
from t5x_pjit_recipes.interop.tokenizer_files import TOKENIZER_FILE, read_tokenizer

TOKENIZER_CONFIG = 'tokenizer_config.json'
SPECIAL_TOKENS = {'pad': '<pad>', 'eos': '</s>', 'unk': '<unk>'}
SENTINEL = '<extra_id_{}>'


@dataclasses.dataclass(frozen=True)
class HuggingFaceVocabulary:
    """The tokenizer.json of a folder, with T5's sentinels.

    ByT5's folders have none, because bytes need none: `data.ByteVocabulary` is the one for them.

    Attributes:
      folder: where it is.

    Raises:
      DataError: if there is none, or listing what it lacks of a T5's vocabulary.
      ConfigError: if tokenizers is not installed.
    """

    folder: str | os.PathLike[str]

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise DataError(
                f'Cannot use {str(self._path)!r} as the vocabulary of a T5: it is of another kind. Take the tokenizer '
                f'of a T5:\n{offenders(faults)}'
            )

    @property
    def pad_id(self) -> int:
        """The id of padding."""
        return self._special_ids['pad']

    @property
    def eos_id(self) -> int:
        """The id that ends a text."""
        return self._special_ids['eos']

    @property
    def unk_id(self) -> int:
        """The id of what is not in the vocabulary."""
        return self._special_ids['unk']

    @functools.cached_property
    def vocab_size(self) -> int:
        """The number of ids, sentinels included; a model's table may be padded beyond."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @functools.cached_property
    def extra_ids(self) -> int:
        """The number of sentinels, which are the last ids."""
        return len(self._sentinels)

    def encode(self, text: str) -> np.ndarray:
        """Turns text into int32 ids, without EOS."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Turns ids into text up to the first EOS; padding vanishes."""
        ids = [int(i) for i in ids]
        end = ids.index(self.eos_id) if self.eos_id in ids else len(ids)
        return self._tokenizer.decode([i for i in ids[:end] if i != self.pad_id], skip_special_tokens=False)

    @property
    def _path(self) -> pathlib.Path:
        return pathlib.Path(self.folder) / TOKENIZER_FILE

    @functools.cached_property
    def _tokenizer(self) -> Any:
        tokenizer = read_tokenizer(self.folder)
        if tokenizer is None:
            raise DataError(
                f'Cannot read a vocabulary from {str(self._path)!r}: there is no such file. For a ByT5 use '
                'data.ByteVocabulary; for others, AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of '
                'transformers writes it.'
            )
        return tokenizer

    @functools.cached_property
    def _special_ids(self) -> dict[str, int | None]:
        config = self._path.with_name(TOKENIZER_CONFIG)
        named = hugging_face.read_json(config) if config.is_file() else {}
        tokens = {kind: named.get(f'{kind}_token') or usual for kind, usual in SPECIAL_TOKENS.items()}
        text = {kind: token['content'] if isinstance(token, dict) else token for kind, token in tokens.items()}
        return {kind: self._tokenizer.token_to_id(token) for kind, token in text.items()}

    @functools.cached_property
    def _sentinels(self) -> list[int]:
        vocabulary, ids = self._tokenizer.get_vocab(with_added_tokens=True), []
        while (token := SENTINEL.format(len(ids))) in vocabulary:
            ids.append(vocabulary[token])
        return ids

    def _faults(self) -> Iterator[str]:
        for kind, token_id in self._special_ids.items():
            if token_id is None:
                yield f'{kind}_token: it has none such as {SPECIAL_TOKENS[kind]}'
        if self.pad_id:
            yield f'pad_token: its id is {self.pad_id}, and padding is 0 here'
        wanted = [self.vocab_size - 1 - n for n in range(self.extra_ids)]
        if wrong := [n for n, token_id in enumerate(self._sentinels) if token_id != wanted[n]]:
            n = wrong[0]
            yield (
                f'{len(wrong)} of {self.extra_ids} sentinels: {SENTINEL.format(n)} has id {self._sentinels[n]}, and '
                f'the last ids count down from {self.vocab_size - 1}, so that it would have {wanted[n]}'
            )


def retokenize(task: str | Task, vocabulary: Vocabulary) -> Task:
    """Returns a task as it is, but with another vocabulary for all its features.

    Args:
      task: the task or its name.
      vocabulary: what its texts become ids by.
    """
    task = task if isinstance(task, Task) else TaskRegistry.get(task)
    features = {
        name: dataclasses.replace(feature, vocabulary=vocabulary) for name, feature in task.output_features.items()
    }
    return dataclasses.replace(task, output_features=features)
