"""Feature converters: from a task's features to the features that a model's batches have."""

import abc
from collections.abc import Mapping
from typing import ClassVar

import jax
import numpy as np

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.data.packing import SEGMENT_KINDS

Example = Mapping[str, np.ndarray]


def shift_right(ids: np.ndarray) -> np.ndarray:
    """Moves ids (length,) one to the right; 0 comes first and the last is lost.

    >>> shift_right(np.array([5, 6, 1]))
    array([0, 5, 6])
    """
    return np.concatenate([np.zeros_like(ids[:1]), ids[:-1]])


class FeatureConverter(abc.ABC):
    """Says which features a model's batches have, and makes them from a task's.

    Attributes:
      TASK_FEATURES: the task features that it takes, all of them needed.
      MODEL_FEATURES: name to dtype of the model features that it makes.
      SIDES: 'encoder', 'decoder' or both, each with its leading feature; packed batches have segment ids and positions
        (int32) for each.
      pack: whether several examples share a row.
    """

    TASK_FEATURES: ClassVar[tuple[str, ...]]
    MODEL_FEATURES: ClassVar[Mapping[str, type]]
    SIDES: ClassVar[Mapping[str, str]]

    def __init__(self, pack: bool = False):
        self.pack = pack

    @abc.abstractmethod
    def convert_example(self, example: Example) -> dict[str, np.ndarray]:
        """Makes the model features of one example, not padded; all of a side's features are equally long."""

    @abc.abstractmethod
    def side_lengths(self, task_feature_lengths: Mapping[str, int]) -> dict[str, int]:
        """Returns the row length of each side."""

    def get_model_feature_lengths(self, task_feature_lengths: Mapping[str, int]) -> dict[str, int]:
        """Returns the row length of every model feature, segment ids and positions not included."""
        by_side = self.side_lengths(task_feature_lengths)
        return {name: by_side[name.split('_')[0]] for name in self.MODEL_FEATURES}

    def element_spec(self, batch_size: int, task_feature_lengths: Mapping[str, int]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of every feature of a batch."""
        lengths = self.get_model_feature_lengths(task_feature_lengths)
        spec = {name: (lengths[name], dtype) for name, dtype in self.MODEL_FEATURES.items()}
        if self.pack:
            sides = self.side_lengths(task_feature_lengths)
            spec |= {f'{side}_{kind}': (length, np.int32) for side, length in sides.items() for kind in SEGMENT_KINDS}
        return {name: jax.ShapeDtypeStruct((batch_size, length), dtype) for name, (length, dtype) in spec.items()}

    def check_features(self, names: Mapping[str, int]) -> None:
        """Raises DataError unless `names` are exactly the task features that it takes."""
        faults = [f'{name}: the converter does not take it' for name in names if name not in self.TASK_FEATURES]
        faults += [f'{name}: the converter needs it' for name in self.TASK_FEATURES if name not in names]
        if faults:
            raise errors.DataError(
                f'Cannot make batches of {", ".join(names) or "no features"} with {type(self).__name__}: it takes '
                f'{", ".join(self.TASK_FEATURES)}. Change task_feature_lengths, the task or the converter:\n'
                + errors.offenders(faults)
            )


class EncDecFeatureConverter(FeatureConverter):
    """For encoder-decoder models: inputs go to the encoder, targets to the decoder."""

    TASK_FEATURES = ('inputs', 'targets')
    MODEL_FEATURES = {
        'encoder_input_tokens': np.int32,
        'decoder_target_tokens': np.int32,
        'decoder_input_tokens': np.int32,
        'decoder_loss_weights': np.int32,
    }
    SIDES = {'encoder': 'encoder_input_tokens', 'decoder': 'decoder_target_tokens'}

    def convert_example(self, example: Example) -> dict[str, np.ndarray]:
        """Makes the four model features of one example."""
        return {'encoder_input_tokens': example['inputs'], **_decoder_features(example['targets'])}

    def side_lengths(self, task_feature_lengths: Mapping[str, int]) -> dict[str, int]:
        """The encoder has the inputs' length, the decoder the targets'."""
        return {'encoder': task_feature_lengths['inputs'], 'decoder': task_feature_lengths['targets']}


class LMFeatureConverter(FeatureConverter):
    """For decoder-only language models: every target is predicted from those before it."""

    TASK_FEATURES = ('targets',)
    MODEL_FEATURES = {
        'decoder_target_tokens': np.int32,
        'decoder_input_tokens': np.int32,
        'decoder_loss_weights': np.int32,
    }
    SIDES = {'decoder': 'decoder_target_tokens'}

    def convert_example(self, example: Example) -> dict[str, np.ndarray]:
        """Makes the three model features of one example."""
        return _decoder_features(example['targets'])

    def side_lengths(self, task_feature_lengths: Mapping[str, int]) -> dict[str, int]:
        """The decoder has the targets' length."""
        return {'decoder': task_feature_lengths['targets']}


class PrefixLMFeatureConverter(LMFeatureConverter):
    """For decoder-only models that read a prefix: inputs and targets in one sequence, loss on the targets alone.

    `decoder_causal_attention` is 1 where tokens may look at each other both ways: the inputs as the decoder reads them,
    so shifted right, together with the 0 that comes first.
    """

    TASK_FEATURES = ('inputs', 'targets')
    MODEL_FEATURES = {**LMFeatureConverter.MODEL_FEATURES, 'decoder_causal_attention': np.int32}

    def convert_example(self, example: Example) -> dict[str, np.ndarray]:
        """Makes the four model features of one example."""
        tokens = np.concatenate([example['inputs'], example['targets']])
        place = np.arange(len(tokens))
        return {
            **_decoder_features(tokens),
            'decoder_loss_weights': (place >= len(example['inputs'])).astype(np.int32),
            'decoder_causal_attention': (place <= len(example['inputs'])).astype(np.int32),
        }

    def side_lengths(self, task_feature_lengths: Mapping[str, int]) -> dict[str, int]:
        """The decoder has room for inputs and targets."""
        return {'decoder': task_feature_lengths['inputs'] + task_feature_lengths['targets']}


def _decoder_features(targets: np.ndarray) -> dict[str, np.ndarray]:
    return {
        'decoder_target_tokens': targets,
        'decoder_input_tokens': shift_right(targets),
        'decoder_loss_weights': np.ones(len(targets), np.int32),
    }
