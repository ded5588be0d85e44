import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.errors import MeshError, PlanError
from t5x_pjit_recipes.layout import Plan, abstract_mesh, make_mesh

MESH = abstract_mesh(data=4, model=2)


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def test_bytes_add_up():
    shapes = {'a': shape(8, 6), 'b': {'c': shape(4, 2, dtype=jnp.bfloat16), 'd': shape(), 'e': shape(5)}}
    specs = {'a': P('data', 'model'), 'b': {'c': P(('data', 'model')), 'd': None, 'e': P()}}
    plan = Plan({**shapes, 'b': {**shapes['b'], 'c': shape(8, 2, dtype=jnp.bfloat16)}}, specs, MESH)
    held = {row.name: (row.num_bytes, row.bytes_per_device) for row in plan.rows}
    assert held == {'a': (192, 24), 'b/c': (32, 4), 'b/d': (4, 4), 'b/e': (20, 20)}
    assert plan.num_bytes == 248
    assert plan.bytes_per_device == 52
    assert [row.name for row in plan.replicated] == ['b/e']


def test_bytes_are_what_devices_hold():
    mesh = make_mesh(data=4, model=2)
    arrays = {'a': np.ones((8, 6), np.float32), 'b': np.ones((3,), np.int8)}
    plan = Plan(arrays, {'a': P(None, 'model'), 'b': None}, mesh)
    placed = jax.device_put(arrays, plan.shardings)
    for device in mesh.devices.flat:
        shards = [s.data for x in jax.tree.leaves(placed) for s in x.addressable_shards if s.device == device]
        assert sum(s.nbytes for s in shards) == plan.bytes_per_device


def test_every_fault_is_told_at_once():
    shapes = {'wi': shape(512, 1023), 'wo': shape(6, 8), 'n': shape(4), 'q': shape(8, 8), 'ok': shape(8)}
    specs = {
        'wi': P(None, 'model'),
        'wo': P('data'),
        'n': P('model', None, 'data'),
        'q': P('dta', 'model'),
        'ok': P('data'),
    }
    with pytest.raises(PlanError) as caught:
        Plan(shapes, specs, MESH).check()
    message = str(caught.value)
    assert 'Cannot shard 4 of 5 arrays on mesh data=4, model=2.' in message
    assert "wi (512, 1023): dim 1 is 1023, which ('model',) splits 2 ways; 1024 would fit" in message
    assert "wo (6, 8): dim 0 is 6, which ('data',) splits 4 ways; 8 would fit" in message
    assert 'n (4,): spec ' in message
    assert '3 entries for 1 dims' in message
    assert "q (8, 8): no mesh axis 'dta' (did you mean 'data'?)" in message


def test_one_mesh_axis_on_two_dims_is_a_fault():
    with pytest.raises(PlanError, match=r"w \(8, 8\): mesh axis 'data' splits two dims"):
        Plan({'w': shape(8, 8)}, {'w': P('data', ('model', 'data'))}, MESH).check()


def test_more_than_ten_faults_are_counted():
    with pytest.raises(PlanError, match='and 2 more'):
        Plan([shape(3)] * 12, P('data'), MESH).check()


def test_missing_and_left_over_specs_are_told_at_once():
    with pytest.raises(PlanError, match=r'(?s)b/c: no spec.*b/x: a spec without an array'):
        Plan({'a': shape(4), 'b': {'c': shape(4)}}, {'a': P(), 'b': {'x': P('data')}}, MESH)


def test_containers_need_not_match_and_prefixes_hold_below():
    shapes = {'a': {'b': shape(4), 'c': shape(8)}, 'd': shape(2)}
    plan = Plan(shapes, freeze({'a': P('data'), 'd': None}), MESH)
    assert plan.specs == {'a': {'b': P('data'), 'c': P('data')}, 'd': P()}
    assert Plan(shapes, None, MESH).specs['a']['b'] == P()


def test_explicit_meshes_are_refused():
    with pytest.raises(MeshError, match='Explicit'):
        Plan({'a': shape(4)}, None, AbstractMesh((4,), ('data',), axis_types=(AxisType.Explicit,)))


def test_table_groups_layers_and_says_what_is_replicated():
    shapes = {f'layers_{i}': {'wi': shape(8, 16), 'scale': shape(8)} for i in range(3)}
    specs = {f'layers_{i}': {'wi': P(None, 'model'), 'scale': None} for i in range(3)}
    table = Plan(shapes, specs, MESH, rules={'layers_0/wi': 'rule 1'}).table()
    assert 'layers_*/scale x3' in table
    assert 'layers_*/wi x2' in table  # one of the three was decided otherwise
    assert 'rule 1' in table
    assert "(None, 'model')" in table
    assert '6 arrays, 1.6 KiB; each device holds 864 B' in table
    assert 'replicated: 3 arrays, 96 B on every device' in table


def test_table_fits_a_width_by_cutting_names_at_their_front():
    plan = Plan({'a_rather_long_name': {'of_some_layer': {'kernel': shape(8, 16)}}}, P(None, 'model'), MESH)
    lines = plan.table(66).splitlines()
    assert max(map(len, lines)) <= 66
    assert lines[1].startswith('…')
    assert 'kernel' in lines[1]


def test_large_plans_are_quick_and_linear():
    def seconds(n):
        shapes = {f'layer_{i}': {'mlp': {'wi': shape(8, 8)}} for i in range(n)}
        start = time.thread_time()
        Plan(shapes, P('data'), MESH).check()
        return time.thread_time() - start

    seconds(100)
    small, large = min(seconds(1000) for _ in range(3)), min(seconds(4000) for _ in range(3))
    assert large < 12 * small
