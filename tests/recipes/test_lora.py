"""LoRA: adapters on a frozen base, against layers that add A B to their output and against a model without adapters."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict, freeze, unfreeze
from flax.linen.partitioning import AxisMetadata

from t5x_pjit_recipes import adafactor, optimizers, partitioning, train_steps
from t5x_pjit_recipes.checkpoints import CheckpointConfig, RestoreCheckpointConfig, SaveCheckpointConfig
from t5x_pjit_recipes.errors import CheckpointError, ConfigError, StateError
from t5x_pjit_recipes.examples.t5 import layers
from t5x_pjit_recipes.initialization import TrainStateInitializer
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.recipes.freeze import drop_other_slots
from t5x_pjit_recipes.recipes.lora import Lora, LoraModel, add_lora, merge_lora
from tests import t5_models, toy_runs

PATTERNS = ['.*attention/(query|out)/kernel', '.*/mlp/(wi_0|wo)/kernel']
SMALL = {'num_encoder_layers': 1, 'num_decoder_layers': 1}


def bits(tree):
    return {name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(tree).items()}


def make_models(rank=4, alpha=8.0):
    plain = t5_models.make_model(adafactor.Adafactor(multiply_by_parameter_scale=False, factored=False), **SMALL)
    return plain, LoraModel(plain, PATTERNS, rank, alpha)


def make_initializer(model, partitioner):
    return TrainStateInitializer(partitioner=partitioner, **t5_models.initializer_arguments(model))


def train_some(model, partitioner, steps=3):
    """Returns the state at the start and after some steps, on the host, and the losses."""
    initializer = make_initializer(model, partitioner)
    state = initializer.from_scratch(t5_models.key())
    first, losses = jax.device_get(state), []

    def step(state, batch):
        state, metrics = train_steps.train_with_lr(state, batch, 0.03, t5_models.key(), model, None)
        return state, metrics['loss'].compute()

    axes, data_spec = initializer.train_state_axes, partitioner.data_partition_spec
    step = partitioner.partition(step, (axes, data_spec), (axes, None), donate_argnums=(0,))
    for _ in range(steps):
        state, loss = step(state, t5_models.make_batch())
        losses.append(float(loss))
    return first, jax.device_get(state), losses


@pytest.fixture(scope='module')
def trained():
    """A trained LoRA model on eight devices."""
    return make_models(), train_some(make_models()[1], partitioning.PjitPartitioner(2))


def test_the_start_is_the_base_bit_for_bit(trained):
    (plain, model), (first, *_) = trained
    base = make_initializer(plain, partitioning.PjitPartitioner(2)).from_scratch(t5_models.key())
    assert bits(base.params) == bits({name: tree for name, tree in first.params.items() if name != 'lora'})
    assert bits(base.params) == bits(model.merged(first.params))
    adapters = named_leaves(first.params['lora'])
    assert all(np.any(leaf != 0) == name.endswith('/a') for name, leaf in adapters.items())


def test_adapters_alone_are_trained_and_have_slots(trained):
    _, (first, last, losses) = trained
    before, after = bits(first.params), bits(last.params)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if name.startswith('lora/')}
    assert losses[-1] < losses[0]
    assert all(name.startswith('lora/') for name in named_leaves(last.param_states))


def test_merging_gives_the_logits_of_layers_that_add_their_adapters(trained):
    (plain, model), (_, last, _) = trained
    params, batch = last.params, t5_models.make_batch(2)
    adapters = named_leaves(params['lora'])
    base = {name: tree for name, tree in params.items() if name != 'lora'}

    def adding(layer, args, kwargs, context):
        out, name = layer(*args, **kwargs), '/'.join(context.module.path) + '/kernel'
        if not isinstance(context.module, layers.DenseGeneral) or f'{name}/a' not in adapters:
            return out
        x = args[0].reshape(*args[0].shape[: args[0].ndim - context.module.num_input_dims], -1)
        return out + 8.0 / 4 * (x @ adapters[f'{name}/a'] @ adapters[f'{name}/b']).reshape(out.shape)

    @jax.jit
    def compute(params):
        with nn.intercept_methods(adding):
            wanted = plain._compute_logits(base, batch)
        merged = merge_lora(params, model.lora)
        scores = plain.score_batch(merged, batch), model.score_batch(params, batch)
        losses = plain.eval_fn(merged, batch)[0], model.eval_fn(params, batch)[0]
        return wanted, plain._compute_logits(merged, batch), plain._compute_logits(base, batch), scores, losses

    wanted, merged, unadapted, scores, losses = compute(params)
    np.testing.assert_allclose(merged, wanted, rtol=0, atol=1e-5)
    assert np.abs(merged - unadapted).max() > 1e-2
    np.testing.assert_array_equal(*scores)
    assert losses[0] == losses[1]


def test_eight_devices_train_what_one_trains(trained):
    _, (_, last, losses) = trained
    alone = partitioning.PjitPartitioner(1, devices=jax.devices()[:1])
    _, expected, expected_losses = train_some(make_models()[1], alone)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    got, wanted = named_leaves(last.params['lora']), named_leaves(expected.params['lora'])
    difference = max(np.abs(got[name] - wanted[name]).max() for name in wanted)
    moved = max(np.abs(leaf).max() for name, leaf in wanted.items() if name.endswith('/b'))
    assert difference < 1e-3 * moved


def test_adapters_lie_as_the_dims_of_their_kernel_and_the_rank_is_whole():
    partitioner = partitioning.PjitPartitioner(
        2, strict=True, logical_axis_rules=partitioning.standard_logical_axis_rules(parameter_partitioning_dims=2)
    )
    specs = named_leaves(make_initializer(make_models()[1], partitioner).train_state_axes.params)
    name = 'decoder/layers_0/mlp/wi_0/kernel'
    found = [tuple(specs[n]) for n in (name, f'lora/{name}/a', f'lora/{name}/b')]
    assert found == [('data', 'model'), ('data', None), (None, 'model')]


CASES = {
    'io': ((6, 10), 'ij', 'ir,rj->ij'),
    'ioo': ((6, 5, 2), 'ijk', 'ir,rjk->ijk'),
    'iio': ((3, 2, 10), 'ijk', 'ijr,rk->ijk'),
    'ilo': ((6, 4, 10), 'ilj', 'lir,lrj->ilj'),
    'lio': ((4, 6, 10), 'lij', 'lir,lrj->lij'),
    'ilool': ((3, 4, 2, 5, 2), 'iljkm', 'lmir,lmrjk->iljkm'),
}


@pytest.mark.parametrize('dims', CASES)
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_dims_say_what_is_input_output_and_layer(dims, dtype):
    shape, names, product = CASES[dims]
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=shape), dtype)
    axes = freeze({'mlp': {'kernel_axes': AxisMetadata(names=tuple(names))}})
    given = Lora([('mlp/kernel', dims)], rank=3, alpha=6)
    params, params_axes = add_lora(freeze({'mlp': {'kernel': kernel}}), axes, lora=given, rng=jax.random.key(0))
    assert isinstance(params, FrozenDict)
    a, b = (params['lora']['mlp']['kernel'][name] for name in 'ab')
    assert (a.dtype, b.dtype) == (jnp.float32, jnp.float32)
    wanted_a, wanted_b = product.split('->')[0].split(',')
    found = [params_axes['lora']['mlp']['kernel'][f'{name}_axes'].names for name in 'ab']
    assert found == [tuple(None if n == 'r' else n for n in wanted) for wanted in (wanted_a, wanted_b)]
    assert (a.ndim, b.ndim) == (len(wanted_a), len(wanted_b))

    b = rng.normal(size=b.shape).astype(np.float32)
    params = unfreeze(params)
    params['lora']['mlp']['kernel']['b'] = b
    merged = merge_lora(params, given)['mlp']['kernel']
    expected = np.asarray(kernel, np.float32) + 2.0 * np.einsum(product, np.asarray(a), b)
    assert merged.dtype == dtype
    np.testing.assert_allclose(np.asarray(merged, np.float32), expected, rtol=1e-5 if dtype == jnp.float32 else 1e-2)


def test_each_kernel_draws_from_a_key_of_its_own_name():
    params = {name: np.zeros((64, 8), np.float32) for name in ('k', 'q', 'v')}
    some, _ = add_lora(params, lora=Lora(['q|v'], 4), rng=jax.random.key(0))
    more, _ = add_lora(params, lora=Lora(['.'], 4), rng=jax.random.key(0))
    assert bits(some['lora']).items() <= bits(more['lora']).items()
    drawn = [more['lora'][name]['a'] for name in params]
    assert np.abs(np.corrcoef(np.reshape(drawn, (3, -1))) - np.eye(3)).max() < 0.3
    assert np.std(drawn) == pytest.approx(64**-0.5, rel=0.1)


@pytest.mark.parametrize(
    ('settings', 'says'),
    [
        ({'patterns': ['.*'], 'rank': 0, 'alpha': -1.0}, 'with rank=0 and alpha=-1.0. Use numbers above zero'),
        ({'patterns': [], 'rank': 4}, 'with patterns=[]. Use numbers above zero, for the rank a whole one, and at'),
        ({'patterns': ['a'], 'rank': 2.5, 'alpha': '8'}, "with rank=2.5 and alpha='8'. Use numbers above zero"),
        ({'patterns': '.*/kernel', 'rank': 4}, "by patterns='.*/kernel': that is a text, no list. Write ['.*/kernel']"),
        (
            {'patterns': [('a', 'ixo'), 'b', ('c', 'ii'), ('d',)], 'rank': 4},
            "Cannot read 3 of 4 patterns of adapters. Write a pattern, or a pair such as ('.*/query/kernel', 'ioo'):\n"
            "  ('a', 'ixo'): ['x'] are none of the letters 'i', 'o' and 'l'\n"
            "  ('c', 'ii'): 'ii' lacks 'i' or 'o'\n"
            "  ('d',): no pair of a pattern and a text of dims",
        ),
    ],
)
def test_settings_that_cannot_be_meant_are_errors_at_once(settings, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        Lora(**settings)


def test_kernels_whose_dims_are_not_said_and_patterns_without_kernels_are_errors():
    params = {
        'query': {'kernel': np.zeros((8, 2, 4))},
        'norm': {'scale': np.zeros(8)},
        'wi': {'kernel': np.zeros((8, 4))},
    }
    with pytest.raises(ConfigError, match=re.escape(
        'Cannot make adapters for 2 of 3 kernels: what is input and what is output is said for another number of dims.'
    )) as caught:  # fmt: skip
        add_lora(params, lora=Lora(['.*'], 4), rng=jax.random.key(0))
    assert "  norm/scale (8,): 2 letters 'io' for 1 dims\n  query/kernel (8, 2, 4): 2 letters 'io' for 3 dims" in str(
        caught.value
    )
    with pytest.raises(
        ConfigError, match=r"1 of them match none of 3 parameters.*\n  pattern 2 'wo/kernel'; the nearest"
    ):
        add_lora(params, lora=Lora([('query/kernel', 'ioo'), 'wo/kernel'], 4), rng=jax.random.key(0))


def test_the_first_pattern_that_matches_says_the_dims():
    found = Lora([('query/kernel', 'ioo'), '.*/kernel'], 4).dims(
        {'query': {'kernel': np.zeros((8, 2, 4))}, 'wi': {'kernel': np.zeros((8, 4))}}
    )
    assert found == {'query/kernel': 'ioo', 'wi/kernel': 'io'}


def test_adapters_that_are_not_those_described_are_errors():
    params = {'q': {'kernel': np.zeros((8, 4), np.float32)}, 'v': {'kernel': np.zeros((8, 4), np.float32)}}
    added, _ = add_lora(params, lora=Lora(['q/kernel'], 2), rng=jax.random.key(0))
    with pytest.raises(StateError, match=re.escape("already, ['q', 'v', 'lora']. Merge them first")):
        add_lora(added, lora=Lora(['q/kernel'], 2), rng=jax.random.key(0))
    with pytest.raises(StateError, match=re.escape(
        "Cannot merge adapters: 4 arrays are not what patterns ['v/kernel'] and rank=2 describe"
    )) as caught:  # fmt: skip
        merge_lora(added, Lora(['v/kernel'], 2))
    assert '  lora/v/kernel/a: wants (8, 2), has none\n' in str(caught.value)
    assert '  lora/q/kernel/b: wants none, has (2, 4)' in str(caught.value)
    with pytest.raises(StateError, match=re.escape('lora/q/kernel/a: wants (8, 3), has (8, 2)')):
        merge_lora(added, Lora(['q/kernel'], 3))


def test_kernels_that_would_lose_what_is_added_are_errors():
    params = {'k': np.ones((8, 4), np.int8), 'q': np.ones((8, 4), np.int32), 'v': np.ones((8, 4), np.float16)}
    with pytest.raises(StateError, match=r'(?s)2 of 3 kernels: they are no real numbers.*k \(8, 4\): int8.*q .*int32'):
        add_lora(params, lora=Lora(['.'], 2), rng=jax.random.key(0))
    with pytest.raises(StateError, match="under 'lora' to a list: it takes no other entries"):
        add_lora([params['v']], lora=Lora(['0'], 2), rng=jax.random.key(0))


def test_a_model_for_inference_needs_no_optimizer():
    plain = t5_models.make_model(**SMALL)
    plain.optimizer_def = None
    model = LoraModel(plain, PATTERNS, 4)
    assert model.optimizer_def is None
    assert model.input_vocabulary == plain.input_vocabulary
    assert model.FEATURE_CONVERTER_CLS is plain.FEATURE_CONVERTER_CLS


@pytest.mark.filterwarnings('ignore:.*learning_rate.*:UserWarning')
def test_a_run_starts_from_a_checkpoint_of_the_plain_model_and_goes_on_from_its_own(tmp_path, capsys):
    def run(folder, steps, model, restore=None):
        config = CheckpointConfig(save=SaveCheckpointConfig(period=2, save_dataset=True), restore=restore)
        return toy_runs.run(tmp_path / folder, steps, model=model, checkpoint_cfg=config)[1]

    def make():
        plain = toy_runs.LinearModel()
        plain.optimizer_def = optimizers.adam(0.05)
        return LoraModel(plain, ['w'], rank=1)

    base = run('base', 2, toy_runs.LinearModel())
    restore = {
        'path': str(tmp_path / 'base' / 'checkpoint_2'),
        'mode': 'specific',
        'state_transformation_fns': [drop_other_slots],
    }
    with pytest.raises(CheckpointError, match=r'target/lora/w/a \(4, 1\) float32'):
        run('refused', 6, make(), RestoreCheckpointConfig(**restore))
    restore = RestoreCheckpointConfig(**restore, fallback_to_scratch=True)
    with pytest.warns(UserWarning, match='what it lacks comes from the fallback state') as caught:
        state = run('adapted', 6, make(), restore)
    assert 'left over in the checkpoint' not in ''.join(str(warning.message) for warning in caught)
    assert int(state.step) == 6
    assert bits(state.params)['w'] == bits(base.params)['w']
    assert np.any(state.params['lora']['w']['b'])
    said = capsys.readouterr().out
    assert 'frozen          1 of 3 parameters, 32 B of 56 B; this saves' in said
    with pytest.warns(UserWarning, match='what it lacks comes from the fallback state'):
        run('pieces', 4, make(), restore)
    assert bits(run('pieces', 6, make(), restore).state_dict()) == bits(state.state_dict())
