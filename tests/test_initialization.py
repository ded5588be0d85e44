import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from t5x_pjit_recipes import checkpoints, layout, optimizers, partitioning
from t5x_pjit_recipes.checkpoints import RestoreCheckpointConfig
from t5x_pjit_recipes.errors import CheckpointError, PlanError
from t5x_pjit_recipes.initialization import TrainStateInitializer
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.train_state import FlaxOptimTrainState
from tests import t5_models
from tests.timing import check_takes_less

XXL = {
    'vocab_size': 32128, 'emb_dim': 4096, 'num_heads': 64, 'num_encoder_layers': 24, 'num_decoder_layers': 24,
    'head_dim': 64, 'mlp_dim': 10240,
}  # fmt: skip
XXL_PARAMETERS = 11_135_332_352


def make_initializer(partitions=2, optimizer_def=None, **config):
    model = t5_models.make_model(optimizer_def, num_encoder_layers=1, num_decoder_layers=1, **config)
    partitioner = partitioning.PjitPartitioner(partitions)
    return TrainStateInitializer(**t5_models.initializer_arguments(model), partitioner=partitioner)


@pytest.fixture(scope='module')
def initializer():
    return make_initializer()


@pytest.fixture(scope='module')
def state(initializer):
    return initializer.from_scratch(t5_models.key())


def test_a_state_is_born_as_planned(initializer, state):
    leaves = named_leaves(state.state_dict())
    rows = {row.name: row for row in initializer.plan.rows}
    assert leaves.keys() == rows.keys()
    for name, leaf in leaves.items():
        planned = NamedSharding(initializer._partitioner.mesh, rows[name].spec)
        assert leaf.sharding.is_equivalent_to(planned, leaf.ndim), name
        assert leaf.addressable_shards[0].data.nbytes == rows[name].bytes_per_device, name


def test_initialisation_equals_the_unsharded_one_on_any_mesh(state):
    model = t5_models.make_model(num_encoder_layers=1, num_decoder_layers=1)
    plain = model.get_initial_variables(t5_models.key(), t5_models.input_shapes(8))['params']
    other = make_initializer(partitions=4).from_scratch(t5_models.key())
    for name, value in named_leaves(plain).items():
        for made in (state, other):
            np.testing.assert_allclose(named_leaves(made.params)[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


def test_no_optimizer_makes_a_state_for_inference():
    model = t5_models.make_model(num_encoder_layers=1, num_decoder_layers=1)
    arguments = {**t5_models.initializer_arguments(model), 'optimizer_def': None}
    made = TrainStateInitializer(**arguments, partitioner=partitioning.PjitPartitioner(2))
    assert type(made.global_train_state_shape).__name__ == 'InferenceState'
    assert set(made.train_state_axes.state_dict()) == {'target', 'state'}


def test_what_cannot_be_divided_is_told_before_anything_is_made():
    with pytest.raises(PlanError, match=r'target/decoder/relpos_bias/rel_embedding \(4, 32\): dim 0 is 4.*8 ways'):
        make_initializer(partitions=8)


@pytest.fixture(scope='module')
def saved(initializer, state, tmp_path_factory):
    """A model directory with two checkpoints, of steps 0 and 3."""
    folder = tmp_path_factory.mktemp('saved')
    manager = checkpoints.OrbaxCheckpointManagerInterface(
        folder, initializer.global_train_state_shape, initializer._partitioner
    )
    manager.save(state)
    manager.save(state.replace_step(3))
    manager.close()
    return str(folder)


def test_the_first_config_with_a_checkpoint_wins(initializer, saved, state, tmp_path):
    configs = [RestoreCheckpointConfig(path=str(tmp_path)), RestoreCheckpointConfig(path=saved)]
    restored = initializer.from_checkpoint(configs)
    assert int(restored.step) == 3
    kernel = restored.params['token_embedder']['embedding']
    np.testing.assert_array_equal(kernel, state.params['token_embedder']['embedding'])
    assert initializer.from_checkpoint(configs[:1]) is None
    specific = RestoreCheckpointConfig(path=f'{saved}/checkpoint_0', mode='specific')
    assert int(initializer.from_checkpoint_or_scratch([specific, *configs], init_rng=t5_models.key()).step) == 0
    assert int(initializer.from_checkpoint_or_scratch(configs[:1], init_rng=t5_models.key()).step) == 0


def test_all_checkpoints_come_one_after_the_other(initializer, saved):
    config = RestoreCheckpointConfig(path=saved, mode='all')
    found = [(int(state.step), path) for state, path in initializer.from_checkpoints([config])]
    assert found == [(0, f'{saved}/checkpoint_0'), (3, f'{saved}/checkpoint_3')]
    with pytest.raises(CheckpointError, match='one state from 2 checkpoints'):
        initializer.from_checkpoint([config])


@pytest.fixture(scope='module')
def xxl():
    """The shapes of T5 1.1 XXL's variables."""
    model = t5_models.make_model(**XXL)
    return jax.eval_shape(lambda: model.get_initial_variables(t5_models.key(), t5_models.input_shapes(64)))


@pytest.mark.parametrize(('dims', 'ways'), [((1, 1), 64), ((1, 2), 4096)])
def test_a_plan_of_xxl_on_4096_devices_adds_up_within_a_second(dims, ways, xxl):
    mesh = layout.abstract_mesh(data=64, model=64)
    rules = partitioning.standard_logical_axis_rules(*dims)

    def planned():
        state = jax.eval_shape(lambda: FlaxOptimTrainState.create(optimizers.adamw(1e-3), xxl))
        axes = partitioning.PjitPartitioner(mesh=mesh, logical_axis_rules=rules).get_mesh_axes(state)
        plan = layout.Plan(state.state_dict(), axes.state_dict(), mesh)
        plan.check()
        return plan

    plan = check_takes_less(1, planned)
    params = [row for row in plan.rows if row.name.startswith('target/')]
    assert sum(row.num_bytes for row in params) == 4 * XXL_PARAMETERS
    assert plan.num_bytes == 3 * 4 * XXL_PARAMETERS + 8  # parameters and two moments; step and count
    for row in plan.rows:
        shard = NamedSharding(mesh, row.spec).shard_shape(row.shape)
        assert row.bytes_per_device == int(np.prod(shard)) * row.dtype.itemsize, row.name
    assert plan.num_bytes / ways < plan.bytes_per_device < 1.01 * plan.num_bytes / ways
