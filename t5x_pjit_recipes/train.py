"""Training: `python -m t5x_pjit_recipes.train --gin_file=gin/runs/pretrain_pydoc.gin`.

`train` takes T5X's arguments, from gin or from Python; the loop is in `training_loop`.
"""

import contextlib
import functools
import inspect
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import rich.console
from absl import flags, logging
from jax.experimental import multihost_utils

from t5x_pjit_recipes import data, gin_utils, models
from t5x_pjit_recipes.checkpoints import (
    CheckpointConfig,
    RestoreCheckpointConfig,
    create_checkpoint_manager_and_restore,
    get_first_valid_restore_config_and_paths,
)
from t5x_pjit_recipes.errors import ConfigError, RecipeError
from t5x_pjit_recipes.initialization import TrainStateInitializer
from t5x_pjit_recipes.reports import describe_savings, describe_train_state, log_model_info
from t5x_pjit_recipes.stops import Stops
from t5x_pjit_recipes.training_loop import TRAIN_METRIC_KEY, TrainingLoop, check_actions

__all__ = ['TRAIN_METRIC_KEY', 'main', 'train']

MODEL_INFO = 'model-info.txt'


def train(
    *,
    model: models.BaseModel,
    train_dataset_cfg: data.DatasetConfig,
    train_eval_dataset_cfg: data.DatasetConfig | None,
    infer_eval_dataset_cfg: data.DatasetConfig | None,
    checkpoint_cfg: CheckpointConfig,
    partitioner: Any,
    trainer_cls: Callable[..., Any],
    model_dir: str,
    total_steps: int,
    eval_steps: int,
    eval_period: int,
    relative_steps: int | None = None,
    stats_period: int | None = None,
    random_seed: int | None,
    use_hardware_rng: bool = False,
    summarize_config_fn: Callable[..., None],
    inference_evaluator_cls: Any = None,
    get_dataset_fn: Callable[..., Any] = data.get_dataset,
    concurrent_metrics: bool = True,
    actions: Mapping[str, Sequence[Any]] | None = None,
    train_eval_get_dataset_fn: Callable[..., Any] = data.get_training_eval_datasets,
    run_eval_before_training: bool = False,
    train_state_initializer_cls: Callable[..., Any] = TrainStateInitializer,
    use_orbax: bool = True,
    verify_matching_vocabs_fn: Callable[..., None] | None = data.verify_matching_vocabs,
    gc_period: int = 0,
) -> tuple[int, Any]:
    """Trains a model, from the latest checkpoint in its directory where there is one.

    Args:
      model: what to train; holds the optimizer.
      train_dataset_cfg: the training data.
      train_eval_dataset_cfg: held-out data for the loss; None for no evaluation.
      infer_eval_dataset_cfg: must be None: evaluating predictions is not supported.
      checkpoint_cfg: how to save, and what to start from where the model directory has nothing.
      partitioner: lays everything out.
      trainer_cls: called with the keywords of `trainer.BaseTrainer`.
      model_dir: where checkpoints, summaries and descriptions go.
      total_steps: the step to train to.
      eval_steps: batches in an evaluation.
      eval_period: steps between evaluations; 0 for none.
      relative_steps: steps to train from where the run starts, in place of `total_steps`.
      stats_period: steps between reports; the smallest of the other periods by default.
      random_seed: seeds initialisation and dropout; None takes one from the clock.
      use_hardware_rng: whether keys are of the quicker and less portable kind 'unsafe_rbg'.
      summarize_config_fn: called with (model directory, summary writer, step) to keep the configuration.
      inference_evaluator_cls: must be None, as `infer_eval_dataset_cfg`.
      get_dataset_fn: called with (cfg, shard_id, num_shards, feature converter class).
      concurrent_metrics: changes nothing: metrics never hold up the device.
      actions: ActionMode name, 'TRAIN' or 'TRAIN_EVAL', to actions that may end the run.
      train_eval_get_dataset_fn: called with (cfg, shard_id, num_shards, eval_steps, feature converter class).
      run_eval_before_training: whether to evaluate before the first step.
      train_state_initializer_cls: makes the state.
      use_orbax: must be True.
      verify_matching_vocabs_fn: called with (cfg, model) to compare vocabularies; None compares none.
      gc_period: steps between garbage collections; 0 leaves them to Python.

    Returns:
      The last step, and the train state there.

    Raises:
      ConfigError: for what is not supported, or cannot be meant.
      TrainingError: if the loss is no longer a number.
    """
    _check_supported(infer_eval_dataset_cfg, inference_evaluator_cls, checkpoint_cfg)
    console = rich.console.Console()
    dataset_cfgs = [cfg for cfg in (train_dataset_cfg, train_eval_dataset_cfg) if cfg is not None]
    if verify_matching_vocabs_fn is not None and hasattr(model, 'output_vocabulary'):
        for cfg in dataset_cfgs:
            verify_matching_vocabs_fn(cfg, model)
    layout = partitioner.get_data_layout(train_dataset_cfg.batch_size)
    shard = (layout.shard_id, layout.num_shards)
    train_iter = get_dataset_fn(train_dataset_cfg, *shard, model.FEATURE_CONVERTER_CLS)
    evals = {}
    if train_eval_dataset_cfg is not None and eval_period:
        evals = train_eval_get_dataset_fn(train_eval_dataset_cfg, *shard, eval_steps, model.FEATURE_CONVERTER_CLS)

    initializer = _make_initializer(train_state_initializer_cls, model, partitioner, train_iter, layout.batch_size)
    _make_directory(model_dir)
    _describe(console, initializer, partitioner, model_dir)
    init_rng, trainer_rng = jax.random.split(_make_key(random_seed, use_hardware_rng))
    state, manager, path = _restore(
        initializer, partitioner, checkpoint_cfg, model_dir, train_iter, init_rng, use_orbax
    )
    state = initializer.from_scratch(init_rng) if state is None else state
    first_step = int(state.step)
    total_steps = first_step + relative_steps if relative_steps else total_steps
    _check_first_step(first_step, total_steps, model, model_dir)
    start = f'continuing from {path}' if path else f'starting from {getattr(initializer, "origin", "scratch")}'
    _say(console, _describe_start(start, first_step, total_steps))

    trainer = trainer_cls(
        model=model,
        train_state=state,
        partitioner=partitioner,
        train_state_axes=initializer.train_state_axes,
        eval_names=list(evals),
        summary_dir=model_dir,
        rng=trainer_rng,
    )
    summarize_config_fn(model_dir, trainer.train_metrics_manager.summary_writer, first_step)
    save_cfg = checkpoint_cfg.save
    loop = TrainingLoop(
        trainer=trainer,
        stops=_make_stops(total_steps, stats_period, save_cfg, eval_period if evals else 0, gc_period),
        train_iter=train_iter,
        eval_datasets=evals,
        manager=manager,
        console=console,
        actions=check_actions(actions),
        state_transformation_fns=save_cfg.state_transformation_fns if save_cfg else (),
    )
    with _closing(manager, trainer):
        if first_step < total_steps:
            _start(loop, first_step, run_eval_before_training)
        return loop.run(first_step), trainer.train_state


