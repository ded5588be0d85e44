import warnings

import jax
import numpy as np
import optax
import pytest
from flax.linen.partitioning import AxisMetadata
from flax.traverse_util import ModelParamTraversal
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes import adafactor, layout, optimizers
from t5x_pjit_recipes.errors import PlanError, RuleError, StateError
from t5x_pjit_recipes.layout.axes import canonical, is_spec_leaf
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.partitioning import PjitPartitioner
from t5x_pjit_recipes.train_state import FlaxOptimTrainState, InferenceState

PARAMS = {
    'mlp': {'wi': np.ones((8, 16), np.float32), 'wo': np.ones((16, 8), np.float32), 'bias': np.ones(8, np.float32)},
    'temperature': np.ones((), np.float32),
}
NAMES = {'wi': ('embed', 'mlp'), 'wo': ('mlp', 'embed'), 'bias': ('embed',)}
AXES = {
    'mlp': {name: AxisMetadata(names=names) for name, names in NAMES.items()},
    'temperature': AxisMetadata(names=()),
}
RULES = [('.*/wi', P(None, 'model')), ('.*/wo', ('mlp', 'embed')), ('.*/bias', None)]


def create(optimizer_def, axes=None):
    variables = {'params': PARAMS} | ({} if axes is None else {'params_axes': axes})
    if optimizer_def is None:
        return InferenceState.create(variables)
    return FlaxOptimTrainState.create(optimizer_def, variables)


def specs_of(state, partitioner):
    specs = named_leaves(partitioner.get_mesh_axes(state).state_dict(), is_leaf=is_spec_leaf)
    return {name: canonical(spec) for name, spec in specs.items()}


def several():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)  # flax speaks of the optimizers that it no longer has
        ends, others = (
            ModelParamTraversal(lambda path, _, is_wi=b: path.endswith('wi') == is_wi) for b in (True, False)
        )
    return optimizers.MultiOptimizer([(ends, optimizers.adam(1e-3)), (others, optimizers.sgd(1e-2))])


OPTIMIZERS = {
    'adamw': lambda: optimizers.adamw(1e-3),
    'sgd': lambda: optimizers.sgd(1e-2, momentum=0.9),
    'adafactor': lambda: adafactor.Adafactor(decay_rate=0.8, beta1=0.9, factored=False),
    'several': several,
    'inference': lambda: None,
}


