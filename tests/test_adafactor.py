"""Adafactor gives T5X's numbers, its axes, and named errors."""

import functools
import json
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.adafactor import (
    HEURISTIC_RULE,
    Adafactor,
    FactorDim,
    HParamMap,
    _AdafactorHyperParams,
    _AdafactorParamState,
    standard_logical_factor_rules,
)
from t5x_pjit_recipes.errors import ConfigError
from t5x_pjit_recipes.optimizers import Optimizer, OptimizerState

NONE, BATCH, ROW, COLUMN = FactorDim.NONE, FactorDim.BATCH, FactorDim.ROW, FactorDim.COLUMN
GOLDENS = pathlib.Path(__file__).parent / 'goldens'
CASES = json.loads((GOLDENS / 'adafactor.json').read_text())
SHAPES = {'attn/kernel': (132, 2, 130), 'dense/bias': (136,), 'dense/kernel': (132, 136), 'emb/embedding': (144, 132)}
SAMPLE = 53  # the golden file holds every 53rd element of an array above 300 elements


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    return unflatten_dict(flat, sep='/')


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    return flatten_dict(tree, sep='/')


@pytest.fixture(scope='module')
def inputs() -> tuple[Any, list[Any]]:
    """Parameters and five gradients, drawn as for the golden file."""
    random = np.random.RandomState(0)

    def draw(scale: float) -> dict[str, Any]:
        return {path: random.randn(*shape).astype(np.float32) * np.float32(scale) for path, shape in SHAPES.items()}

    return nested(draw(0.1)), [nested(draw(0.01)) for _ in range(5)]


@pytest.fixture(scope='module')
def expected() -> dict[str, np.ndarray]:
    with np.load(GOLDENS / 'adafactor.npz') as arrays:
        return dict(arrays)


def bound(name: str) -> tuple[Adafactor, Any]:
    axes = {path.removeprefix('target/'): names for path, names in CASES[name]['logical'].items() if 'target/' in path}
    axes = nested({path: P(*names) for path, names in axes.items()})
    definition = Adafactor(**CASES[name]['kwargs'], logical_factor_rules=standard_logical_factor_rules())
    return definition.with_param_axes(axes), axes


@pytest.mark.parametrize('name', [name for name in CASES if 'error' not in CASES[name]])
def test_five_steps_give_t5x_s_numbers(name: str, inputs: tuple, expected: dict) -> None:
    params, grads = inputs
    step = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads))
    optimizer = bound(name)[0].create(jax.tree.map(jnp.asarray, params))
    for number, grad in enumerate(grads):
        if name == 'skip_nan' and number == 2:
            grad = jax.tree.map(lambda g: np.full_like(g, np.nan), grad)
        optimizer = step(optimizer, grad)
    golden = {path.removeprefix(f'{name}/'): x for path, x in expected.items() if path.startswith(f'{name}/')}
    found = flat(optimizer.state_dict())
    assert found.keys() == golden.keys()
    for path, array in found.items():
        sample = np.ravel(array) if array.size <= 300 else np.ravel(array)[::SAMPLE]
        np.testing.assert_allclose(sample, golden[path].ravel(), rtol=2e-5, atol=2e-6, err_msg=path)
        assert array.dtype == golden[path].dtype
    assert step._cache_size() == 1


@pytest.mark.parametrize('name', [name for name in CASES if 'error' not in CASES[name]])
def test_logical_axes_are_t5x_s(name: str, inputs: tuple) -> None:
    definition, axes = bound(name)
    optimizer = jax.eval_shape(definition.create, inputs[0])
    found = flat(definition.derive_logical_axes(optimizer, axes).state_dict())
    assert {path: names if names is None else list(names) for path, names in found.items()} == CASES[name]['logical']


def test_a_rank_above_two_needs_a_rule(inputs: tuple) -> None:
    assert CASES['heuristic_factoring']['error'].startswith('ValueError')
    with pytest.raises(ConfigError, match=r'1 of 4 parameters(?s:.*)  attn/kernel \(132, 2, 130\): rank 3 is above 2'):
        Adafactor(learning_rate=0.1).create(inputs[0])