@contextlib.contextmanager
def _closing(manager: Any, trainer: Any) -> Iterator[None]:
    try:
        yield
    finally:
        if manager is not None:
            manager.close()
        trainer.close()
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices('the end of training')


def _make_initializer(
    initializer_cls: Callable[..., Any], model: Any, partitioner: Any, train_iter: Any, batch_size: int
) -> Any:
    spec = train_iter.element_spec
    return initializer_cls(
        optimizer_def=model.optimizer_def,
        init_fn=model.get_initial_variables,
        input_shapes={name: (batch_size, *x.shape[1:]) for name, x in spec.items()},
        input_types={name: x.dtype for name, x in spec.items()},
        partitioner=partitioner,
    )


def _make_directory(model_dir: str) -> None:
    try:
        pathlib.Path(model_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f'Cannot write to MODEL_DIR={model_dir!r}: {error.strerror}. Use a directory that can be made.'
        ) from error


def _describe_start(start: str, first_step: int, total_steps: int) -> str:
    if first_step == total_steps:
        return f'{start}: nothing to do, it is at step {first_step} of {total_steps}. Set TRAIN_STEPS above it.'
    return f'{start}, to step {total_steps}; compiling the first step ...'


def _check_first_step(first_step: int, total_steps: int, model: Any, model_dir: str) -> None:
    if hasattr(model.optimizer_def, 'check_first_step'):
        model.optimizer_def.check_first_step(first_step)
    if total_steps < first_step:
        raise ConfigError(
            f'Cannot train to step {total_steps}: the checkpoint in {model_dir} is at step {first_step}. '
            f'Set TRAIN_STEPS above {first_step}, or use another MODEL_DIR.'
        )


