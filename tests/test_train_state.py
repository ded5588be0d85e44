"""Train states: made, laid out, updated, saved and restored."""

import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict, freeze
from flax.linen.partitioning import AxisMetadata, param_with_axes, variable_with_axes
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes import optimizers
from t5x_pjit_recipes.adafactor import Adafactor, FactorDim, standard_logical_factor_rules
from t5x_pjit_recipes.errors import StateError
from t5x_pjit_recipes.layout.axes import AxisNames
from t5x_pjit_recipes.train_state import EMPTY_DICT, FlaxOptimTrainState, InferenceState, TrainState

PARAMS = {'dense': {'kernel': np.ones((2, 4), np.float32), 'bias': np.ones(4, np.float32)}}
PARAMS_AXES = {
    'dense': {'kernel_axes': AxisMetadata(names=('vocab', 'embed')), 'bias_axes': AxisMetadata(names=('embed',))}
}
LOGICAL = {'dense': {'kernel': P('vocab', 'embed'), 'bias': P('embed')}}
MUTABLES = {'batch_stats': {'mean': np.zeros(4, np.float32)}, 'counter': {'n': np.int32(0)}}
MUTABLES_AXES = {'batch_stats_axes': {'mean_axes': AxisMetadata(names=('embed',))}}
VARIABLES = {'params': PARAMS, 'params_axes': PARAMS_AXES}
ADAM = optimizers.OptaxWrapper(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))


def adafactor(**kwargs: Any) -> Adafactor:
    return Adafactor(0.1, logical_factor_rules=standard_logical_factor_rules(), **kwargs)


def paths(state: TrainState) -> set[str]:
    return set(flatten_dict(state.state_dict(), sep='/'))


