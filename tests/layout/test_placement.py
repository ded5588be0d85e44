import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict, freeze
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.errors import PlacementError, PlanError
from t5x_pjit_recipes.layout import Plan, gather, make_mesh, place

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
