"""Wrapped optax optimizers and combined ones: T5X's numbers, axes and state dicts."""

import gzip
import json
import pathlib
import warnings
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze
from flax.traverse_util import ModelParamTraversal, flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes import optimizers
from t5x_pjit_recipes.adafactor import Adafactor, HParamMap, standard_logical_factor_rules
from t5x_pjit_recipes.errors import ConfigError, StateError
from t5x_pjit_recipes.optimizer_defs import derive_logical_axes
from t5x_pjit_recipes.optimizers import (
    MultiOptimizer,
    OptaxStatePartitionRules,
    OptaxWrapper,
    Optimizer,
    OptimizerDef,
    OptimizerState,
)

GOLDENS = pathlib.Path(__file__).parent / 'goldens'
CASES = json.loads((GOLDENS / 'optimizers.json').read_text())
AXES = {
    'dense': {'bias': P('mlp'), 'kernel': P('embed', 'mlp')},
    'emb': {'embedding': P('vocab', 'embed')},
}
SMALL = {'dense': {'bias': np.ones(4, np.float32), 'kernel': np.ones((2, 4), np.float32)}}
SMALL_AXES = {'dense': AXES['dense']}


def flat(tree: Any) -> dict[str, Any]:
    return flatten_dict(tree, sep='/')


@pytest.fixture(scope='module')
def golden() -> Any:
    with np.load(GOLDENS / 'optimizers.npz') as arrays:
        flat_arrays = dict(arrays)

    def under(prefix: str) -> dict[str, Any]:
        inside = {path: x for path, x in flat_arrays.items() if path.startswith(prefix + '/')}
        return unflatten_dict({path.removeprefix(prefix + '/'): jnp.asarray(x) for path, x in inside.items()}, sep='/')

    return under


def make(name: str) -> OptaxWrapper:
    kwargs = CASES[name]['kwargs'] | ({'key': 0} if name == 'noisy_sgd' else {})
    return getattr(optimizers, name)(**kwargs)


@pytest.mark.parametrize('name', [name for name in CASES if 'error' not in CASES[name]])
def test_three_steps_give_t5x_s_numbers(name: str, golden: Any) -> None:
    step = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads, learning_rate=None))
    optimizer = make(name).create(golden('params'))
    for number in range(3):
        optimizer = step(optimizer, golden(f'grads{number}'))
    found, expected = flat(optimizer.state_dict()), flat(golden(name))
    assert sorted(found) == CASES[name]['state_dict_keys']
    assert int(found['state/step']) == 3
    for path in expected:
        np.testing.assert_allclose(found[path], expected[path], rtol=2e-5, atol=2e-6, err_msg=path)
    assert step._cache_size() == 1


@pytest.mark.parametrize('name', [name for name in CASES if 'error' not in CASES[name]])
def test_logical_axes_are_t5x_s(name: str, golden: Any) -> None:
    optimizer = jax.eval_shape(make(name).create, golden('params'))
    found = flat(optimizer.optimizer_def.derive_logical_axes(optimizer, AXES).state_dict())
    assert {path: names if names is None else list(names) for path, names in found.items()} == CASES[name]['logical']


def test_a_random_key_in_the_state_is_replicated(golden: Any) -> None:
    optimizer = make('noisy_sgd').create(golden('params'))
    optimizer = optimizer.apply_gradient(golden('grads0'), learning_rate=None)
    axes = optimizer.optimizer_def.derive_logical_axes(optimizer, AXES)
    assert (axes.state.param_states[0].count, axes.state.param_states[0].rng_key) == (None, None)