class Annotated(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = param_with_axes('kernel', nn.initializers.ones, (4, 2), jnp.float32, axes=('vocab', 'embed'))
        mean = variable_with_axes('stats', 'mean', jnp.zeros, (2,), axes=('embed',))
        mean.value = (x @ kernel).mean(0)
        return x @ kernel


def test_states_are_made_of_what_flax_gives() -> None:
    variables = Annotated().init(jax.random.key(0), jnp.ones((3, 4)))
    axes = FlaxOptimTrainState.create(ADAM, variables).as_logical_axes()
    assert axes.params == {'kernel': P('vocab', 'embed')}
    assert axes.flax_mutables == {'stats': {'mean': P('embed')}}


@pytest.mark.parametrize('state', [FlaxOptimTrainState.create(ADAM, VARIABLES), InferenceState.create(VARIABLES)])
def test_states_keep_the_protocol(state: TrainState) -> None:
    assert isinstance(state, TrainState)
    assert (state.step.dtype, int(state.step)) == (np.int32, 0)
    assert state.params == PARAMS
    assert state.flax_mutables == EMPTY_DICT


def test_an_inference_state_is_not_trained() -> None:
    state = InferenceState.create(VARIABLES)
    with pytest.raises(NotImplementedError, match='InferenceState has no optimizer'):
        state.apply_gradient(PARAMS, 0.1)
    with pytest.raises(NotImplementedError, match='InferenceState has no optimizer'):
        _ = state.param_states


TARGET = {'target/dense/kernel', 'target/dense/bias'}


def test_layout_of_adafactor_s_state_dict() -> None:
    slots = {f'state/param_states/dense/{p}/{s}' for p in ('kernel', 'bias') for s in ('v_row', 'v_col', 'v', 'm')}
    state = FlaxOptimTrainState.create(adafactor(), VARIABLES)
    assert paths(state) == TARGET | {'state/step'} | slots
    assert state.state_dict()['state']['param_states']['dense']['bias']['m'].shape == (1,)


def test_layout_of_optax_s_state_dict() -> None:
    moments = {f'state/param_states/0/{slot}/dense/{p}' for p in ('kernel', 'bias') for slot in ('mu', 'nu')}
    state = FlaxOptimTrainState.create(optimizers.adamw(0.1), VARIABLES)
    assert paths(state) == TARGET | moments | {'state/step', 'state/param_states/0/count'}


def test_layout_of_an_inference_state_s_state_dict() -> None:
    state = InferenceState.create(VARIABLES | MUTABLES)
    mutables = {'flax_mutables/batch_stats/mean', 'flax_mutables/counter/n'}
    assert paths(state) == TARGET | mutables | {'state/step'}
    assert type(state.state_dict()['flax_mutables']) is dict


def test_one_definition_serves_two_models() -> None:
    definition = adafactor()
    first = FlaxOptimTrainState.create(definition, VARIABLES)
    swapped = {'dense': PARAMS_AXES['dense'] | {'kernel_axes': AxisMetadata(names=('embed', 'vocab'))}}
    second = FlaxOptimTrainState.create(definition, {'params': PARAMS, 'params_axes': swapped})
    row, column, none = FactorDim.ROW, FactorDim.COLUMN, FactorDim.NONE
    maps = [state._optimizer.optimizer_def.hyper_params.factor_map for state in (first, second)]
    assert maps[0] == {'dense/kernel': (column, row), 'dense/bias': (none,)}
    assert maps[1] == {'dense/kernel': (row, column), 'dense/bias': (none,)}
    assert definition.hyper_params.factor_map is None


CONTAINERS = {'dict': dict, 'FrozenDict': freeze}


@pytest.mark.parametrize('axes_suffix', ['_axes', ''])
@pytest.mark.parametrize('axes_container', CONTAINERS)
@pytest.mark.parametrize('container', CONTAINERS)
def test_containers_come_out_as_they_went_in(container: str, axes_container: str, axes_suffix: str) -> None:
    params = CONTAINERS[container](PARAMS)
    axes = {path.replace('_axes', axes_suffix): names for path, names in flatten_dict(PARAMS_AXES, sep='/').items()}
    axes = CONTAINERS[axes_container]({'dense': {path.split('/')[1]: names for path, names in axes.items()}})
    state = FlaxOptimTrainState.create(adafactor(), {'params': params, 'params_axes': axes})
    stepped = jax.eval_shape(lambda state: state.apply_gradient(params, learning_rate=0.1), state)
    for tree in (state.params, stepped.params, state.restore_state(state.state_dict()).params):
        assert jax.tree.structure(tree) == jax.tree.structure(params)
    assert type(state.as_logical_axes().params) is type(params)
    assert state.as_logical_axes().params == LOGICAL


@pytest.mark.parametrize(
    'kernel', [AxisMetadata(names=('vocab', 'embed')), P('vocab', 'embed'), AxisNames('vocab', 'embed')]
)
def test_axes_may_be_spelled_in_any_way(kernel: Any) -> None:
    state = InferenceState.create({'params': PARAMS, 'params_axes': {'dense': {'kernel': kernel, 'bias': None}}})
    assert state.as_logical_axes().params == {'dense': {'kernel': P('vocab', 'embed'), 'bias': None}}
    assert state.as_logical_axes().step is None


@pytest.mark.parametrize('create', [lambda v: FlaxOptimTrainState.create(ADAM, v), InferenceState.create])
def test_every_parameter_without_fitting_axes_is_named(create: Any) -> None:
    params = {'a': np.ones((2, 3)), 'b': np.ones(2), 'c': np.ones(2)}
    axes = {'a_axes': AxisMetadata(names=('embed',)), 'c_axes': AxisMetadata(names=('embed',))}
    faults = r"2 of 3 arrays in 'params'(?s:.*)  a \(2, 3\): 1 axes \('embed',\) for 2 dims\n  b \(2,\): no axes"
    with pytest.raises(StateError, match=faults):
        create({'params': params, 'params_axes': axes})


def test_mutables_without_fitting_axes_are_named() -> None:
    variables = VARIABLES | {'stats': {'a': np.ones(2)}, 'stats_axes': {'b': AxisMetadata(names=('embed',))}}
    with pytest.raises(StateError, match=r"in 'stats' by 'stats_axes'(?s:.*)  a \(2,\): no axes"):
        InferenceState.create(variables)


def test_variables_without_params_are_refused() -> None:
    with pytest.raises(StateError, match=r"no collection 'params' in \['batch_stats'\]"):
        InferenceState.create({'batch_stats': {}})


def test_a_model_without_axes_is_told_three_ways_to_get_them() -> None:
    ways = r'(?s:.*)param_with_axes(?s:.*)AxisMetadata(?s:.*)override_params_axes_names'
    plain = {'params': PARAMS}
    for state in (FlaxOptimTrainState.create(ADAM, plain), InferenceState.create(plain)):
        with pytest.raises(StateError, match='2 parameters: params_axes is None.' + ways):
            state.as_logical_axes()
    with pytest.raises(StateError, match='bind Adafactor to 2 parameters' + ways):
        FlaxOptimTrainState.create(adafactor(), plain)
    assert FlaxOptimTrainState.create(Adafactor(0.1), plain).params is PARAMS  # its heuristic needs no axes


NO_SPECS = {'batch_stats': {'mean': None}, 'counter': {'n': None}}
MUTABLES_CASES = {
    'none': ({}, {}, {}),
    'without axes': (MUTABLES, {}, NO_SPECS),
    'some with axes': (MUTABLES, MUTABLES_AXES, NO_SPECS | {'batch_stats': {'mean': P('embed')}}),
    'all with axes': (
        MUTABLES,
        MUTABLES_AXES | {'counter_axes': {'n_axes': AxisMetadata(names=())}},
        {'batch_stats': {'mean': P('embed')}, 'counter': {'n': P()}},
    ),
    'an array for a collection': ({'total': np.ones(3)}, {}, {'total': None}),
    'a name that ends in _axes': ({'rotary_axes': {'angle': np.ones(3)}}, {}, {'rotary_axes': {'angle': None}}),
}


@pytest.mark.parametrize('kind', ['train', 'inference'])
@pytest.mark.parametrize('name', MUTABLES_CASES)
def test_mutables_are_laid_out_leaf_by_leaf(name: str, kind: str) -> None:
    mutables, mutables_axes, specs = MUTABLES_CASES[name]
    variables = VARIABLES | mutables | mutables_axes
    state = InferenceState.create(variables) if kind == 'inference' else FlaxOptimTrainState.create(ADAM, variables)
    axes = state.as_logical_axes()
    assert axes.flax_mutables == specs
    assert isinstance(axes.flax_mutables, FrozenDict)
    assert (axes.params_axes, axes.flax_mutables_axes) == (None, None)
    restored = state.restore_state(state.state_dict())
    assert jax.tree.structure(restored.flax_mutables) == jax.tree.structure(state.flax_mutables)


def test_mutables_survive_an_update_unless_new_ones_come() -> None:
    state = FlaxOptimTrainState.create(ADAM, VARIABLES | MUTABLES)
    kept = state.apply_gradient(PARAMS, learning_rate=0.1)
    assert kept.flax_mutables == state.flax_mutables
    new = state.apply_gradient(PARAMS, learning_rate=0.1, flax_mutables={'counter': {'n': 7}})
    assert new.flax_mutables['counter'] == {'n': 7}
    assert new.flax_mutables['batch_stats'] == MUTABLES['batch_stats']
    assert new.replace_flax_mutables(EMPTY_DICT).flax_mutables == EMPTY_DICT


@pytest.mark.parametrize('state', [FlaxOptimTrainState.create(ADAM, VARIABLES), InferenceState.create(VARIABLES)])
def test_parts_are_replaced(state: Any) -> None:
    moved = state.replace_step(5).replace_params({'dense': {}})
    assert (int(moved.step), moved.step.dtype, moved.params) == (5, np.int32, {'dense': {}})
    assert int(state.step) == 0


@pytest.mark.parametrize('definition', [ADAM, adafactor(beta1=0.9)], ids=['adam', 'adafactor'])
@pytest.mark.parametrize('leaf', [jax.ShapeDtypeStruct((), np.int32), P('data'), None])
def test_restoring_takes_any_kind_of_leaf(definition: Any, leaf: Any) -> None:
    state = FlaxOptimTrainState.create(definition, VARIABLES | MUTABLES)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        leaves = jax.eval_shape(state.state_dict)
    else:
        leaves = jax.tree.map(lambda _: leaf, state.state_dict())
    restored = state.restore_state(leaves)
    assert flatten_dict(restored.state_dict()) == flatten_dict(leaves)


def test_an_inference_state_reads_a_training_state() -> None:
    trained = FlaxOptimTrainState.create(ADAM, VARIABLES).apply_gradient(PARAMS, learning_rate=0.1)
    state = InferenceState.create(VARIABLES).restore_state(trained.state_dict())
    assert int(state.step) == 1
    assert isinstance(state.params, FrozenDict)
    jax.tree.map(np.testing.assert_array_equal, state.params.unfreeze(), trained.params)


@pytest.mark.parametrize('kind', ['train', 'inference'])
def test_restoring_names_each_leaf_that_does_not_fit(kind: str) -> None:
    variables = VARIABLES | MUTABLES
    state = InferenceState.create(variables) if kind == 'inference' else FlaxOptimTrainState.create(ADAM, variables)
    state_dict = state.state_dict()
    state_dict['target'] = {'dense': {'kernel': np.ones((2, 5))}}
    with pytest.raises(StateError, match=r'kernel has shape \(2, 4\) .* \(2, 5\)\n  target/dense/bias is absent'):
        state.restore_state(state_dict)
    with pytest.raises(StateError, match='flax_mutables/batch_stats/mean is absent\n  flax_mutables/counter/n is'):
        state.restore_state(state.state_dict() | {'flax_mutables': {}})
    extra = state.state_dict()['target']['dense'] | {'gate': np.ones(1)}
    with pytest.warns(UserWarning, match='left over(?s:.*)target/dense/gate'):
        restored = state.restore_state(state.state_dict() | {'target': {'dense': extra}})
    assert restored.params == state.params


def test_mutables_that_are_new_to_the_state_are_taken() -> None:
    state = InferenceState.create(VARIABLES)
    assert state.restore_state(state.state_dict() | {'flax_mutables': MUTABLES}).flax_mutables == MUTABLES


@pytest.mark.parametrize('definition', [ADAM, adafactor(beta1=0.9)], ids=['adam', 'adafactor'])
def test_a_state_of_shardings_places_state_in_and_state_out(definition: Any) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ('data', 'model'))
    variables = jax.tree.map(jnp.asarray, VARIABLES | MUTABLES | MUTABLES_AXES)
    shapes = jax.eval_shape(lambda: FlaxOptimTrainState.create(definition, variables))
    mesh_axes = {'vocab': 'data', 'embed': 'model'}

    def sharding(axes: P | None) -> NamedSharding:
        return NamedSharding(mesh, P(*(mesh_axes[axis] for axis in axes or ())))

    axes = shapes.as_logical_axes()
    shardings = jax.tree.map(sharding, axes, is_leaf=lambda x: x is None)
    state = jax.jit(lambda: FlaxOptimTrainState.create(definition, variables), out_shardings=shardings)()
    assert jax.tree.structure(state) == jax.tree.structure(shapes)
    assert hash(jax.tree.structure(state)) == hash(jax.tree.structure(shapes))
    step = jax.jit(
        lambda state: state.apply_gradient(state.params, learning_rate=0.1),
        in_shardings=(shardings,),
        out_shardings=shardings,
    )
    state = step(step(state))
    assert step._cache_size() == 1
    assert state.params['dense']['kernel'].sharding.spec == P('data', 'model')
    alone = FlaxOptimTrainState.create(definition, variables)
    for _ in range(2):
        alone = alone.apply_gradient(alone.params, learning_rate=0.1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state, alone)


def test_a_thousand_parameters_take_linear_time() -> None:
    params = {f'layers_{i}': {'kernel': np.ones((2, 2)), 'bias': np.ones(2)} for i in range(500)}
    axes = {
        name: {'kernel_axes': AxisMetadata(names=('embed', 'mlp')), 'bias_axes': AxisMetadata(names=('mlp',))}
        for name in params
    }
    start = time.thread_time()
    shapes = jax.eval_shape(lambda: FlaxOptimTrainState.create(adafactor(), {'params': params, 'params_axes': axes}))
    logical = shapes.as_logical_axes()
    logical.restore_state(logical.state_dict())
    assert time.thread_time() - start < 5.0
