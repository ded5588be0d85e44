"""Every optimizer of the installed optax, laid out and run: a sharded step equals an unsharded one."""

import functools
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import traverse_util
from flax.linen.partitioning import AxisMetadata
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes import layout, optimizers, partitioning
from t5x_pjit_recipes.errors import ConfigError
from t5x_pjit_recipes.layout.axes import is_spec_leaf
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.optimizers import OptaxWrapper
from t5x_pjit_recipes.train_state import FlaxOptimTrainState

AXES = {
    'wide': ('embed', 'mlp'),
    'square': ('embed', 'mlp'),
    'stacked': ('layers', 'embed', 'mlp'),
    'norm': {'scale': ('mlp',)},
    'scale': ('embed',),  # ends the name of the other
    'temperature': (),
    'tied': ('embed', 'mlp'),
    'tied_again': ('embed', 'mlp'),
}
RULES = [('embed', 'data'), ('mlp', 'model'), ('layers', None), ('batch', 'data')]
SIZES = {'wide': (8, 12), 'square': (8, 8), 'stacked': (3, 8, 8), 'tied': (12, 8)}


def make_params() -> Any:
    rng = np.random.default_rng(0)
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    params = {name: jnp.asarray(normal(shape)) for name, shape in SIZES.items()}
    params |= {'norm': {'scale': jnp.asarray(normal(4))}, 'scale': jnp.asarray(normal(12))}
    params |= {'temperature': jnp.asarray(normal(()))}
    return params | {'tied_again': params['tied']}  # one array under two names


def loss(params: Any) -> Any:
    return sum(0.5 * jnp.vdot(leaf - 0.5, leaf - 0.5) for leaf in jax.tree.leaves(params))


# What optax asks of the trees, or wants besides gradients.
ONLY = {
    'scale_by_muon': lambda leaf: leaf.ndim == 2,  # for matrices; `muon` passes all else to Adam
    'sm3': lambda leaf: leaf.ndim > 0,  # its update fails for scalars
}
BESIDES = {'lbfgs': ['value', 'grad', 'value_fn'], 'sam': [], 'sophia': ['obj_fn']}
BESIDES['hutchinson_estimator_diag_hessian'] = ['obj_fn']
NEEDS_MORE = {
    'lbfgs': 'value, grad, value_fn',
    'momo': 'value',
    'momo_adam': 'value',
    'polyak_sgd': 'value',
    'reduce_on_plateau': 'value',
}
sgd = optax.sgd(0.1)
ARGUMENTS = {
    'chain': {'transformations': [optax.clip_by_global_norm(1.0), optax.adamw(0.1)]},
    'differentially_private_aggregate': {'l2_norm_clip': 1.0, 'noise_multiplier': 0.1, 'key': 0},
    'dpsgd': {'l2_norm_clip': 1.0, 'noise_multiplier': 0.1, 'seed': 0},
    'galore': {'rank': 4},
    'mechanize': {'base_optimizer': sgd},
    'noisy_sgd': {'key': 0},
    'optax_adafactor': {'min_dim_size_to_factor': 4, 'momentum': 0.9},
    'sam': {'optimizer': sgd, 'adv_optimizer': optax.sgd(0.01)},
    'scale_by_galore': {'rank': 4},
    'scale_by_muon': {
        'weight_dimension_numbers': lambda tree: jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), tree)
    },
    'schedule_free': {'base_optimizer': sgd},
    'split_real_and_imaginary': {'inner': optax.adam(0.1)},
}
NOT_FLAT = jax.tree.map(lambda names: len(names) > 1, AXES, is_leaf=lambda x: isinstance(x, tuple))
LABELS = jax.tree.map(lambda keep: 'adam' if keep else 'sgd', NOT_FLAT)
PLAIN = {'adam': optax.adam(0.1), 'sgd': optax.sgd(0.1, 0.9)}
WRAPPERS = {
    'apply_if_finite': optax.apply_if_finite(optax.adam(0.1), 3),
    'apply_every': optax.chain(optax.adam(0.1), optax.apply_every(1)),
    'conditionally_mask': optax.conditionally_mask(optax.trace(0.9), lambda step, **_: step > 0),
    'conditionally_transform': optax.conditionally_transform(optax.adam(0.1), lambda step, **_: step > 0),
    'ema': optax.chain(sgd, optax.ema(0.9)),
    'flatten': optax.flatten(optax.adam(0.1)),
    'freeze': optax.chain(optax.adam(0.1), optax.freeze(NOT_FLAT)),
    'inject_hyperparams': optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
    'inject_schedule': optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.1, 0.2, 3)),
    'masked': optax.masked(optax.adam(0.1), NOT_FLAT),
    'masked_adafactor': optax.masked(optax.adafactor(0.1, min_dim_size_to_factor=4), NOT_FLAT),
    'multi_steps': optax.MultiSteps(optax.adam(0.1), 1).gradient_transformation(),
    'multi_transform': optax.multi_transform(PLAIN, LABELS),
    'named_chain': optax.named_chain(('clip', optax.clip(1.0)), ('adam', optax.adam(0.1))),
    'partition': optax.partition({**PLAIN, 'adam': optax.adafactor(0.1, min_dim_size_to_factor=4)}, LABELS),
    'selective_transform': optax.selective_transform(optax.adam(0.1), freeze_mask=NOT_FLAT),
    'snapshot': optax.chain(sgd, optax.snapshot('norm', lambda updates: jax.tree.map(jnp.max, updates))),
    'zero_nans': optax.chain(optax.zero_nans(), sgd),
}
NAMES = sorted(name for name in optimizers.__all__ if name.islower() and name != 'wrap_optax_optimizer')


