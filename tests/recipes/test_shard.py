"""The recipe in three lines is the recipe spelled out; and what one may get wrong is told, all of it at once."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict, freeze
from flax.linen import partitioning as flax_partitioning
from flax.linen.partitioning import AxisMetadata
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes import adafactor, layout, optimizers
from t5x_pjit_recipes.errors import ConfigError, PlacementError, PlanError, RuleError, StateError, TrainingError
from t5x_pjit_recipes.layout.axes import AxisNames
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.partitioning import PjitPartitioner
from t5x_pjit_recipes.recipes.param_layouts import plan_params
from t5x_pjit_recipes.recipes.shard import (
    create_train_state,
    make_train_step,
    params_axes_from_specs,
    shard_params,
    state_axes,
)
from t5x_pjit_recipes.train_state import FlaxOptimTrainState

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
BATCH = {'x': RNG.normal(size=(8, 16)).astype(np.float32), 'y': RNG.normal(size=(8, 16)).astype(np.float32)}
# The thread's rules: each mesh axis is a logical name that stands for itself.
MESH_AXES_AS_NAMES = [('batch', 'data'), ('data', 'data'), ('model', 'model')]
RULES = layout.RegexRules([('mlp/wi/kernel', P('data', 'model')), ('.*/wo/kernel', P('model')), ('norm/.*', P())])
SPECS = {'mlp': {'wi': {'kernel': P('data', 'model')}, 'wo': {'kernel': P('model', None)}}, 'norm': {'scale': P(None)}}


def make_params():
    rng = np.random.default_rng(1)
    wi, wo = rng.normal(size=(16, 32)) / 4, rng.normal(size=(32, 16)) / 6
    return jax.tree.map(
        np.float32, {'mlp': {'wi': {'kernel': wi}, 'wo': {'kernel': wo}}, 'norm': {'scale': np.ones(16)}}
    )


def loss_fn(params, batch):
    hidden = nn.relu((batch['x'] * params['norm']['scale'][None]) @ params['mlp']['wi']['kernel'])
    return jnp.mean((hidden @ params['mlp']['wo']['kernel'] - batch['y']) ** 2)


OPTIMIZERS = {
    'adamw': lambda: optimizers.adamw(1e-2),
    'adafactor': lambda: adafactor.Adafactor(1e-2, min_dim_size_to_factor=8),
}
LAYOUTS = {
    'rules': RULES,
    'pairs': list(RULES.rules),
    'specs': SPECS,
    'prefix': {'mlp': {'wi': P('data', 'model'), 'wo': P('model')}, 'norm': None},
    'frozen specs': freeze(SPECS),
}


def spelled_out(optimizer, params, steps):
    """Trains as the forum thread spells it."""
    partitioner = PjitPartitioner(2, logical_axis_rules=MESH_AXES_AS_NAMES)
    params = partitioner.partition(lambda x: x, (SPECS,), SPECS)(params)
    params_axes = jax.tree.map(lambda s: AxisMetadata(names=tuple(s)), SPECS)
    model_variables = type(params)({'params': params, 'params_axes': params_axes})
    state = FlaxOptimTrainState.create(optimizer, model_variables)
    axes = partitioner.get_mesh_axes(state)
    rate = None if isinstance(optimizer, optimizers.OptaxWrapper) else 1e-2

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradient(grads, learning_rate=rate), loss

    step = partitioner.partition(train_step, (axes, P('data')), (axes, None), donate_argnums=(0,))
    losses = []
    for _ in range(steps):
        state, loss = step(state, BATCH)
        losses.append(float(loss))
    return state, losses


def in_three_lines(optimizer, params, rules_or_specs, steps):
    partitioner = PjitPartitioner(2)
    state = create_train_state(partitioner, optimizer, params, rules_or_specs)
    step = make_train_step(partitioner, state, loss_fn)
    losses = []
    for _ in range(steps):
        state, loss = step(state, BATCH)
        losses.append(float(loss))
    return state, losses


@functools.cache
def thread(optimizer, container):
    return spelled_out(OPTIMIZERS[optimizer](), container(make_params()), steps=3)


def assert_same_bits(state, other):
    got, wanted = (named_leaves(s.state_dict()) for s in (state, other))
    assert got.keys() == wanted.keys()
    for name, leaf in got.items():
        np.testing.assert_array_equal(leaf, wanted[name], err_msg=name)
        assert leaf.sharding.is_equivalent_to(wanted[name].sharding, leaf.ndim), name


@pytest.mark.parametrize('container', [dict, freeze], ids=['dict', 'FrozenDict'])
@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('given', ['rules', 'specs'])
def test_three_lines_are_the_recipe_spelled_out(given, optimizer, container):
    expected, expected_losses = thread(optimizer, container)
    state, losses = in_three_lines(OPTIMIZERS[optimizer](), container(make_params()), LAYOUTS[given], steps=3)
    assert losses == expected_losses
    assert losses[-1] < losses[0]
    assert type(state.params) is type(expected.params) is (FrozenDict if container is freeze else dict)
    assert_same_bits(state, expected)


@pytest.mark.parametrize('given', LAYOUTS)
def test_every_spelling_of_a_layout_gives_one_placement(given):
    partitioner = PjitPartitioner(2)
    placed = shard_params(partitioner, make_params(), LAYOUTS[given])
    expected = layout.Plan(make_params(), SPECS, partitioner.mesh)
    layout.check_placement(placed, expected)
    jax.tree.map(np.testing.assert_array_equal, layout.gather(placed), make_params())


LOGICAL = {
    'mlp': {'wi': {'kernel': ('embed', 'mlp')}, 'wo': {'kernel': ('mlp', 'embed')}},
    'norm': {'scale': ('embed',)},
}


@pytest.mark.parametrize(
    'spell', [lambda names: AxisMetadata(names=names), lambda names: AxisNames(*names), lambda names: names]
)
def test_logical_axes_lay_out_params_and_states_by_the_partitioners_rules(spell):
    axes = jax.tree.map(spell, LOGICAL, is_leaf=lambda x: isinstance(x, tuple))
    partitioner = PjitPartitioner(2)
    placed = shard_params(partitioner, make_params(), axes)
    assert placed['mlp']['wi']['kernel'].sharding.spec == P(None, 'model')
    state = create_train_state(partitioner, optax.adamw(1e-2), placed, axes)
    assert state.param_states[0].mu['mlp']['wo']['kernel'].sharding.spec == P('model')
    assert 'embed: rule' in plan_params(partitioner, make_params(), axes).table()


@pytest.mark.parametrize('tree', [[np.ones((8, 4))], (np.ones((8, 4)), np.ones(8)), np.ones((8, 4))])
def test_the_container_that_came_in_goes_out(tree):
    placed = shard_params(PjitPartitioner(2), tree, P('data'))
    assert jax.tree.structure(placed) == jax.tree.structure(tree)
    assert all(leaf.sharding.spec == P('data') for leaf in jax.tree.leaves(placed))


def test_the_partitioners_own_rules_need_not_be_given_again():
    partitioner = PjitPartitioner(2, param_rules=RULES)
    state = create_train_state(partitioner, optimizers.adamw(1e-2), make_params())
    assert_same_bits(state, create_train_state(PjitPartitioner(2), optimizers.adamw(1e-2), make_params(), RULES))
    axes = partitioner.get_mesh_axes(state)
    assert axes.params['mlp']['wi']['kernel'] == P('data', 'model')
    layout.check_placement(shard_params(partitioner, make_params()), layout.Plan(state.params, SPECS, partitioner.mesh))


class Normed(nn.Module):
    """One annotated layer, and a collection of running means."""

    @nn.compact
    def __call__(self, x):
        kernel = flax_partitioning.param_with_axes(
            'kernel', nn.initializers.lecun_normal(), (16, 32), axes=('embed', 'mlp')
        )
        mean = self.variable('batch_stats', 'mean', lambda: jnp.full(16, 3.0))
        return (x - mean.value[None]) @ kernel


def init_normed(rng):
    return Normed().init(rng, BATCH['x'])


def init_plain(rng):
    return init_normed(rng)['params']


@pytest.mark.parametrize(
    ('init', 'given'),
    [
        (init_normed, None),
        (init_plain, [('kernel', P(None, 'model'))]),
        (init_plain, {'kernel': AxisNames(None, 'mlp')}),
    ],
    ids=['own axes', 'rules', 'axes'],
)
def test_an_init_function_makes_what_its_arrays_make(init, given):
    partitioner = PjitPartitioner(2)
    state = create_train_state(partitioner, optimizers.adamw(1e-2), init, given, rng=KEY)
    from_arrays = create_train_state(partitioner, optimizers.adamw(1e-2), init(KEY), given)
    for name, leaf in named_leaves(from_arrays.state_dict()).items():
        np.testing.assert_allclose(named_leaves(state.state_dict())[name], leaf, rtol=1e-6, err_msg=name)
    assert state.params['kernel'].sharding.spec == P(None, 'model')
    assert state.param_states[0].mu['kernel'].sharding.spec == P(None, 'model')


def test_mutables_survive_training():
    partitioner = PjitPartitioner(2)
    state = create_train_state(partitioner, optax.sgd(0.1), init_normed, rng=KEY)
    step = make_train_step(partitioner, state, lambda params, x: jnp.mean((x @ params['kernel']) ** 2))
    for _ in range(2):
        state, _ = step(state, BATCH['x'])
    np.testing.assert_array_equal(state.flax_mutables['batch_stats']['mean'], np.full(16, 3.0))


def test_nothing_is_whole_on_a_device_while_an_init_function_runs():
    partitioner = PjitPartitioner(8)
    before = set(map(id, jax.live_arrays()))
    state = create_train_state(
        partitioner, optimizers.adam(1.0), lambda rng: {'w': jax.random.normal(rng, (64, 64))}, P('model'), rng=KEY
    )
    made = [array for array in jax.live_arrays() if id(array) not in before]
    assert max(shard.data.size for array in made for shard in array.addressable_shards) == 64 * 64 // 8
    assert state.params['w'].shape == (64, 64)


def test_slots_of_zero1_stay_divided_over_data():
    partitioner = PjitPartitioner(2, optimizer_rules='zero1')
    state = create_train_state(partitioner, optimizers.adam(1e-2), make_params(), RULES)
    state, _ = make_train_step(partitioner, state, loss_fn)(state, BATCH)
    assert state.params['mlp']['wo']['kernel'].sharding.spec == P('model')
    assert state.param_states[0].mu['mlp']['wo']['kernel'].sharding.spec == P('model', 'data')


def test_params_that_lie_right_are_shared_and_others_stay_the_callers():
    partitioner, params = PjitPartitioner(2), make_params()
    placed = shard_params(partitioner, params, SPECS)
    elsewhere = jax.device_put(params)
    for given in (placed, elsewhere, params):
        state = create_train_state(partitioner, optax.sgd(1e-2), given, SPECS)
        make_train_step(partitioner, state, loss_fn)(state, BATCH)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(placed))
    jax.tree.map(np.testing.assert_array_equal, elsewhere, make_params())
    jax.tree.map(np.testing.assert_array_equal, params, make_params())
    with pytest.raises(PlacementError, match="'mlp/wi/kernel' was donated"):
        create_train_state(partitioner, optax.sgd(1e-2), placed, SPECS)


def test_a_step_is_traced_once():
    traces = []

    def counted(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    partitioner = PjitPartitioner(2)
    state = create_train_state(partitioner, optax.sgd(1e-2), make_params(), RULES)
    step = make_train_step(partitioner, state, counted)
    for _ in range(4):
        state, _ = step(state, BATCH)
    assert len(traces) == 1
    step(state, BATCH)
    with pytest.raises(PlacementError, match="'state/_optimizer/state/step' was donated"):
        step(state, BATCH)


def test_a_step_takes_aux_and_a_key_that_differs_from_step_to_step():
    def noisy(params, batch, rng):
        noise = jax.random.uniform(rng)
        return loss_fn(params, batch) + 0 * noise, {'noise': noise}

    partitioner = PjitPartitioner(2)
    state = create_train_state(partitioner, optax.sgd(1e-2), make_params(), RULES)
    step = make_train_step(partitioner, state, noisy)
    seen = []
    for _ in range(3):
        state, (loss, aux) = step(state, BATCH, KEY)
        assert loss.shape == ()
        seen.append(float(aux['noise']))
    assert seen == [float(jax.random.uniform(jax.random.fold_in(KEY, i))) for i in range(3)]


@pytest.mark.parametrize('rate', [0.25, lambda step: 0.25 / (1 + step)], ids=['number', 'schedule'])
def test_a_learning_rate_can_be_given_to_the_step(rate):
    partitioner = PjitPartitioner(2)
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0)
    state = create_train_state(partitioner, optimizer, {'w': np.ones((8, 2), np.float32)}, P('data'))
    step = make_train_step(partitioner, state, lambda params, x: jnp.sum(params['w'] * x), learning_rate=rate)
    expected = np.ones((8, 2), np.float32)
    for number in range(2):
        state, _ = step(state, np.ones((8, 2), np.float32))
        expected = expected - np.float32(rate(number) if callable(rate) else rate)
    np.testing.assert_array_equal(state.params['w'], expected)


def test_a_state_made_by_hand_is_laid_out_by_the_partitioners_rules():
    partitioner = PjitPartitioner(2, logical_axis_rules=MESH_AXES_AS_NAMES)
    variables = {'params': make_params(), 'params_axes': params_axes_from_specs(SPECS)}
    state = FlaxOptimTrainState.create(optimizers.adamw(1e-2), variables)
    step = make_train_step(partitioner, state, loss_fn)
    for _ in range(3):
        state, _ = step(state, BATCH)
    assert_same_bits(state, thread('adamw', dict)[0])


def test_axes_from_specs_have_a_name_for_each_dim():
    short = {'mlp': {'wi': P('data', 'model'), 'wo': P('model')}, 'norm': None}
    by_shape = params_axes_from_specs(short, make_params())
    assert by_shape == params_axes_from_specs(SPECS)
    assert by_shape['mlp']['wo']['kernel'].names == ('model', None)
    shapes = jax.eval_shape(lambda: make_params())
    assert params_axes_from_specs(P('model'), shapes)['norm']['scale'].names == ('model',)


# What a hostile user might give, and what they are told.
MISTAKES = {
    'specs of another structure': (
        {'mlp': {'wi': P('data', 'model'), 'wu': P('model')}},
        PlanError,
        r'(?s)mlp/wo/kernel: no spec.*norm/scale: no spec.*mlp/wu: a spec without an array',
    ),
    'rules that match nothing, arrays that none matches': (
        [('wi/kernel', P('model')), ('.*/wo/kernel', P('model'))],
        RuleError,
        r"(?s)mlp/wi/kernel \(16, 32\): no rule.*norm/scale.*rule 1 'wi/kernel' matches no whole name, but a part",
    ),
    'dims that do not divide, axes that do not exist, too many dims': (
        {'mlp': {'wi': P(None, 'modle'), 'wo': P(('data', 'model'), 'model')}, 'norm': P('data', None, 'model')},
        PlanError,
        r"(?s)Cannot shard 3 of 3.*'modle' \(did you mean 'model'\?\).*'model' splits two dims.*3 entries for 1 dims",
    ),
    'a mesh axis as a logical name': (
        {'mlp': {'wi': {'kernel': ('embed', 'model')}, 'wo': {'kernel': ('mpl', None)}}, 'norm': {'scale': ('embed',)}},
        RuleError,
        r"(?s)mlp/wi/kernel: 'model' \(a mesh axis; .*mlp/wo/kernel: 'mpl' \(did you mean 'mlp'",
    ),
    'too few names': (
        {'mlp': {'wi': {'kernel': ('embed',)}, 'wo': {'kernel': ('mlp', 'embed')}}},
        StateError,
        r"(?s)mlp/wi/kernel \(16, 32\): 1 axes \('embed',\) for 2 dims.*norm/scale \(16,\): no axes",
    ),
    'names and specs in one tree': (
        {'mlp': {'wi': {'kernel': AxisNames('embed', 'mlp')}, 'wo': P('model')}, 'norm': P()},
        PlanError,
        r'(?s)1 leaves name logical axes and 2 are specs.*mlp/wi/kernel: logical.*mlp/wo: mesh.*norm: mesh',
    ),
    'text': ('model', PlanError, r"'model' is a str; write PartitionSpec"),
    'nothing': (None, RuleError, r'Cannot lay out 3 arrays: no rules or specs were given'),
}


@pytest.mark.parametrize('call', ['shard_params', 'create_train_state'])
@pytest.mark.parametrize('mistake', MISTAKES)
def test_a_layout_that_cannot_be_is_refused(mistake, call):
    given, error, message = MISTAKES[mistake]
    partitioner = PjitPartitioner(2)
    with pytest.raises(error, match=message) as caught:
        if call == 'shard_params':
            shard_params(partitioner, make_params(), given)
        else:
            create_train_state(partitioner, optimizers.adamw(1e-2), make_params(), given)
    assert 'param_states' not in str(caught.value)


def test_shapes_in_place_of_arrays_are_refused():
    shapes = jax.eval_shape(make_params)
    shapes['norm'] = make_params()['norm']
    said = r'(?s)Cannot place 2 of 3 arrays.*mlp/wi/kernel \(16, 32\): a ShapeDtypeStruct.*mlp/wo/kernel'
    with pytest.raises(PlacementError, match=said):
        shard_params(PjitPartitioner(2), shapes, RULES)
    with pytest.raises(PlacementError, match=said):
        create_train_state(PjitPartitioner(2), optimizers.adamw(1e-2), shapes, RULES)


def test_what_is_no_array_is_refused():
    params = {**make_params(), 'act': jnp.tanh, 'name': 'mlp'}
    said = r'(?s)Cannot place 2 of 5 leaves: they are neither arrays nor numbers.*act: a .*name: a str'
    with pytest.raises(PlacementError, match=said):
        shard_params(PjitPartitioner(2), params, P())
    with pytest.raises(PlacementError, match=said):
        create_train_state(PjitPartitioner(2), optimizers.adamw(1e-2), params, P())


@jax.tree_util.register_pytree_with_keys_class
class Holder:
    """A container that JAX knows and Flax does not, as the modules of other libraries are."""

    def __init__(self, weights):
        self.weights = weights

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey('weights'), self.weights)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_containers_that_flax_does_not_know_can_be_sharded_and_make_no_state():
    params, partitioner = {'mlp': Holder({'w': np.ones((4, 8), np.float32)})}, PjitPartitioner(2)
    rules = [('mlp/weights/w', P(None, 'model'))]
    assert shard_params(partitioner, params, rules)['mlp'].weights['w'].sharding.spec == P(None, 'model')
    with pytest.raises(StateError, match=r'(?s)state of 1 parameters: Flax knows no state dict.*Holder: 1 arrays'):
        create_train_state(partitioner, optimizers.adamw(1e-2), params, rules)


@pytest.mark.parametrize(
    ('init', 'rng', 'said'),
    [
        (nn.Dense(4), KEY, 'parameters by Dense, a Flax module: its inputs are not known. Give a function of a key'),
        (make_params, None, 'parameters by make_params without a key. Give rng=jax.random.key'),
        (make_params, 0, r'random numbers by int of shape \(\): that is no key. Give rng=jax.random.key'),
    ],
)
def test_a_function_without_what_it_needs_is_refused(init, rng, said):
    with pytest.raises(ConfigError, match=said):
        create_train_state(PjitPartitioner(2), optimizers.adamw(1e-2), init, P(), rng=rng)


def test_parameters_without_gradients_are_refused():
    params = {**make_params(), 'ids': np.arange(4), 'mask': np.ones(4, bool)}
    partitioner = PjitPartitioner(2)
    state = create_train_state(partitioner, optimizers.sgd(1e-2), params, [*RULES.rules, ('ids|mask', P())])
    with pytest.raises(
        TrainingError, match=r'(?s)gradients by 2 of 5 parameters.*ids \(4,\): int32.*mask \(4,\): bool'
    ):
        make_train_step(partitioner, state, loss_fn)


def test_an_accumulating_optimizer_of_optax_is_one():
    accumulating = optax.MultiSteps(optax.sgd(1e-2), 2)
    state = create_train_state(PjitPartitioner(2), accumulating, make_params(), RULES)
    assert state.param_states.acc_grads['mlp']['wi']['kernel'].sharding.spec == P('data', 'model')


@pytest.mark.parametrize(
    ('optimizer', 'said'),
    [
        (optimizers.adamw, 'adamw, a function: it is no optimizer. Call it with its arguments'),
        (adafactor.Adafactor, 'Adafactor, a type: it is no optimizer. Call it with its arguments'),
        ('adamw', "'adamw', a str: it is no optimizer. Give one"),
        (None, 'None, a NoneType: it is no optimizer. Give one'),
    ],
)
def test_what_is_no_optimizer_is_refused(optimizer, said):
    with pytest.raises(ConfigError, match=said):
        create_train_state(PjitPartitioner(2), optimizer, make_params(), RULES)


@pytest.mark.parametrize('given', [SPECS, list(RULES.rules), LOGICAL], ids=['specs', 'rules', 'axes'])
def test_two_sets_of_rules_are_refused(given):
    partitioner = PjitPartitioner(2, param_rules=RULES)
    with pytest.raises(RuleError, match='3 param_rules, and .* besides'):
        shard_params(partitioner, make_params(), given)
    with pytest.raises(RuleError, match='3 param_rules, and .* besides'):
        create_train_state(partitioner, optimizers.adamw(1e-2), make_params(), given)


def test_two_sets_of_axes_and_a_missing_key_are_refused():
    partitioner, optimizer = PjitPartitioner(2), optimizers.adamw(1e-2)
    with pytest.raises(StateError, match="1 parameters by two trees of axis names: .*'params_axes'"):
        create_train_state(partitioner, optimizer, init_normed, {'kernel': AxisNames('embed', 'mlp')}, rng=KEY)
    with pytest.raises(RuleError, match=r"(?s)1 of 1 parameters: their own axis names and.*'embed', 'mlp'"):
        create_train_state(partitioner, optimizer, init_normed, [('kernel', P('model'))], rng=KEY)
    with pytest.raises(ConfigError, match='without a key. Give rng='):
        create_train_state(partitioner, optimizer, init_plain, P())


@functools.cache
def whole_state():
    """For steps that end in an error, before anything is donated."""
    return create_train_state(PjitPartitioner(2), optimizers.sgd(1e-2), make_params(), RULES)


def test_a_batch_that_does_not_divide_is_refused():
    step = make_train_step(PjitPartitioner(2), whole_state(), loss_fn)
    with pytest.raises(PlanError, match=r'(?s)batch/x \(6, 16\): dim 0 is 6, which .* splits 4 ways; 8.*batch/y'):
        step(whole_state(), jax.tree.map(lambda x: x[:6], BATCH))
    assert not whole_state().params['norm']['scale'].is_deleted()


def test_a_batch_without_rows_and_a_number_for_a_key_are_refused():
    step = make_train_step(PjitPartitioner(2), whole_state(), loss_fn)
    with pytest.raises(TrainingError, match=r'(?s)a batch without rows.*x \(0, 16\)\n  y \(0, 16\)'):
        step(whole_state(), jax.tree.map(lambda x: x[:0], BATCH))
    with pytest.raises(ConfigError, match=r'random numbers by int32 of shape \(\): that is no key'):
        step(whole_state(), BATCH, 0)
    assert not whole_state().params['norm']['scale'].is_deleted()


@pytest.mark.parametrize(
    ('loss', 'said'),
    [
        (lambda params, batch: batch['x'].mean(axis=1), r'float32 of shape \(8,\)'),
        (lambda params, batch: (loss_fn(params, batch), 1, 2), 'a tuple'),
        (lambda params, batch: {'loss': loss_fn(params, batch)}, 'a dict'),
        (lambda params, batch: jnp.int32(3), r'int32 of shape \(\)'),
        (lambda params, batch: None, 'a NoneType'),
    ],
)
def test_a_loss_that_is_no_number_is_refused(loss, said):
    step = make_train_step(PjitPartitioner(2), whole_state(), loss)
    with pytest.raises(TrainingError, match=f'a loss that is {said}: it must be one real number'):
        step(whole_state(), BATCH)


def test_a_missing_learning_rate_is_refused_and_an_idle_one_is_told_of():
    partitioner = PjitPartitioner(2)
    state = create_train_state(partitioner, adafactor.Adafactor(), make_params(), RULES)
    with pytest.raises(ConfigError, match='learning_rate=None'):
        make_train_step(partitioner, state, loss_fn)(state, BATCH)
    step = make_train_step(partitioner, whole_state(), loss_fn, learning_rate=0.5)
    with pytest.warns(UserWarning, match='learning_rate passed to apply_gradient has no effect'):
        step.eval_shape(whole_state(), BATCH)


def test_a_state_of_which_nothing_tells_the_layout_is_refused():
    state = FlaxOptimTrainState.create(optimizers.sgd(0.1), {'params': make_params()})
    with pytest.raises(StateError, match=r'(?s)4 of its 4 arrays are not on the.*target/mlp/wi/kernel'):
        make_train_step(PjitPartitioner(2), state, loss_fn)
    other = create_train_state(PjitPartitioner(4), optimizers.sgd(0.1), make_params(), RULES)
    with pytest.raises(StateError, match='4 of its 4 arrays'):
        state_axes(PjitPartitioner(2), other)


def test_specs_over_several_mesh_axes_have_no_names_and_need_none():
    specs = {'wi': P(('data', 'model')), 'wo': P(None, ('model', 'data')), 'scale': P('data')}
    with pytest.raises(RuleError, match=r"(?s)2 of 3 specs.*wi: dim 0 by \('data', 'model'\).*wo: dim 1"):
        params_axes_from_specs(specs)
    params = {'wi': np.ones((8, 4)), 'wo': np.ones((4, 8)), 'scale': np.ones(8)}
    partitioner = PjitPartitioner(2)
    state = create_train_state(partitioner, optimizers.adam(0.1), params, specs)
    nu = state.param_states[0].nu
    for name, spec in specs.items():
        assert nu[name].sharding.is_equivalent_to(NamedSharding(partitioner.mesh, spec), nu[name].ndim)
