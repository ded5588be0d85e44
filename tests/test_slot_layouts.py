"""Layouts of optimizer states beyond T5X's: factors by the dims they keep, ZeRO-1, and what is said of them."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes import layout, optimizers, partitioning
from t5x_pjit_recipes.adafactor import Adafactor, standard_logical_factor_rules
from t5x_pjit_recipes.errors import ConfigError, RuleError, StateError
from t5x_pjit_recipes.initialization import TrainStateInitializer
from t5x_pjit_recipes.layout.axes import AxisMetadata, is_spec_leaf
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.layout.plan import format_bytes
from t5x_pjit_recipes.layout.slots import divide_further
from t5x_pjit_recipes.optimizers import OptaxWrapper
from t5x_pjit_recipes.reports import describe_train_state
from t5x_pjit_recipes.train_state import FlaxOptimTrainState
from tests import t5_models

AXES = {
    'stacked': ('layers', 'embed', 'mlp'),
    'square': ('embed', 'mlp'),
    'wide': ('embed', 'mlp'),
    'scale': ('embed',),
}
SHAPES = {'stacked': (2, 8, 12), 'square': (8, 8), 'wide': (8, 16), 'scale': (8,)}


def make_state(definition: Any) -> FlaxOptimTrainState:
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    axes = {name: AxisMetadata(names=names) for name, names in AXES.items()}
    return FlaxOptimTrainState.create(definition, {'params': params, 'params_axes': axes})


def factored(**kwargs: Any) -> Adafactor:
    rules = standard_logical_factor_rules()
    return Adafactor(0.1, min_dim_size_to_factor=4, logical_factor_rules=rules, **kwargs)


def specs_of(partitioner: Any, state: Any) -> dict[str, Any]:
    return named_leaves(partitioner.get_mesh_axes(state).state_dict(), is_leaf=is_spec_leaf)


def sharded_step(partitioner: Any, state: Any, learning_rate: Any = None) -> None:
    """Checks that one step on the mesh is one step on one device, and that its result lies as planned."""
    step = lambda state: state.apply_gradient(state.params, learning_rate=learning_rate)
    specs = partitioner.get_mesh_axes(state)
    plan = layout.Plan(state.state_dict(), specs.state_dict(), partitioner.mesh)
    plan.check()
    found, expected = partitioner.partition(step, (specs,), specs)(state), jax.jit(step)(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found.params, expected.params)
    lies = named_leaves(plan.shardings)
    for path, array in named_leaves(found.state_dict()).items():
        assert array.sharding.is_equivalent_to(lies[path], array.ndim), path


def test_factors_lie_by_the_dims_that_they_keep_where_that_is_asked_for() -> None:
    states = {shard: make_state(factored(shard_factored_slots=shard)) for shard in (False, True)}
    slots = {shard: state.as_logical_axes().param_states for shard, state in states.items()}
    assert {(slot.v_row, slot.v_col) for slot in slots[False].values()} == {(None, None)}
    assert (slots[True]['stacked'].v_row, slots[True]['stacked'].v_col) == (P('layers', 'embed'), P('layers', 'mlp'))
    assert (slots[True]['square'].v_row, slots[True]['square'].v_col) == (P('embed'), P('mlp'))
    assert (slots[True]['scale'].v_row, slots[True]['scale'].v) == (None, P('embed'))
    shapes = {shard: [leaf.shape for leaf in jax.tree.leaves(state)] for shard, state in states.items()}
    assert shapes[True] == shapes[False]
    assert factored() == factored(shard_factored_slots=False) != factored(shard_factored_slots=True)


def test_a_step_with_divided_factors_is_the_same_step() -> None:
    partitioner = partitioning.PjitPartitioner(2, logical_axis_rules=partitioning.standard_logical_axis_rules(1, 2))
    state = make_state(factored(shard_factored_slots=True))
    found = specs_of(partitioner, state)
    assert found['state/param_states/square/v_row'] == P('data')
    assert found['state/param_states/stacked/v_col'] == P(None, 'model')
    sharded_step(partitioner, state, learning_rate=0.1)


def test_a_slot_is_divided_further_along_its_first_free_dim() -> None:
    sizes = {'replica': 2, 'data': 4, 'model': 2}
    for spec, shape, expected in [
        (None, (6, 8), P(None, 'data')),
        (P(None, 'model'), (8, 8), P('data', 'model')),
        (P('model'), (8,), P('model')),
        (P('data'), (8, 8), P('data')),
        (None, (6,), None),
        (None, (), None),
        (None, (0, 0), None),
    ]:
        assert divide_further(spec, shape, ('data',), sizes) == expected
    assert divide_further(None, (8, 16), ('replica', 'data'), sizes) == P(('replica', 'data'), None)
    assert divide_further(P('data'), (8, 6), ('replica', 'data'), sizes) == P('data', 'replica')


ZERO1 = {
    'adamw': optimizers.adamw(0.1),
    'adafactor': factored(beta1=0.9),
    'noisy_sgd': optimizers.noisy_sgd(0.1, key=0),
    'sm3': optimizers.sm3(0.1),
    'masked': OptaxWrapper(optax.masked(optax.adam(0.1), {name: name != 'scale' for name in SHAPES})),
}


@pytest.mark.parametrize('name', ZERO1)
def test_zero1_divides_slots_and_not_parameters_and_changes_no_step(name: str) -> None:
    partitioner = partitioning.PjitPartitioner(2, optimizer_rules='zero1', strict=True)
    state = make_state(ZERO1[name])
    found, plain = specs_of(partitioner, state), specs_of(partitioning.PjitPartitioner(2), state)
    assert {p: s for p, s in found.items() if p.startswith('target/')} == {
        p: s for p, s in plain.items() if p.startswith('target/')
    }
    if name == 'adamw':
        assert found['state/param_states/0/mu/wide'] == P('data', 'model')
        assert found['state/param_states/0/nu/scale'] == P('data')
        assert found['state/param_states/0/count'] is None
    sharded_step(partitioner, state, learning_rate=0.1 if name == 'adafactor' else None)


def test_zero1_leaves_random_keys_whole() -> None:
    state = make_state(OptaxWrapper(optax.GradientTransformation(
        lambda params: {'key': jax.random.PRNGKey(0), 'mu': params}, lambda g, s, p: (g, s)
    )))  # fmt: skip
    partitioner = partitioning.PjitPartitioner(4, optimizer_rules='zero1')
    found = specs_of(partitioner, state)
    assert (found['state/param_states/key'], found['state/param_states/mu/scale']) == (None, P('data'))


def test_zero1_saves_what_the_plan_says() -> None:
    mesh = layout.abstract_mesh(data=8, model=1)
    model = t5_models.make_model(optimizers.adamw(1e-3))
    held, texts = {}, {}
    for rules in (None, 'zero1'):
        partitioner = partitioning.PjitPartitioner(mesh=mesh, optimizer_rules=rules)
        initializer = TrainStateInitializer(**t5_models.initializer_arguments(model), partitioner=partitioner)
        shapes, specs = initializer.global_train_state_shape, initializer.train_state_axes
        held[rules] = layout.Plan(shapes.param_states, specs.param_states, mesh).bytes_per_device
        texts[rules] = describe_train_state(shapes, specs, mesh)
    assert held[None] / held['zero1'] == pytest.approx(8, rel=1e-3)
    assert f'optimizer state {format_bytes(held["zero1"] + 4):>10} per device' in texts['zero1']
    assert 'divided further' in texts['zero1']
    assert 'as their parameter, ' in texts[None]
    assert 'divided further' not in texts[None]


def test_optimizer_rules_that_do_not_exist_or_find_no_data_axis_are_refused() -> None:
    with pytest.raises(RuleError, match=r"'zero2' \(did you mean 'zero1'\?\)"):
        partitioning.PjitPartitioner(1, optimizer_rules='zero2')
    with pytest.raises(RuleError, match="optimizer_rules='zero1': the rules give 'batch' no mesh axis"):
        partitioning.PjitPartitioner(1, logical_axis_rules=[('batch', None)], optimizer_rules='zero1')


def test_a_state_describes_its_slots() -> None:
    text = make_state(optimizers.optax_adafactor(0.1, min_dim_size_to_factor=4, momentum=0.9)).describe()
    head, *lines = text.splitlines()
    assert head == '18 slots: 5 as their parameter, 6 by the dims they keep, 7 replicated (28 B)'
    assert "  0/v_row/stacked  (2, 8)  ('layers', 'embed')  64 B  dims (0, 1) of (2, 8, 12)" in lines
    assert "  0/v_col/square  (8,)  ('mlp',)  32 B  dims (1,) of (8, 8)" in lines
    text = make_state(factored()).describe()
    assert '  square/v_row  (8,)  32 B  has dims (0,) or (1,) of (8, 8)' in text
    assert '  stacked/v_col  (2, 12)  96 B  has dims (0, 2) of (2, 8, 12)' in text
    with pytest.raises(StateError, match='params_axes is None'):
        FlaxOptimTrainState.create(optimizers.sgd(0.1), {'params': {'w': np.ones(2)}}).describe()


def test_an_injected_rate_takes_effect_in_a_sharded_step_and_another_warns_once() -> None:
    partitioner = partitioning.PjitPartitioner(2)
    sharded_step(partitioner, make_state(OptaxWrapper(optax.inject_hyperparams(optax.adamw)(0.1))), 0.5)
    state = make_state(optimizers.muon(0.1))
    with pytest.warns(UserWarning, match='has no effect') as told:
        sharded_step(partitioner, state, learning_rate=0.5)
    assert len(told) == 1


def test_a_transformation_of_the_user_s_own_that_wants_more_is_named() -> None:
    def update(grads: Any, state: Any, params: Any = None, *, temperature: float) -> Any:
        return jax.tree.map(lambda g: -temperature * g, grads), state

    state = make_state(OptaxWrapper(optax.GradientTransformationExtraArgs(lambda params: (), update)))
    with pytest.raises(ConfigError, match='wants temperature besides'):
        state.apply_gradient(state.params, learning_rate=None)