# Shape, arguments, the first three weights, their sum, and samples of the state.
TABLE = {
    'vector': ((6,), {}, [-0.5, -0.4020114, -0.1539573], -0.5482558, {'v': [1e-30, 0.4622021, 0.4305775]}),
    'factored': (
        (4, 6),
        {},
        [-0.5, -0.5438691, -0.4014085],
        -0.5375521,
        {'v_row': [0.3482014, 0.620756, 0.6017342], 'v_col': [0.4265594, 0.4822311, 0.5231953]},
    ),
    'small': ((4, 6), {'min_dim_size_to_factor': 128}, [-0.5, -0.5235367, -0.4063629], -0.5814441, {}),
    'tall': ((6, 4), {}, [-0.5, -0.5415287, -0.4058687], -0.5642228, {'v_row': [0.459787, 0.5301848, 0.4597269]}),
    'square': ((4, 4), {}, [-0.5, -0.5262514, -0.3623958], -0.5931541, {'v_row': [0.2486208, 0.54318, 0.6616354]}),
    'two columns': (
        (3, 2, 4),
        {'factor_map': HParamMap([('w', (ROW, COLUMN, COLUMN))])},
        [-0.5, -0.5330902, -0.4148411],
        -0.5629122,
        {'v_row': [0.3959004, 0.6723133, 0.3688302]},
    ),
    'batch': (
        (2, 3, 4),
        {'factor_map': HParamMap([('w', ('batch', 'row', 'col'))])},
        [-0.5, -0.5470699, -0.4111825],
        -0.5716652,
        {},
    ),
    'momentum': (
        (4, 6),
        {'beta1': 0.9},
        [-0.5, -0.4772069, -0.4172406],
        -0.5098087,
        {'m': [0, 0.007350412, -0.001702113]},
    ),
    'bfloat16 momentum': (
        (4, 6),
        {'beta1': 0.9, 'dtype_momentum': jnp.bfloat16},
        [-0.5, -0.4771663, -0.4172464],
        -0.5097209,
        {'m': [0, 0.007324219, -0.001701355]},
    ),
    'no scale': ((4, 6), {'multiply_by_parameter_scale': False}, [-0.5, -0.7522371, -0.3658187], -0.6293125, {}),
    'weight decay': ((4, 6), {'weight_decay_rate': 0.01}, [-0.4851495, -0.5285619, -0.3893286], -0.5219564, {}),
    'weight decay by rate': (
        (4, 6),
        {'weight_decay_rate_lr_exponent': 2},
        [-0.4851495, -0.5285619, -0.3893286],
        -0.5219564,
        {},
    ),
    'global norm': (
        (4, 6),
        {'global_norm_clip_threshold': 0.5},
        [-0.5, -0.5440422, -0.4011359],
        -0.5375142,
        {'v_row': [0.007481739, 0.01362139, 0.01317539]},
    ),
    'offset': ((4, 6), {'step_offset': -10}, [-0.5, -0.5443821, -0.4022355], -0.533886, {}),
    'largest scale': ((4, 6), {'max_parameter_scale': 0.1}, [-0.5, -0.4877237, -0.4115819], -0.5129313, {}),
    'no clipping': ((4, 6), {'clipping_threshold': None}, [-0.5, -0.5446918, -0.4007711], -0.538292, {}),
    'decay rate': ((4, 6), {'decay_rate': 1.0}, [-0.5, -0.5438215, -0.4038791], -0.534042, {}),
    'batch only': (
        (6,),
        {'factor_map': HParamMap([('w', (BATCH,))])},
        [-0.5, -0.4117055, -0.1594282],
        -0.5374557,
        {},
    ),
    'rows only': (
        (2, 3),
        {'factor_map': HParamMap([('w', (BATCH, ROW))])},
        [-0.5, -0.4162896, -0.1516506],
        -0.5630515,
        {},
    ),
    'batch, none': (
        (2, 3),
        {'factor_map': HParamMap([('w', (BATCH, NONE))])},
        [-0.5, -0.4162896, -0.1516505],
        -0.5630515,
        {},
    ),
}


