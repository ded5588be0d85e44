"""Positions: where a process stands in its data, kept as JSON beside the train state.

An iterator takes part by having `get_state()`, which returns something JSON can hold, and `set_state(state)`.
"""

import json
from typing import Any, Protocol

import jax
from etils import epath
from orbax import checkpoint as ocp

from t5x_pjit_recipes import errors

DATASET = 'dataset'


class DatasetIterator(Protocol):
    """An iterator that can say where it stands and go back there."""

    def get_state(self) -> Any:
        """Returns the position, as something JSON can hold."""

    def set_state(self, state: Any) -> None:
        """Goes to a position that `get_state` returned."""


def make_handler() -> ocp.JsonCheckpointHandler:
    """Makes the handler with which every process writes a file of its own."""
    everyone = ocp.options.MultiprocessingOptions(primary_host=None)
    return ocp.JsonCheckpointHandler(filename=_file_name(), multiprocessing_options=everyone)


def snapshot(iterator: DatasetIterator) -> Any:
    """Copies an iterator's position, so that it may go on while the copy is written.

    Raises:
      DataError: if JSON cannot hold the position.
    """
    state = iterator.get_state()
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise errors.DataError(
            f'Cannot save the position of {type(iterator).__name__}: its get_state() returned a '
            f'{type(state).__name__} that JSON cannot hold ({error}). Return dicts, lists, strings and numbers.'
        ) from error


def restore(iterator: DatasetIterator, directory: epath.Path) -> bool:
    """Moves an iterator to the position in a step's directory; returns False where there is none for this process."""
    path = directory / DATASET / _file_name()
    if not path.exists():
        return False
    iterator.set_state(json.loads(path.read_text()))
    return True


def describe_absence(directory: epath.Path) -> str:
    """Says which position a step's directory lacks, and which it has."""
    folder = directory / DATASET
    there = sorted(path.name for path in folder.glob('train_ds-*')) if folder.is_dir() else []
    return f'{directory} has no {DATASET}/{_file_name()}' + (f', but {", ".join(there[:3])}' if there else '')


def _file_name() -> str:
    return f'train_ds-{jax.process_index():03d}-of-{jax.process_count():03d}'
