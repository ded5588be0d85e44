"""Restoration: from configs to a manager, to the checkpoint that is chosen, to the state that a run starts from."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from etils import epath

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.checkpoints import configs, positions, steps


def get_first_valid_restore_config_and_paths(
    restore_cfgs: Sequence[configs.RestoreCheckpointConfig],
) -> tuple[configs.RestoreCheckpointConfig | None, list[str]]:
    """Finds the first config that has something to restore, and the directories of the steps it means.

    Args:
      restore_cfgs: in order of preference. Mode 'specific' is taken at its word; for 'latest' and 'all' the first
        of a config's directories that holds a step counts.

    Returns:
      The config and its step directories, oldest first; (None, []) if there is nothing.

    Raises:
      CheckpointError: if a directory to be searched does not exist, or holds a checkpoint that is not read here.
    """
    for cfg in restore_cfgs:
        paths = [cfg.path] if isinstance(cfg.path, str | os.PathLike) else list(cfg.path)
        if cfg.mode == 'specific' and paths:
            return cfg, paths
        for path in paths:
            found = _step_dirs(path)
            if found:
                return cfg, found[-1:] if cfg.mode == 'latest' else found
    return None, []


def _step_dirs(path: str) -> list[str]:
    directory = epath.Path(path)
    if not directory.is_dir():
        raise errors.CheckpointError(
            f'Cannot look for checkpoints in {path!r}: there is no such directory. Correct the path, or drop it.'
        )
    found = [steps.get_checkpoint_dir(path, step) for step in steps.all_steps(path)]
    if not found and (directory / 'checkpoint').is_file():
        raise errors.CheckpointError(
            f"Cannot look for steps in {path!r}: its file 'checkpoint' shows that TensorFlow or T5X's legacy format "
            "wrote it, which are not read here. Name a model directory, or use mode='specific' for one step."
        )
    return found


def get_fallback_state(
    restore_cfg: configs.RestoreCheckpointConfig | None,
    init_fn: Callable[[jax.Array], Any],
    init_rng: jax.Array | None,
) -> Any:
    """Initialises a state to fill up what a checkpoint lacks, if the config asks for one.

    Args:
      restore_cfg: asks by `fallback_to_scratch`; None asks for nothing.
      init_fn: makes the state dict from a key.
      init_rng: the key.

    Raises:
      ConfigError: if it is asked for without state_transformation_fns or without a key.
    """
    if restore_cfg is None or not restore_cfg.fallback_to_scratch:
        return None
    lacks = {'state_transformation_fns': not restore_cfg.all_transformation_fns, 'init_rng': init_rng is None}
    if any(lacks.values()):
        raise errors.ConfigError(
            f'Cannot restore {restore_cfg.path!r} with fallback_to_scratch=True: it needs '
            f'{" and ".join(name for name, lacking in lacks.items() if lacking)}. Give them, or set it to False.'
        )
    return init_fn(init_rng)


def create_orbax_checkpoint_manager(
    *,
    save_cfg: configs.SaveCheckpointConfig | None = None,
    restore_cfg: configs.RestoreCheckpointConfig | None = None,
    train_state: Any,
    partitioner: Any,
    ds_iter: positions.DatasetIterator | None = None,
    model_dir: str | None = None,
) -> Any:
    """Makes the manager that saves by one config and restores by the other.

    Args:
      save_cfg: None if nothing will be saved.
      restore_cfg: None if nothing will be restored, or as the model has it.
      train_state: a template with global shapes.
      partitioner: has `mesh` and `get_mesh_axes(train_state)`.
      ds_iter: used if either config asks for the dataset.
      model_dir: where to save; by default where `restore_cfg` looks.

    Raises:
      ConfigError: if the configs name different managers, no directory, or a dataset without an iterator.
    """
    classes = {cfg.checkpoint_manager_cls for cfg in (save_cfg, restore_cfg) if cfg is not None}
    if len(classes) != 1:
        raise errors.ConfigError(
            f'Cannot make a checkpoint manager of {len(classes)} classes: {_class_names(save_cfg, restore_cfg)}. '
            'Give one config or both, with the same checkpoint_manager_cls.'
        )
    save_dataset = save_cfg is not None and save_cfg.save_dataset
    restore_dataset = restore_cfg is not None and restore_cfg.restore_dataset
    if (save_dataset or restore_dataset) and ds_iter is None:
        raise errors.ConfigError(
            f'Cannot keep the position of a dataset with save_dataset={save_dataset}, restore_dataset='
            f'{restore_dataset} and ds_iter=None: there is no iterator. Give ds_iter, or set both to False.'
        )
    kwargs = {} if save_cfg is None else _save_options(save_cfg)
    return classes.pop()(
        directory=_directory(model_dir, restore_cfg),
        train_state=train_state,
        partitioner=partitioner,
        dataset_iterator=ds_iter if save_dataset or restore_dataset else None,
        restore_dtype=None if restore_cfg is None else restore_cfg.dtype,
        **kwargs,
    )


def _save_options(save_cfg: configs.SaveCheckpointConfig) -> dict[str, Any]:
    return {
        'save_dtype': save_cfg.dtype,
        'keep': save_cfg.keep,
        'period': save_cfg.period,
        'checkpoint_steps': save_cfg.checkpoint_steps,
        'keep_dataset_checkpoints': save_cfg.keep_dataset_checkpoints,
    }


def _class_names(*cfgs: Any) -> str:
    return ', '.join(f'{type(cfg).__name__} has {cfg.checkpoint_manager_cls!r}' for cfg in cfgs if cfg) or 'no config'


def _directory(model_dir: str | None, restore_cfg: configs.RestoreCheckpointConfig | None) -> str:
    paths = [] if restore_cfg is None else [restore_cfg.path] if isinstance(restore_cfg.path, str) else restore_cfg.path
    directory = model_dir or next(iter(paths), None)
    if directory is None:
        raise errors.ConfigError(
            'Cannot make a checkpoint manager with model_dir=None and no path to restore: it needs a directory. '
            'Give model_dir.'
        )
    return steps.model_dir_of(directory)


def create_checkpoint_manager_and_restore(
    train_state_initializer: Any,
    partitioner: Any,
    restore_checkpoint_cfg: configs.RestoreCheckpointConfig | None,
    restore_path: str | None,
    fallback_init_rng: jax.Array | None,
    save_checkpoint_cfg: configs.SaveCheckpointConfig | None = None,
    model_dir: str | None = None,
    ds_iter: positions.DatasetIterator | None = None,
    use_orbax: bool = True,
) -> tuple[Any, Any]:
    """Makes a manager and restores one checkpoint with it.

    Args:
      train_state_initializer: has `global_train_state_shape` and `from_scratch(rng)`.
      partitioner: has `mesh` and `get_mesh_axes(train_state)`.
      restore_checkpoint_cfg: how to restore; None for not at all.
      restore_path: the directory of one step; None for nothing.
      fallback_init_rng: for `fallback_to_scratch`.
      save_checkpoint_cfg: how the manager saves.
      model_dir: where it saves; by default where the restore config looks.
      ds_iter: the dataset iterator.
      use_orbax: must be True, the other value means T5X's legacy checkpointer.

    Returns:
      The train state, or None if nothing was to be restored, and the manager.
    """
    if not use_orbax:
        raise errors.ConfigError(
            "Cannot make a checkpoint manager with use_orbax=False: T5X's legacy checkpointer is not here. "
            'Leave it at True.'
        )
    manager = create_orbax_checkpoint_manager(
        save_cfg=save_checkpoint_cfg,
        restore_cfg=restore_checkpoint_cfg,
        train_state=train_state_initializer.global_train_state_shape,
        partitioner=partitioner,
        ds_iter=ds_iter,
        model_dir=model_dir,
    )
    if restore_checkpoint_cfg is None or not restore_path:
        return None, manager
    asked = {'restore_dataset': True} if restore_checkpoint_cfg.restore_dataset else {}
    state = manager.restore(
        path=restore_path,
        fallback_state=get_fallback_state(
            restore_checkpoint_cfg,
            lambda rng: train_state_initializer.from_scratch(rng).state_dict(),
            fallback_init_rng,
        ),
        state_transformation_fns=restore_checkpoint_cfg.all_transformation_fns,
        **asked,
    )
    return state, manager