@pytest.mark.parametrize('name', TABLE)
def test_three_steps_of_one_parameter(name: str) -> None:
    shape, kwargs, weights, total, samples = TABLE[name]
    index = np.arange(np.prod(shape))
    param = ((index - index.size / 2) / index.size).astype(np.float32).reshape(shape)
    optimizer = Adafactor(0.1, **{'min_dim_size_to_factor': 2} | kwargs).create({'w': jnp.asarray(param)})
    # The numbers were measured op by op, where bfloat16 is rounded after each; a compiled step keeps more digits.
    step = Optimizer.apply_gradient if 'dtype_momentum' in kwargs else jax.jit(Optimizer.apply_gradient)
    for i in range(3):
        optimizer = step(optimizer, {'w': np.sin(index * (i + 1.0)).astype(np.float32).reshape(shape)})
    np.testing.assert_allclose(np.ravel(optimizer.target['w'])[:3], weights, rtol=2e-5)
    np.testing.assert_allclose(np.sum(optimizer.target['w']), total, rtol=2e-5)
    for slot, sample in samples.items():
        found = np.ravel(getattr(optimizer.state.param_states['w'], slot)).astype(np.float32)
        np.testing.assert_allclose(found[:3], sample, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize(
    ('kwargs', 'before', 'after'),
    [
        ({}, (0.9, 0.1, 0.0, 0.0), {'v_row': 0.9574349, 'v_col': 0.6169143}),
        ({'global_norm_clip_threshold': 1.0}, (0.9, 0.1, 0.0, 0.0), {'v_row': 0.478811, 'v_col': 0.13829}),
        ({'factored': False, 'beta1': 0.0}, (0.0, 0.0, 0.5, 0.0), {'v': 0.787174, 'm': 0.1}),
    ],
)
def test_anchors(kwargs: dict, before: tuple, after: dict) -> None:
    ones = np.ones((3, 2), np.float32)
    definition = Adafactor(0.1, min_dim_size_to_factor=0, **kwargs)
    empty = jax.eval_shape(definition.init_state, {'x': ones}).param_states['x']
    slots = [
        np.full(slot.shape, value, np.float32)
        for slot, value in zip((empty.v_row, empty.v_col, empty.v, empty.m), before, strict=True)
    ]
    state = OptimizerState(np.int32(1), {'x': _AdafactorParamState(*slots)})
    update = jax.jit(functools.partial(definition.apply_gradient, definition.hyper_params))
    params, state = update({'x': ones}, state, {'x': ones})
    np.testing.assert_allclose(params['x'], 0.9 * ones, rtol=1e-6)
    for slot, value in after.items():
        found = getattr(state.param_states['x'], slot)
        np.testing.assert_allclose(found, np.full(np.shape(found), value), rtol=2e-5)
    assert int(state.step) == 2


@pytest.mark.parametrize(
    ('shape', 'rule', 'v_row', 'v_col'),
    [
        ((24, 16), HEURISTIC_RULE, (16,), (24,)),
        ((24, 16), (ROW, COLUMN), (16,), (24,)),  # an explicit rule gives way to the heuristic
        ((24, 4), HEURISTIC_RULE, (1,), (1,)),
        ((24, 4), None, (1,), (1,)),
        ((24, 4, 16), (COLUMN, BATCH, ROW), (4, 16), (24, 4)),
        ((24, 4, 16), (ROW, BATCH, COLUMN), (24, 4), (4, 16)),
        ((24, 4, 16), (COLUMN, ROW, ROW), (4, 16), (24,)),
        ((24, 4, 16), (COLUMN, COLUMN, ROW), (16,), (24, 4)),
        ((24, 4, 16), (BATCH, NONE, NONE), (1,), (1,)),
    ],
)
def test_rules_decide_the_shapes_of_the_state(shape: tuple, rule: Any, v_row: tuple, v_col: tuple) -> None:
    definition = Adafactor(0.1, min_dim_size_to_factor=8, factor_map=HParamMap([('.*', rule)]))
    state = definition.init_state({'w': np.zeros(shape)}).param_states['w']
    unfactored = v_row == (1,)
    assert (state.v_row.shape, state.v_col.shape) == (v_row, v_col)
    assert (state.v.shape, state.m.shape) == (shape if unfactored else (1,), (1,))


def test_ignored_rules_are_one_debug_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, 't5x_pjit_recipes.adafactor'):
        definition = Adafactor(0.1, factor_map=HParamMap([('.*', (ROW, COLUMN))]))
        definition.create({'a': np.ones((2, 2)), 'b': np.ones((2, 2))}).apply_gradient({'a': 1.0, 'b': 1.0})
    assert [record.message.splitlines()[1:] for record in caplog.records] == [['  a', '  b']]


def test_binding_axes_leaves_the_definition_alone() -> None:
    definition = Adafactor(logical_factor_rules={'embed': 'row', 'mlp': 'Column'})
    again, other = (definition.with_param_axes({'w': axes}) for axes in (P('embed', 'mlp'), P('mlp', 'embed')))
    assert definition.hyper_params.factor_map is None
    assert again.hyper_params.factor_map == {'w': (ROW, COLUMN)}
    assert other.hyper_params.factor_map == {'w': (COLUMN, ROW)}


def test_equal_definitions_hash_equal() -> None:
    first, second = (bound('beta1')[0] for _ in range(2))
    assert first is not second
    assert (first, hash(first)) == (second, hash(second))
    assert first != Adafactor(0.01, beta1=0.9)
    assert first != bound('t5_default')[0]


