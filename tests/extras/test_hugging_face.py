"""Folders of safetensors: what is read lies as planned, what is written is read again, and faults are named."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors import safe_open
from safetensors.numpy import save_file

from t5x_pjit_recipes import layout
from t5x_pjit_recipes.errors import CheckpointError
from t5x_pjit_recipes.interop import hugging_face
from t5x_pjit_recipes.interop.hugging_face import Folder, Weight, linear, stack

MESH = layout.make_mesh(data=4, model=2)
SOURCES = {
    'wte': Weight('wte.weight'),
    'h': {'kernel': stack(lambda i: linear(f'h.{i}.weight'), 2), 'bias': stack(lambda i: Weight(f'h.{i}.bias'), 2)},
    'head': linear('head.weight'),
}
SPECS = {'wte': P('model', 'data'), 'h': {'kernel': P(None, 'data', 'model'), 'bias': P()}, 'head': P('data')}


def make_params(dtype=np.float32):
    rng = np.random.default_rng(0)

    def array(*shape):
        return rng.normal(size=shape).astype(dtype)

    return {
        'wte': array(16, 8),
        'h': {'kernel': array(2, 8, 6), 'bias': array(2, 6)},
        'head': array(8, 16),
    }


def write(path, tensors, config=None):
    path.mkdir()
    save_file(tensors, path / 'model.safetensors')
    (path / 'config.json').write_text(json.dumps(config or {}))
    return path


@pytest.mark.parametrize('dtype', [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize('max_file_bytes', [2**30, 300])
def test_what_is_written_is_read_into_shards(tmp_path, dtype, max_file_bytes):
    params = make_params(dtype)
    plan = layout.Plan(params, SPECS, MESH)
    placed = layout.place(params, plan)
    folder = tmp_path / 'model'
    hugging_face.save_folder(folder, {'model_type': 'toy'}, SOURCES, placed, max_file_bytes=max_file_bytes)
    assert (len(list(folder.glob('*.safetensors'))) == 1) == (max_file_bytes > 300)
    read = Folder(folder)
    assert read.config == {'model_type': 'toy'}
    shapes = hugging_face.folder_shapes(read, SOURCES)
    loaded = hugging_face.load_params(read, SOURCES, layout.Plan(shapes, SPECS, MESH))
    layout.check_placement(loaded, plan)
    jax.tree.map(np.testing.assert_array_equal, layout.gather(loaded), params)


def test_arrays_are_read_in_the_dtype_that_is_planned(tmp_path):
    params = make_params()
    hugging_face.save_folder(tmp_path / 'model', {}, SOURCES, params)
    folder = Folder(tmp_path / 'model')
    shapes = hugging_face.folder_shapes(folder, SOURCES, dtype=jnp.bfloat16)
    loaded = hugging_face.load_params(folder, SOURCES, layout.Plan(shapes, SPECS, MESH))
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype('bfloat16')}
    np.testing.assert_array_equal(loaded['wte'], params['wte'].astype(jnp.bfloat16))


def test_what_was_read_can_be_donated(tmp_path):
    params = make_params()
    hugging_face.save_folder(tmp_path / 'model', {}, SOURCES, params)
    folder = Folder(tmp_path / 'model')
    plan = layout.Plan(hugging_face.folder_shapes(folder, SOURCES), P(), MESH)
    loaded = hugging_face.load_params(folder, SOURCES, plan)
    add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0, out_shardings=plan.shardings)
    for _ in range(3):
        loaded = add(loaded)
    for leaf, before in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        for shard in leaf.addressable_shards:
            np.testing.assert_allclose(shard.data, before + 3, rtol=1e-6)


def test_tensors_are_marked_as_transformers_wants_them(tmp_path):
    hugging_face.save_folder(tmp_path / 'model', {}, SOURCES, make_params())
    with safe_open(tmp_path / 'model' / 'model.safetensors', 'numpy') as file:
        assert file.metadata() == {'format': 'pt'}
        assert file.get_slice('h.1.weight').get_shape() == [6, 8]


def test_all_tensors_that_do_not_fit_are_named(tmp_path):
    tensors = {
        'wte.weights': np.zeros((16, 8), np.float32),
        'h.0.weight': np.zeros((6, 8), np.float32),
        'h.1.weight': np.zeros((6, 4), np.float32),
        'h.0.bias': np.zeros((6,), np.float32),
        'head.weight': np.zeros((16, 8), np.float32),
        'attn.masked_bias': np.zeros((1,), np.float32),
    }
    folder = Folder(write(tmp_path / 'model', tensors))
    with pytest.raises(CheckpointError) as caught:
        hugging_face.folder_shapes(folder, SOURCES, ignored=[r'.*masked_bias'])
    assert str(caught.value).splitlines()[1:] == [
        "  wte.weights (16, 8): not wanted (did you mean 'wte.weight'?)",
        '  h.1.bias: missing, for h/bias',
        '  h.1.weight (6, 4): for h/kernel, where the first layer has (6, 8)',
        "  wte.weight: missing, for wte (did you mean 'wte.weights'?)",
    ]


def test_a_tensor_of_another_shape_is_named(tmp_path):
    folder = Folder(write(tmp_path / 'model', {'qkv': np.zeros((10, 4), np.float32)}))
    with pytest.raises(CheckpointError, match=r'qkv: for qkv, its shape is \(10, 4\), and \(\(2, 3\), 4\) is wanted'):
        hugging_face.folder_shapes(folder, {'qkv': Weight('qkv', ((2, 3), 4))})


@pytest.mark.parametrize(
    ('files', 'message'),
    [
        ({}, r"config.json': there is no such file. Name a folder"),
        ({'config.json': '{}'}, r'neither model.safetensors nor .*index.json, but config.json'),
        ({'config.json': '{}', 'pytorch_model.bin': ''}, 'config.json, pytorch_model.bin. Save the model again'),
        ({'config.json': '{'}, r"Cannot read '.*config.json': Expecting property name"),
        ({'config.json': '{}', 'model.safetensors': 'x'}, r"Cannot read weights from '.*model.safetensors'"),
    ],
)
def test_a_folder_that_cannot_be_read_is_named(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Folder(tmp_path)


def test_weights_are_not_written_over(tmp_path):
    hugging_face.save_folder(tmp_path / 'model', {}, SOURCES, make_params())
    with pytest.raises(CheckpointError, match='has some already, model.safetensors. Name a new folder'):
        hugging_face.save_folder(tmp_path / 'model', {}, SOURCES, make_params())


def test_a_tree_of_another_model_is_not_written(tmp_path):
    params = make_params()
    params['extra'] = params.pop('head')
    with pytest.raises(CheckpointError, match='Cannot write 4 arrays as the tensors of 4.*\n  extra\n  head'):
        hugging_face.save_folder(tmp_path / 'model', {}, SOURCES, params)
    assert not (tmp_path / 'model').exists()


def test_a_path_that_is_a_file_is_not_written_to(tmp_path):
    (tmp_path / 'model').write_text('')
    with pytest.raises(CheckpointError, match="model': it is a file"):
        hugging_face.save_folder(tmp_path / 'model', {}, SOURCES, make_params())


def test_tensors_that_the_index_names_and_no_file_has_are_told(tmp_path):
    folder = tmp_path / 'model'
    hugging_face.save_folder(folder, {}, SOURCES, make_params(), max_file_bytes=300)
    first, second, *_ = sorted(folder.glob('*.safetensors'))
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=rf'of 6 tensors are not in(.|\n)*: not in {second.name}'):
        Folder(folder)


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('config.json', '[]', r'config\.json.* it holds a list'),
        ('model.safetensors.index.json', '{}', r'index\.json.* it has no weight_map'),
        ('model.safetensors.index.json', '{"weight_map": ["a"]}', r'index\.json.* it has no weight_map'),
    ],
)
def test_json_of_another_form_is_named(tmp_path, name, content, message):
    folder = write(tmp_path / 'model', {'a': np.ones(4, np.float32)})
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Folder(folder)


def read_whole(folder, dtype=None):
    opened = Folder(folder)
    sources = {name: Weight(name) for name in opened.shapes}
    shapes = hugging_face.folder_shapes(opened, sources, dtype=dtype)
    plan = layout.Plan(shapes, P(), MESH)
    params = hugging_face.load_params(opened, sources, plan)
    layout.check_placement(params, plan)
    return params


def test_what_is_stored_in_64_bits_is_read_in_those_that_jax_has(tmp_path):
    floats, counts = np.linspace(0, 1, 4), np.arange(4)
    read = read_whole(write(tmp_path / 'model', {'floats': floats, 'counts': counts}))
    np.testing.assert_array_equal(read['floats'], floats.astype(np.float32))
    np.testing.assert_array_equal(read['counts'], counts)


def test_integers_that_do_not_fit_are_named(tmp_path):
    folder = write(tmp_path / 'model', {'counts': np.array([1, 2**40])})
    with pytest.raises(CheckpointError, match="'counts', stored as int64, as int32: some"):
        read_whole(folder)


@pytest.mark.parametrize(('stored', 'dtype'), [(np.int8, np.float32), (np.float32, np.int32)])
def test_quantised_weights_are_not_taken_for_others(tmp_path, stored, dtype):
    folder = write(tmp_path / 'model', {'a': np.ones(4, stored)})
    with pytest.raises(CheckpointError, match=f'1 tensors(.|\n)*a: stored as {np.dtype(stored)}, and a is to be'):
        read_whole(folder, dtype)


def test_tensors_without_dims_or_without_numbers_are_read(tmp_path):
    tensors = {'scale': np.array(3, np.float32), 'none': np.zeros((0, 4), np.float32), 'mask': np.ones((2, 2), bool)}
    read = read_whole(write(tmp_path / 'model', tensors))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[name], tensor)
