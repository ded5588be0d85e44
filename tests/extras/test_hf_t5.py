"""Hugging Face's T5: what transformers computes from a folder is what our T5 does, in both directions."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import unfreeze
from safetensors.numpy import load_file, save_file

from t5x_pjit_recipes import data, layout, models, optimizers, partitioning
from t5x_pjit_recipes.errors import CheckpointError, ConfigError
from t5x_pjit_recipes.examples.t5.network import T5Config, Transformer
from t5x_pjit_recipes.layout.paths import map_named
from t5x_pjit_recipes.recipes import hf_t5
from t5x_pjit_recipes.train_state import FlaxOptimTrainState

ORACLE = pathlib.Path(__file__).with_name('oracle.py')
BASE = {'vocab_size': 96, 'd_model': 32, 'd_kv': 8, 'd_ff': 48, 'num_layers': 2, 'num_heads': 4}
# Entries of config.json, whether the head is its own, and what our T5 is to make of it.
CASES = {
    't5': ({}, False, {}),
    't5_1_1': ({'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False}, True, {}),
    'tied_unscaled': ({'initializer_factor': 0.3, 'tie_word_embeddings': False}, False, {'scale_logits': False}),
    'own_head_scaled': ({}, True, {'scale_logits': True}),
    'deep_decoder': ({'num_decoder_layers': 3, 'feed_forward_proj': 'gated-silu', 'd_kv': 4}, False, {}),
    'shallow_decoder': ({'num_decoder_layers': 1, 'tie_word_embeddings': False}, True, {}),
    'mt5': ({'model_type': 'mt5', 'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False}, True, {}),
}
OURS = {
    'tied': {'logits_via_embedding': True},
    'own_head': {'mlp_activations': ('gelu', 'linear')},
    'tied_unscaled': {'logits_via_embedding': True, 'scale_logits': False, 'mlp_activations': ('silu', 'linear')},
    'own_head_scaled': {'scale_logits': True, 'num_decoder_layers': 1},
    'plain_gelu': {'mlp_activations': ('gelu',), 'num_encoder_layers': 1, 'num_decoder_layers': 3},
}
TOLERANCE = 1e-4


def consult(*arguments):
    python = os.environ.get('ORACLE_PYTHON', sys.executable)
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    done = subprocess.run([python, ORACLE, *arguments], text=True, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr


def write_inputs(directory):
    """Writes tokens, some of them padding; longer than 128, so that distances fill all buckets."""
    rng = np.random.default_rng(1)
    inputs = {}
    for name, lengths in {'encoder_input_tokens': (150, 40, 7, 150), 'targets': (140, 12, 30, 1)}.items():
        tokens = rng.integers(1, BASE['vocab_size'], (len(lengths), max(lengths)), np.int32)
        inputs[name] = np.where(np.arange(max(lengths)) < np.array(lengths)[:, None], tokens, 0)
    inputs['decoder_input_tokens'] = np.pad(inputs['targets'], ((0, 0), (1, 0)))[:, :-1]
    np.savez(directory / 'inputs.npz', **inputs)
    return inputs


def our_logits(network, params, inputs, partitioner=None):
    def fn(params, inputs):
        tokens = inputs['encoder_input_tokens'], inputs['decoder_input_tokens'], inputs['targets']
        return network.apply({'params': params}, *tokens, enable_dropout=False)

    if partitioner is None:
        return jax.jit(fn)(params, inputs)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
    data = partitioner.data_partition_spec
    return partitioner.partition(fn, (specs, data), data)(params, inputs)


def largest_difference(ours, theirs, inputs, record=None):
    there = inputs['targets'] > 0
    ours, theirs = np.asarray(ours)[there], theirs[there]
    assert 1 < np.abs(theirs).max() < 20
    difference = float(np.abs(ours - theirs).max())
    print(f'largest difference {difference:.1e}, of logits up to {np.abs(theirs).max():.1f}')
    if record is not None:
        record('largest_difference', difference)
    return difference


@pytest.fixture(scope='module')
def theirs(tmp_path_factory):
    """Folders that transformers has made, and what it computes from them."""
    directory = tmp_path_factory.mktemp('theirs')
    inputs = write_inputs(directory)
    cases = {name: {'entries': {**BASE, **entries}, 'own_head': own} for name, (entries, own, _) in CASES.items()}
    (directory / 'cases.json').write_text(json.dumps(cases))
    consult('make', directory / 'cases.json', directory)
    return directory, inputs


def wanted_config(name):
    entries, own, more = CASES[name]
    activation, gate, _ = (entries.get('feed_forward_proj', '') + '--').split('-', 2)
    gates = {'gated-gelu': ('gelu', 'linear'), 'gated-silu': ('silu', 'linear')}
    return T5Config(
        vocab_size=96, emb_dim=32, num_heads=4, head_dim=entries.get('d_kv', 8), mlp_dim=48, num_encoder_layers=2,
        num_decoder_layers=entries.get('num_decoder_layers', 2),
        mlp_activations=gates.get(f'{activation}-{gate}', ('relu',)), logits_via_embedding=not own, **more,
    )  # fmt: skip


@pytest.mark.parametrize('name', CASES)
def test_our_logits_are_theirs(theirs, name, record_property):
    directory, inputs = theirs
    network = hf_t5.load_network(directory / name)
    assert network.config == wanted_config(name)
    params = hf_t5.load_params(directory / name, partitioning.PjitPartitioner(1, devices=jax.devices()[:1]))
    expected = np.load(directory / f'{name}.npz')['logits']
    ours = our_logits(network, params, inputs)
    assert largest_difference(ours, expected, inputs, record_property) < TOLERANCE


def make_partitioner(devices=8):
    rules = partitioning.standard_logical_axis_rules(activation_partitioning_dims=1, parameter_partitioning_dims=2)
    return partitioning.PjitPartitioner(2, logical_axis_rules=rules, strict=True, devices=jax.devices()[:devices])


@pytest.mark.parametrize('name', ['t5', 't5_1_1'])
def test_logits_of_sharded_parameters_are_theirs(theirs, name, record_property):
    directory, inputs = theirs
    partitioner = make_partitioner()
    assert dict(partitioner.mesh.shape) == {'data': 4, 'model': 2}
    params = hf_t5.load_params(directory / name, partitioner)
    kernel = params['decoder']['layers_1']['mlp']['wo']['kernel']
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(48 // 2, 32 // 4)}
    ours = our_logits(hf_t5.load_network(directory / name), params, inputs, partitioner)
    expected = np.load(directory / f'{name}.npz')['logits']
    assert largest_difference(ours, expected, inputs, record_property) < TOLERANCE


def livelier(config, name, x):
    """Makes norms and biases differ from head to head, and keeps logits at order 1 to 10."""
    if name.endswith(('scale', 'rel_embedding')):
        return x + 0.3 * jax.random.normal(jax.random.PRNGKey(len(name)), x.shape)
    if name.endswith('logits_dense/kernel') and config.logits_are_scaled:
        return 6 * x
    return x if config.logits_are_scaled or 'embedding' not in name else x / 3


@pytest.fixture(scope='module')
def ours(tmp_path_factory):
    """Folders that we have written, what we compute from the parameters, and what transformers does."""
    directory = tmp_path_factory.mktemp('ours')
    inputs = write_inputs(directory)
    logits = {}
    for seed, (name, more) in enumerate(OURS.items()):
        sizes = {'num_encoder_layers': 2, 'num_decoder_layers': 2, **more}
        config = T5Config(vocab_size=96, emb_dim=32, num_heads=4, head_dim=8, mlp_dim=48, **sizes)
        variables = Transformer(config).init(jax.random.PRNGKey(seed), *[jnp.ones((1, 2), jnp.int32)] * 3)
        params = map_named(functools.partial(livelier, config), variables['params'])
        hf_t5.save(directory / name, config, params)
        logits[name] = our_logits(Transformer(config), params, inputs)
    consult('logits', directory)
    return directory, inputs, logits


@pytest.mark.parametrize('name', OURS)
def test_their_logits_are_ours(ours, name, record_property):
    directory, inputs, logits = ours
    theirs = np.load(directory / f'{name}.npz')['logits']
    assert largest_difference(logits[name], theirs, inputs, record_property) < TOLERANCE


@pytest.mark.parametrize('name', OURS)
def test_what_was_written_is_read_again(ours, name):
    config = hf_t5.load_network(ours[0] / name).config
    wanted = {'num_encoder_layers': 2, 'num_decoder_layers': 2, **OURS[name]}
    assert {key: getattr(config, key) for key in wanted} == wanted


@pytest.mark.parametrize('name', CASES)
def test_a_folder_written_back_is_the_same_folder(theirs, name, tmp_path):
    source = theirs[0] / name
    network, params = hf_t5.load_network(source), hf_t5.load_params(source, make_partitioner())
    entries = json.loads((source / 'config.json').read_text())
    hf_t5.save(tmp_path / 'back', network.config, params, like=entries)
    before, after = read_all(source), read_all(tmp_path / 'back')
    assert before.keys() == after.keys()
    for tensor, array in before.items():
        np.testing.assert_array_equal(array, after[tensor], err_msg=tensor)
    written = json.loads((tmp_path / 'back' / 'config.json').read_text())
    differ = {key for key, value in entries.items() if written[key] != value}
    assert differ <= {'tie_word_embeddings'}  # Version 5 says that it is true in whatever it writes.


def read_all(folder):
    return {name: array for file in folder.glob('*.safetensors') for name, array in load_file(file).items()}


def rewritten(source, path, change=lambda tensors: None, **entries):
    """Writes a folder again, in one file, with other tensors and entries."""
    path.mkdir()
    tensors = read_all(source)
    change(tensors)
    save_file(tensors, path / 'model.safetensors', metadata={'format': 'pt'})
    config = json.loads((source / 'config.json').read_text())
    (path / 'config.json').write_text(json.dumps({**config, **entries}))
    return path


def add_copies(tensors):
    """Adds what older versions of transformers wrote as well."""
    for name in ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight', 'lm_head.weight'):
        tensors[name] = tensors['shared.weight'].copy()
    unused = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'
    tensors[unused] = np.ones((32, 4), np.float32)


def rename_table(tensors):
    tensors['decoder.embed_tokens.weight'] = tensors.pop('shared.weight')


@pytest.mark.parametrize('change', [add_copies, rename_table])
def test_older_spellings_of_a_folder_are_the_same_parameters(theirs, tmp_path, change):
    source = theirs[0] / 't5'
    other = rewritten(source, tmp_path / 'other', change)
    assert hf_t5.load_network(other) == hf_t5.load_network(source)
    params = [hf_t5.load_params(folder, make_partitioner(2)) for folder in (source, other)]
    jax.tree.map(np.testing.assert_array_equal, *params)


def test_parameters_are_read_in_the_dtype_that_is_asked_for(theirs):
    params = hf_t5.load_params(theirs[0] / 't5', make_partitioner(), dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype('bfloat16')}


def test_embeddings_of_encoder_and_decoder_that_differ_are_an_error(theirs, tmp_path):
    def change(tensors):
        tensors['encoder.embed_tokens.weight'] = tensors['shared.weight'] + 1

    other = rewritten(theirs[0] / 't5', tmp_path / 'other', change)
    with pytest.raises(CheckpointError, match='these differ from shared.weight.*\n  encoder.embed_tokens.weight'):
        hf_t5.load_network(other)


def test_all_tensors_that_do_not_fit_are_named(theirs, tmp_path):
    def change(tensors):
        tensors['encoder.final_layer_norms.weight'] = tensors.pop('encoder.final_layer_norm.weight')
        del tensors['decoder.block.1.layer.2.DenseReluDense.wi.weight']
        tensors['decoder.block.0.layer.0.SelfAttention.q.weight'] = np.zeros((64, 32), np.float32)

    other = rewritten(theirs[0] / 't5', tmp_path / 'other', change)
    with pytest.raises(CheckpointError) as caught:
        hf_t5.load_params(other, make_partitioner(2))
    assert str(caught.value).splitlines()[1:] == [
        "  encoder.final_layer_norms.weight (32,): not wanted (did you mean 'encoder.final_layer_norm.weight'?)",
        '  decoder.block.0.layer.0.SelfAttention.q.weight: for decoder/layers_0/self_attention/query/kernel, its shape '
        'is (64, 32), and (32, 32) is wanted',
        '  decoder.block.1.layer.2.DenseReluDense.wi.weight: missing, for decoder/layers_1/mlp/wi/kernel',
        '  encoder.final_layer_norm.weight: missing, for encoder/encoder_norm/scale (did you mean '
        "'encoder.final_layer_norms.weight'?)",
    ]


def test_a_folder_of_another_kind_is_an_error(theirs, tmp_path):
    other = rewritten(theirs[0] / 't5', tmp_path / 'other', model_type='umt5', relative_attention_num_buckets=64)
    with pytest.raises(ConfigError) as caught:
        hf_t5.load_network(other)
    assert str(caught.value).splitlines()[1:] == [
        "  model_type='umt5': only 't5' and 'mt5' are known",
        '  relative_attention_num_buckets=64: it is 32 here',
    ]


def test_parameters_of_another_model_are_not_written(theirs, tmp_path):
    source = theirs[0] / 't5'
    params = hf_t5.load_params(source, make_partitioner(2))
    config = dataclasses.replace(hf_t5.load_network(source).config, mlp_dim=64, num_encoder_layers=1)
    with pytest.raises(CheckpointError) as caught:
        hf_t5.save(tmp_path / 'out', config, params)
    assert 'decoder/layers_0/mlp/wi/kernel: (32, 64) in the model, (32, 48) in what is to be saved' in str(caught.value)
    assert not (tmp_path / 'out').exists()


def test_what_is_read_lies_as_the_partitioner_says(theirs):
    partitioner = make_partitioner()
    variables = hf_t5.load(theirs[0] / 't5_1_1', partitioner)
    state = FlaxOptimTrainState.create(optimizers.adamw(1e-3), variables)
    params_specs = partitioner.get_mesh_axes(state).params
    layout.check_placement(variables['params'], layout.Plan(variables['params'], params_specs, partitioner.mesh))


def make_initializer(folder, config, optimizer_def):
    model = models.EncoderDecoderModel(Transformer(config), None, None, optimizer_def)
    shapes = {'encoder_input_tokens': (8, 4), 'decoder_input_tokens': (8, 4)}
    return hf_t5.FolderInitializer(
        optimizer_def, model.get_initial_variables, shapes, make_partitioner(), folder=folder
    )


@pytest.mark.parametrize('optimizer_def', [optimizers.adamw(1e-3), None], ids=['training', 'inference'])
def test_a_state_from_a_folder_is_born_placed(theirs, optimizer_def):
    folder = theirs[0] / 't5_1_1'
    initializer = make_initializer(folder, wanted_config('t5_1_1'), optimizer_def)
    state = initializer.from_scratch(jax.random.PRNGKey(0))
    layout.check_placement(state.state_dict(), initializer.plan)
    assert int(state.step) == 0
    read = hf_t5.load_params(folder, make_partitioner())
    jax.tree.map(np.testing.assert_array_equal, unfreeze(state.params), unfreeze(read))
    if optimizer_def is not None:
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.param_states[0].mu))
        state.apply_gradient(state.params, learning_rate=None)


def test_a_folder_that_is_not_the_models_is_an_error(theirs):
    config = dataclasses.replace(wanted_config('t5'), logits_via_embedding=False, mlp_dim=64)
    with pytest.raises(CheckpointError) as caught:
        make_initializer(theirs[0] / 't5', config, None)
    message = str(caught.value)
    assert f"decoder/logits_dense/kernel: (32, 96) in the model, none in the folder '{theirs[0]}/t5'" in message
    assert 'encoder/layers_0/mlp/wi/kernel: (32, 64) in the model, (32, 48) in' in message


@pytest.mark.parametrize('given', [{}, {'like': 'a', 'model': 'b'}])
def test_exporting_needs_one_thing_that_says_which_t5_it_is(given):
    with pytest.raises(ConfigError, match='Cannot export with like=.* one of them says which T5 this is. Give LIKE'):
        hf_t5.export('checkpoint_1', 'out', **given)


def test_a_vocabulary_with_more_ids_than_the_folder_is_an_error(theirs):
    with pytest.raises(ConfigError, match='it has 384 ids, and the table of embeddings 96'):
        hf_t5.load_network(theirs[0] / 't5', vocabulary=data.ByteVocabulary())


def test_a_vocabulary_with_far_fewer_ids_than_the_folder_is_told_of(tmp_path):
    config = T5Config(640, emb_dim=8, num_heads=1, num_encoder_layers=1, num_decoder_layers=1, mlp_dim=8)
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), hf_t5.variable_shapes(config)['params'])
    hf_t5.save(tmp_path / 'words', config, params)
    with pytest.warns(UserWarning, match=r"ByteVocabulary.* has 384 ids, and '.*words' knows 640"):
        hf_t5.load_network(tmp_path / 'words', vocabulary=data.ByteVocabulary())