@pytest.mark.parametrize('make', OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_rules_lay_a_state_out_as_axes_do(make):
    """Rules that say what the axes say give the same state: parameters, slots and counters."""
    by_axes = specs_of(create(make(), AXES), PjitPartitioner(2))
    assert specs_of(create(make()), PjitPartitioner(2, param_rules=RULES)) == by_axes
    assert by_axes['target/mlp/wi'] == P(None, 'model')


@pytest.mark.parametrize(
    'rules',
    [
        layout.RegexRules(RULES),
        layout.RegexRules([('wi$', P(None, 'model')), ('wo', P('model')), ('.', P())], dialect='search'),
        layout.RegexRules.from_windows([(('mlp', 'wi'), P(None, 'model')), (('wo',), P('model')), (('bias',), None)]),
    ],
)
def test_rules_come_in_any_dialect(rules):
    state = create(optimizers.adam(1e-3))
    partitioner = PjitPartitioner(2, param_rules=rules)
    assert specs_of(state, partitioner) == specs_of(state, PjitPartitioner(2, param_rules=RULES))


def test_logical_axes_are_those_that_rules_name():
    logical = PjitPartitioner(2, param_rules=RULES).get_logical_axes(create(optimizers.adam(1e-3))).state_dict()
    assert logical['target']['mlp'] == {'wi': None, 'wo': P('mlp', 'embed'), 'bias': None}
    assert logical['state']['param_states']['0']['mu']['mlp']['wo'] == P('mlp', 'embed')


def test_a_state_without_axes_trains_laid_out_by_rules():
    partitioner = PjitPartitioner(2, param_rules=RULES)
    state = create(optimizers.adam(1e-3))
    axes = partitioner.get_mesh_axes(state)
    step = partitioner.partition(
        lambda s, x: s.apply_gradient(jax.grad(lambda p: (x @ p['mlp']['wi']).sum())(s.params), learning_rate=None),
        (axes, P('data')),
        axes,
    )
    state = step(state, np.ones((8, 8), np.float32))
    plan = layout.Plan(state.state_dict(), axes.state_dict(), partitioner.mesh)
    layout.check_placement(state.state_dict(), plan)
    assert canonical(state.param_states[0].mu['mlp']['wi'].sharding.spec) == P(None, 'model')


def test_rules_fill_the_gaps_of_axes():
    axes = {'mlp': {**AXES['mlp'], 'wo': None, 'bias': None}, 'temperature': None}
    state = create(optimizers.adam(1e-3), axes)
    partitioner = PjitPartitioner(2, param_rules=RULES[1:])
    assert specs_of(state, partitioner) == specs_of(create(optimizers.adam(1e-3), AXES), PjitPartitioner(2))
    with pytest.raises(RuleError, match=r'no rule matches 1[^\n]*\n  mlp/bias \(8,\): no rule'):
        specs_of(state, PjitPartitioner(2, param_rules=RULES[1:2]))


def test_rules_that_agree_with_axes_are_no_contradiction():
    state = create(optimizers.adam(1e-3), AXES)
    assert specs_of(state, PjitPartitioner(2, param_rules=RULES)) == specs_of(state, PjitPartitioner(2))


def test_contradictions_are_told_with_both_sides():
    rules = [('.*/wi', P('model', None)), ('.*/wo', ('embed', 'mlp')), ('.*', P())]
    with pytest.raises(RuleError) as caught:
        specs_of(create(optimizers.adam(1e-3), AXES), PjitPartitioner(2, param_rules=rules))
    message = str(caught.value)
    assert 'Cannot lay out 2 of 4 parameters' in message
    assert (
        "\n  mlp/wi (8, 16): the model says ('embed', 'mlp'), which is (None, 'model'); "
        "rule 1 '.*/wi' says ('model', None), which is ('model', None)"
    ) in message
    assert (
        "\n  mlp/wo (16, 8): the model says ('mlp', 'embed'), which is ('model', None); "
        "rule 2 '.*/wo' says ('embed', 'mlp'), which is (None, 'model')"
    ) in message


def test_rules_that_match_nothing_or_leave_parameters_out_are_told():
    with pytest.raises(RuleError, match=r"(?s)no rule matches 2, 1 rules match nothing.*mlp/bias.*rule 2 'gone'"):
        specs_of(create(None), PjitPartitioner(2, param_rules=[('.*/wi', P()), ('gone', P())]))


def test_mesh_axes_that_do_not_exist_are_told_before_anything_is_laid_out():
    partitioner = PjitPartitioner(2, param_rules=[('.*', P(None, ('data', 'modle')))])
    with pytest.raises(RuleError, match=r"rule 1 '\.\*': no mesh axis 'modle' \(did you mean 'model'\?\)"):
        partitioner.mesh  # noqa: B018


def test_a_plain_tuple_names_logical_axes_which_need_a_rule():
    state, rules = create(None), [('.*/wi', ('data', None)), ('.*', P())]
    with pytest.warns(UserWarning, match=r"mlp/wi: 'data' \(a mesh axis; PartitionSpec\('data', ...\) names those\)"):
        specs_of(state, PjitPartitioner(2, param_rules=rules))
    with pytest.raises(RuleError, match="mlp/wi: 'data'"):
        specs_of(state, PjitPartitioner(2, param_rules=rules, strict=True))


def test_specs_longer_than_the_rank_are_faults_of_the_plan():
    state, partitioner = create(None), PjitPartitioner(2, param_rules=[('.*', P(None, 'model'))])
    with pytest.raises(PlanError, match=r'mlp/bias \(8,\): spec .* has 2 entries for 1 dims'):
        layout.Plan(PARAMS, partitioner.get_mesh_axes(state).params, partitioner.mesh).check()


def test_without_rules_a_state_without_axes_is_refused_with_the_remedies():
    with pytest.raises(StateError, match='params_axes is None.*override_params_axes_names.*param_rules'):
        PjitPartitioner(2).get_mesh_axes(create(None))


def test_states_of_other_kinds_are_refused():
    class State:
        params = PARAMS

    with pytest.raises(StateError, match='Cannot lay out a State by param_rules: it lacks the field params_axes'):
        PjitPartitioner(2, param_rules=RULES).get_mesh_axes(State())


def test_the_rules_behind_a_layout_explain_it():
    partitioner = PjitPartitioner(2, param_rules=RULES)
    state = create(None, {'mlp': {**AXES['mlp'], 'wo': None, 'bias': None}, 'temperature': None})
    plan = layout.Plan(
        PARAMS, partitioner.get_mesh_axes(state).params, partitioner.mesh, rules=partitioner.get_derivation(state)
    )
    assert {row.name: row.rule for row in plan.rows} == {
        'mlp/bias': "rule 3 '.*/bias'",
        'mlp/wi': 'embed: rule 3, mlp: rule 4',
        'mlp/wo': "rule 2 '.*/wo' mlp: rule 4, embed: rule 3",
        'temperature': 'a scalar',
    }
    assert "logical axes of its own: ('embed', 'mlp')" in str(layout.explain('mlp/wi', plan))
    by_axes = PjitPartitioner(2).get_derivation(create(None, AXES))
    assert by_axes.reasons(PARAMS)['mlp/wo'] == 'mlp: rule 4, embed: rule 3'


def test_factored_slots_keep_the_dims_that_they_keep():
    params = {'wi': np.ones((8, 16), np.float32), 'wo': np.ones((16, 8), np.float32), 'scale': np.ones(3, np.float32)}
    rules = layout.RegexRules([('wi', P('data', 'model')), ('wo', P('model')), ('scale', P())])
    optimizer = optimizers.OptaxWrapper(optax.adafactor(1e-3, min_dim_size_to_factor=4))
    state = FlaxOptimTrainState.create(optimizer, {'params': params})
    axes = PjitPartitioner(2, param_rules=rules, strict=True).get_mesh_axes(state)
    slots = axes.state_dict()['state']['param_states']['0']
    arrays = state.state_dict()['state']['param_states']['0']
    by_size = {8: {'wi': P('data'), 'wo': P(None)}, 16: {'wi': P('model'), 'wo': P('model')}}
    for factor in ('v_row', 'v_col'):
        for name in ('wi', 'wo'):
            (size,) = arrays[factor][name].shape
            assert slots[factor][name] == by_size[size][name], (factor, name)
