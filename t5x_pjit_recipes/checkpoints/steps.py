"""Steps: the directories `checkpoint_<step>` of a model directory, and which of them count.

Looking changes nothing on disk. A directory that is still being written, or whose writing was killed, does not count.
"""

import os
import re

from etils import epath
from orbax import checkpoint as ocp

from t5x_pjit_recipes import errors

PREFIX = 'checkpoint'
_STEP_NAME = re.compile(rf'{PREFIX}_(0|[1-9]\d*)')


def all_steps(checkpoints_dir: str | os.PathLike[str]) -> list[int]:
    """Lists the steps that were saved completely into a model directory, in ascending order."""
    directory = epath.Path(checkpoints_dir)
    if not directory.is_dir():
        return []
    named = ((_STEP_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted(int(match[1]) for match, path in named if match and is_committed(path))


def latest_step(checkpoints_dir: str | os.PathLike[str]) -> int | None:
    """Returns the highest step in a model directory, or None where there is none; step 0 counts."""
    return max(all_steps(checkpoints_dir), default=None)


def get_checkpoint_dir(
    checkpoints_dir: str | os.PathLike[str], step: int, step_format_fixed_length: int | None = None
) -> str:
    """Names the directory that holds one step.

    Args:
      checkpoints_dir: the model directory.
      step: the training step.
      step_format_fixed_length: how many digits the step is padded to with zeros; None for no padding.

    >>> get_checkpoint_dir('/models/t5', 100)
    '/models/t5/checkpoint_100'
    """
    return os.path.join(os.fspath(checkpoints_dir), f'{PREFIX}_{step:0{step_format_fixed_length or 1}d}')


def get_step_from_checkpoint_dir(checkpoint_dir: str | os.PathLike[str]) -> tuple[str, int]:
    """Splits a step's directory into its model directory and the step.

    Raises:
      CheckpointError: if the last part of the path is not `checkpoint_<step>`.

    >>> get_step_from_checkpoint_dir('/models/t5/checkpoint_100')
    ('/models/t5', 100)
    """
    parent, name = os.path.split(os.fspath(checkpoint_dir).rstrip('/'))
    match = re.fullmatch(rf'{PREFIX}_(\d+)', name)
    if not match:
        raise errors.CheckpointError(
            f'Cannot tell the step of {os.fspath(checkpoint_dir)!r}: its last part {name!r} is not {PREFIX}_<step>. '
            'Name the directory of one step.'
        )
    return parent, int(match[1])


def model_dir_of(path: str | os.PathLike[str]) -> str:
    """Returns the model directory that `path` is, or that the directory of one step is in.

    >>> model_dir_of('/models/t5/checkpoint_100'), model_dir_of('/models/t5')
    ('/models/t5', '/models/t5')
    """
    parent, name = os.path.split(os.fspath(path).rstrip('/'))
    return parent if _STEP_NAME.fullmatch(name) else os.fspath(path)


def is_committed(path: epath.Path) -> bool:
    """Tells whether the writing of a step's directory was finished, as its file system shows it."""
    return path.is_dir() and ocp.path.step.is_path_finalized(path)


def describe_steps(checkpoints_dir: str | os.PathLike[str], without: str | None = None) -> str:
    """Says in one sentence which steps a model directory holds, the directory named `without` left out."""
    steps = [step for step in all_steps(checkpoints_dir) if f'{PREFIX}_{step}' != without]
    if not steps:
        return f'{os.fspath(checkpoints_dir)} holds no {"other " if without else ""}steps.'
    shown = ', '.join(map(str, steps[-errors.MAX_LISTED :]))
    older = f' and {len(steps) - errors.MAX_LISTED} older ones' if len(steps) > errors.MAX_LISTED else ''
    return f'{os.fspath(checkpoints_dir)} holds {"other " if without else ""}steps {shown}{older}.'
