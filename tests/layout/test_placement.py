import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict, freeze
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.errors import PlacementError, PlanError
from t5x_pjit_recipes.layout import Plan, abstract_mesh, check_placement, describe_placement, gather, make_mesh, place

PARAMS = {'w': np.arange(32, dtype=np.float32).reshape(8, 4), 'b': {'s': np.arange(6, dtype=np.int32)}}
SPECS = {'w': P('data', 'model'), 'b': {'s': None}}
MESH = make_mesh(data=4, model=2)
OTHER = make_mesh(data=2, model=2, devices=jax.devices()[4:])


def plan_for(mesh):
    return Plan(PARAMS, SPECS, mesh)


@pytest.mark.parametrize(
    'source',
    [
        lambda: PARAMS,
        lambda: jax.tree.map(jnp.asarray, PARAMS),
        lambda: jax.device_put(PARAMS, jax.devices()[3]),
        lambda: jax.device_put(PARAMS, NamedSharding(MESH, P())),
        lambda: place(PARAMS, plan_for(OTHER)),
        lambda: freeze(PARAMS),
    ],
    ids=['numpy', 'uncommitted', 'device 3', 'replicated', 'other mesh', 'frozen'],
)
def test_arrays_from_anywhere_lie_as_planned(source):
    given = source()
    placed = place(given, plan_for(MESH))
    assert type(placed) is type(given)
    assert placed['w'].sharding.is_equivalent_to(NamedSharding(MESH, P('data', 'model')), 2)
    assert placed['b']['s'].sharding.is_equivalent_to(NamedSharding(MESH, P()), 1)
    np.testing.assert_array_equal(placed['w'], PARAMS['w'])
    assert not isinstance(placed, FrozenDict) or isinstance(given, FrozenDict)


def test_what_lies_right_is_the_same_object():
    placed = place(PARAMS, plan_for(MESH))
    again = place(placed, plan_for(MESH))
    assert again['w'] is placed['w']
    assert again['b']['s'] is placed['b']['s']


def test_gather_brings_back_equal_arrays():
    back = gather(place(PARAMS, plan_for(MESH)))
    assert type(back['w']) is np.ndarray
    jax.tree.map(np.testing.assert_array_equal, back, PARAMS)


def test_faults_stop_placing():
    with pytest.raises(PlanError, match=r'w \(6, 4\): dim 0 is 6'):
        place({'w': np.ones((6, 4))}, Plan({'w': np.ones((6, 4))}, P('data'), MESH))


def test_another_tree_than_the_planned_is_refused():
    with pytest.raises(PlacementError, match=r'1 arrays by a plan for 2: b/s'):
        place({'w': PARAMS['w']}, plan_for(MESH))


def test_deleted_leaves_are_named():
    placed = place(PARAMS, plan_for(MESH))
    placed['b']['s'].delete()
    with pytest.raises(PlacementError, match=r"leaf 'b/s' was donated or deleted"):
        place(placed, plan_for(OTHER))


def test_a_placement_is_described_as_it_is():
    mesh = make_mesh(data=4, model=2)
    tree = {
        'layers_0': {'w': np.ones((8, 6), np.float32)},
        'layers_1': {'w': np.ones((8, 6), np.float32)},
        'scale': np.ones((6,), np.float32),
    }
    placed = place(tree, Plan(tree, {'layers_0': P('data'), 'layers_1': P('data'), 'scale': None}, mesh))
    one = jax.device_put(np.ones(4, np.int8), jax.devices()[3])
    gone = jax.device_put(np.ones(2, np.float32), jax.devices()[0])
    gone.delete()
    text = describe_placement({**placed, 'one': one, 'gone': gone, 'host': np.ones(3, np.float32), 'step': 0})
    cells = [line.split('  ') for line in text.splitlines()]
    found = {cell[0]: [c.strip() for c in cell[1:] if c.strip()] for cell in cells}
    assert found['layers_*/w x2'] == ['(8, 6)', 'float32', "('data',) on data=4, model=2", '96 B']
    assert found['scale'] == ['(6,)', 'float32', 'replicated on 8 devices', '24 B']
    assert found['one'] == ['(4,)', 'int8', 'whole on CPU 3', '4 B']
    assert found['gone'][2:] == ['gone: donated or deleted', '0 B']
    assert found['host'][2:] == ['on the host', '0 B']
    assert '7 arrays: 1 gone, 2 on the host, 2 sharded, 1 on one device, 1 replicated' in text
    assert text.splitlines()[-2:] == [
        'CPU 3 holds 124 B',
        'CPU 0, CPU 1, CPU 2, CPU 4, CPU 5, CPU 6, CPU 7 each hold 120 B',
    ]
    assert max(map(len, describe_placement({'a' * 60: one}, width=70).splitlines())) <= 70
    assert 'nothing lies anywhere' in describe_placement({})


def test_tracers_are_described_as_such():
    texts = []
    jax.eval_shape(lambda x: texts.append(describe_placement({'x': x})) or x, jax.ShapeDtypeStruct((2,), np.float32))
    assert 'being traced' in texts[0]


def test_what_was_placed_lies_as_planned():
    mesh = make_mesh(data=4, model=2)
    tree = {'w': np.ones((8, 6), np.float32), 's': np.ones((), np.float32)}
    specs = {'w': P(None, 'model'), 's': None}
    placed = place(tree, Plan(tree, specs, mesh))
    check_placement(placed, Plan(tree, specs, mesh))
    check_placement(placed, Plan(tree, specs, abstract_mesh(data=4, model=2)))
    check_placement(freeze(placed), Plan(tree, {'w': P(None, ('model',)), 's': P()}, mesh))


def test_each_leaf_that_lies_otherwise_is_told():
    mesh = make_mesh(data=4, model=2)
    tree = {name: np.ones((8, 8), np.float32) for name in ('ok', 'other', 'host', 'one', 'shape', 'absent')}
    plan = Plan(tree, P(None, 'model'), mesh)
    placed = place(tree, plan)
    del placed['absent']
    placed['other'] = jax.device_put(tree['other'], jax.sharding.NamedSharding(mesh, P('data')))
    placed['host'], placed['extra'] = tree['host'], np.ones(2)
    placed['one'] = jax.device_put(tree['one'], jax.devices()[1])
    placed['shape'] = np.ones((8, 4), np.int32)
    with pytest.raises(PlacementError) as caught:
        check_placement(placed, plan)
    message = str(caught.value)
    assert 'Cannot take 6 of 6 arrays to lie as planned on mesh data=4, model=2.' in message
    assert "\n  other (8, 8): planned (None, 'model'), lies ('data',) on data=4, model=2" in message
    assert "\n  host (8, 8): planned (None, 'model'), lies on the host" in message
    assert "\n  one (8, 8): planned (None, 'model'), lies whole on CPU 1" in message
    assert '\n  shape (8, 8): planned as (8, 8) float32, is (8, 4) int32' in message
    assert '\n  absent (8, 8): planned, and not there' in message
    assert '\n  extra (2,): not in the plan' in message
    assert 'ok (8' not in message


def test_a_placement_on_a_mesh_of_other_sizes_is_not_that_of_the_plan():
    tree = {'w': np.ones((8, 6), np.float32)}
    placed = place(tree, Plan(tree, P('data'), make_mesh(data=8)))
    with pytest.raises(PlacementError, match=r"planned \('data',\), lies \('data',\) on data=8"):
        check_placement(placed, Plan(tree, P('data'), abstract_mesh(data=4, model=2)))
