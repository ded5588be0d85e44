"""The manager of a model directory: saves train states in the background, and restores them onto any mesh."""

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from orbax import checkpoint as ocp

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.checkpoints import loading, options, positions, steps, stored
from t5x_pjit_recipes.layout import paths

_DISCARDED = '.discarded'
_NAME = 'OrbaxCheckpointManagerInterface'
_UNSUPPORTED = {
    'keep_dataset_checkpoints': None,
    'metric_name_to_monitor': None,
    'metric_mode': 'max',
    'keep_checkpoints_without_metrics': True,
}


class OrbaxCheckpointManagerInterface:
    """Saves and restores the train states of one model directory, as `checkpoint_<step>`.

    Nothing on disk is touched before the first save; that one also removes what killed saves left behind.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        train_state: Any,
        partitioner: Any,
        dataset_iterator: positions.DatasetIterator | None = None,
        save_dtype: Any = None,
        restore_dtype: Any = None,
        keep: int | None = None,
        period: int | None = 1,
        checkpoint_steps: Collection[int] | None = None,
        keep_dataset_checkpoints: int | None = None,
        force_keep_period: int | None = None,
        metric_name_to_monitor: str | None = None,
        metric_mode: str = 'max',
        keep_checkpoints_without_metrics: bool = True,
    ):
        """Describes what is to be saved and restored.

        Args:
          directory: the model directory.
          train_state: a template, with `state_dict()` and `restore_state()`; its leaves have the *global* shapes.
          partitioner: has `mesh` and `get_mesh_axes(train_state)`.
          dataset_iterator: has `get_state()` and `set_state()`; its position is saved, one file for each process.
          save_dtype: what floats under `target` are saved as; None for as they are. Nothing else is cast.
          restore_dtype: what floats under `target` are restored as; None for the template's dtype.
          keep: how many of the latest checkpoints are kept; None for all.
          period: steps between two saves, for `should_save`; None for `checkpoint_steps` alone.
          checkpoint_steps: further steps at which to save.
          keep_dataset_checkpoints: not supported, as are the three options about metrics.
          force_keep_period: steps that it divides are kept beyond `keep`.
          metric_name_to_monitor: see above.
          metric_mode: see above.
          keep_checkpoints_without_metrics: see above.

        Raises:
          ConfigError: if an option that is not supported is set, or a number is out of its range.
        """
        options.check_unset(_NAME, _UNSUPPORTED, locals())
        for name, value in {'keep': keep, 'period': period, 'force_keep_period': force_keep_period}.items():
            options.check_count(_NAME, name, value)
        options.check_steps(_NAME, 'checkpoint_steps', checkpoint_steps)
        self._directory = epath.Path(directory).absolute()
        self._train_state = train_state
        self._partitioner = partitioner
        self._dataset_iterator = dataset_iterator
        self._save_dtype = None if save_dtype is None else jnp.dtype(save_dtype)
        self._restore_dtype = None if restore_dtype is None else jnp.dtype(restore_dtype)
        self._policy = _preservation_policy(keep, force_keep_period)
        self._period = period
        self._checkpoint_steps = frozenset(checkpoint_steps or ())
        self._writer: ocp.CheckpointManager | None = None

    @property
    def directory(self) -> epath.Path:
        """The model directory."""
        return self._directory

    def all_steps(self) -> list[int]:
        """Lists the steps that are complete on disk, in ascending order."""
        return steps.all_steps(self._directory)

    def latest_step(self) -> int | None:
        """Returns the highest step that is complete on disk, or None."""
        return steps.latest_step(self._directory)

    def should_save(self, step: int) -> bool:
        """Tells whether `step` is due by `period` or `checkpoint_steps`, and not there already."""
        due = step in self._checkpoint_steps or (self._period is not None and step % self._period == 0)
        return due and not self._holds(step)

    def save(self, train_state: Any, state_transformation_fns: Sequence[Callable] = (), force: bool = True) -> bool:
        """Starts saving a train state under its own step, and returns as soon as the state may be donated.

        Args:
          train_state: what to save; has `state_dict()` with `state/step`.
          state_transformation_fns: applied in order, `(state_dict, infos) -> (state_dict, infos)`; infos have the
            name, shape and dtype of each leaf.
          force: whether to save a step that is not due.

        Returns:
          Whether it is saved: False for a step that is not due and not forced, and for one that is there already.
        """
        state_dict = train_state.state_dict()
        step = int(state_dict['state']['step'])
        if self._holds(step) or not (force or self.should_save(step)):
            return False
        state_dict = _transformed_for_saving(state_dict, state_transformation_fns)
        state_dict = jax.tree.map(_canonical, state_dict)
        save_args = paths.map_named(self._save_args, state_dict)
        items = {stored.STATE: ocp.args.PyTreeSave(state_dict, save_args=save_args)}
        if self._dataset_iterator is not None:
            items[positions.DATASET] = ocp.args.JsonSave(positions.snapshot(self._dataset_iterator))
        return self._make_writer().save(step, args=ocp.args.Composite(**items), force=True)

    def restore(
        self,
        step: int | None = None,
        path: str | os.PathLike[str] | None = None,
        fallback_state: Mapping[str, Any] | None = None,
        state_transformation_fns: Sequence[Callable] = (),
        lazy_parameters: bool = False,
        *,
        restore_dataset: bool | None = None,
    ) -> Any:
        """Restores a train state, each array read straight onto the partitioner's mesh.

        Args:
          step: a step of this model directory; the latest where neither it nor `path` is given.
          path: the directory of one step, in any model directory.
          fallback_state: a state dict. Leaves that the checkpoint lacks are taken from it, those it has too many are
            left out, and one warning lists both.
          state_transformation_fns: applied in order, `(stored_state_dict, target_state_dict) -> stored_state_dict`,
            before any array is read: leaves may be renamed, left out, or replaced by arrays.
          lazy_parameters: not supported.
          restore_dataset: whether the dataset iterator is moved to the checkpoint's position, which then must exist;
            by default where it exists, in a checkpoint of this model directory.

        A template without an optimizer reads the params, the step and the mutables alone.

        Returns:
          A train state of the template's class, dtypes (but see `restore_dtype`), and the partitioner's layout.

        Raises:
          CheckpointError: if there is no such checkpoint, or it is not one of this train state.
        """
        options.check_unset('a restore', {'lazy_parameters': False}, {'lazy_parameters': lazy_parameters})
        directory = self._resolve(step, path)
        tree = stored.read_tree(directory)
        target = self._train_state.state_dict()
        offered = _without_optimizer(tree) if _is_for_inference(self._train_state) else tree
        for fn in state_transformation_fns:
            offered = fn(offered, target)
        wanted = loading.wanted_leaves(self._train_state, self._partitioner, self._restore_dtype)
        leaves = loading.load_leaves(directory, tree, offered, wanted, fallback_state)
        self._restore_position(directory, restore_dataset)
        return self._train_state.restore_state(paths.map_named(lambda name, _: leaves[name], target))

    def wait_until_finished(self) -> None:
        """Waits until what was saved is on disk; raises what went wrong in the background."""
        if self._writer is not None:
            self._writer.wait_until_finished()

    def close(self) -> None:
        """Waits, as `wait_until_finished` does, and frees the threads that saved."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._delete_discarded()

    def _holds(self, step: int) -> bool:
        if self._writer is not None:
            return step in self._writer.all_steps()
        return steps.is_committed(self._step_dir(step))

    def _step_dir(self, step: int) -> epath.Path:
        return epath.Path(steps.get_checkpoint_dir(self._directory, step))

    def _make_writer(self) -> ocp.CheckpointManager:
        if self._writer is None:
            handlers = {stored.STATE: ocp.PyTreeCheckpointHandler(), positions.DATASET: positions.make_handler()}
            self._writer = ocp.CheckpointManager(
                self._directory,
                item_names=tuple(handlers),
                item_handlers=handlers,
                options=ocp.CheckpointManagerOptions(
                    step_prefix=steps.PREFIX,
                    preservation_policy=self._policy,
                    cleanup_tmp_directories=True,
                    todelete_subdir=_DISCARDED,
                    async_options=ocp.AsyncOptions(post_finalization_callback=self._delete_discarded),
                ),
            )
        return self._writer

    def _delete_discarded(self) -> None:
        """Deletes what `keep` discarded; it was moved first, since a kill can leave a directory half deleted."""
        discarded = self._directory / _DISCARDED
        if jax.process_index() == 0 and discarded.is_dir():
            discarded.rmtree()

    def _save_args(self, name: str, leaf: Any) -> ocp.SaveArgs:
        return ocp.SaveArgs(dtype=self._save_dtype if loading.is_castable(name, leaf) else None)

    def _resolve(self, step: int | None, path: str | os.PathLike[str] | None) -> epath.Path:
        if step is not None and path is not None:
            raise errors.CheckpointError(
                f'Cannot restore step={step} and path={os.fspath(path)!r} at once: each names a checkpoint. Give one.'
            )
        if path is not None:
            return epath.Path(path).absolute()
        step = self.latest_step() if step is None else step
        if step is None:
            raise errors.CheckpointError(
                f'Cannot restore the latest step: {self._directory} holds no steps. Train first, or give a path.'
            )
        return self._step_dir(step)

    def _restore_position(self, directory: epath.Path, asked: bool | None) -> None:
        """Moves the dataset iterator; a run that goes on without its position is told so."""
        wanted = directory.parent == self._directory if asked is None else asked
        if self._dataset_iterator is None or not wanted or positions.restore(self._dataset_iterator, directory):
            return
        absence = positions.describe_absence(directory)
        if asked:
            raise errors.CheckpointError(
                f"Cannot restore the dataset's position: {absence}. Set restore_dataset=False to read the data anew."
            )
        warnings.warn(f'The data is read from its start: {absence}.', UserWarning, stacklevel=3)


