import json
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from t5x_pjit_recipes.errors import MeshError
from t5x_pjit_recipes.layout import meshes, tiles
from tests.layout.fakes import FakeTpu, gpus, ids, tpus

GOLDENS = json.loads((pathlib.Path(__file__).parents[1] / 'goldens' / 'tpu_meshes.json').read_text())
V3 = tpus(4, 4, 1, cores=2, kind='TPU v3')


def golden_devices(topology):
    described = GOLDENS['topologies'][topology]
    return [
        FakeTpu(i, process, (x, y, z), core, described['kind'])
        for i, (x, y, z, core, process) in enumerate(described['devices'])
    ]


def coords(mesh):
    return [[[*d.coords, d.core_on_chip] for d in row] for row in mesh.devices]


def golden_id(grid):
    return f'{grid["topology"]}-{"x".join(map(str, grid["submesh"]))}'


@pytest.mark.parametrize('grid', GOLDENS['grids'], ids=golden_id)
def test_tile_gives_the_golden_grid(grid):
    mesh = meshes.tiled_mesh(grid['submesh'], golden_devices(grid['topology']))
    assert mesh.axis_names == ('data', 'model')
    assert list(mesh.devices.shape) == grid['shape']
    assert coords(mesh) == grid['coords']


@pytest.mark.parametrize('grid', GOLDENS['grids'][::5], ids=golden_id)
def test_tile_gives_the_golden_grid_on_described_hardware(grid, monkeypatch):
    pytest.importorskip('libtpu')
    monkeypatch.setenv('TPU_SKIP_MDS_QUERY', '1')
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(grid['topology'], platform='tpu').devices
    assert coords(meshes.tiled_mesh(grid['submesh'], devices)) == grid['coords']


V3_ROWS = {
    1: [[i] for i in [0, 1, 8, 9, 2, 3, 10, 11, 16, 17, 24, 25, 18, 19, 26, 27]],
    2: [[0, 1], [8, 9], [2, 3], [10, 11], [16, 17], [24, 25], [18, 19], [26, 27]],
    4: [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19], [24, 25, 26, 27], [4, 5, 6, 7], [12, 13, 14, 15]],
    8: [[0, 1, 8, 9, 2, 3, 10, 11], [16, 17, 24, 25, 18, 19, 26, 27], [4, 5, 12, 13, 6, 7, 14, 15]],
    16: [[0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]],
}
V4_CUBE = tpus(2, 2, 2)


@pytest.mark.parametrize('partitions', V3_ROWS)
def test_default_mesh_of_v3(partitions):
    rows = ids(meshes.default_mesh(partitions, devices=V3))
    assert len(rows) == 32 // partitions
    assert rows[: len(V3_ROWS[partitions])] == V3_ROWS[partitions]


