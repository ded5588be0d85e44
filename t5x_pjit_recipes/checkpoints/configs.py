"""Configs: what gin files say about saving and restoring, checked where it is made."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from t5x_pjit_recipes import errors, state_utils
from t5x_pjit_recipes.checkpoints import manager, options

_SAVE_DTYPES = (None, 'float32', 'bfloat16')
_RESTORE_DTYPES = (*_SAVE_DTYPES, 'float16')
_MODES = ('specific', 'latest', 'all')


@dataclasses.dataclass(frozen=True)
class SaveCheckpointConfig:
    """When and how train states are saved.

    Attributes:
      dtype: what floats under `target` are saved as; None for as they are.
      period: steps between two saves; None for none but those of `checkpoint_steps`.
      checkpoint_steps: further steps at which to save.
      keep: how many of the latest checkpoints are kept; None for all.
      keep_dataset_checkpoints: not supported.
      save_dataset: whether the dataset iterator's position is saved too.
      checkpointer_cls: not supported; it would choose T5X's legacy format.
      state_transformation_fns: `(state_dict, infos) -> (state_dict, infos)`, applied in order before saving.
      checkpoint_manager_cls: the class that saves.
    """

    dtype: str | None = 'float32'
    period: int | None = None
    checkpoint_steps: Sequence[int] | None = None
    keep: int | None = None
    keep_dataset_checkpoints: int | None = None
    save_dataset: bool = False
    checkpointer_cls: Any = None
    state_transformation_fns: Sequence[Callable] = ()
    checkpoint_manager_cls: Callable[..., Any] = manager.OrbaxCheckpointManagerInterface

    def __post_init__(self):
        owner = type(self).__name__
        options.check_unset(owner, {'keep_dataset_checkpoints': None, 'checkpointer_cls': None}, vars(self))
        options.check_choice(owner, 'dtype', self.dtype, _SAVE_DTYPES)
        options.check_count(owner, 'period', self.period)
        options.check_count(owner, 'keep', self.keep)
        options.check_steps(owner, 'checkpoint_steps', self.checkpoint_steps)


@dataclasses.dataclass(frozen=True)
class RestoreCheckpointConfig:
    """Which checkpoint a train state is restored from, and how.

    Attributes:
      path: a directory, or several of which the first with a checkpoint counts; an empty sequence for none.
      mode: 'specific' if `path` is the directory of a step; 'latest' or 'all' if it is a model directory.
      assignment_map: (pattern of a name in the new state, name in the checkpoint or None) pairs, applied before
        state_transformation_fns; see `state_utils.apply_assignment_map`.
      strict: only means something for TensorFlow checkpoints, which are refused.
      fallback_to_scratch: whether leaves that the checkpoint lacks are initialised; needs an assignment_map or
        state_transformation_fns.
      dtype: what floats under `target` are restored as; None for the model's dtype.
      restore_dataset: whether the dataset iterator goes to the checkpoint's position.
      checkpointer_cls: not supported; it would choose T5X's legacy format.
      state_transformation_fns: `(stored_state_dict, target_state_dict) -> stored_state_dict`, applied in order.
      checkpoint_manager_cls: the class that restores.
    """

    path: str | Sequence[str]
    mode: str = 'latest'
    assignment_map: Sequence[tuple[str, str | None]] | None = None
    strict: bool = True
    fallback_to_scratch: bool = False
    dtype: str | None = None
    restore_dataset: bool = False
    checkpointer_cls: Any = None
    state_transformation_fns: Sequence[Callable] = ()
    checkpoint_manager_cls: Callable[..., Any] = manager.OrbaxCheckpointManagerInterface

    def __post_init__(self):
        owner = type(self).__name__
        options.check_unset(owner, {'checkpointer_cls': None}, vars(self))
        options.check_choice(owner, 'mode', self.mode, _MODES)
        options.check_choice(owner, 'dtype', self.dtype, _RESTORE_DTYPES)

    @property
    def all_transformation_fns(self) -> tuple[Callable, ...]:
        """The transformations in the order of their application, that of `assignment_map` first."""
        if self.assignment_map is None:
            return tuple(self.state_transformation_fns)
        renaming = functools.partial(state_utils.apply_assignment_map, assignment_map=self.assignment_map)
        return renaming, *self.state_transformation_fns


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """How a run saves and what it starts from; None for neither."""

    save: SaveCheckpointConfig | None = None
    restore: RestoreCheckpointConfig | None = None

    def __post_init__(self):
        for name, kind in {'save': SaveCheckpointConfig, 'restore': RestoreCheckpointConfig}.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise errors.ConfigError(
                    f'Cannot make CheckpointConfig with {name}={value!r}: that is not a {kind.__name__}. '
                    f'In gin, write @utils.{kind.__name__}() with its brackets.'
                )
