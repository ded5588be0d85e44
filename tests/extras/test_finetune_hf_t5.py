"""The run of gin/recipes/finetune_hf_t5.gin, from a folder that transformers has made and back to one."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from t5x_pjit_recipes.recipes import hf_t5
from tests.extras.test_hf_t5 import consult, largest_difference, our_logits, write_inputs

ENTRIES = {
    'vocab_size': 384, 'd_model': 32, 'd_kv': 8, 'd_ff': 64, 'num_layers': 1, 'num_decoder_layers': 2, 'num_heads': 4,
    'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False, 'dropout_rate': 0.0,
}  # fmt: skip
SMALL = [
    '--gin_file=gin/recipes/finetune_hf_t5.gin',
    '--cpu_devices=8',
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 16}",
    '--gin.BATCH_SIZE=8',
    '--gin.EVAL_STEPS=1',
    '--gin.EVAL_PERIOD=4',
    '--gin.CHECKPOINT_PERIOD=4',
    '--gin.NUM_PARTITIONS=2',
    '--gin.LEARNING_RATE=0.02',
    '--gin.train_script.train.stats_period=1',
    "--gin.FOLDER='base'",
    "--gin.MODEL_DIR='run'",
]


def command(module, cwd, *flags):
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
    done = subprocess.run(
        [sys.executable, '-m', f't5x_pjit_recipes.{module}', *flags],
        cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope='module')
def fine_tuned(tmp_path_factory):
    """A directory with the folder, a run from it, what was exported from that, and what the commands said."""
    directory = tmp_path_factory.mktemp('fine_tuned')
    inputs = write_inputs(directory)
    (directory / 'cases.json').write_text(json.dumps({'base': {'entries': ENTRIES, 'own_head': True}}))
    consult('make', directory / 'cases.json', directory)
    (directory / 'base' / 'tokenizer_config.json').write_text('{}')
    said = [command('train', directory, *SMALL, f'--gin.TRAIN_STEPS={steps}') for steps in (8, 12)]
    flags = ["--gin.CHECKPOINT='run/checkpoint_12'", "--gin.FOLDER='exported'", "--gin.LIKE='base'"]
    said.append(command('recipes.hf_t5', directory, '--gin_file=gin/recipes/export_hf_t5.gin', *flags))
    consult('logits', directory)
    return directory, inputs, said


def test_the_loss_falls_from_where_the_folder_is(fine_tuned):
    said = fine_tuned[2][0]
    assert 'mesh data=4, model=2 on 8 CPU devices' in said
    assert 'starting from base, to step 8' in said
    losses = [float(loss) for loss in re.findall(r'step \d/8 +loss ([\d.]+)', said)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5


def test_a_run_goes_on_from_its_own_checkpoint_not_from_the_folder(fine_tuned):
    assert re.search(r'continuing from \S*run/checkpoint_8, to step 12', fine_tuned[2][1])


def test_transformers_computes_from_the_exported_folder_what_we_do_from_the_checkpoint(fine_tuned, record_property):
    directory, inputs, said = fine_tuned
    assert 'wrote exported from run/checkpoint_12' in said[2]
    assert (directory / 'exported' / 'tokenizer_config.json').read_text() == '{}'
    network = hf_t5.load_network(directory / 'exported')
    params = hf_t5.read_params(directory / 'run' / 'checkpoint_12')
    theirs = np.load(directory / 'exported.npz')['logits']
    assert largest_difference(our_logits(network, params, inputs), theirs, inputs, record_property) < 1e-4
    before = np.load(directory / 'base.npz')['logits']
    assert np.abs(before - theirs).max() > 0.1


def test_an_export_may_go_where_its_config_lies(fine_tuned, tmp_path):
    directory = fine_tuned[0]
    for name in ('config.json', 'tokenizer_config.json'):
        shutil.copy(directory / 'base' / name, tmp_path)
    hf_t5.export(directory / 'run' / 'checkpoint_12', tmp_path, like=tmp_path)
    assert (tmp_path / 'model.safetensors').read_bytes() == (directory / 'exported' / 'model.safetensors').read_bytes()