@pytest.mark.parametrize(
    ('devices', 'tile', 'rows'),
    [
        (V3, (1, 2, 1, 2), [[0, 1, 8, 9], [2, 3, 10, 11], [16, 17, 24, 25], [18, 19, 26, 27]]),
        (V3, (1, 4, 1, 2), [[0, 1, 8, 9, 16, 17, 24, 25], [2, 3, 10, 11, 18, 19, 26, 27]]),
        (V4_CUBE, (2, 1, 1, 1), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (V4_CUBE, (1, 2, 2, 1), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (V4_CUBE, (1, 1, 2, 1), [[0, 4], [2, 6], [1, 5], [3, 7]]),
    ],
)
def test_tile_gives_these_rows(devices, tile, rows):
    assert ids(meshes.tiled_mesh(tile, devices))[: len(rows)] == rows


@pytest.mark.parametrize(
    ('devices', 'partitions', 'first_rows'),
    [
        (V4_CUBE, 1, [[0], [2], [1], [3], [4], [6], [5], [7]]),
        (V4_CUBE, 2, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (V4_CUBE, 4, [[0, 2, 1, 3], [4, 6, 5, 7]]),
        (tpus(4, 4, 4), 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (tpus(4, 4, 4), 8, [[0, 4, 1, 5, 2, 6, 3, 7], [16, 20, 17, 21, 18, 22, 19, 23]]),
        (tpus(4, 4, 8), 8, [[0, 16, 32, 48, 64, 80, 96, 112]]),
    ],
)
def test_default_mesh_of_v4(devices, partitions, first_rows):
    assert ids(meshes.default_mesh(partitions, devices=devices))[: len(first_rows)] == first_rows


def test_tile_across_a_two_core_ring_builds_a_mesh_of_whole_tiles():
    mesh = meshes.tiled_mesh((4, 1, 1, 1), golden_devices('v4:4x4x4'))
    assert mesh.devices.shape == (32, 4)
    for row in mesh.devices:
        assert [d.coords[0] for d in row] == [0, 1, 2, 3]
        assert len({(*d.coords[1:], d.core_on_chip) for d in row}) == 1


@pytest.mark.parametrize('kind', ['TPU v5 lite', 'TPU v5', 'TPU v6 lite', 'TPU7x', 'TPU v2', 'TPU v4 lite'])
def test_every_tpu_kind_has_a_default_tile(kind):
    devices = tpus(4, 4, 1, kind=kind)
    for partitions in (1, 2, 4, 8, 16):
        mesh = meshes.default_mesh(partitions, devices=devices)
        assert dict(mesh.shape) == {'data': 16 // partitions, 'model': partitions}
        assert sorted(d.id for d in mesh.devices.flat) == list(range(16))


def test_computed_tiles_are_compact_and_fill_chips_first():
    assert tiles.default_tile('TPU v5 lite', 4, (8, 8, 1, 1)) == (2, 2, 1, 1)
    assert tiles.default_tile('TPU7x', 4, (4, 4, 4, 2)) == (2, 1, 1, 2)
    assert tiles.default_tile('TPU v4', 8, (2, 2, 2, 1)) == (2, 2, 2, 1)


@pytest.mark.parametrize('partitions', [1, 2, 4, 8])
def test_num_partitions_is_honoured_on_cpu(partitions):
    mesh = meshes.default_mesh(partitions, devices=jax.devices())
    assert dict(mesh.shape) == {'data': 8 // partitions, 'model': partitions}
    assert [d.id for d in mesh.devices.flat] == list(range(8))
    assert all(t == AxisType.Auto for t in mesh.axis_types)


@pytest.mark.parametrize(
    ('tile', 'model'),
    [((1, 1, 1, 1), 1), ((1, 1, 1, 2), 2), ((1, 2, 1, 1), 2), ((1, 2), 2), ((1, 2, 1, 2), 4), ((1, 1, 2, 2), 4),
     ((1, 4, 1, 2), 8)],
)  # fmt: skip
def test_submesh_on_cpu_keeps_id_order(tile, model):
    mesh = meshes.tiled_mesh(tile, jax.devices())
    assert dict(mesh.shape) == {'data': 8 // model, 'model': model}
    assert [d.id for d in mesh.devices.flat] == list(range(8))


def test_one_cpu_device_gives_a_mesh_of_one_with_a_warning():
    with pytest.warns(UserWarning, match='num_partitions=16 gives a 1x1 mesh'):
        mesh = meshes.cpu_mesh(16, jax.devices()[:1])
    assert mesh.devices.shape == (1, 1)


@pytest.mark.parametrize(
    ('hosts', 'per_host', 'partitions', 'rows'),
    [
        (1, 8, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 4, 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (2, 4, 8, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (4, 2, 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (1, 6, 3, [[0, 1, 2], [3, 4, 5]]),
        (4, 2, 1, [[0], [1], [2], [3], [4], [5], [6], [7]]),
    ],
)
def test_gpu_mesh_keeps_model_within_hosts(hosts, per_host, partitions, rows):
    assert ids(meshes.default_mesh(partitions, devices=gpus(hosts, per_host))) == rows


def test_emulated_slices_are_outer_along_each_axis():
    mesh = meshes.hybrid_mesh((1, 2, 2), (2, 1, 1), jax.devices())
    assert mesh.axis_names == ('replica', 'data', 'model')
    assert np.vectorize(lambda d: d.id)(mesh.devices).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    across_data = meshes.hybrid_mesh((1, 2, 2), (1, 2, 1), jax.devices())
    assert np.vectorize(lambda d: d.id)(across_data.devices).tolist() == [[[0, 1], [2, 3], [4, 5], [6, 7]]]


@pytest.mark.parametrize(
    ('build', 'says'),
    [
        (lambda: meshes.make_mesh(data=3, model=2), r'multiply to 6, which is not 8.*multiply to 8'),
        (lambda: meshes.make_mesh(data=-1, model=3), r'multiply to 3, which does not divide 8'),
        (lambda: meshes.make_mesh(data=-1, model=-1), r'data, model cannot be resolved'),
        (lambda: meshes.make_mesh(data=0, model=2), r'data=0 cannot be resolved'),
        (lambda: meshes.default_mesh(3, devices=jax.devices()), r'num_partitions=3.*does not divide 8.*\[1, 2, 4, 8\]'),
        (lambda: meshes.default_mesh(16, devices=jax.devices()), r'num_partitions=16.*does not divide 8'),
        (lambda: meshes.default_mesh(4, devices=gpus(2, 6)), r'2 hosts of 6 devices.*4.*\[1, 2, 3, 6, 12\]'),
        (lambda: meshes.default_mesh(0, devices=jax.devices()), r'neither num_partitions nor'),
        (lambda: meshes.tiled_mesh((3, 1, 1, 1), V4_CUBE), r'x: 2 devices, of which the tile takes 3; use .* \[1, 2\]'),
        (lambda: meshes.tiled_mesh((1, 3, 1, 1), jax.devices()), r'3 devices a tile do not divide 8'),
        (lambda: meshes.tiled_mesh(('1', 1, 1, 1), V4_CUBE), r"\('1', 1, 1, 1\).*positive whole numbers"),
        (lambda: meshes.tiled_mesh((1, 1, 1, 1), V4_CUBE[:-1]), r'7 devices.*span \(2, 2, 2, 1\), which holds 8'),
        (lambda: meshes.default_mesh(32, devices=tpus(4, 4, 1)), r'num_partitions=32.*does not divide 16'),
        (lambda: meshes.hybrid_mesh((1, 2, 2), (1, 1, 1), jax.devices()), r'4 x 1 = 4.*multiply to 8'),
        (lambda: meshes.hybrid_mesh((2, 2), (2, 1), jax.devices()), r'Give three sizes'),
        (lambda: meshes.default_mesh(1, None, (1, 8, 1), devices=jax.devices()), r'dcn_mesh_shape=None: one of them'),
    ],
)  # fmt: skip
def test_wrong_sizes_are_refused_with_numbers(build, says):
    with pytest.raises(MeshError, match=f'(?s){says}'):
        build()


def test_explicit_mesh_is_refused_with_the_way_to_convert():
    mesh = Mesh(np.array(jax.devices()), ('data',), axis_types=(AxisType.Explicit,))
    with pytest.raises(MeshError, match=r'data \(Explicit\).*Mesh\(mesh.devices, mesh.axis_names\)'):
        meshes.check_auto(mesh)
    meshes.check_auto(Mesh(mesh.devices, mesh.axis_names))


def test_mesh_is_described_in_one_line():
    assert meshes.describe_mesh(meshes.make_mesh(data=4, model=2)) == 'mesh data=4, model=2 on 8 CPU devices'
    assert meshes.describe_mesh(meshes.abstract_mesh(data=64, model=64)) == 'mesh data=64, model=64 on 4096 devices'