def _preservation_policy(keep: int | None, force_keep_period: int | None) -> Any:
    latest = ocp.checkpoint_managers.LatestN(n=keep)
    if force_keep_period is None:
        return latest
    every = ocp.checkpoint_managers.EveryNSteps(interval_steps=force_keep_period)
    return ocp.checkpoint_managers.AnyPreservationPolicy([latest, every])


def _canonical(leaf: Any) -> jax.Array | np.ndarray:
    """Leaves arrays on devices alone; gives all else the dtype that JAX would, in memory that nobody else writes to."""
    return leaf if isinstance(leaf, jax.Array) else np.array(leaf, jax.dtypes.result_type(leaf))


def _transformed_for_saving(state_dict: Mapping[str, Any], fns: Sequence[Callable]) -> Mapping[str, Any]:
    infos = paths.map_named(
        lambda name, leaf: stored.StoredLeaf(name, jnp.shape(leaf), jax.dtypes.result_type(leaf)), state_dict
    )
    for fn in fns:
        state_dict, infos = fn(state_dict, infos)
    return state_dict


def _is_for_inference(train_state: Any) -> bool:
    """Tells whether a train state has no optimizer at all, as opposed to one that keeps nothing but the step."""
    try:
        has_optimizer = train_state.param_states is not None
    except (AttributeError, NotImplementedError):
        has_optimizer = False
    return not has_optimizer and set(train_state.state_dict()['state']) == {'step'}


def _without_optimizer(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out the optimizer's state."""
    return {**tree, 'state': {name: leaf for name, leaf in tree.get('state', {}).items() if name == 'step'}}
