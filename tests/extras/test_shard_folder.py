"""A Hugging Face folder in shards, from Python and from gin."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from t5x_pjit_recipes import gin_utils, layout
from t5x_pjit_recipes.errors import RuleError
from t5x_pjit_recipes.partitioning import PjitPartitioner
from t5x_pjit_recipes.recipes import families, shard

ROOT = pathlib.Path(__file__).parents[2]
BLOCKS = [f'encoder.block.{i}.layer' for i in range(2)]
SHAPES = {
    'shared.weight': (64, 16),
    **{f'{block}.0.SelfAttention.{name}.weight': (16, 16) for block in BLOCKS for name in 'qkvo'},
    'encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight': (32, 4),
    **{f'{block}.{i}.layer_norm.weight': (16,) for block in BLOCKS for i in range(2)},
    **{f'{block}.1.DenseReluDense.wi.weight': (32, 16) for block in BLOCKS},
    **{f'{block}.1.DenseReluDense.wo.weight': (16, 32) for block in BLOCKS},
    'encoder.final_layer_norm.weight': (16,),
}


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    save_file(tensors, tmp_path / 'model.safetensors')
    (tmp_path / 'config.json').write_text(json.dumps({'model_type': 't5'}))
    return tmp_path, tensors


def test_a_folder_lies_as_a_familys_rules_say(folder, capsys):
    path, tensors = folder
    placed = shard.shard_folder(path, PjitPartitioner(2), families.torch_rules('hf_t5'))
    assert placed.keys() == {name.replace('.', '/') for name in tensors}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(placed[name.replace('.', '/')], tensor, err_msg=name)
    wi = placed['encoder/block/1/layer/1/DenseReluDense/wi/weight']
    assert {part.data.shape for part in wi.addressable_shards} == {(32 // 2, 16 // 4)}
    said = capsys.readouterr().out
    assert said.splitlines()[0] == 'mesh data=4, model=2 on 8 CPU devices'
    assert 'encoder/block/*/layer/*/DenseReluDense/wi/weight x2' in said
    assert f'{len(SHAPES)} arrays: {len(SHAPES) - 6} sharded, 6 replicated' in said
    assert f'all {len(SHAPES)} arrays lie as planned' in said


def test_a_folder_of_another_family_is_refused(folder):
    with pytest.raises(RuleError, match=rf'Cannot lay out {len(SHAPES)} arrays by .*: no rule matches {len(SHAPES)}'):
        shard.shard_folder(folder[0], PjitPartitioner(2), families.torch_rules('bloom'))
    with pytest.raises(RuleError, match=r"family 'blom' \(did you mean 'bloom'\?\): there are bloom, gpt2"):
        families.torch_rules('blom')


def command(*flags):
    line = [sys.executable, '-m', 't5x_pjit_recipes.recipes.shard', '--gin_file=gin/recipes/shard_folder.gin', *flags]
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
    return subprocess.run(line, env=environment, text=True, capture_output=True, cwd=ROOT)


def test_a_command_shards_a_folder_and_says_how_it_lies(folder):
    done = command(f"--gin.FOLDER='{folder[0]}'", '--cpu_devices=4')
    assert done.returncode == 0, done.stderr
    assert "('model', 'data') on data=2, model=2" in done.stdout
    assert f'all {len(SHAPES)} arrays lie as planned' in done.stdout


def test_rules_of_ones_own_can_be_given_in_gin(folder, monkeypatch):
    path, _ = folder
    monkeypatch.chdir(ROOT)
    gin_utils.clear_config()
    rules = "[('.*/w[io]/weight', \"PartitionSpec('model', None)\"), ('.*', None)]"
    bindings = [f"FOLDER = '{path}'", f'RULES = {rules}', 'NUM_PARTITIONS = 4']
    gin_utils.parse_gin_flags(['.'], ['gin/recipes/shard_folder.gin'], bindings)
    placed = gin_utils.configured(shard.shard_folder)()
    gin_utils.clear_config()
    expected = {name: P('model') if '/w' in name and '/D' in name else P() for name in placed}
    layout.check_placement(placed, layout.Plan(placed, expected, PjitPartitioner(4).mesh))
