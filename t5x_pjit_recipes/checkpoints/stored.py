"""A checkpoint on disk: what it holds, known before any array is read; its arrays, read straight into place."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from orbax import checkpoint as ocp

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.checkpoints import steps
from t5x_pjit_recipes.layout import paths

STATE = 'state'


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """An array of a checkpoint that has not been read: a leaf of the trees that transformation functions get."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


def read_tree(directory: epath.Path) -> dict[str, Any]:
    """Reads which leaves a checkpoint holds, as a nested dict of StoredLeaf; no array is read.

    Args:
      directory: the directory of one step.

    Raises:
      CheckpointError: if there is no checkpoint, or none that this package can read.
    """
    check_readable(directory)
    with _reading(directory), contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        tree = handler.metadata(directory / STATE).tree
        return paths.map_named(lambda name, leaf: StoredLeaf(name, tuple(leaf.shape), np.dtype(leaf.dtype)), tree)


def read_arrays(
    directory: epath.Path, tree: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads some of a checkpoint's arrays, each onto its own sharding and in its own dtype.

    Args:
      directory: the directory of one step.
      tree: what `read_tree` returned for it.
      wanted: name in the checkpoint to shape, dtype and sharding. All other arrays stay unread.

    Raises:
      CheckpointError: if an array cannot be read.
    """

    def restore_args(name: str, _: StoredLeaf) -> ocp.RestoreArgs:
        want = wanted.get(name)
        if want is None:
            return ocp.RestoreArgs()
        return ocp.ArrayRestoreArgs(sharding=want.sharding, global_shape=want.shape, dtype=want.dtype)

    args = ocp.args.PyTreeRestore(
        item=paths.map_named(lambda name, _: wanted.get(name, ocp.PLACEHOLDER), tree),
        restore_args=paths.map_named(restore_args, tree),
    )
    with _reading(directory), contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        restored = paths.named_leaves(handler.restore(directory / STATE, args=args))
    return {name: restored[name] for name in wanted}


def check_readable(directory: epath.Path) -> None:
    """Raises CheckpointError, with the other steps that exist, unless `directory` holds a finished checkpoint."""
    problem = _problem(directory)
    if problem:
        raise errors.CheckpointError(f'Cannot restore checkpoint {directory}: {problem}. {_others(directory)}')


def _problem(directory: epath.Path) -> str | None:
    index = epath.Path(f'{directory}.index')
    if index.exists():
        return f'{index.name} beside it says that TensorFlow wrote it, which is not a format read here'
    if not directory.is_dir():
        return 'there is no such directory'
    if not steps.is_committed(directory):
        return 'its saving was never finished'
    if (directory / STATE / '_METADATA').exists():
        return None
    if (directory / 'checkpoint').is_file():
        return "its file 'checkpoint' shows T5X's legacy format, which is not read here"
    return f'it has no {STATE}/_METADATA, which says what it holds'


def _others(directory: epath.Path) -> str:
    inside = steps.all_steps(directory)
    if inside:
        return f'{steps.describe_steps(directory)} Name one of them: {steps.get_checkpoint_dir(directory, inside[-1])}'
    return f'{steps.describe_steps(directory.parent, without=directory.name)} Name a finished step.'


@contextlib.contextmanager
def _reading(directory: epath.Path) -> Iterator[None]:
    """Turns whatever goes wrong while a checkpoint is read into an error that names it."""
    try:
        yield
    except Exception as error:
        reason = str(error).partition('. ')[0].partition('\n')[0].rstrip('.')
        raise errors.CheckpointError(
            f'Cannot read checkpoint {directory}: {type(error).__name__}: {reason}. {_others(directory)}'
        ) from error
