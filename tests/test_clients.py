"""What existing projects do with the partitioner, in the shapes in which they do it."""

import functools
from contextlib import nullcontext
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict, freeze
from flax.linen import partitioning as flax_partitioning
from flax.linen.partitioning import AxisMetadata
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes import adafactor, optimizers
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.partitioning import PjitPartitioner
from t5x_pjit_recipes.train_state import FlaxOptimTrainState, InferenceState

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


class Mlp(nn.Module):
    """Two layers with annotated parameters and a constrained activation."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        wi = flax_partitioning.param_with_axes('wi', init, (4, 16), axes=('embed', 'mlp'))
        wo = flax_partitioning.param_with_axes('wo', init, (16, 4), axes=('mlp', 'embed'))
        x = flax_partitioning.with_sharding_constraint(nn.relu(x @ wi), ('batch', 'mlp'))
        return x @ wo


OPTIMIZERS = {
    'adamw': lambda: optimizers.adamw(1e-2),
    'adafactor': lambda: adafactor.Adafactor(
        learning_rate=1e-2,
        min_dim_size_to_factor=4,
        logical_factor_rules=adafactor.standard_logical_factor_rules(),
    ),
}


def squares(params, x, y):
    return jnp.mean((Mlp().apply({'params': params}, x) - y) ** 2)


def is_laid_out(array, mesh, *spec):
    return array.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec)), array.ndim)


class Holder(flax.struct.PyTreeNode):
    """A user's own state around ours."""

    inner: Any
    losses: Any


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_init_inside_eval_shape_then_partitioned(optimizer):
    partitioner = PjitPartitioner(2)
    definition = OPTIMIZERS[optimizer]()

    def init(rng):
        variables = Mlp().init(rng, X)
        assert type(variables) is dict
        return FlaxOptimTrainState.create(definition, variables)

    shape = jax.eval_shape(init, jax.random.PRNGKey(0))
    axes = partitioner.get_mesh_axes(shape)
    state = partitioner.partition(init, in_axis_resources=(None,), out_axis_resources=axes)(jax.random.PRNGKey(0))
    assert type(state.params) is dict
    assert is_laid_out(state.params['wi'], partitioner.mesh, None, 'model')
    plain = init(jax.random.PRNGKey(0))
    for name, value in named_leaves(plain.state_dict()).items():
        np.testing.assert_allclose(named_leaves(state.state_dict())[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_a_state_inside_a_users_own_node(optimizer):
    partitioner = PjitPartitioner(2)
    state = FlaxOptimTrainState.create(OPTIMIZERS[optimizer](), Mlp().init(jax.random.PRNGKey(0), X))
    axes = Holder(inner=partitioner.get_mesh_axes(state), losses=None)

    def step(holder, x):
        loss, grads = jax.value_and_grad(squares)(holder.inner.params, x, x)
        inner = holder.inner.apply_gradient(grads, learning_rate=1e-2)
        return holder.replace(inner=inner, losses=holder.losses.at[0].set(loss))

    program = partitioner.partition(step, (axes, P('data')), axes, donate_argnums=(0,))
    holder = Holder(inner=state, losses=jnp.zeros(3))
    before = float(squares(state.params, X, X))
    with pytest.warns(UserWarning, match='learning_rate') if optimizer == 'adamw' else nullcontext():
        holder = program(holder, X)
    for _ in range(4):
        holder = program(holder, X)
    assert float(holder.losses[0]) < before
    assert int(holder.inner.step) == 5
    assert is_laid_out(holder.inner.params['wo'], partitioner.mesh, 'model')


@pytest.mark.filterwarnings('ignore:.*learning_rate.*:UserWarning')
def test_distillation_by_hand():
    specs = {'dense': {'kernel': P(None, 'mp'), 'bias': P('mp')}}
    partitioner = PjitPartitioner(2, logical_axis_rules=[('batch', 'dp'), ('mp', 'mp')])
    partitioner.mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('dp', 'mp'))
    params_axes = jax.tree.map(lambda s: AxisMetadata(names=tuple(s)), specs)
    params = {'dense': {'kernel': X, 'bias': np.zeros(4, np.float32)}}
    sharded = partitioner.partition(lambda x: x, (specs,), specs)(freeze(params))
    state = FlaxOptimTrainState.create(
        optimizer_def=optimizers.adam(1e-2),
        model_variables=freeze({'params': sharded, 'params_axes': params_axes}),
    )
    axes = partitioner.get_mesh_axes(state)
    assert axes.params == freeze(specs)

    def loss(params, x):
        return jnp.mean((x @ params['dense']['kernel'] + params['dense']['bias'][None]) ** 2)

    partitioned = partitioner.partition(loss, (axes.params, None), None)
    x = np.ones((2, 8), np.float32)
    value, grads = jax.value_and_grad(partitioned)(state.params, x)
    np.testing.assert_allclose(value, loss(freeze(params), x), rtol=1e-6)
    per_example, _ = jax.vmap(jax.value_and_grad(partitioned), in_axes=(None, 0))(state.params, x[:, None])
    np.testing.assert_allclose(per_example, [loss(freeze(params), x[i : i + 1]) for i in range(2)], rtol=1e-6)
    outer = partitioner.partition(lambda p, x: 2 * partitioned(p, x), (axes.params, None), None)
    np.testing.assert_allclose(outer(state.params, x), 2 * value, rtol=1e-6)
    after = state.apply_gradient(grads, learning_rate=1e-2)
    assert isinstance(after.params, FrozenDict)
    assert type(after.params.unfreeze()) is dict
    for kernel in (after.params['dense']['kernel'], after.param_states[0].mu['dense']['kernel']):
        assert is_laid_out(kernel, partitioner.mesh, None, 'mp')


def test_two_partitioners_on_halves_feed_each_other():
    rules = [('batch', 'dp'), ('mlp', 'mp')]
    teacher, student = (PjitPartitioner(2, logical_axis_rules=rules) for _ in range(2))
    for partitioner, devices in ((teacher, jax.devices()[:4]), (student, jax.devices()[4:])):
        partitioner.mesh = Mesh(np.array(devices).reshape(2, 2), ('dp', 'mp'))
    logits = teacher.partition(lambda x: x * 2, (P('dp'),), P('dp', 'mp'))(X)
    assert {d.id for d in logits.devices()} == {0, 1, 2, 3}
    program = student.partition(lambda x: x + 1, (P('dp'),), P('dp'))
    for _ in range(2):
        out = program(logits)
        assert {d.id for d in out.devices()} == {4, 5, 6, 7}
        np.testing.assert_array_equal(out, X * 2 + 1)
    assert not logits.is_deleted()


def test_axes_can_be_replaced_and_hashed():
    state = InferenceState.create(freeze(Mlp().init(jax.random.PRNGKey(0), X)))
    axes = PjitPartitioner(2).get_mesh_axes(state)
    replaced = axes.replace(step=P(), params=freeze({**axes.params, 'wi': None}))
    assert replaced.params['wi'] is None
    assert replaced.params['wo'] == P('model', None)
    assert hash(axes.params) == hash(PjitPartitioner(2).get_mesh_axes(state).params)


def test_predicting_with_an_inference_state_and_partial_apply():
    partitioner = PjitPartitioner(2)
    model = Mlp()
    state = InferenceState.create(freeze(model.init(jax.random.PRNGKey(0), X)))
    axes = partitioner.get_mesh_axes(state)
    placed = partitioner.move_params_to_devices(state, axes)
    plain = model.apply({'params': placed.params}, X)

    def predict(params, x, *, scale):
        return scale * model.apply({'params': params}, x)

    program = partitioner.partition(
        functools.partial(predict, scale=2.0),
        in_axis_resources=(axes.params, partitioner.data_partition_spec),
        out_axis_resources=partitioner.data_partition_spec,
    )
    np.testing.assert_allclose(program(placed.params, X), 2 * plain, rtol=1e-5, atol=1e-6)
    text = program.lower(placed.params, X).as_text()
    assert 'sharding_constraint' in text


def test_a_layout_of_the_default_batch():
    assert vars(PjitPartitioner(2).get_data_layout()) == {
        'batch_size': 4,
        'shard_id': 0,
        'num_shards': 1,
        'is_first_host_in_replica_set': True,
    }