def _check_supported(infer_eval_cfg: Any, evaluator_cls: Any, checkpoint_cfg: CheckpointConfig) -> None:
    given = {'infer_eval_dataset_cfg': infer_eval_cfg, 'inference_evaluator_cls': evaluator_cls}
    faults = [f'{name}={value!r}' for name, value in given.items() if value is not None]
    if faults:
        raise ConfigError(
            f'Cannot train with {", ".join(faults)}: evaluating predictions is not supported. Set it to None; '
            'train_eval_dataset_cfg evaluates the loss.'
        )
    restore = checkpoint_cfg.restore
    if restore is not None and restore.path and (restore.mode == 'all' or not isinstance(restore.path, str)):
        raise ConfigError(
            f'Cannot start from path={restore.path!r} with mode={restore.mode!r}: a run starts from one checkpoint. '
            "Give one path, with mode='latest' for a model directory or mode='specific' for one step."
        )


def _make_key(random_seed: int | None, use_hardware_rng: bool) -> jax.Array:
    if random_seed is None:
        seed = np.int32(int(time.time()) % 2**31)
        random_seed = int(multihost_utils.broadcast_one_to_all(seed)) if jax.process_count() > 1 else int(seed)
    # A raw key as T5X makes it, or a typed one, which alone remembers its kind.
    return jax.random.key(random_seed, impl='unsafe_rbg') if use_hardware_rng else jax.random.PRNGKey(random_seed)


def _describe(console: rich.console.Console, initializer: Any, partitioner: Any, model_dir: str) -> None:
    shapes, axes = initializer.global_train_state_shape, initializer.train_state_axes
    log_model_info(str(pathlib.Path(model_dir) / MODEL_INFO), shapes, partitioner)
    width = console.width if console.is_terminal else None
    _say(console, describe_train_state(shapes, axes, partitioner.mesh, width=width))
    if savings := describe_savings(shapes, partitioner):
        _say(console, savings)


def _say(console: rich.console.Console, text: str) -> None:
    if jax.process_index() == 0:
        console.print(text, soft_wrap=True, highlight=False, markup=False)


def _restore(
    initializer: Any,
    partitioner: Any,
    checkpoint_cfg: CheckpointConfig,
    model_dir: str,
    train_iter: Any,
    init_rng: jax.Array,
    use_orbax: bool,
) -> tuple[Any, Any, str | None]:
    """Restores what the run goes on from, makes the manager that saves, names the checkpoint; None for what is not."""
    save_cfg = checkpoint_cfg.save
    cfg, paths = get_first_valid_restore_config_and_paths(_restore_configs(checkpoint_cfg, model_dir))
    saves = save_cfg is not None and bool(save_cfg.period or save_cfg.checkpoint_steps)
    if cfg is None and not saves:
        return None, None, None
    path = paths[0] if paths else None
    return *create_checkpoint_manager_and_restore(
        initializer,
        partitioner,
        cfg,
        path,
        init_rng,
        save_checkpoint_cfg=save_cfg,
        model_dir=model_dir,
        ds_iter=train_iter,
        use_orbax=use_orbax,
    ), path


def _restore_configs(checkpoint_cfg: CheckpointConfig, model_dir: str) -> list[RestoreCheckpointConfig]:
    """Lists what to start from, in order: the run's own latest checkpoint, then what the config names."""
    save, restore = checkpoint_cfg.save, checkpoint_cfg.restore
    configs = []
    if save is not None:
        fns = [] if restore is None else [_resuming(fn) for fn in restore.all_transformation_fns]
        configs.append(
            RestoreCheckpointConfig(
                path=model_dir,
                mode='latest',
                restore_dataset=save.save_dataset,
                state_transformation_fns=fns,
                checkpoint_manager_cls=save.checkpoint_manager_cls,
            )
        )
    if restore is not None and restore.path:
        configs.append(restore)
    return configs


