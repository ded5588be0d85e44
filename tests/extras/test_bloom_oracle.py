"""BLOOM against `BloomForCausalLM`: same logits, same greedy tokens, in both directions."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from t5x_pjit_recipes import layout, partitioning
from t5x_pjit_recipes.errors import CheckpointError, ConfigError, MeshError
from t5x_pjit_recipes.interop.hugging_face import Folder
from t5x_pjit_recipes.recipes import bloom

ORACLE = pathlib.Path(__file__).with_name('bloom_oracle.py')
SIZES = {'vocab_size': 96, 'hidden_size': 48, 'n_layer': 3}
CASES = {
    'heads_4': {**SIZES, 'n_head': 4},
    'heads_6': {**SIZES, 'n_head': 6},
    'post_layernorm': {**SIZES, 'n_head': 4, 'apply_residual_connection_post_layernorm': True},
    'heads_12_deep': {**SIZES, 'n_head': 12, 'n_layer': 5, 'layer_norm_epsilon': 1e-3},
    'bare_bfloat16_in_files': {
        **SIZES,
        'n_head': 6,
        'n_layer': 2,
        'bare': True,
        'dtype': 'bfloat16',
        'save': {'max_shard_size': '30KB'},
    },
}


def run_oracle(*args):
    python = os.environ.get('ORACLE_PYTHON', sys.executable)
    subprocess.run([python, str(ORACLE), *map(str, args)], check=True, env={**os.environ, 'PYTHONWARNINGS': 'ignore'})


@pytest.fixture(scope='module')
def oracle(tmp_path_factory):
    directory = tmp_path_factory.mktemp('bloom')
    (directory / 'cases.json').write_text(json.dumps(CASES))
    run_oracle('make', directory, directory / 'cases.json')
    return directory


@pytest.fixture(scope='module')
def partitioner():
    return partitioning.PjitPartitioner(num_partitions=2, strict=True)


def make_apply(module, partitioner, state):
    specs = partitioner.get_mesh_axes(state).params
    rows = partitioner.data_partition_spec

    def apply(params, tokens):
        return module.apply({'params': params}, tokens)

    return partitioner.partition(apply, (specs, rows), None)


def logits_of(module, partitioner, state, tokens):
    return np.asarray(make_apply(module, partitioner, state)(state.params, tokens.astype(np.int32)))


@pytest.mark.parametrize('name', CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(oracle, partitioner, name):
    expected = np.load(oracle / f'{name}.npz')
    module, state = bloom.load(oracle / name, partitioner, dtype=jnp.float32)
    got = logits_of(module, partitioner, state, expected['tokens'])
    print(f'{name}: largest difference {np.abs(got - expected["logits"]).max():.2e} of {np.ptp(got):.1f}')
    np.testing.assert_allclose(got, expected['logits'], rtol=0, atol=1e-4)
    sampling = bloom.Sampling(max_new_tokens=expected['new'].shape[1], eos_id=None)
    generate = bloom.make_generate(module, partitioner, state=state, sampling=sampling)
    assert generate(state, json.loads(str(expected['prompts']))) == expected['new'].tolist()
    assert len(np.unique(expected['new'])) > 5


def test_bfloat16_is_as_near_as_that_of_torch(oracle, partitioner):
    expected = np.load(oracle / 'heads_6.npz')
    module, state = bloom.load(oracle / 'heads_6', partitioner, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype('bfloat16')}
    embedding = layout.gather(state.params['word_embeddings']['embedding'])
    np.testing.assert_array_equal(embedding.astype(np.float32), expected['embedding'])
    error = np.abs(logits_of(module, partitioner, state, expected['tokens']) - expected['logits']).mean()
    torch_error = np.abs(expected['bfloat16_logits'] - expected['logits']).mean()
    print(f'bfloat16: mean error {error:.4f}, of torch {torch_error:.4f}')
    assert error < 1.2 * torch_error


@pytest.mark.parametrize('name', ['heads_6', 'post_layernorm'])
def test_transformers_reads_what_is_saved(oracle, partitioner, tmp_path, name):
    expected = np.load(oracle / f'{name}.npz')
    module, state = bloom.load(oracle / name, partitioner, dtype=jnp.float32)
    bloom.save(tmp_path / 'saved', module, state.params)
    run_oracle('logits', tmp_path / 'saved', oracle / f'{name}.npz', tmp_path / 'logits.npz')
    np.testing.assert_array_equal(np.load(tmp_path / 'logits.npz')['logits'], expected['logits'])


def copy_folder(source, target, config=(), tensors=None):
    """Copies a folder with other entries in its config.json, and tensors changed, or taken out where they are None."""
    target.mkdir()
    content = json.loads((source / 'config.json').read_text()) | dict(config)
    (target / 'config.json').write_text(json.dumps(content))
    kept = load_file(source / 'model.safetensors') | (tensors or {})
    save_file({name: x for name, x in kept.items() if x is not None}, target / 'model.safetensors')
    return target


@pytest.mark.parametrize(
    ('config', 'tensors', 'message'),
    [
        ({}, {'transformer.ln_f.bias': None}, 'transformer.ln_f.bias: missing, for ln_f/bias'),
        ({}, {'transformer.h.0.more': np.ones(3)}, r'transformer.h.0.more \(3,\): not wanted'),
        ({}, {'transformer.ln_f.bias': np.ones(47)}, r'ln_f.bias: for ln_f/bias, its shape is \(47,\), and \(48,\)'),
        ({'n_layer': 4}, {}, r'transformer.h.3.mlp.dense_4h_to_h.bias: missing'),
        ({'n_layer': 2}, {}, r'transformer.h.2.input_layernorm.bias \(48,\): not wanted'),
    ],
)
def test_tensors_that_do_not_fit_are_named(oracle, partitioner, tmp_path, config, tensors, message):
    folder = copy_folder(oracle / 'heads_6', tmp_path / 'model', config, tensors)
    with pytest.raises(CheckpointError, match=message):
        bloom.load(folder, partitioner)


def test_a_second_copy_of_the_tied_head_is_passed_over(oracle, partitioner, tmp_path):
    table = Folder(oracle / 'heads_6').read('transformer.word_embeddings.weight')
    folder = copy_folder(oracle / 'heads_6', tmp_path / 'model', tensors={'lm_head.weight': table})
    (_, read), (_, wanted) = (bloom.load(path, partitioner) for path in (folder, oracle / 'heads_6'))
    jax.tree.map(np.testing.assert_array_equal, read.params, wanted.params)
    assert len(jax.tree.leaves(read.params)) > 10


def test_a_head_that_is_not_the_table_is_refused(oracle, partitioner, tmp_path):
    head = {'lm_head.weight': np.ones((96, 48), np.float32)}
    folder = copy_folder(oracle / 'heads_6', tmp_path / 'model', tensors=head)
    with pytest.raises(CheckpointError, match=r'lm_head\.weight \(96, 48\) is not transformer\.word_embeddings'):
        bloom.load(folder, partitioner)


def test_a_folder_of_another_model_is_refused(oracle, partitioner, tmp_path):
    folder = copy_folder(oracle / 'heads_6', tmp_path / 'model', {'model_type': 'gpt2'})
    with pytest.raises(ConfigError, match="model_type='gpt2' as BLOOM"):
        bloom.load(folder, partitioner)


def test_heads_that_the_model_axis_does_not_divide_are_told(oracle):
    partitioner = partitioning.PjitPartitioner(num_partitions=4, strict=True)
    with pytest.raises(MeshError, match='6 attention heads 4 ways .* Use num_partitions from 1, 2'):
        bloom.load(oracle / 'heads_6', partitioner)


def test_texts_go_through_the_tokenizer_of_the_folder(oracle, partitioner, tmp_path):
    tokenizers = pytest.importorskip('tokenizers')
    folder = copy_folder(oracle / 'heads_6', tmp_path / 'model')
    letters = {letter: i for i, letter in enumerate('abcdefghijklmnopqrstuvwxyz', 10)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    made.add_special_tokens([tokenizers.AddedToken(f'<{i}>', special=True) for i in range(10)])
    made.save(str(folder / 'tokenizer.json'))
    tokenizer = bloom.load_tokenizer(folder)
    assert tokenizer.encode('hello') == [17, 14, 21, 21, 24]
    module, state = bloom.load(folder, partitioner, dtype=jnp.float32)
    generate = bloom.make_generate(module, partitioner, state=state)
    (text,) = bloom.generate_text(generate, state, prompts=['hello'], tokenizer=tokenizer)
    (ids,) = generate(state, [[17, 14, 21, 21, 24]])
    assert text.replace(' ', '') == ''.join(chr(i - 10 + ord('a')) for i in ids if 10 <= i < 36)


def test_the_command_prints_mesh_plan_placement_and_tokens(oracle, partitioner, capsys):
    expected = np.load(oracle / 'heads_6.npz')
    prompts = json.loads(str(expected['prompts']))
    sampling = bloom.Sampling(max_new_tokens=10, eos_id=None)
    found = bloom.complete(oracle / 'heads_6', prompts, partitioner=partitioner, sampling=sampling, dtype='float32')
    assert found == expected['new'].tolist()
    said = capsys.readouterr().out
    assert said.startswith('mesh data=4, model=2 on 8 CPU devices\n')
    # 3 layers of 1 row and 3 heads on each device, 8 wide, 25 positions, keys and values.
    assert re.search(rf'key/value cache +{3 * 3 * 8 * 25 * 2 * 4 / 1024:.1f} KiB per device', said)
    assert f'{prompts[0]} -> {found[0]}' in said
