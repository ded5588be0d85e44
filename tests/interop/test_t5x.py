"""The real T5X trains with our partitioner, and each reads what the other saved; skipped where it is not importable."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from t5x_pjit_recipes import checkpoints
from t5x_pjit_recipes.initialization import TrainStateInitializer
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.partitioning import PjitPartitioner
from tests.t5_models import initializer_arguments, make_adafactor, make_model

ROOT = pathlib.Path(__file__).parents[2]
OURS, THEIRS = 't5x_pjit_recipes', 't5x'
STEPS = 4
SMALL = {
    'emb_dim': 16,
    'num_heads': 4,
    'num_encoder_layers': 1,
    'num_decoder_layers': 1,
    'head_dim': 4,
    'mlp_dim': 32,
}


def run(*command):
    # The command puts up its own devices, and must not find those of this process.
    environment = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | {'JAX_PLATFORMS': 'cpu'}
    environment['PYTHONPATH'] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, text=True, capture_output=True, timeout=900
    )


def finish(*command):
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def t5x(tmp_path_factory):
    """Runs T5X: a function of {name: keywords of a run} that returns {name: arrays of the last train state}."""
    if importlib.util.find_spec('t5x') is None:
        pytest.skip('t5x is not installed')
    imported = run('-c', 'import t5x.train')
    if imported.returncode:
        cause = imported.stderr.strip().splitlines()[-1]
        pytest.skip(f't5x is installed, and importing it ends with: {cause}')

    def run_all(runs):
        results = tmp_path_factory.mktemp('results')
        asked = [{'result': str(results / f'{name}.npz'), **keywords} for name, keywords in runs.items()]
        (results / 'runs.json').write_text(json.dumps(asked, default=str))
        print(finish(ROOT / 'tests/interop/t5x_runs.py', results / 'runs.json'))
        return {name: dict(np.load(results / f'{name}.npz')) for name in runs}

    return run_all


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('runs')


@pytest.fixture(scope='module')
def undisturbed(t5x, folder):
    """Runs of four steps that saved every second one."""
    runs = {
        'theirs': {'partitioning': THEIRS},
        'theirs in 2 microbatches': {'partitioning': THEIRS, 'microbatches': 2},
        'ours': {'partitioning': OURS},
        'ours in 2 microbatches': {'partitioning': OURS, 'microbatches': 2},
        'ours, legacy checkpoints': {'partitioning': OURS, 'use_orbax': False},
    }
    return t5x({name: {'model_dir': folder / name, 'steps': STEPS, **keywords} for name, keywords in runs.items()})


@pytest.fixture(scope='module')
def own_run(t5x, folder):
    """The folder of a run of our own `train`, with the same model."""
    model_dir = folder / 'own'
    flags = [f'--gin.network.T5Config.{name}={value}' for name, value in SMALL.items()]
    flags += ['--gin.TRAIN_STEPS=2', '--gin.CHECKPOINT_PERIOD=2', '--gin.EVAL_PERIOD=0', '--gin.BATCH_SIZE=8']
    flags += ["--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 16}", f"--gin.MODEL_DIR='{model_dir}'"]
    flags += ['--gin.adafactor.Adafactor.min_dim_size_to_factor=8', '--cpu_devices=8']
    finish('-m', 't5x_pjit_recipes.train', '--gin_file=gin/runs/pretrain_pydoc.gin', *flags)
    return model_dir


@pytest.fixture(scope='module')
def resumed(undisturbed, own_run, t5x, folder):
    """Runs in a new process that find the checkpoint of step 2, as a run would that was stopped after it."""
    runs = {
        'ours': ('ours', {'partitioning': OURS}),
        'theirs': ('theirs', {'partitioning': THEIRS}),
        'theirs after ours': ('ours', {'partitioning': THEIRS}),
        'ours after theirs': ('theirs', {'partitioning': OURS}),
        'ours, legacy checkpoints': ('ours, legacy checkpoints', {'partitioning': OURS, 'use_orbax': False}),
    }
    asked = {}
    for name, (source, keywords) in runs.items():
        model_dir = folder / f'{name}, resumed'
        shutil.copytree(folder / source, model_dir, ignore=shutil.ignore_patterns(f'checkpoint_{STEPS}'))
        asked[name] = {'model_dir': model_dir, 'steps': STEPS, **keywords}
    # A run that is at its last step already ends with what it restored.
    without_data = ['utils.SaveCheckpointConfig.save_dataset = False']
    asked['own'] = {'model_dir': own_run, 'partitioning': THEIRS, 'steps': 2, 'bindings': without_data}
    return t5x(asked)


def assert_identical(got, wanted):
    assert got.keys() == wanted.keys()
    different = [name for name in wanted if got[name].tobytes() != wanted[name].tobytes()]
    assert not different


def restore(model_dir, step):
    """Restores a train state of ours on the mesh data=4, model=2."""
    model = make_model(make_adafactor(min_dim_size_to_factor=8), **SMALL)
    partitioner = PjitPartitioner(2)
    initializer = TrainStateInitializer(partitioner=partitioner, **initializer_arguments(model))
    shapes = initializer.global_train_state_shape
    manager = checkpoints.OrbaxCheckpointManagerInterface(str(model_dir), shapes, partitioner)
    state = manager.restore(step)
    manager.close()
    return state, partitioner.get_mesh_axes(shapes)


@pytest.mark.parametrize('microbatches', ['', ' in 2 microbatches'])
def test_training_with_ours_is_bit_identical_to_training_with_theirs(undisturbed, microbatches):
    ours, theirs = undisturbed['ours' + microbatches], undisturbed['theirs' + microbatches]
    assert ours['state/step'] == STEPS
    assert_identical(ours, theirs)


def test_the_partitioner_that_gin_named_was_used(undisturbed, folder):
    assert 'from t5x_pjit_recipes import partitioning' in (folder / 'ours/config.gin').read_text()
    assert 'from t5x import partitioning' in (folder / 'theirs/config.gin').read_text()


def test_both_kinds_of_checkpoint_leave_training_as_it_is(undisturbed):
    assert_identical(undisturbed['ours, legacy checkpoints'], undisturbed['ours'])


@pytest.mark.parametrize('name', ['ours', 'theirs after ours', 'ours after theirs', 'ours, legacy checkpoints'])
def test_a_resumed_run_ends_as_an_undisturbed_one(undisturbed, resumed, name):
    # T5X's Orbax restore makes the step a float, with either partitioner.
    got = {**resumed[name], 'state/step': resumed[name]['state/step'].astype(np.int32)}
    assert_identical(got, undisturbed['ours'])


def test_resuming_with_ours_gives_the_dtypes_that_resuming_with_theirs_gives(resumed):
    dtypes = {name: {leaf: x.dtype for leaf, x in resumed[name].items()} for name in ('ours', 'theirs')}
    assert dtypes['ours'] == dtypes['theirs']


def test_our_states_are_restored_from_what_t5x_saved(undisturbed, folder):
    state, axes = restore(folder / 'theirs', STEPS)
    got = named_leaves(state.state_dict())
    assert_identical({name: np.asarray(x) for name, x in got.items()}, undisturbed['theirs'])
    specs = named_leaves(axes.state_dict(), is_leaf=lambda x: x is None or isinstance(x, jax.sharding.PartitionSpec))
    mesh = got['target/encoder/layers_0/mlp/wi_0/kernel'].sharding.mesh
    assert mesh.shape == {'data': 4, 'model': 2}
    for name, x in got.items():
        wanted = jax.sharding.NamedSharding(mesh, specs[name] or jax.sharding.PartitionSpec())
        assert x.sharding.is_equivalent_to(wanted, x.ndim), name


def test_t5x_restores_what_our_own_run_saved(own_run, resumed):
    state, _ = restore(own_run, 2)
    got = {**resumed['own'], 'state/step': resumed['own']['state/step'].astype(np.int32)}
    assert_identical(got, {name: np.asarray(x) for name, x in named_leaves(state.state_dict()).items()})
