"""One run in two processes, each with half of the devices and its own rows of every batch."""

import json
import socket

import numpy as np

from t5x_pjit_recipes import checkpoints
from t5x_pjit_recipes.progress import LOSS
from tests.test_runs import finish, start

SETTINGS = [
    '--gin.TRAIN_STEPS=6',
    '--gin.CHECKPOINT_PERIOD=3',
    '--gin.EVAL_PERIOD=3',
    '--gin.BATCH_SIZE=8',
    '--gin.DROPOUT_RATE=0.0',
    '--gin.train/utils.DatasetConfig.pack=False',  # packed rows depend on who packs them
    '--gin.train_script.train.stats_period=1',
]


def losses(model_dir, collection):
    lines = [json.loads(line) for line in (model_dir / 'metrics.jsonl').read_text().splitlines()]
    return {line['step']: line[LOSS] for line in lines if line['collection'] == collection and LOSS in line}


def free_address():
    with socket.socket() as probe:
        probe.bind(('localhost', 0))
        return f'localhost:{probe.getsockname()[1]}'


def run_in_two(model_dir, *flags):
    address = free_address()
    processes = [
        start(
            model_dir, *SETTINGS, '--cpu_devices=2', *flags,
            f'--coordinator_address={address}', '--process_count=2', f'--process_index={index}',
        )
        for index in range(2)
    ]  # fmt: skip
    return [finish(process) for process in processes]


def test_two_processes_train_as_one_does_and_resume(tmp_path):
    one, two = tmp_path / 'one', tmp_path / 'two'
    finish(start(one, *SETTINGS, '--cpu_devices=4'))
    first, second = run_in_two(two, '--gin.TRAIN_STEPS=3')
    assert 'mesh data=2, model=2 on 4 CPU devices in 2 processes' in first
    assert 'mesh' not in second  # process 0 alone speaks
    run_in_two(two)
    for collection in ('train', 'training_eval/pydoc_span_corruption'):
        expected, found = losses(one, collection), losses(two, collection)
        assert found.keys() == expected.keys()
        assert len(found) >= 2
        for step, loss in expected.items():
            np.testing.assert_allclose(found[step], loss, rtol=0, atol=1e-4, err_msg=f'step {step}')
    assert checkpoints.all_steps(two) == [0, 3, 6]
    assert {p.name for p in (two / 'checkpoint_6' / 'dataset').glob('train_ds*')} == {
        'train_ds-000-of-002',
        'train_ds-001-of-002',
    }