MESH_AXES = json.loads(gzip.decompress((GOLDENS / 'mesh_axes.json.gz').read_bytes()))
T5_OPTIMIZERS = {
    'adafactor': Adafactor(0.1, logical_factor_rules=standard_logical_factor_rules()),
    'adafactor_beta1': Adafactor(0.1, beta1=0.9, logical_factor_rules=standard_logical_factor_rules()),
    'adam': optimizers.adam(0.1),
    'adamw': optimizers.adamw(0.1),
    'lamb': optimizers.lamb(0.1),
    'lion': optimizers.lion(0.1),
    'sgd_momentum': optimizers.sgd(0.1, momentum=0.9),
}


@pytest.mark.parametrize('name', T5_OPTIMIZERS)
@pytest.mark.parametrize('size', MESH_AXES)
def test_shapes_and_axes_of_a_t5_are_t5x_s(size: str, name: str) -> None:
    case = MESH_AXES[size]['optimizers'][name]
    targets = [path for path in case['shapes'] if path.startswith('target/')]
    shapes = {path.removeprefix('target/'): jax.ShapeDtypeStruct(*case['shapes'][path]) for path in targets}
    axes = {path.removeprefix('target/'): P(*case['logical'][path]) for path in targets}
    params, axes = (unflatten_dict(tree, sep='/') for tree in (shapes, axes))
    definition = T5_OPTIMIZERS[name]
    if isinstance(definition, Adafactor):
        definition = definition.with_param_axes(axes)
    optimizer = jax.eval_shape(definition.create, params)
    found = flat(optimizer.state_dict())
    assert {path: [list(x.shape), str(x.dtype)] for path, x in found.items() if path != 'state/step'} == {
        path: shape for path, shape in case['shapes'].items() if path != 'state/step'
    }
    logical = flat(definition.derive_logical_axes(optimizer, axes).state_dict())
    assert {path: names if names is None else list(names) for path, names in logical.items()} == case['logical']


def test_axes_of_adamw_have_the_state_s_own_structure() -> None:
    optimizer = optimizers.adamw(0.1).create(freeze(SMALL))
    axes = optimizer.optimizer_def.derive_logical_axes(optimizer, SMALL_AXES)
    slots = freeze(SMALL_AXES)
    assert axes.target == slots
    assert axes.state == OptimizerState(
        None, (optax.ScaleByAdamState(None, slots, slots), optax.EmptyState(), optax.EmptyState())
    )
    assert type(axes.state.param_states[0].mu) is type(slots)


ROUND_TRIPS = {
    'adam': optimizers.adam(0.1),
    'chain': optimizers.chain([optax.clip_by_global_norm(1.0), optax.trace(0.9), optax.scale(-0.1)]),
    'inject': OptaxWrapper(optax.inject_hyperparams(optax.adamw)(learning_rate=0.1)),
    'lion': optimizers.lion(0.1),
    'masked': OptaxWrapper(optax.masked(optax.adam(0.1), {'dense': {'bias': False, 'kernel': True}})),
    'multi_steps': OptaxWrapper(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
    'multi_transform': OptaxWrapper(
        optax.multi_transform({'a': optax.adam(0.1), 'b': optax.sgd(0.1)}, {'dense': {'bias': 'a', 'kernel': 'b'}})
    ),
    'sgd': optimizers.sgd(0.1),
    'yogi': optimizers.yogi(0.1),
}


@pytest.mark.parametrize('name', ROUND_TRIPS)
def test_a_restored_optimizer_equals_the_saved_one(name: str) -> None:
    start = ROUND_TRIPS[name].create(SMALL)
    step = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads, learning_rate=None))
    trained = step(start, SMALL)
    restored = start.restore_state(trained.state_dict())
    assert jax.tree.structure(restored) == jax.tree.structure(trained)
    jax.tree.map(np.testing.assert_array_equal, restored, trained)


def test_empty_states_vanish_from_the_state_dict() -> None:
    assert set(optimizers.adamw(0.1).create(SMALL).state_dict()['state']['param_states']) == {'0'}