def _resuming(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Tells a transformation that the checkpoint is the run's own, if it wants to know."""
    return functools.partial(fn, is_resuming=True) if 'is_resuming' in inspect.signature(fn).parameters else fn


def _make_stops(total_steps: int, stats_period: int | None, save_cfg: Any, eval_period: int, gc_period: int) -> Stops:
    save_period = save_cfg.period if save_cfg is not None else None
    periods = [p for p in (eval_period, save_period, gc_period) if p]
    return Stops(
        total_steps=total_steps,
        report=stats_period or min(periods, default=total_steps),
        save=save_period,
        save_steps=tuple(save_cfg.checkpoint_steps or ()) if save_cfg is not None else (),
        evaluate=eval_period,
        collect=gc_period,
    )


def _start(loop: TrainingLoop, first_step: int, evaluate: bool) -> None:
    """Compiles, and does what comes before the first step."""
    spec = loop.train_iter.element_spec
    loop.trainer.compile_train({name: np.ones(x.shape, x.dtype) for name, x in spec.items()})
    if evaluate:
        loop.evaluate()
    if loop.stops.save:
        loop.save()


def main(argv: Sequence[str]) -> None:
    """Trains as the flags say."""
    del argv
    if not flags.FLAGS['verbosity'].present:
        logging.set_verbosity(logging.WARNING)
    if flags.FLAGS.cpu_devices:
        emulate_cpu_devices(flags.FLAGS.cpu_devices)
    if flags.FLAGS.multiprocess_gpu or flags.FLAGS.coordinator_address:
        jax.distributed.initialize(
            flags.FLAGS.coordinator_address, flags.FLAGS.process_count, flags.FLAGS.process_index
        )
    try:
        gin_utils.parse_gin_flags(flags.FLAGS.gin_search_paths, flags.FLAGS.gin_file, flags.FLAGS.gin_bindings)
        step, _ = gin_utils.configured(train)()
    except KeyboardInterrupt:
        sys.exit('stopped; the same command goes on from the last checkpoint')
    except RecipeError as error:
        # The message says it all; what gin adds to it and the way it came are noise to whoever reads it.
        sys.exit(f'{type(error).__name__}: {gin_utils.without_traces(str(error))}')
    if jax.process_index() == 0:
        print(f'to go on:   {_command_to_go_on(step)}')


def emulate_cpu_devices(count: int) -> None:
    """Makes JAX show this many CPU devices; it must not have shown any yet."""
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', count)


def _command_to_go_on(step: int) -> str:
    """Spells the command of this run with twice the steps, to be copied."""
    python = pathlib.Path(sys.executable)
    python = python.relative_to(pathlib.Path.cwd()) if python.is_relative_to(pathlib.Path.cwd()) else python
    kept = [arg for arg in sys.argv[1:] if not arg.startswith('--gin.TRAIN_STEPS=')]
    return ' '.join(
        [str(python), '-m', 't5x_pjit_recipes.train', *map(_quoted, [*kept, f'--gin.TRAIN_STEPS={2 * step}'])]
    )


def _quoted(argument: str) -> str:
    """Quotes for a shell, so that it reads well where it has quotes of its own.

    >>> print(_quoted("--gin.MODEL_DIR='runs/x'"), _quoted('--a=1'))
    "--gin.MODEL_DIR='runs/x'" --a=1
    """
    readable = "'" in argument and not set(argument) & set('"$`\\!')
    return f'"{argument}"' if readable else shlex.quote(argument)


def define_flags() -> None:
    """Defines the flags of this script."""
    gin_utils.define_flags()
    flags.DEFINE_bool('multiprocess_gpu', False, 'Whether this is one of several processes, each with some devices.')
    flags.DEFINE_string('coordinator_address', None, 'HOST:PORT of process 0, where the processes meet.')
    flags.DEFINE_integer('process_count', None, 'How many processes there are.')
    flags.DEFINE_integer('process_index', None, 'Which of them this is, from 0.')
    flags.DEFINE_integer(
        'cpu_devices', None, 'How many CPU devices to emulate; without it, all devices there are.', lower_bound=1
    )


if __name__ == '__main__':
    # Gin files name the function by this module's full name, so that is the one to run.
    from t5x_pjit_recipes import train as script

    train = script.train
    script.define_flags()
    flags.adopt_module_key_flags(script)
    flags.adopt_module_key_flags(gin_utils)
    gin_utils.run(script.main)
