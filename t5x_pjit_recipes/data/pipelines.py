"""From a DatasetConfig to batches: examples are shuffled, dealt to processes, converted, packed or padded, and batched.

Without packing, the batches of all processes together are the same whatever their number.
"""

import time
import warnings
from collections.abc import Mapping
from typing import Any

import grain
import jax
import numpy as np
from jax.experimental import multihost_utils

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.data.config import DatasetConfig
from t5x_pjit_recipes.data.feature_converters import FeatureConverter
from t5x_pjit_recipes.data.iterators import Batch, DatasetIterator, EvalDataset
from t5x_pjit_recipes.data.packing import pack_rows, pad_rows
from t5x_pjit_recipes.data.tasks import Task
from t5x_pjit_recipes.data.vocabularies import Vocabulary

# Evaluations without a seed of their own are to be comparable between runs.
EVAL_SEED = 0


def get_vocabulary(cfg: DatasetConfig) -> tuple[Vocabulary, Vocabulary]:
    """Returns the vocabularies of inputs and targets; a task without these features must have a single one.

    Raises:
      DataError: if the task has no feature, or several vocabularies.
    """
    features = cfg.resolve_task().output_features
    if 'inputs' in features and 'targets' in features:
        return features['inputs'].vocabulary, features['targets'].vocabulary
    vocabularies = [feature.vocabulary for feature in features.values()]
    if not vocabularies or any(vocabulary != vocabularies[0] for vocabulary in vocabularies):
        raise errors.DataError(
            f"Cannot tell the vocabulary of {cfg.mixture_or_task_name!r}: it has not both 'inputs' and 'targets', and "
            f'{len(vocabularies)} other features do not share one. Name the features inputs and targets:\n'
            + errors.offenders(f'{name}: {feature.vocabulary}' for name, feature in features.items())
        )
    return vocabularies[0], vocabularies[0]


def verify_matching_vocabs(cfg: DatasetConfig, model: Any) -> None:
    """Raises DataError unless the task and the model have the same vocabularies."""
    ours = dict(zip(('input', 'output'), get_vocabulary(cfg), strict=True))
    theirs = {'input': model.input_vocabulary, 'output': model.output_vocabulary}
    faults = [f'{side}: task {ours[side]}, model {theirs[side]}' for side in ours if ours[side] != theirs[side]]
    if faults:
        raise errors.DataError(
            f'Cannot train on {cfg.mixture_or_task_name!r}: its vocabularies are not those of the model. '
            'Give the model the vocabularies of the task:\n' + errors.offenders(faults)
        )


def get_dataset(
    cfg: DatasetConfig,
    shard_id: int,
    num_shards: int,
    feature_converter_cls: type[FeatureConverter],
    num_epochs: int | None = None,
    continue_from_last_checkpoint: bool = False,
) -> DatasetIterator:
    """Makes the iterator over one process's rows of the global batches.

    Args:
      cfg: the data set.
      shard_id: which of the shards this process reads, from the partitioner's data layout.
      num_shards: how many shards there are; `cfg.batch_size // num_shards` rows of each batch are this process's.
      feature_converter_cls: the model's `FEATURE_CONVERTER_CLS`.
      num_epochs: passes over the data, each in its own order; None goes on for ever. Rows that do not fill the last
        batch are left out, so that all processes see equally many batches.
      continue_from_last_checkpoint: refused; `set_state` does it.

    Raises:
      DataError: if task, split, features or lengths do not fit each other, or the batch cannot be divided.
    """
    if continue_from_last_checkpoint:
        raise errors.DataError(
            'Cannot make a data set with continue_from_last_checkpoint=True: the position is in the checkpoint. '
            'Give what get_state() returned to set_state().'
        )
    reader = _Reader(cfg, shard_id, num_shards, feature_converter_cls)
    identity = reader.identity() | {'num_epochs': num_epochs}
    seed = _shared_seed() if cfg.seed is None else cfg.seed
    return DatasetIterator(lambda seed: reader.batches(seed, num_epochs), seed, reader.element_spec, identity)


def get_training_eval_datasets(
    cfg: DatasetConfig,
    shard_id: int,
    num_shards: int,
    eval_steps: int,
    feature_converter_cls: type[FeatureConverter],
    deterministic: bool = False,
    model_dir: str | None = None,
    start_step: int = 0,
) -> dict[str, EvalDataset]:
    """Makes what to evaluate on during training: `eval_steps` batches, the same ones each time.

    A split that is too small is repeated. A task that lacks the split is left out, with a warning.

    Args:
      cfg: the data set.
      shard_id: as for `get_dataset`.
      num_shards: as for `get_dataset`.
      eval_steps: number of batches.
      feature_converter_cls: as for `get_dataset`.
      deterministic: changes nothing, batches always depend on the seed alone.
      model_dir: not needed here.
      start_step: not needed here.

    Returns:
      Task name to an iterable of batches that can be read many times.
    """
    task = cfg.resolve_task()
    if cfg.split not in task.splits:
        hint = errors.did_you_mean(cfg.split, task.splits)
        warnings.warn(f'No evaluation on {task.name}: it has no split {cfg.split!r}{hint}.', stacklevel=2)
        return {}
    reader = _Reader(cfg, shard_id, num_shards, feature_converter_cls)
    batches = reader.batches(EVAL_SEED if cfg.seed is None else cfg.seed, None, deal_rows=cfg.pack)
    return {task.name: EvalDataset(batches, eval_steps, reader.element_spec, cfg.use_memory_cache)}