def test_restoring_names_what_is_absent_reshaped_and_left_over() -> None:
    optimizer = optimizers.adam(0.1).create(SMALL)
    state_dict = optimizer.state_dict()
    state_dict['target']['dense']['bias'] = np.ones(5)
    del state_dict['state']['param_states']['0']['count']
    with pytest.raises(
        StateError, match=r'dense/bias has shape \(4,\) .* \(5,\)\n  state/param_states/0/count is absent'
    ):
        optimizer.restore_state(state_dict)
    with pytest.warns(UserWarning, match='1 leaves are left over(?s:.*)target/dense/gate'):
        optimizer.restore_state({**optimizer.state_dict(), 'target': {'dense': {**SMALL['dense'], 'gate': 1}}})


def test_the_step_is_int32_and_a_python_integer_becomes_so() -> None:
    optimizer = optimizers.sgd(0.1).create(SMALL)
    restored = optimizer.restore_state({'target': SMALL, 'state': {'step': 7}})
    for step, value in ((optimizer.state.step, 0), (restored.state.step, 7)):
        assert (step.dtype, step.shape, int(step), jnp.asarray(step).weak_type) == (np.int32, (), value, False)


def test_equal_transformations_make_equal_definitions() -> None:
    transformation = optax.adam(0.1)
    first, second = OptaxWrapper(transformation), OptaxWrapper(transformation)
    assert (first, hash(first)) == (second, hash(second))
    assert first != OptaxWrapper(optax.adam(0.1))


def test_an_ignored_learning_rate_is_said_once_under_jit_too() -> None:
    optimizer = optimizers.sgd(0.1).create(SMALL)
    assert not optimizer.optimizer_def.uses_learning_rate(optimizer.state)
    with pytest.warns(UserWarning, match=r'has no effect.*optax.inject_hyperparams'):
        once = jax.jit(lambda o: o.apply_gradient(SMALL, learning_rate=5.0))(optimizer)
    np.testing.assert_allclose(once.target['dense']['bias'], 0.9 * np.ones(4), rtol=1e-6)
    once.apply_gradient(SMALL, learning_rate=5.0)  # a second warning would be an error here


INJECTED = {
    'plain': optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    'chain': optax.chain(optax.clip(10.0), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)),
    'multi_steps': optax.MultiSteps(
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), 1
    ).gradient_transformation(),
}


@pytest.mark.parametrize('name', INJECTED)
def test_an_injected_learning_rate_takes_effect(name: str) -> None:
    optimizer = OptaxWrapper(INJECTED[name]).create(jax.tree.map(jnp.asarray, SMALL))
    assert optimizer.optimizer_def.uses_learning_rate(optimizer.state)
    assert optimizer.optimizer_def.uses_learning_rate(jax.eval_shape(lambda: optimizer).state)
    step = jax.jit(lambda optimizer, rate: optimizer.apply_gradient(SMALL, learning_rate=rate))
    for rate in (0.5, 0.25):
        optimizer = step(optimizer, rate)
    np.testing.assert_allclose(optimizer.target['dense']['bias'], 0.25 * np.ones(4), rtol=1e-6)
    assert step._cache_size() == 1


def test_a_scheduled_hyperparameter_stays_scheduled() -> None:
    scheduled = OptaxWrapper(optax.inject_hyperparams(optax.sgd)(learning_rate=lambda step: 0.1))
    assert not scheduled.uses_learning_rate(scheduled.init_state(SMALL))


def test_rules_are_exceptions_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    state = optax.chain(optax.trace(0.9), optax.adam(0.1)).init(SMALL)
    monkeypatch.setitem(
        OptaxStatePartitionRules._RULES, optax.TraceState, lambda state, axes: optax.TraceState({'dense': None})
    )
    trace, (adam, _) = OptaxStatePartitionRules.derive_optax_logical_axes(state, SMALL_AXES, params=SMALL)
    assert trace == optax.TraceState({'dense': None})
    assert adam.mu == SMALL_AXES


