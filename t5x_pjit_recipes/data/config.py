"""What T5X's configurations say about a data set."""

import dataclasses
import importlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.data.tasks import Task, TaskRegistry

# Fields that may hold what this pipeline has no use for: the value that asks for nothing, and why others do.
_REFUSED = {
    'use_custom_packing_ops': (False, 'rows are packed by Grain'),
    'runtime_preprocessors': (None, 'all preprocessors belong to the task'),
}
_WITHOUT_EFFECT = {
    'use_cached': (False, 'there is no offline cache here, examples are made as they are read'),
    'num_prefetch_threads': (None, 'one thread reads ahead'),
    'num_workers': (0, 'one thread reads ahead'),
}


@dataclasses.dataclass
class DatasetConfig:
    """A task, its split and how batches are made of it; the fields are T5X's.

    Attributes:
      mixture_or_task_name: name of a registered task, or a Task.
      task_feature_lengths: feature name to row length in tokens, for all features that the model takes.
      split: name of the source's split.
      batch_size: rows in the global batch.
      shuffle: whether all examples are shuffled, anew in each epoch.
      seed: decides the order and all random preprocessing; None draws one from the clock.
      use_cached: has no effect here, with a warning.
      pack: whether several examples share a row.
      use_custom_packing_ops: refused.
      module: a module to import first, because it registers the task.
      use_memory_cache: whether evaluation keeps its batches in memory.
      trim_output_features: whether too long features are cut; if not, they are errors.
      runtime_preprocessors: refused.
      num_prefetch_threads: has no effect here, with a warning.
      num_workers: has no effect here, with a warning.
    """

    mixture_or_task_name: str | Task
    task_feature_lengths: Mapping[str, int]
    split: str
    batch_size: int
    shuffle: bool
    seed: int | None
    use_cached: bool = False
    pack: bool = False
    use_custom_packing_ops: bool = False
    module: str | None = None
    use_memory_cache: bool = True
    trim_output_features: bool = True
    runtime_preprocessors: Sequence[Any] | None = None
    num_prefetch_threads: int | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        faults = [*self._size_faults(), *self._unusual(_REFUSED)]
        if faults:
            raise errors.DataError(
                f'Cannot configure the data of {self._name}: {len(faults)} of its values cannot be used. Change them:\n'
                + errors.offenders(faults)
            )
        if ignored := self._unusual(_WITHOUT_EFFECT):
            warnings.warn(
                f'Some values have no effect on the data of {self._name}:\n' + errors.offenders(ignored), stacklevel=3
            )

    @property
    def _name(self) -> str:
        return getattr(self.mixture_or_task_name, 'name', self.mixture_or_task_name)

    def _unusual(self, fields: Mapping[str, tuple[Any, str]]) -> list[str]:
        values = {field: getattr(self, field) for field in fields}
        return [f'{field}={values[field]!r}: {why}' for field, (usual, why) in fields.items() if values[field] != usual]

    def _size_faults(self) -> list[str]:
        sizes = {'batch_size': self.batch_size}
        sizes |= {f'task_feature_lengths[{name!r}]': length for name, length in self.task_feature_lengths.items()}
        faults = [
            f'{name}={size!r}: a whole number above 0 is needed' for name, size in sizes.items() if not _size(size)
        ]
        if self.seed is not None and not (isinstance(self.seed, int) and 0 <= self.seed < 2**32):
            faults.append(f'seed={self.seed!r}: a whole number from 0 to 2**32 - 1 is needed, or None')
        return faults

    def resolve_task(self) -> Task:
        """Imports `module` if there is one, and returns the task.

        Raises:
          DataError: if there is no such module or task, or the task has not the features that lengths are given for.
        """
        _import_module(self.module)
        named = self.mixture_or_task_name
        task = named if isinstance(named, Task) else TaskRegistry.get(named)
        unknown = [name for name in self.task_feature_lengths if name not in task.output_features]
        if unknown:
            raise errors.DataError(
                f'Cannot give lengths to {len(unknown)} features of task {task.name!r}: it has '
                f'{", ".join(task.output_features)}. Correct task_feature_lengths:\n'
                + errors.offenders(f'{name}{errors.did_you_mean(name, task.output_features)}' for name in unknown)
            )
        return task


def _size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _import_module(module: str | None) -> None:
    try:
        if module:
            importlib.import_module(module)
    except ImportError as error:
        raise errors.DataError(
            f'Cannot import module {module!r}, which should register tasks: {error}. '
            'Correct DatasetConfig.module, or set it to None.'
        ) from error
