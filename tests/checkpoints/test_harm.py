"""Killed saves and damaged files, in processes of their own: what is listed restores bit for bit or is named."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from t5x_pjit_recipes import checkpoints, errors

from .doubles import Partitioner, State, assert_same, make_manager, save

ROOT = Path(__file__).parents[2]
SPECS = {'target/w': jax.sharding.PartitionSpec('data', 'model')}


def state_at(step):
    values = np.random.default_rng(step).normal(size=(2, 256, 512)).astype('f4')
    return State({'target': {'w': values[0]}, 'state': {'step': np.int32(step), 'param_states': {'w': values[1]}}})


def save_forever(directory):
    """Goes on from the latest step until it is killed, and checks what it goes on from."""
    manager = make_manager(directory, state_at(0), Partitioner(specs=SPECS), keep=4)
    step = manager.latest_step() or 0
    if step:
        assert_same(manager.restore(), state_at(step))
    while True:
        step += 1
        manager.save(Partitioner(specs=SPECS).place(state_at(step)))


def run(call):
    code = f'from tests.checkpoints import test_harm; test_harm.{call}'
    return subprocess.Popen(
        [sys.executable, '-W', 'error', '-c', code],
        cwd=ROOT,
        env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '8'},
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_at_some_moment(process, directory, after):
    while len(checkpoints.all_steps(directory)) < 2 or checkpoints.latest_step(directory) < after + 2:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    time.sleep(random.Random(after).uniform(0, 0.1))
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_every_step_that_is_listed_after_a_kill_was_saved_whole(tmp_path):
    latest = 0
    for _ in range(2):
        kill_at_some_moment(run(f'save_forever({str(tmp_path)!r})'), tmp_path, latest)
        manager = make_manager(tmp_path, state_at(0), Partitioner(2, 4, SPECS))
        assert manager.latest_step() > latest
        latest = manager.latest_step()
        for step in manager.all_steps():
            assert_same(manager.restore(step=step), state_at(step))
    manager.save(state_at(latest + 1))
    manager.close()
    assert {path.name for path in tmp_path.iterdir()} == {f'checkpoint_{step}' for step in manager.all_steps()}


def spoil(directory):
    for path in (directory / 'state').rglob('d/*'):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)


def lose(directory):
    for path in (directory / 'state').rglob('d/*'):
        path.unlink()


def check_damage_is_named(directory):
    """Runs apart, because reads that fail together leave noise behind them in the process."""
    for harm in (spoil, lose):
        save(directory, state_at(1))
        save(directory, state_at(2))
        harm(Path(directory) / 'checkpoint_2')
        with pytest.raises(errors.CheckpointError, match=r'checkpoint_2: .* holds other steps 1\.'):
            make_manager(directory, state_at(0)).restore()
        directory += '_again'


def test_damaged_arrays_are_named_with_the_steps_that_are_whole(tmp_path):
    process = run(f'check_damage_is_named({str(tmp_path / "model")!r})')
    _, messages = process.communicate()
    assert process.returncode == 0, messages