def test_without_shapes_the_number_of_dims_tells_slots() -> None:
    state = optax.adam(0.1).init(SMALL)
    axes = OptaxStatePartitionRules.derive_optax_logical_axes(state, SMALL_AXES)
    assert axes == OptaxStatePartitionRules.derive_optax_logical_axes(state, SMALL_AXES, params=SMALL)
    assert axes[0].nu == SMALL_AXES


def test_masked_parameters_stay_masked_in_their_axes() -> None:
    masked = {'dense': {'bias': optax.MaskedNode(), 'kernel': SMALL['dense']['kernel']}}
    axes = OptaxStatePartitionRules.derive_params_axes(masked, SMALL_AXES)
    assert axes == {'dense': {'bias': optax.MaskedNode(), 'kernel': P('embed', 'mlp')}}


@flax.struct.dataclass
class Rate:
    learning_rate: float = 1.0


class Signs(OptimizerDef):
    """A definition of a user's own, without `derive_logical_axes`."""

    def init_state(self, params: Any) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), {})

    def apply_gradient(self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any) -> tuple[Any, Any]:
        new = jax.tree.map(lambda p, g: p - hyper_params.learning_rate * jnp.sign(g), params, grads)
        return new, OptimizerState(state.step + 1, {})


def test_a_definition_of_one_s_own() -> None:
    definition = Signs(Rate())
    optimizer = definition.create(SMALL).apply_gradient(SMALL, learning_rate=0.25)
    np.testing.assert_array_equal(optimizer.target['dense']['bias'], 0.75 * np.ones(4))
    with pytest.raises(TypeError, match='momentum'):
        optimizer.apply_gradient(SMALL, momentum=0.9)
    with pytest.raises(StateError, match='the state of Signs: it has no method derive_logical_axes'):
        derive_logical_axes(optimizer, SMALL_AXES)


def ending(suffix: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)  # Flax would rather see optax's own partition
        return ModelParamTraversal(lambda path, _: path.endswith(suffix))


KERNELS, BIASES, EVERYTHING = ending('kernel'), ending('bias'), ending('')
PARAMS = {
    'dense': SMALL['dense'],
    'frozen': {'scale': np.ones(3, np.float32)},
}
PARAMS_AXES = {'dense': AXES['dense'], 'frozen': {'scale': P('embed')}}


@pytest.fixture(params=[dict, freeze], ids=['dict', 'FrozenDict'])
def params(request: pytest.FixtureRequest) -> Any:
    return jax.tree.map(jnp.asarray, request.param(PARAMS))


def alone(definition: OptimizerDef, leaf: Any, **kwargs: Any) -> Any:
    """Trains one parameter by itself for two steps."""
    optimizer = definition.create({'w': leaf})
    for _ in range(2):
        optimizer = optimizer.apply_gradient({'w': leaf}, **kwargs)
    return optimizer.target['w']


def trained(definition: OptimizerDef, params: Any) -> Optimizer:
    step = jax.jit(lambda optimizer: optimizer.apply_gradient(params))
    optimizer = step(step(definition.create(params)))
    assert step._cache_size() == 1
    return optimizer


def test_parts_are_trained_as_if_alone(params: Any) -> None:
    parts = [(KERNELS, Adafactor(0.1)), (BIASES, Adafactor(0.01, beta1=0.9))]
    optimizer = trained(MultiOptimizer(parts), params)
    for name, (_, definition) in zip(('kernel', 'bias'), parts, strict=True):
        expected = alone(definition, SMALL['dense'][name])
        np.testing.assert_allclose(optimizer.target['dense'][name], expected, rtol=1e-6)
    np.testing.assert_array_equal(optimizer.target['frozen']['scale'], np.ones(3))
    assert jax.tree.structure(optimizer.target) == jax.tree.structure(params)
    state = optimizer.state_dict()['state']['param_states']
    assert state['frozen'] == {'scale': None}
    assert set(state['dense']['bias']) == {'v_row', 'v_col', 'v', 'm'}