class _Reader:
    """One process's way from a config to batches, checked where it is made."""

    def __init__(self, cfg: DatasetConfig, shard_id: int, num_shards: int, converter_cls: type[FeatureConverter]):
        _check_shards(cfg.batch_size, shard_id, num_shards)
        self.cfg, self.task = cfg, cfg.resolve_task()
        self.shard_id, self.num_shards = int(shard_id), int(num_shards)
        self.converter = converter_cls(pack=cfg.pack)
        self.converter.check_features(cfg.task_feature_lengths)
        self.rows = cfg.batch_size // self.num_shards
        self.lengths = self.converter.get_model_feature_lengths(cfg.task_feature_lengths)
        self.element_spec = self.converter.element_spec(self.rows, cfg.task_feature_lengths)

    def identity(self) -> dict[str, Any]:
        """What two readers must share to read the same batches; a seed from the clock is not part of it."""
        cfg = self.cfg
        return {
            'task': self.task.name,
            'split': cfg.split,
            'num_source_examples': len(self.task.source.examples(cfg.split)),
            'seed': cfg.seed,
            'shuffle': cfg.shuffle,
            'pack': cfg.pack,
            'batch_size': cfg.batch_size,
            'task_feature_lengths': dict(cfg.task_feature_lengths),
            'trim_output_features': cfg.trim_output_features,
            'feature_converter': type(self.converter).__name__,
            'shard_id': self.shard_id,
            'num_shards': self.num_shards,
        }

    def batches(self, seed: int, num_epochs: int | None, deal_rows: bool | None = None) -> grain.IterDataset:
        """Makes the batches: each process deals itself examples, or all make the same rows and each takes its own.

        The latter costs more but gives all processes equally many batches; by default it is done where data end.
        """
        deal_rows = num_epochs is not None if deal_rows is None else deal_rows
        examples = make_examples(self.task, self.cfg, seed).repeat(num_epochs)
        if not deal_rows:
            examples = examples[self.shard_id :: self.num_shards]
        in_turn = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        dataset = examples.map(self.converter.convert_example).to_iter_dataset(in_turn)
        pack, sides = self.converter.pack, self.converter.SIDES
        dataset = pack_rows(dataset, self.lengths, sides) if pack else pad_rows(dataset, self.lengths)
        dataset = dataset.batch(self.cfg.batch_size if deal_rows else self.rows, drop_remainder=True)
        return dataset.map(self._own_rows) if deal_rows else dataset

    def _own_rows(self, batch: Batch) -> Batch:
        return {name: rows[self.shard_id :: self.num_shards] for name, rows in batch.items()}


def make_examples(task: Task, cfg: DatasetConfig, seed: int) -> grain.MapDataset:
    """Makes one epoch of examples, as token features that fit their lengths, in random access.

    An example depends on the seed, the epoch and its own index alone, not on who reads it.

    Raises:
      DataError: if the split is absent or nothing is left after preprocessing.
    """
    dataset = grain.MapDataset.source(task.source.examples(cfg.split)).seed(seed).map(_as_dict)
    for preprocessor in task.preprocessors:
        dataset = preprocessor(dataset, task.output_features, cfg.task_feature_lengths)
    if not len(dataset):
        raise errors.DataError(
            f'Cannot read split {cfg.split!r} of task {task.name!r}: 0 examples are left after preprocessing. '
            'Look at its preprocessors.'
        )
    dataset = dataset.map(lambda example: _fit(example, task.name, cfg.task_feature_lengths, cfg.trim_output_features))
    return dataset.shuffle(seed=seed) if cfg.shuffle else dataset


def _as_dict(example: Any) -> Any:
    return {'text': example} if isinstance(example, str) else example


def _fit(example: Batch, task_name: str, lengths: Mapping[str, int], trim: bool) -> Batch:
    """Keeps the features that have lengths, and cuts them to these."""
    absent = [name for name in lengths if name not in example]
    if absent:
        raise errors.DataError(
            f'Cannot read an example of task {task_name!r}: {", ".join(absent)} are needed, it has '
            f'{", ".join(example)}. Look at the preprocessors of the task.'
        )
    long = [f'{n}: {len(example[n])} tokens, room for {most}' for n, most in lengths.items() if len(example[n]) > most]
    if long and not trim:
        raise errors.DataError(
            f'Cannot put an example of task {task_name!r} into a row: it is too long, and trim_output_features=False. '
            'Make task_feature_lengths larger, or allow trimming:\n' + errors.offenders(long)
        )
    return {name: example[name][:most] for name, most in lengths.items()}


def _check_shards(batch_size: int, shard_id: int, num_shards: int) -> None:
    if num_shards < 1 or not 0 <= shard_id < num_shards:
        raise errors.DataError(
            f'Cannot read shard {shard_id} of {num_shards}: 0 <= shard_id < num_shards is needed. '
            "Take both from the partitioner's get_data_layout()."
        )
    if batch_size % num_shards:
        raise errors.DataError(
            f'Cannot divide a batch of {batch_size} rows between {num_shards} shards: {batch_size % num_shards} are '
            f'left over. Make batch_size a multiple of {num_shards}.'
        )


def _shared_seed() -> int:
    seed = np.int32(int(time.time()) % 2**31)
    return int(multihost_utils.broadcast_one_to_all(seed)) if jax.process_count() > 1 else int(seed)
