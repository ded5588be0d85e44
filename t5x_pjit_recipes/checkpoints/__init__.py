"""Checkpoints: train states on disk, saved in the background with Orbax and restored onto any mesh.

A model directory holds one directory for each saved step:

    checkpoint_<step>/
      state/      an Orbax PyTree: `target`, `state` and, where there are any, `flax_mutables`
      dataset/    train_ds-<process>-of-<processes>: where each process stands in its data, as JSON
"""

from t5x_pjit_recipes.checkpoints.configs import CheckpointConfig, RestoreCheckpointConfig, SaveCheckpointConfig
from t5x_pjit_recipes.checkpoints.manager import OrbaxCheckpointManagerInterface
from t5x_pjit_recipes.checkpoints.restoration import (
    create_checkpoint_manager_and_restore,
    create_orbax_checkpoint_manager,
    get_fallback_state,
    get_first_valid_restore_config_and_paths,
)
from t5x_pjit_recipes.checkpoints.steps import (
    all_steps,
    get_checkpoint_dir,
    get_step_from_checkpoint_dir,
    latest_step,
)
from t5x_pjit_recipes.checkpoints.stored import StoredLeaf

__all__ = [
    'CheckpointConfig',
    'OrbaxCheckpointManagerInterface',
    'RestoreCheckpointConfig',
    'SaveCheckpointConfig',
    'StoredLeaf',
    'all_steps',
    'create_checkpoint_manager_and_restore',
    'create_orbax_checkpoint_manager',
    'get_checkpoint_dir',
    'get_fallback_state',
    'get_first_valid_restore_config_and_paths',
    'get_step_from_checkpoint_dir',
    'latest_step',
]