def test_parts_may_be_optax_s(params: Any) -> None:
    adam = OptaxWrapper(optax.adam(0.1))
    definition = MultiOptimizer([(KERNELS, adam), (BIASES, Adafactor(0.01))])
    optimizer = trained(definition, params)
    np.testing.assert_allclose(
        optimizer.target['dense']['kernel'], alone(adam, SMALL['dense']['kernel'], learning_rate=None), rtol=1e-6
    )
    np.testing.assert_allclose(
        optimizer.target['dense']['bias'], alone(Adafactor(0.01), SMALL['dense']['bias']), rtol=1e-6
    )
    restored = definition.create(params).restore_state(optimizer.state_dict())
    assert jax.tree.structure(restored) == jax.tree.structure(optimizer)
    axes = definition.derive_logical_axes(optimizer, PARAMS_AXES)
    assert axes.state.param_states[0][0].mu == {'dense': {'kernel': P('embed', 'mlp')}}
    assert axes.state.param_states[1]['dense']['bias'].v == P('mlp')
    assert definition.uses_learning_rate(optimizer.state)
    assert not MultiOptimizer([(KERNELS, adam)]).uses_learning_rate(
        OptimizerState(0, (adam.init_state({}).param_states,))
    )


def test_axes_reach_the_parts_of_a_copy(params: Any) -> None:
    rules = standard_logical_factor_rules()
    definition = MultiOptimizer([(KERNELS, Adafactor(0.1, logical_factor_rules=rules)), (BIASES, Adafactor(0.1))])
    first, second = (definition.with_param_axes(freeze(PARAMS_AXES)) for _ in range(2))
    assert definition.sub_optimizers[0].hyper_params.factor_map is None
    assert set(first.sub_optimizers[0].hyper_params.factor_map) == {'dense/kernel'}
    assert (first, hash(first)) == (second, hash(second))
    assert first != definition
    axes = first.derive_logical_axes(first.create(params), PARAMS_AXES)
    assert axes.state.param_states['dense']['kernel'].v == P('embed', 'mlp')
    assert axes.state.param_states['frozen']['scale'] is None
    definition.set_param_axes(PARAMS_AXES)
    assert definition == first


def test_overrides_reach_every_part() -> None:
    definition = MultiOptimizer([(KERNELS, Adafactor(0.1)), (BIASES, Adafactor(0.2))])
    assert [part.learning_rate for part in definition.update_hyper_params(learning_rate=0.3)] == [0.3, 0.3]
    assert [part.learning_rate for part in definition.update_hyper_params()] == [0.1, 0.2]


def test_a_parameter_of_two_parts_is_named() -> None:
    with pytest.raises(ConfigError, match=r'(?s)selects 1 of them.*  dense/kernel: parts \[0, 1\]'):
        MultiOptimizer([(KERNELS, Adafactor()), (EVERYTHING, Adafactor())]).create({'dense': {'kernel': np.ones(1)}})


def test_hparam_maps_decide_in_parts_by_full_path() -> None:
    scales = HParamMap([('dense/bias', False), ('.*', True)])
    definition = MultiOptimizer([(BIASES, Adafactor(0.1, multiply_by_parameter_scale=scales))])
    updated = definition.create({'dense': {'bias': np.full(2, 0.5)}}).apply_gradient({'dense': {'bias': np.ones(2)}})
    np.testing.assert_allclose(updated.target['dense']['bias'], [0.4, 0.4], rtol=1e-6)


def test_every_constructor_of_t5x_makes_a_wrapper() -> None:
    names = ['adabelief', 'adagrad', 'adam', 'adamw', 'fromage', 'lamb', 'lars', 'lion', 'noisy_sgd', 'radam']
    names += ['rmsprop', 'sgd', 'yogi']
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # optax announces a change of the arguments of noisy_sgd
        assert all(isinstance(getattr(optimizers, name)(learning_rate=0.1), OptaxWrapper) for name in names)
