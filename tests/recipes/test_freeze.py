"""Training a part: frozen bits stay, no slots for them, and the plan says what it saves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.partitioning import AxisMetadata

from t5x_pjit_recipes import adafactor, optimizers, partitioning, reports, train_steps
from t5x_pjit_recipes.checkpoints import CheckpointConfig, RestoreCheckpointConfig, SaveCheckpointConfig
from t5x_pjit_recipes.errors import ConfigError, RuleError
from t5x_pjit_recipes.initialization import TrainStateInitializer, train_state_shape
from t5x_pjit_recipes.layout.meshes import abstract_mesh
from t5x_pjit_recipes.layout.paths import map_named, named_leaves
from t5x_pjit_recipes.recipes import freeze
from t5x_pjit_recipes.train_state import FlaxOptimTrainState
from tests import t5_models, toy_runs

HELD = ['encoder/.*', 'norm/scale']
NAMES = {
    'encoder/wi': ('embed', 'mlp'),
    'encoder/wo': ('mlp', 'embed'),
    'norm/scale': ('embed',),
    'head/w': ('embed', 'vocab'),
}


def make_variables(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    sizes = {'embed': 8, 'mlp': 16, 'vocab': 4}
    params, axes = {}, {}
    for name, names in NAMES.items():
        above, leaf = name.split('/')
        array = rng.normal(size=[sizes[axis] for axis in names])
        array.flat[:4] = [-0.0, np.inf, np.nan, 1e30]  # What sums and products with zeros do not leave alone.
        params.setdefault(above, {})[leaf] = jnp.asarray(array, dtype)
        axes.setdefault(above, {})[f'{leaf}_axes'] = AxisMetadata(names=names)
    params['head'] = {'w': jnp.asarray(rng.normal(size=(8, 4)), dtype)}
    return {'params': params, 'params_axes': axes}


def gradients(params, step):
    def gradient(name, leaf):
        return jnp.asarray(np.random.default_rng([step, *name.encode()]).normal(size=leaf.shape), leaf.dtype)

    return map_named(gradient, params)


def trained(optimizer_def, variables, steps=3):
    state = FlaxOptimTrainState.create(optimizer_def, variables)
    rate = 0.1 if state._optimizer.optimizer_def.uses_learning_rate(state._optimizer.state) else None
    update = jax.jit(lambda state, grads: state.apply_gradient(grads, rate))
    for step in range(steps):
        state = update(state, gradients(state.params, step))
    return state


def bits(tree):
    return {name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(tree).items()}


OPTIMIZERS = {
    'adafactor': lambda: adafactor.Adafactor(min_dim_size_to_factor=4, weight_decay_rate=0.1, beta1=0.9),
    'adafactor with axes': lambda: t5_models.make_adafactor(global_norm_clip_threshold=1.0),
    'adamw': lambda: optimizers.OptaxWrapper(optax.adamw(0.1, weight_decay=0.1)),
    'clipped': lambda: optimizers.OptaxWrapper(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))),
}


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_frozen_parameters_keep_their_bits_and_have_no_slots(name, dtype):
    variables = make_variables(dtype)
    state = trained(freeze.freeze(OPTIMIZERS[name](), HELD), variables)
    before, after = bits(variables['params']), bits(state.params)
    assert {name for name in before if before[name] != after[name]} == {'head/w'}
    assert np.isfinite(state.params['head']['w']).all()
    slots = [name for name in named_leaves(state.param_states) if 'encoder' in name or 'norm' in name]
    assert slots == []
    assert any('head/w' in name for name in named_leaves(state.param_states))


@pytest.mark.parametrize('name', ['adafactor', 'adafactor with axes', 'adamw'])
def test_the_part_is_trained_as_if_it_were_alone(name):
    variables = make_variables()
    state = trained(freeze.freeze(OPTIMIZERS[name](), HELD), variables)
    alone = {key: {'head': tree['head']} for key, tree in variables.items()}
    expected = trained(OPTIMIZERS[name](), alone)
    np.testing.assert_allclose(state.params['head']['w'], expected.params['head']['w'], rtol=1e-6)


def test_freeze_and_train_only_are_two_spellings_of_one_thing():
    a = trained(freeze.freeze(OPTIMIZERS['adafactor'](), HELD), make_variables())
    b = trained(freeze.train_only(OPTIMIZERS['adafactor'](), ['head/.*']), make_variables())
    assert bits(a.params) == bits(b.params)
    assert bits(a.param_states) == bits(b.param_states)


@pytest.mark.parametrize(
    'spell', [lambda tx: freeze.optax_freeze(tx, HELD), lambda tx: freeze.optax_train_only(tx, ['head/.*'])]
)
def test_the_optax_spelling_trains_to_the_same_bits(spell):
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.1))
    variables = make_variables()
    ours = FlaxOptimTrainState.create(freeze.freeze(optimizers.OptaxWrapper(transformation), HELD), variables)
    params, theirs = variables['params'], spell(transformation)
    opt_state = theirs.init(params)
    for step in range(3):
        grads = gradients(variables['params'], step)
        ours = ours.apply_gradient(grads, None)
        updates, opt_state = theirs.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    finite = {name: array for name, array in named_leaves(params).items() if name == 'head/w'}
    np.testing.assert_array_equal(finite['head/w'], ours.params['head']['w'])
    frozen = {name: value for name, value in bits(params).items() if name != 'head/w'}
    assert frozen.items() <= bits(variables['params']).items()
    assert [name for name in named_leaves(opt_state) if 'encoder' in name or 'norm' in name] == []


def test_an_optax_spelling_is_laid_out_without_slots_of_the_frozen():
    definition = optimizers.OptaxWrapper(freeze.optax_freeze(optax.adam(0.1), HELD))
    state = FlaxOptimTrainState.create(definition, make_variables())
    specs = partitioning.PjitPartitioner(2).get_mesh_axes(state)
    laid_out = {name: tuple(spec) for name, spec in named_leaves(specs.param_states).items() if 'mu' in name}
    assert list(laid_out.values()) == [(None, 'model')]


@pytest.mark.parametrize(
    ('verb', 'patterns', 'says'),
    [
        ('freeze', ['encoder/.*', 'encodr/wi', 'wo'],
         r'Cannot freeze parameters by 3 patterns: 2 of them match none of 4 parameters.*\n'
         r"  pattern 2 'encodr/wi'; the nearest: encoder/wi\n"
         r"  pattern 3 'wo' matches no whole name, but a part of encoder/wo"),
        ('train_only', ['haed/.*'],
         "Cannot train parameters by 1 patterns.*\n  pattern 1 'haed/.*'; the nearest: head/w"),
        ('freeze', ['.*'], re.escape("Cannot freeze by patterns ['.*']: none of 4 parameters would be trained")),
        ('train_only', ['.*'],
         re.escape("Cannot train by patterns ['.*']: all of 4 parameters would be trained. Use the")),
        ('freeze', [], re.escape('Cannot freeze by patterns []: all of 4 parameters would be trained')),
        ('train_only', [], re.escape('Cannot train by patterns []: none of 4 parameters would be trained')),
    ],
)  # fmt: skip
def test_patterns_that_cannot_be_meant_are_errors_as_soon_as_the_parameters_are_known(verb, patterns, says):
    definition = getattr(freeze, verb)(adafactor.Adafactor(), patterns)
    with pytest.raises(ConfigError, match=says):
        FlaxOptimTrainState.create(definition, make_variables())
    with pytest.raises(ConfigError, match=says):
        getattr(freeze, f'optax_{verb}')(optax.adam(0.1), patterns).init(make_variables()['params'])


def test_the_nearest_name_is_told_by_its_end_where_a_pattern_leaves_its_beginning_open():
    names = ['decoder/mlp/wo/kernel', 'decoder/layers_0/self_attention/query/kernel']
    with pytest.raises(ConfigError, match=re.escape(f"pattern 1 '.*/qery/kernel'; the nearest: {names[1]}")):
        freeze.match_names(('.*/qery/kernel',), names, 'freeze parameters')


def test_patterns_that_are_none_are_errors_at_once():
    with pytest.raises(
        ConfigError, match=re.escape("by patterns='encoder/.*': that is a text, no list. Write ['encoder/.*']")
    ):
        freeze.freeze(adafactor.Adafactor(), 'encoder/.*')
    with pytest.raises(RuleError, match=re.escape("rule 2, ('(wi', None): '(wi' is no regular expression")):
        freeze.freeze(adafactor.Adafactor(), ['encoder/.*', '(wi'])


@pytest.mark.parametrize('keys', [('a/b', 'c'), (0, 1)], ids=['with slashes', 'numbers'])
def test_keys_may_be_any(keys):
    params = {key: {'w': jnp.ones((4, 4))} for key in keys}
    state = trained(freeze.freeze(adafactor.Adafactor(), [f'{keys[0]}/w']), {'params': params})
    assert np.array_equal(state.params[keys[0]]['w'], params[keys[0]]['w'])
    assert not np.array_equal(state.params[keys[1]]['w'], params[keys[1]]['w'])
    assert all(name.startswith(f'{keys[1]}/w/') for name in named_leaves(state.param_states))


def test_what_is_to_be_trained_and_not_in_dicts_is_an_error_where_optax_trains_it():
    params = {'layers': [{'w': jnp.ones((2, 2))}, {'w': jnp.ones((2, 2))}], 'head': jnp.ones(2)}
    with pytest.raises(ConfigError, match=r"(?s)'layers/0/w'\]: 1 of 2 .* in lists.*optax_freeze:\n  layers/1/w"):
        FlaxOptimTrainState.create(freeze.freeze(optimizers.sgd(0.1), ['layers/0/w']), {'params': params})
    with pytest.raises(ConfigError, match='1 of 1 parameters to be trained .*optax_train_only:\n  1'):
        FlaxOptimTrainState.create(freeze.train_only(optimizers.sgd(0.1), ['1']), {'params': [params['head']] * 2})
    state = trained(optimizers.OptaxWrapper(freeze.optax_freeze(optax.sgd(0.1), ['layers/0/w'])), {'params': params})
    changed = {n for n, x in named_leaves(state.params).items() if not np.array_equal(x, named_leaves(params)[n])}
    assert changed == {'layers/1/w', 'head'}


@pytest.mark.parametrize('make', [lambda: adafactor.Adafactor(), lambda: optimizers.adamw(0.1)])
def test_freezing_twice_freezes_both(make):
    twice = freeze.freeze(freeze.freeze(make(), ['encoder/wi']), ['encoder/wo', 'norm/scale'])
    once = freeze.freeze(make(), HELD)
    assert bits(trained(twice, make_variables()).params) == bits(trained(once, make_variables()).params)


def test_optimizers_of_either_kind_are_taken_or_refused_by_name():
    variables = make_variables()
    given = trained(freeze.freeze(optax.adamw(0.1), HELD), variables)
    wrapped = trained(freeze.freeze(optimizers.OptaxWrapper(optax.adamw(0.1)), HELD), variables)
    assert bits(given.params) == bits(wrapped.params)
    with pytest.raises(ConfigError, match='Cannot train by adamw, a function: it is no optimizer. Call it'):
        freeze.freeze(optax.adamw, HELD)
    with pytest.raises(ConfigError, match='freeze by OptaxWrapper: that is no optax transformation'):
        freeze.optax_freeze(optimizers.adamw(0.1), HELD)


def test_definitions_compare_by_their_meaning():
    def make(patterns):
        return freeze.freeze(adafactor.Adafactor(0.1), patterns)

    assert make(HELD) == make(tuple(HELD))
    assert hash(make(HELD)) == hash(make(tuple(HELD)))
    assert make(HELD) != make(HELD[:1])
    assert make(HELD) != freeze.train_only(adafactor.Adafactor(0.1), HELD)


def test_a_step_offset_beyond_the_start_is_refused_as_without_freezing():
    with pytest.raises(ConfigError, match='at step 3 with step_offset=10'):
        freeze.freeze(adafactor.Adafactor(step_offset=10), HELD).check_first_step(3)


T5_HELD = ['token_embedder/.*', 'encoder/.*']


def compiled_step(optimizer_def, num_microbatches, *, stopped=False):
    model = t5_models.make_model(optimizer_def, emb_dim=64, mlp_dim=512, num_decoder_layers=1)
    loss_fn = model.loss_fn

    def stopped_loss_fn(params, batch, rng):
        held = re.compile('|'.join(T5_HELD))
        return loss_fn(
            map_named(lambda name, x: jax.lax.stop_gradient(x) if held.fullmatch(name) else x, params), batch, rng
        )

    if stopped:
        model.loss_fn = stopped_loss_fn
    shape = train_state_shape(**t5_models.initializer_arguments(model))
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in t5_models.make_batch().items()}
    step = jax.jit(
        lambda state, batch: train_steps.train_with_lr(state, batch, 0.1, None, model, num_microbatches),
        donate_argnums=0,
    )
    return step.lower(shape, batch).compile()


@pytest.mark.parametrize('num_microbatches', [None, 2])
def test_the_compiled_step_computes_and_holds_no_gradient_of_what_is_frozen(num_microbatches):
    whole = compiled_step(t5_models.make_adafactor(), num_microbatches)
    frozen = freeze.freeze(t5_models.make_adafactor(), T5_HELD)
    part, stopped = (compiled_step(frozen, num_microbatches, stopped=stopped) for stopped in (False, True))
    assert part.cost_analysis()['flops'] == stopped.cost_analysis()['flops']
    assert part.cost_analysis()['flops'] < 0.6 * whole.cost_analysis()['flops']
    sizes = [step.memory_analysis().temp_size_in_bytes for step in (part, stopped, whole)]
    assert sizes[0] == sizes[1]
    assert sizes[0] < 0.6 * sizes[2]


def test_the_plan_says_what_freezing_saves():
    model = t5_models.make_model(freeze.freeze(optimizers.adam(0.1), T5_HELD))
    partitioner = partitioning.PjitPartitioner(2)
    partitioner.mesh = abstract_mesh(data=4, model=2)
    state = train_state_shape(**t5_models.initializer_arguments(model))
    said = freeze.describe_savings(state, partitioner)
    assert said == reports.describe_savings(state, partitioner)
    params = named_leaves(state.params)
    held = [x for name, x in params.items() if re.fullmatch('|'.join(T5_HELD), name)]
    assert f'frozen          {len(held)} of {len(params)} parameters' in said
    # Adam has two slots like each parameter, and a counter.
    found = {
        title: [
            float(number) for number in re.search(rf'([\d.]+) KiB of ([\d.]+) KiB of {title} per device', said).groups()
        ]
        for title in ('gradients', 'optimizer state')
    }
    assert found['optimizer state'] == pytest.approx([2 * x for x in found['gradients']], abs=0.2)
    specs = partitioner.get_mesh_axes(state)
    parts = reports.plan_parts(state, specs, partitioner.mesh)
    saved = parts['params'].bytes_per_device - parts['gradients'].bytes_per_device
    assert found['gradients'] == pytest.approx([saved / 1024, parts['params'].bytes_per_device / 1024], abs=0.06)
    assert (
        reports.describe_savings(
            train_state_shape(**t5_models.initializer_arguments(t5_models.make_model())), partitioner
        )
        == ''
    )


def test_a_run_that_trains_a_part_starts_from_a_run_that_trained_all(tmp_path, capsys):
    class TwoLayers(toy_runs.LinearModel):
        def __init__(self, optimizer_def):
            super().__init__()
            self.optimizer_def = optimizer_def

        def get_initial_variables(self, rng, input_shapes, input_types=None):
            variables = super().get_initial_variables(rng, input_shapes, input_types)
            return {
                'params': {**variables['params'], 'b': jnp.zeros(2)},
                'params_axes': {**variables['params_axes'], 'b_axes': AxisMetadata(names=('mlp',))},
            }

        def loss_fn(self, params, batch, dropout_rng):
            return super().loss_fn(params, {**batch, 'y': batch['y'] - params['b'][None]}, dropout_rng)

    def run(folder, steps, optimizer_def, restore=None):
        config = CheckpointConfig(save=SaveCheckpointConfig(period=2, save_dataset=True), restore=restore)
        return toy_runs.run(tmp_path / folder, steps, model=TwoLayers(optimizer_def), checkpoint_cfg=config)[1]

    base = run('base', 2, adafactor.Adafactor())
    capsys.readouterr()
    restore = RestoreCheckpointConfig(
        path=str(tmp_path / 'base' / 'checkpoint_2'),
        mode='specific',
        state_transformation_fns=[freeze.drop_other_slots],
    )
    part = freeze.freeze(adafactor.Adafactor(), ['w'])
    state = run('part', 6, part, restore)
    assert 'frozen          1 of 2 parameters, 32 B of 40 B; this saves' in capsys.readouterr().out
    assert bits(state.params)['w'] == bits(base.params)['w']
    assert bits(state.params)['b'] != bits(base.params)['b']
    run('pieces', 4, part, restore)
    assert bits(run('pieces', 6, part, restore).state_dict()) == bits(state.state_dict())


def test_slots_are_taken_over_whole_or_not_at_all():
    stored = {'target': {'a': 1}, 'state': {'step': 2, 'param_states': {'a': {'v': 3}, 'b': {'v': 4}}}}
    wanted = {'state': {'step': 0, 'param_states': {'a': {'v': 0}, 'b': None}}}
    got = freeze.drop_other_slots(stored, wanted)
    assert got == {'target': {'a': 1}, 'state': {'step': 2, 'param_states': {'a': {'v': 3}}}}
    wanted = {'state': {'step': 0, 'param_states': {'a': {'v': 0, 'm': 0}}}}
    assert freeze.drop_other_slots(stored, wanted) == {'target': {'a': 1}, 'state': {'step': 2}}
    assert freeze.drop_other_slots(stored, wanted, is_resuming=True) is stored


def test_a_frozen_state_is_born_placed_and_trains_on_eight_devices_as_on_one():
    results = []
    for partitioner in (partitioning.PjitPartitioner(1, devices=jax.devices()[:1]), partitioning.PjitPartitioner(2)):
        model = t5_models.make_model(
            freeze.freeze(t5_models.make_adafactor(), T5_HELD), num_encoder_layers=1, num_decoder_layers=1
        )
        made = TrainStateInitializer(partitioner=partitioner, **t5_models.initializer_arguments(model))
        state = made.from_scratch(t5_models.key())
        before = bits(state.params)
        step = partitioner.partition(
            lambda state, batch, model=model: train_steps.train_with_lr(state, batch, 0.1, None, model, None)[0],
            (made.train_state_axes, partitioner.data_partition_spec),
            made.train_state_axes,
            donate_argnums=(0,),
        )
        state = step(state, t5_models.make_batch())
        after = bits(state.params)
        held = {name for name in before if re.fullmatch('|'.join(T5_HELD), name)}
        assert {name for name in before if before[name] == after[name]} == held
        results.append(state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *map(jax.device_get, results))
