"""Tasks: a source, the preprocessing of its examples and the features that come out, registered under a name."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.data.sources import Source
from t5x_pjit_recipes.data.vocabularies import ByteVocabulary, Vocabulary

# Called as preprocessor(dataset, output_features, lengths); takes and returns a grain.MapDataset.
Preprocessor = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of a task's examples.

    Attributes:
      vocabulary: what turns its text into ids.
      add_eos: whether the preprocessors that append EOS do so here.
    """

    vocabulary: Vocabulary
    add_eos: bool = True


BYTE_FEATURES: Mapping[str, Feature] = MappingProxyType(
    {'inputs': Feature(ByteVocabulary()), 'targets': Feature(ByteVocabulary())}
)


@dataclasses.dataclass(frozen=True)
class Task:
    """A named way from raw examples to features.

    Attributes:
      name: what `DatasetConfig.mixture_or_task_name` says.
      source: raw examples by split.
      output_features: feature name to Feature.
      preprocessors: applied in order, see `preprocessors`.
    """

    name: str
    source: Source
    output_features: Mapping[str, Feature]
    preprocessors: Sequence[Preprocessor] = ()

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the source's splits."""
        return self.source.splits


class TaskRegistry:
    """All tasks of this process, by name."""

    _tasks: ClassVar[dict[str, Task]] = {}

    @classmethod
    def add(
        cls,
        name: str,
        source: Source,
        output_features: Mapping[str, Feature],
        preprocessors: Sequence[Preprocessor] = (),
    ) -> Task:
        """Makes a task and registers it.

        Raises:
          DataError: if the name is taken.
        """
        if name in cls._tasks:
            raise errors.DataError(
                f'Cannot add task {name!r}: the name is taken. Choose another, or call '
                f'TaskRegistry.remove({name!r}) first.'
            )
        cls._tasks[name] = Task(name, source, output_features, tuple(preprocessors))
        return cls._tasks[name]

    @classmethod
    def get(cls, name: str) -> Task:
        """Returns a task by its name.

        Raises:
          DataError: if nothing is registered under it.
        """
        if name not in cls._tasks:
            near = ', '.join(map(repr, errors.near_misses(name, cls._tasks)))
            raise errors.DataError(
                f'Cannot find task {name!r}: nothing is registered under that name.'
                f'{f" Near: {near}." if near else ""} Import the module that registers it, or name one of these:\n'
                + errors.offenders(cls.names(), most=50)
            )
        return cls._tasks[name]

    @classmethod
    def remove(cls, name: str) -> None:
        """Takes a task out of the registry, if it is there."""
        cls._tasks.pop(name, None)

    @classmethod
    def names(cls) -> list[str]:
        """Lists the names of all tasks, sorted."""
        return sorted(cls._tasks)
