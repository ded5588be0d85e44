"""T5X's name for what gin files ask for: everything here is made elsewhere."""

from t5x_pjit_recipes.checkpoints import (
    CheckpointConfig,
    RestoreCheckpointConfig,
    SaveCheckpointConfig,
    create_checkpoint_manager_and_restore,
    create_orbax_checkpoint_manager,
    get_fallback_state,
    get_first_valid_restore_config_and_paths,
)
from t5x_pjit_recipes.data import (
    DatasetConfig,
    get_dataset,
    get_training_eval_datasets,
    get_vocabulary,
    verify_matching_vocabs,
)
from t5x_pjit_recipes.initialization import InitFnCallable, TrainStateInitializer
from t5x_pjit_recipes.layout.axes import PartitionSpec
from t5x_pjit_recipes.param_axes import override_params_axes_names
from t5x_pjit_recipes.reports import log_model_info
from t5x_pjit_recipes.schedules import create_learning_rate_scheduler

__all__ = [
    'CheckpointConfig',
    'DatasetConfig',
    'InitFnCallable',
    'PartitionSpec',
    'RestoreCheckpointConfig',
    'SaveCheckpointConfig',
    'TrainStateInitializer',
    'create_checkpoint_manager_and_restore',
    'create_learning_rate_scheduler',
    'create_orbax_checkpoint_manager',
    'get_dataset',
    'get_fallback_state',
    'get_first_valid_restore_config_and_paths',
    'get_training_eval_datasets',
    'get_vocabulary',
    'log_model_info',
    'override_params_axes_names',
    'verify_matching_vocabs',
]