@pytest.mark.parametrize(
    ('kwargs', 'error', 'message'),
    [
        ({'factored': False, 'factor_map': HParamMap([])}, ValueError, 'factor_map, with factored=False'),
        ({'multiply_by_parameter_scale': 1}, TypeError, 'multiply_by_parameter_scale=1 of type int'),
        ({'factor_map': {'w': None}}, TypeError, "factor_map={'w': None} of type dict"),
        (
            {'beta1': 1.5, 'clipping_threshold': 0},
            ValueError,
            '(?s)2 of its.*beta1=1.5.*clipping_threshold=0',
        ),
        ({'step_offset': 0.5}, ValueError, 'step_offset=0.5, not whole'),
        ({'logical_factor_rules': {'embed': 'rows'}}, ValueError, r"'rows' \(did you mean 'row'\?\)"),
    ],
)
def test_arguments_without_a_meaning_are_refused_at_construction(kwargs: dict, error: type, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Adafactor(**kwargs)
    assert isinstance(caught.value, error)


def test_an_offset_beyond_the_step_is_named() -> None:
    definition = Adafactor(0.1, step_offset=3)
    optimizer = definition.create({'w': np.ones(2, np.float32)})
    with pytest.warns(UserWarning, match='at step 0 with step_offset=3'):
        optimizer.apply_gradient({'w': np.ones(2, np.float32)})
    with pytest.raises(ConfigError, match='at step 2 with step_offset=3'):
        definition.check_first_step(2)
    definition.check_first_step(3)


def test_without_a_learning_rate_there_is_no_update() -> None:
    with pytest.raises(ConfigError, match='learning_rate=None'):
        Adafactor().create({'w': np.ones(2)}).apply_gradient({'w': np.ones(2)})


def test_a_passed_learning_rate_takes_effect() -> None:
    grads = {'w': np.ones(2, np.float32)}
    optimizer = Adafactor(0.1).create(grads)
    assert optimizer.optimizer_def.uses_learning_rate(optimizer.state)
    np.testing.assert_array_equal(optimizer.apply_gradient(grads, learning_rate=0.0).target['w'], grads['w'])


def test_hyperparameters_keep_t5x_s_order() -> None:
    positional = _AdafactorHyperParams(
        0.1, True, True, 0.9, 0.7, 5, 2.0, 0.01, 64, 1e-20, 1e-2, None, None, 2, 3.0, 4.0, True
    )
    named = Adafactor(
        learning_rate=0.1,
        beta1=0.9,
        decay_rate=0.7,
        step_offset=5,
        clipping_threshold=2.0,
        weight_decay_rate=0.01,
        min_dim_size_to_factor=64,
        epsilon1=1e-20,
        epsilon2=1e-2,
        weight_decay_rate_lr_exponent=2,
        global_norm_clip_threshold=3.0,
        max_parameter_scale=4.0,
        skip_nan_updates=True,
    )
    assert named.hyper_params == positional


def test_a_parameter_of_shape_one_is_no_placeholder() -> None:
    definition = Adafactor(0.1)
    axes = definition.derive_logical_axes(definition.create({'w': np.ones(1)}), {'w': P('embed')})
    assert axes.state.param_states['w'] == _AdafactorParamState(None, None, P('embed'), None)


def test_momentum_of_beta1_zero_has_the_parameter_s_axes() -> None:
    definition = Adafactor(0.1, beta1=0.0)
    axes = definition.derive_logical_axes(definition.create({'w': np.ones((2, 2))}), {'w': P('embed', 'mlp')})
    assert axes.state.param_states['w'].m == P('embed', 'mlp')


def test_containers_of_parameters_are_kept_whatever_the_gradients_use() -> None:
    params = freeze({'w': np.ones((2, 2), np.float32)})
    optimizer = Adafactor(0.1).create(params)
    updated = optimizer.apply_gradient({'w': np.ones((2, 2), np.float32)})
    axes = optimizer.optimizer_def.derive_logical_axes(optimizer, {'w': P('embed', 'mlp')})
    assert jax.tree.structure(updated) == jax.tree.structure(optimizer)
    assert isinstance(axes, Optimizer)
    assert type(axes.target) is type(axes.state.param_states) is type(params)


def test_parameter_scale_by_path() -> None:
    params = {'a': np.full(2, 0.5, np.float32), 'b': np.full(2, 0.5, np.float32)}
    scaled = Adafactor(0.1, multiply_by_parameter_scale=HParamMap([('a', False), ('b', True)]))
    updated = scaled.create(params).apply_gradient({'a': np.ones(2), 'b': np.ones(2)}).target
    np.testing.assert_allclose([updated['a'][0], updated['b'][0]], [0.4, 0.45], rtol=1e-6)
