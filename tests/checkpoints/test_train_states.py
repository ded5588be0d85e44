"""T5X's train states, with every kind of optimizer, restore onto other partitions and into other states."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.partitioning import AxisMetadata
from jax.sharding import NamedSharding, PartitionSpec

from t5x_pjit_recipes import adafactor, errors, optimizers, partitioning, train_state
from t5x_pjit_recipes.checkpoints import OrbaxCheckpointManagerInterface
from t5x_pjit_recipes.layout import axes, paths

OPTIMIZERS = {
    'adafactor': lambda: adafactor.Adafactor(logical_factor_rules=adafactor.standard_logical_factor_rules()),
    'adamw': lambda: optimizers.adamw(0.1),
    'sgd': lambda: optimizers.OptaxWrapper(optax.sgd(0.1)),
}


def variables():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return flax.core.freeze(
        {
            'params': {'mlp': {'wi': {'kernel': normal(128, 256)}}, 'norm': {'scale': normal(128)}},
            'params_axes': {
                'mlp': {'wi': {'kernel_axes': AxisMetadata(names=('embed', 'mlp'))}},
                'norm': {'scale_axes': AxisMetadata(names=('embed',))},
            },
        }
    )


@functools.cache
def make_state(name):
    """A state after one step, so that no slot is all zeros."""
    state = train_state.FlaxOptimTrainState.create(OPTIMIZERS[name](), variables())
    grads = jax.tree.map(lambda x: x * 0.5 + 1, state.params)
    rate = 0.1 if name == 'adafactor' else None
    return jax.jit(lambda state, grads: state.apply_gradient(grads, learning_rate=rate))(state, grads)


def make_manager(directory, state, num_partitions):
    partitioner = partitioning.PjitPartitioner(
        num_partitions, logical_axis_rules=partitioning.standard_logical_axis_rules()
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    return OrbaxCheckpointManagerInterface(str(directory), shapes, partitioner), partitioner


def assert_restored(restored, state, partitioner):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    specs = paths.named_leaves(partitioner.get_mesh_axes(restored).state_dict(), is_leaf=axes.is_spec_leaf)
    expected = paths.named_leaves(state.state_dict())
    for name, leaf in paths.named_leaves(restored.state_dict()).items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name, strict=True)
        sharding = NamedSharding(partitioner.mesh, specs[name] or PartitionSpec())
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), name


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """One model directory for each optimizer, saved with two partitions."""
    root = tmp_path_factory.mktemp('models')
    for name in OPTIMIZERS:
        manager, _ = make_manager(root / name, make_state(name), 2)
        manager.save(make_state(name))
        manager.close()
    return root


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_a_state_restores_with_more_partitions(saved, name):
    manager, partitioner = make_manager(saved / name, make_state(name), 4)
    assert_restored(manager.restore(), make_state(name), partitioner)


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_an_inference_state_restores_from_a_training_run(saved, name):
    state = train_state.InferenceState.create(variables())
    manager, partitioner = make_manager(saved / name, state, 1)
    trained = make_state(name)
    expected = state.replace_params(trained.params).replace_step(trained.step)
    assert_restored(manager.restore(), expected, partitioner)


@pytest.mark.parametrize(
    ('name', 'other', 'pattern'),
    [
        ('adafactor', 'adamw', r'missing in the checkpoint:\n  state/param_states/0/count \(\) int32'),
        ('adamw', 'sgd', r'left over in the checkpoint:\n  state/param_states/0/count \(\) int32'),
    ],
)
def test_the_state_of_another_optimizer_is_refused(saved, name, other, pattern):
    manager, _ = make_manager(saved / name, make_state(other), 2)
    with pytest.raises(errors.CheckpointError, match=pattern):
        manager.restore()
