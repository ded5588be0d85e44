"""Slots of every kind of optax state lie as their parameters do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax.core import freeze
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.errors import PlanError
from t5x_pjit_recipes.layout.axes import AxisMetadata, AxisNames
from t5x_pjit_recipes.layout.paths import is_none, named_leaves
from t5x_pjit_recipes.layout.slots import kept_axes, slot_specs, specs_like
from tests.timing import check_takes_less, quickest

PARAMS = {
    'mlp': {'kernel': np.zeros((8, 4), np.float32), 'bias': np.zeros(4, np.float32)},
    'norm': {'scale': np.zeros(8, np.float32)},
    'scale': np.zeros(4, np.float32),
}
SPECS = {'mlp': {'kernel': P('x', 'y'), 'bias': P('y')}, 'norm': {'scale': P('x')}, 'scale': None}
NOT_BIAS = {'mlp': {'kernel': True, 'bias': False}, 'norm': {'scale': True}, 'scale': True}
LABELS = jax.tree.map(lambda keep: 'adam' if keep else 'sgd', NOT_BIAS)


def specs_of(transformation: optax.GradientTransformation, params: Any = PARAMS, specs: Any = SPECS) -> tuple[Any, Any]:
    shapes = jax.eval_shape(transformation.init, params)
    return shapes, slot_specs(shapes, params, specs, init=transformation.init)


TRANSFORMATIONS = {
    'adamw': optax.adamw(0.1),
    'sgd_momentum': optax.sgd(0.1, momentum=0.9),
    'adafactor': optax.adafactor(0.1),
    'adadelta': optax.adadelta(0.1),
    'amsgrad': optax.amsgrad(0.1),
    'apply_if_finite': optax.apply_if_finite(optax.adam(0.1), 3),
    'chain': optax.chain(optax.clip_by_global_norm(1.0), optax.masked(optax.trace(0.9), NOT_BIAS), optax.scale(-0.1)),
    'conditionally_transform': optax.conditionally_transform(optax.adam(0.1), lambda step: step > 1),
    'inject_hyperparams': optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
    'lbfgs': optax.lbfgs(0.1),
    'masked': optax.masked(optax.adam(0.1), NOT_BIAS),
    'multi_steps': optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation(),
    'multi_transform': optax.multi_transform({'adam': optax.adam(0.1), 'sgd': optax.sgd(0.1, 0.9)}, LABELS),
    'muon': optax.contrib.muon(0.1),
    'novograd': optax.novograd(0.1),
    'prodigy': optax.contrib.prodigy(0.1),
    'schedule_free': optax.contrib.schedule_free_adamw(0.1),
    'sm3': optax.sm3(0.1),
    'zero_nans': optax.zero_nans(),
}


@pytest.mark.parametrize('name', TRANSFORMATIONS)
def test_structure_is_kept_and_specs_fit_the_shapes(name: str) -> None:
    shapes, specs = specs_of(TRANSFORMATIONS[name])
    leaves, treedef = jax.tree.flatten(shapes)
    found = treedef.flatten_up_to(specs)  # raises where the structures differ
    for leaf, spec in zip(leaves, found, strict=True):
        assert spec is None or len(spec) == len(leaf.shape)


CASES = {
    'adamw': {'0/count': None, '0/mu/mlp/kernel': P('x', 'y'), '0/nu/mlp/bias': P('y'), '0/nu/scale': None},
    'inject_hyperparams': {'hyperparams/learning_rate': None, 'inner_state/0/mu/norm/scale': P('x')},
    'lbfgs': {'0/params/mlp/kernel': P('x', 'y'), '0/diff_params_memory/mlp/kernel': P(None, 'x', 'y')},
    'masked': {'inner_state/0/mu/mlp/kernel': P('x', 'y'), 'inner_state/0/count': None},
    'multi_steps': {'mini_step': None, 'acc_grads/mlp/kernel': P('x', 'y'), 'inner_opt_state/0/mu/mlp/bias': P('y')},
    'multi_transform': {'inner_states/adam/inner_state/0/mu/mlp/kernel': P('x', 'y')},
    'schedule_free': {'z/mlp/kernel': P('x', 'y')},
    'zero_nans': {'found_nan/mlp/kernel': None, 'found_nan/scale': None},
}


@pytest.mark.parametrize('name', CASES)
def test_slots_lie_as_their_parameters(name: str) -> None:
    named = named_leaves(specs_of(TRANSFORMATIONS[name])[1], is_leaf=is_none)
    assert {path: named[path] for path in CASES[name]} == CASES[name]


def test_masked_parameters_have_no_slots() -> None:
    _, specs = specs_of(TRANSFORMATIONS['masked'])
    assert specs.inner_state[0].mu['mlp'] == {'kernel': P('x', 'y'), 'bias': optax.MaskedNode()}


def test_the_longest_suffix_names_the_parameter() -> None:
    _, specs = specs_of(optax.trace(0.9))
    assert specs.trace['norm']['scale'] == P('x')  # not that of 'scale'


def test_lookahead_slots_lie_as_the_fast_parameters() -> None:
    lookahead = optax.lookahead(optax.adam(0.1), 5, 0.5)
    shapes = jax.eval_shape(lookahead.init, optax.LookaheadParams.init_synced(PARAMS))
    specs = slot_specs(shapes, PARAMS, SPECS)
    assert specs.fast_state[0].mu == SPECS
    assert specs.steps_since_sync is None


def test_containers_follow_the_state_not_the_specs() -> None:
    _, specs = specs_of(optax.trace(0.9), freeze(PARAMS), SPECS)
    assert jax.tree.structure(specs) == jax.tree.structure(optax.TraceState(freeze(SPECS)))


# One tree whose sizes tell nothing: a square, a cube, repeated dims, and dims that are the sizes of other things.
EQUAL = {
    'square': jax.ShapeDtypeStruct((200, 200), np.float32),
    'wide': jax.ShapeDtypeStruct((200, 300), np.float32),
    'stacked': jax.ShapeDtypeStruct((3, 200, 200), np.float32),
    'history': jax.ShapeDtypeStruct((10, 10), np.float32),
}
EQUAL_SPECS = {name: P(*'wxyz'[: len(shape.shape)]) for name, shape in EQUAL.items()}
# Optax factors the two largest dims, the last of equals the largest; GaLore projects the first unless it is smaller.
TRACED = {
    'adafactor': (
        optax.adafactor(0.1),
        {'0/v_row/square': P('w'), '0/v_col/square': P('x'), '0/v_row/wide': P('w'), '0/v_col/wide': P('x')}
        | {'0/v_row/stacked': P('w', 'x'), '0/v_col/stacked': P('w', 'y'), '0/v/square': None},
    ),
    'sm3': (
        optax.sm3(0.1),
        {'0/mu/square/0': P('w'), '0/mu/square/1': P('x'), '0/mu/stacked/2': P('y'), '0/nu/square': P('w', 'x')},
    ),
    'galore': (
        optax.contrib.galore(0.1),
        {'0/projector/square': P('w', None), '0/base_optimizer_state/mu/square': P(None, 'x')}
        | {'0/projector/wide': P('x', None), '0/base_optimizer_state/mu/wide': P('w', None)},
    ),
    'lbfgs': (optax.lbfgs(0.1), {'0/diff_params_memory/history': P(None, 'w', 'x'), '0/weights_memory': None}),
}


@pytest.mark.parametrize('name', TRACED)
def test_equal_dims_are_told_apart_by_a_trace_with_symbols(name: str) -> None:
    transformation, expected = TRACED[name]
    named = named_leaves(specs_of(transformation, EQUAL, EQUAL_SPECS)[1], is_leaf=is_none)
    assert {path: named[path] for path in expected} == expected


def test_without_a_trace_what_fits_in_two_ways_is_replicated() -> None:
    shapes = jax.eval_shape(optax.adafactor(0.1).init, EQUAL)
    found = slot_specs(shapes, EQUAL, EQUAL_SPECS)[0]
    assert (found.v_row['square'], found.v_row['wide'], found.v_col['wide']) == (None, P('w'), P('x'))
    # Two ways that lie alike are no doubt.
    assert slot_specs(shapes, EQUAL, EQUAL_SPECS | {'stacked': P('w')})[0].v_row['stacked'] == P('w', None)


def test_an_init_that_cannot_take_symbols_is_passed_over() -> None:
    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: np.zeros(int(p.shape[0])), params)

    shapes = jax.eval_shape(init, EQUAL)
    expected = {'history': None, 'square': None, 'stacked': P('w'), 'wide': P('w')}
    assert slot_specs(shapes, EQUAL, EQUAL_SPECS, init=init) == expected


def test_a_trace_of_another_structure_is_not_believed() -> None:
    def init(params: Any) -> Any:
        return [jnp.zeros(p.shape[1]) for p in jax.tree.leaves(params) if p.shape[0] == p.shape[1]]

    params = {'0': EQUAL['square']}
    assert slot_specs(jax.eval_shape(init, params), params, {'0': P('x', 'y')}, init=init) == [None]


def test_parameters_in_a_list_are_told_apart_from_places_in_the_state() -> None:
    params = [np.zeros((8, 8), np.float32), np.zeros((4, 4), np.float32)]
    specs = [P('x', 'y'), P('z', 'w')]
    _, (state, _) = specs_of(optax.sm3(0.1), params, specs)
    assert state.mu == [[P('x'), P('y')], [P('z'), P('w')]]
    assert specs_of(optax.adam(0.1), params, specs)[1][0].mu == specs


def test_look_ahead_of_synchronised_parameters() -> None:
    params = optax.LookaheadParams.init_synced(PARAMS)
    lookahead = optax.lookahead(optax.adam(0.1), 5, 0.5)
    _, specs = specs_of(lookahead, params, optax.LookaheadParams(SPECS, SPECS))
    assert specs.fast_state[0].mu == SPECS


@pytest.mark.parametrize(
    ('entry', 'kept'),
    [
        (AxisNames('a', 'b', 'c'), AxisNames('a', 'c')),
        (AxisMetadata(names=('a', 'b', 'c')), AxisMetadata(names=('a', 'c'))),
        (('a', 'b', 'c'), ('a', 'c')),
        (P(('a', 'd'), 'b'), P(('a', 'd'), None)),
        (P(None, 'b'), None),
        (None, None),
    ],
)
def test_kept_axes_are_spelled_as_they_were(entry: Any, kept: Any) -> None:
    assert kept_axes(entry, (0, 2)) == kept
    assert type(kept_axes(entry, (0, 2))) is type(kept)


def test_a_dim_that_is_there_twice_is_divided_once() -> None:
    assert kept_axes(P('x', 'y'), (0, 0)) == P('x', None)


def test_any_entry_is_passed_on() -> None:
    axes = {'w': ('vocab', 'embed')}
    params = {'w': np.zeros((4, 2))}
    assert slot_specs(optax.TraceState(params), params, axes) == optax.TraceState(axes)


def test_every_parameter_without_a_spec_is_named() -> None:
    with pytest.raises(PlanError, match=r'2 of 4 arrays.*\n  mlp/bias\n  norm/scale'):
        specs_like(PARAMS, {'mlp': {'kernel': P()}, 'scale': P()})


@pytest.mark.parametrize('name', ['adamw', 'adafactor', 'sm3', 'lbfgs', 'muon'])
def test_the_state_of_a_thousand_leaves_takes_about_a_second(name: str) -> None:
    # 500 squares and 500 vectors: every factored slot needs the trace.
    params = {f'layers_{i}': {'kernel': EQUAL['square'], 'bias': np.zeros(200, np.float32)} for i in range(500)}
    specs = jax.tree.map(lambda _: P('x'), params)
    init = TRANSFORMATIONS[name].init
    shapes = jax.eval_shape(init, params)
    # Most of it is optax's own init, which a slow machine makes longer than the second that it all takes on others.
    own = quickest(lambda: jax.eval_shape(lambda p: init(p), params), tries=1)
    check_takes_less(max(1, 2 * own), lambda: slot_specs(shapes, params, specs, init=init))


def test_ten_thousand_leaves_take_well_under_a_second() -> None:
    params = {f'layers_{i}': {'mlp': {'kernel': np.zeros((2, 1))}} for i in range(5000)}
    specs = jax.tree.map(lambda _: P('x'), params)
    state = optax.ScaleByAdamState(np.zeros(()), params, params)
    check_takes_less(0.8, lambda: slot_specs(state, params, specs))