def make(name: str) -> OptaxWrapper:
    if name in WRAPPERS:
        return OptaxWrapper(WRAPPERS[name])
    constructor, arguments = getattr(optimizers, name), dict(ARGUMENTS.get(name, {}))
    if 'learning_rate' in inspect.signature(constructor).parameters:
        arguments = {'learning_rate': 0.1, **arguments}
    return constructor(**arguments)


def with_more(name: str) -> OptaxWrapper:
    """Makes an optimizer whose transformation is given what else it wants, as a step of one's own would."""
    inner = optax.with_extra_args_support(make(name).optax_optimizer)

    def update(grads: Any, state: Any, params: Any) -> Any:
        more = {'value': loss(params), 'grad': grads, 'value_fn': loss, 'obj_fn': loss}
        return inner.update(grads, state, params, **{key: more[key] for key in BESIDES.get(name, ['value'])})

    return OptaxWrapper(optax.GradientTransformation(inner.init, update))


def make_step(name: str) -> Any:
    per_example = name in ('dpsgd', 'differentially_private_aggregate')

    def step(state: Any) -> Any:
        grads = jax.grad(loss)(state.params)
        if per_example:
            grads = jax.tree.map(lambda g: jnp.stack([g, 0.5 * g]), grads)
        return state.apply_gradient(grads, learning_rate=None)

    return step


@pytest.fixture(scope='module', autouse=True)
def quick_compiling() -> Iterator[None]:
    jax.config.update('jax_disable_most_optimizations', True)  # many programs, each run once
    yield
    jax.config.update('jax_disable_most_optimizations', False)


@pytest.fixture(scope='module')
def partitioner() -> partitioning.PjitPartitioner:
    return partitioning.PjitPartitioner(2, devices=jax.devices()[:4], logical_axis_rules=RULES, strict=True)


PARAMS_AXES = jax.tree.map(lambda names: AxisMetadata(names=names), AXES, is_leaf=lambda x: isinstance(x, tuple))


def make_state(name: str) -> FlaxOptimTrainState:
    params, axes = traverse_util.flatten_dict(make_params()), traverse_util.flatten_dict(PARAMS_AXES)
    paths = [path for path in params if ONLY.get(name, lambda leaf: True)(params[path])]
    part = lambda flat: traverse_util.unflatten_dict({path: flat[path] for path in paths})
    return FlaxOptimTrainState.create(with_more(name), {'params': part(params), 'params_axes': part(axes)})


def read(array: Any) -> Any:
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


@pytest.mark.filterwarnings('ignore:.*deprecated:DeprecationWarning:optax')
@pytest.mark.parametrize('name', [*NAMES, *WRAPPERS])
def test_a_sharded_step_equals_an_unsharded_one(name: str, partitioner: Any) -> None:
    state = make_state(name)
    specs = partitioner.get_mesh_axes(state)
    layout.Plan(state.state_dict(), specs.state_dict(), partitioner.mesh).check()
    step = make_step(name)
    expected = step(state)
    sharded = partitioner.partition(step, (specs,), specs)(state)
    assert jax.tree.structure(sharded) == jax.tree.structure(expected)
    arrays, wanted = named_leaves(sharded.state_dict()), named_leaves(expected.state_dict())
    lies = named_leaves(specs.state_dict(), is_leaf=is_spec_leaf)
    for path, array in arrays.items():
        np.testing.assert_allclose(read(array), read(wanted[path]), rtol=1e-6, atol=1e-6, err_msg=path)
        assert array.sharding.is_equivalent_to(NamedSharding(partitioner.mesh, lies[path] or P()), array.ndim), path


def test_every_alias_of_optax_and_all_of_contrib_is_here() -> None:
    made_by = {
        name: inspect.signature(make).return_annotation
        for module in (optax, optax.contrib)
        for name, make in vars(module).items()
        if inspect.isroutine(getattr(make, 'func', make)) and not name.startswith('_')
        and (module is optax.contrib or 'learning_rate' in inspect.signature(make).parameters)
    }  # fmt: skip
    made_by |= dict.fromkeys(['dog', 'dowg', 'hutchinson_estimator_diag_hessian'], optax.GradientTransformation)
    wanted = {name for name, made in made_by.items() if 'GradientTransformation' in str(made)}
    wanted -= {'adafactor', 'scale_by_learning_rate', 'scale_by_rprop'}
    assert len(wanted) > 50
    assert wanted <= set(optimizers.__all__)
    assert {'optax_adafactor', *wanted} <= set(dir(optimizers))
    assert not hasattr(optimizers, 'adafactor')  # T5X's is in a module of its own


@pytest.mark.parametrize('name', NEEDS_MORE)
def test_what_a_step_cannot_pass_is_named(name: str) -> None:
    optimizer = make(name).create(make_params())
    with warnings.catch_warnings(), pytest.raises(ConfigError, match=f'wants {NEEDS_MORE[name]} besides'):
        optimizer.apply_gradient(optimizer.target, learning_rate=None)


def test_wrapped_transformations_may_be_arguments() -> None:
    averaged = optimizers.schedule_free(optimizers.sgd(0.1), learning_rate=0.1).create({'w': np.ones(4, np.float32)})
    chained = optimizers.chain([optimizers.sgd(0.1), optax.scale(2.0)]).create({'w': np.ones(4, np.float32)})
    assert averaged.state.param_states.z['w'].shape == (4,)
    chained = chained.apply_gradient({'w': np.ones(4, np.float32)}, learning_rate=None)
    np.testing.assert_allclose(chained.target['w'], 0.8, rtol=1e-6)
