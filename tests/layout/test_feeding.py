import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.errors import DataError, MeshError
from t5x_pjit_recipes.layout import feeding, meshes
from tests.layout.fakes import gpus, tpus

V3_MESH = meshes.default_mesh(4, devices=tpus(4, 4, 1, cores=2, kind='TPU v3'))


@pytest.mark.parametrize('process', range(4))
def test_chunks_of_a_v3_slice(process):
    chunker = feeding.LocalChunker(V3_MESH, process_index=process)
    place = [0, 2, 1, 3][process]
    assert chunker.num_chunks == {'data': 4, 'model': 1}
    assert chunker.chunk_ids == {'data': place, 'model': 0}
    rows = chunker.get_local_chunk_info((128, 16), ('data', 'model'))
    assert rows == feeding.LocalChunkInfo((slice(32 * place, 32 * (place + 1)), slice(0, 16)), 0)
    copies = chunker.get_local_chunk_info((128, 16), (None, 'model'))
    assert copies.slice[0] == slice(None)
    assert copies.replica_id == place


def test_two_mesh_axes_on_one_dim_count_in_mixed_radix():
    mesh = meshes.gpu_mesh(4, gpus(4, 2))  # data 2, model 4: two processes along each
    for process in range(4):
        chunker = feeding.LocalChunker(mesh, process_index=process)
        info = chunker.get_local_chunk_info((16,), (('data', 'model'),))
        assert info.slice == (slice(4 * process, 4 * process + 4),)
        assert chunker.get_shard_id(('model', 'data')) == 2 * (process % 2) + process // 2
        assert chunker.get_replica_id({'data'}) == process % 2


def test_shorter_specs_leave_dims_whole():
    chunker = feeding.LocalChunker(V3_MESH, process_index=0)
    assert chunker.get_local_chunk_info((128, 3, 5), ('data',)).slice[1:] == (slice(None), slice(None))


def test_a_remainder_is_an_error():
    chunker = feeding.LocalChunker(V3_MESH, process_index=0)
    with pytest.raises(DataError, match=r"dim 0 is 130, which \('data',\) splits into 4 chunks"):
        chunker.get_local_chunk_info((130, 16), ('data', 'model'))


def test_an_unknown_mesh_axis_is_an_error_with_a_near_miss():
    with pytest.raises(MeshError, match=r"'modle' \(did you mean 'model'\?\)"):
        feeding.LocalChunker(V3_MESH, process_index=0).get_local_chunk_info((8,), ('modle',))


def test_a_process_without_devices_is_an_error():
    with pytest.raises(MeshError, match=r'process 9 holds: none of its 32 devices.*\[0, 1, 2, 3\]'):
        feeding.LocalChunker(V3_MESH, process_index=9)


@pytest.mark.parametrize('process', range(4))
def test_data_layout_is_plain_python(process):
    chunker = feeding.LocalChunker(V3_MESH, process_index=process)
    layout = feeding.get_data_layout(chunker, ('data',), 64)
    assert layout == feeding.DataLayout(64, [0, 2, 1, 3][process], 4, True)
    assert json.loads(json.dumps(vars(layout))) == vars(layout)
    assert feeding.get_data_layout(chunker, ('data',)).batch_size == 8


def test_a_batch_that_does_not_divide_is_an_error():
    with pytest.raises(DataError, match=r'batch of 12 over 8 devices.*batch size of 8 or 16'):
        feeding.get_data_layout(feeding.LocalChunker(V3_MESH, process_index=0), ('data',), 12)


def test_global_batch_is_laid_out_and_equal():
    batch = {'x': np.arange(32, dtype=np.int32).reshape(8, 4), 'y': np.arange(8)}
    made = feeding.global_batch(batch, meshes.make_mesh(data=4, model=2), P('data'))
    for name, value in batch.items():
        np.testing.assert_array_equal(made[name], value)
        assert made[name].sharding.spec == P('data')
        assert {s.data.shape[0] for s in made[name].addressable_shards} == {2}
    assert jax.process_count() == 1
