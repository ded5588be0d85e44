"""Whole runs as a user starts them, each in a process of its own."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import venv

import jax
import numpy as np
import pytest

from t5x_pjit_recipes import checkpoints, gin_utils
from t5x_pjit_recipes.checkpoints import stored
from t5x_pjit_recipes.layout.paths import named_leaves

ROOT = pathlib.Path(__file__).parents[1]
SMALL = [
    '--gin_file=gin/runs/pretrain_pydoc.gin',
    '--cpu_devices=2',
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 16}",
    '--gin.BATCH_SIZE=4',
    '--gin.EVAL_STEPS=1',
    '--gin.DROPOUT_RATE=0.1',
    '--gin.network.T5Config.num_encoder_layers=1',
    '--gin.network.T5Config.num_decoder_layers=1',
    '--gin.network.T5Config.emb_dim=16',
    '--gin.network.T5Config.mlp_dim=32',
]


def start(model_dir, *flags, python=sys.executable, cwd=None):
    command = [python, '-m', 't5x_pjit_recipes.train', *SMALL, f"--gin.MODEL_DIR='{model_dir}'", *flags]
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
    return subprocess.Popen(
        command,
        cwd=cwd or model_dir.parent,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process):
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read(directory):
    """Reads every array of a checkpoint."""
    tree = stored.read_tree(stored.epath.Path(directory))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for name, leaf in named_leaves(tree).items()
    }
    return stored.read_arrays(stored.epath.Path(directory), tree, wanted)


def test_a_run_killed_at_any_moment_ends_bit_identical(tmp_path):
    flags = ('--gin.TRAIN_STEPS=24', '--gin.CHECKPOINT_PERIOD=4')
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    undisturbed = start(whole, *flags)
    process = start(killed, *flags)
    wait_for(lambda: (checkpoints.latest_step(killed) or 0) >= 4, process)
    delay = random.SystemRandom().uniform(0, 2)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0)
    said = finish(start(killed, *flags))
    assert f'continuing from {killed}/checkpoint_' in said
    finish(undisturbed)
    steps = [f'{folder}/checkpoint_24' for folder in (whole, killed)]
    first, second = map(read, steps)
    assert first.keys() == second.keys()
    assert len(first) > 50
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=f'{name}, killed {delay:.3f} s after a checkpoint')
    positions = [json.loads(next(pathlib.Path(s, 'dataset').glob('train_ds*')).read_text()) for s in steps]
    assert positions[0] == positions[1]


def test_an_installed_wheel_finds_its_gin_files_and_trains(tmp_path):
    subprocess.run(
        [sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps', '--no-build-isolation', '-w', tmp_path, ROOT],
        check=True, cwd=tmp_path,
    )  # fmt: skip
    venv.create(tmp_path / 'env', with_pip=False)
    python = tmp_path / 'env' / 'bin' / 'python'
    site = next((tmp_path / 'env' / 'lib').glob('python*/site-packages'))
    wheel = next(tmp_path.glob('t5x_pjit_recipes-*.whl'))
    pip = [sys.executable, '-m', 'pip', '--quiet', 'install', '--no-deps', '--target', site, wheel]
    subprocess.run(pip, check=True, cwd=tmp_path)
    # What the package needs is taken from the environment that runs the tests; the package itself is the wheel's.
    (site / 'requirements.pth').write_text(str(pathlib.Path(np.__file__).parents[1]))
    said = finish(start(tmp_path / 'run', '--gin.TRAIN_STEPS=2', python=str(python), cwd=tmp_path))
    assert 'checkpoint_2' in said
    where = subprocess.run(
        [python, '-c', 'from t5x_pjit_recipes import gin_utils; print(gin_utils.gin_root())'],
        check=True, cwd=tmp_path, text=True, capture_output=True,
    ).stdout.strip()  # fmt: skip
    assert pathlib.Path(where) == site / 't5x_pjit_recipes' / 'gin_files'
    installed = {p.relative_to(where).as_posix() for p in pathlib.Path(where).rglob('*.gin')}
    assert installed == {p.relative_to(ROOT / 'gin').as_posix() for p in (ROOT / 'gin').rglob('*.gin')}
    assert gin_utils.gin_root() == ROOT / 'gin'


@pytest.mark.parametrize(
    ('flags', 'says'),
    [
        (['--gin.TRAIN_STEP=3'], 'TRAIN_STEP'),
        (["--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'target': 16}"], 'target (did'),
    ],
)
def test_a_mistake_on_the_command_line_ends_in_one_readable_error(flags, says, tmp_path):
    process = start(tmp_path / 'run', *flags, cwd=tmp_path)
    said, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert says in said.split('Error: ')[-1]
    assert 'did you mean' in said
