"""What is restored is what was saved, wherever it is restored to and whatever happened in between."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes import checkpoints, errors
from t5x_pjit_recipes.layout import paths

from .doubles import SPECS, Numbers, Partitioner, State, assert_same, make_manager, make_tree, save


@pytest.fixture(scope='module')
def state():
    return Partitioner().place(State(make_tree()))


@pytest.fixture(scope='module')
def saved(tmp_path_factory, state):
    """A model directory with the steps 0 and 3."""
    directory = tmp_path_factory.mktemp('model')
    save(directory, State(make_tree(step=0, seed=1)))
    save(directory, state)
    return directory


@pytest.mark.parametrize(
    ('data', 'model', 'specs'),
    [
        (4, 2, SPECS),
        (2, 4, SPECS),
        (8, 1, {'target/mlp/wi': P(None, 'data'), 'state/param_states/mlp/wi': P('data')}),
        (1, 1, {}),
    ],
)
def test_restoring_onto_any_mesh_gives_equal_bits_laid_out_as_asked(saved, state, data, model, specs):
    partitioner = Partitioner(data, model, specs)
    restored = make_manager(saved, state, partitioner).restore()
    assert_same(restored, state)
    for name, leaf in paths.named_leaves(restored.tree).items():
        assert leaf.sharding.is_equivalent_to(NamedSharding(partitioner.mesh, specs.get(name, P())), leaf.ndim), name


def test_unplaced_states_and_python_numbers_are_saved_too(saved):
    state = State(make_tree(step=0, seed=1))
    assert_same(make_manager(saved, state).restore(step=0), state)


def test_no_step_means_the_latest_and_step_zero_counts(saved, tmp_path, state):
    assert int(make_manager(saved, state).restore().tree['state']['step']) == 3
    zero = State(make_tree(step=0))
    save(tmp_path, zero)
    assert checkpoints.latest_step(tmp_path) == 0
    assert int(make_manager(tmp_path, zero).restore().tree['state']['step']) == 0


def test_a_state_donated_right_after_save_is_saved_as_it_was(tmp_path):
    specs = {'target/big': P('data', 'model'), 'target/whole': P()}
    partitioner = Partitioner(specs=specs)
    make = lambda step: partitioner.place(
        State({'target': {n: np.full((256, 512), step, 'f4') for n in ('big', 'whole')}, 'state': {'step': step}})
    )
    update = jax.jit(lambda tree: jax.tree.map(lambda x: -x - 1, tree), donate_argnums=0)
    manager = make_manager(tmp_path, make(0), partitioner)
    for step in range(1, 6):
        state = make(step)
        manager.save(state)
        jax.block_until_ready(update(state.tree))
    manager.close()
    assert manager.all_steps() == [1, 2, 3, 4, 5]
    for step in manager.all_steps():
        assert_same(manager.restore(step=step), make(step))


def test_saving_a_step_twice_saves_it_once(tmp_path, state):
    manager = make_manager(tmp_path, state)
    assert manager.save(state)
    assert not manager.save(state)
    manager.close()
    assert not make_manager(tmp_path, state).save(state)
    assert checkpoints.all_steps(tmp_path) == [3]


@pytest.mark.parametrize(
    ('options', 'kept'),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({'keep': 2}, [5, 6]),
        ({'keep': 1, 'force_keep_period': 2}, [2, 4, 6]),
    ],
)
def test_keep_counts_the_latest(tmp_path, options, kept):
    make = lambda step: State({'target': {'w': np.ones(2, 'f4')}, 'state': {'step': step}})
    manager = make_manager(tmp_path, make(0), **options)
    for step in range(1, 7):
        manager.save(make(step))
    manager.close()
    assert manager.all_steps() == kept


@pytest.mark.parametrize(
    ('options', 'due'),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({'period': 2}, [0, 2, 4]),
        ({'period': None, 'checkpoint_steps': [1, 5]}, [1, 5]),
        ({'period': 3, 'checkpoint_steps': [1, 5]}, [0, 1, 3, 5]),
        ({'period': None}, []),
    ],
)
def test_steps_are_due_by_period_and_by_name(tmp_path, state, options, due):
    manager = make_manager(tmp_path, state, **options)
    assert [step for step in range(6) if manager.should_save(step)] == due


def test_a_step_that_is_not_due_is_saved_only_by_force(tmp_path, state):
    manager = make_manager(tmp_path, state, period=2)
    assert not manager.save(state, force=False)
    assert manager.save(state)
    manager.close()


def test_save_dtype_casts_floats_under_target_alone(tmp_path, state):
    save(tmp_path, state, save_dtype='bfloat16')
    cast = lambda x: x.astype(jnp.bfloat16)
    expected = State({**state.tree, 'target': jax.tree.map(cast, state.tree['target'])})
    assert_same(make_manager(tmp_path, expected).restore(), expected)


def test_restore_dtype_casts_floats_under_target_and_never_the_step(tmp_path):
    tree = make_tree(step=1_000_001)
    save(tmp_path, State(tree))
    expected = State({**tree, 'target': jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree['target'])})
    assert_same(make_manager(tmp_path, State(tree), restore_dtype='bfloat16').restore(), expected)


def test_the_dataset_goes_on_where_it_stood(tmp_path, state):
    iterator = Numbers(41)
    manager = make_manager(tmp_path, state, dataset_iterator=iterator)
    manager.save(state)
    iterator.position = 99
    manager.close()
    assert (tmp_path / 'checkpoint_3/dataset/train_ds-000-of-001').read_text() == '{"position": 41}'
    manager.restore()
    assert iterator.position == 41


def test_another_directory_moves_the_dataset_only_if_asked(tmp_path, state):
    save(tmp_path, state, dataset_iterator=Numbers(41))
    iterator = Numbers(5)
    manager = make_manager(tmp_path / 'other', state, dataset_iterator=iterator)
    manager.restore(path=tmp_path / 'checkpoint_3')
    assert iterator.position == 5
    manager.restore(path=tmp_path / 'checkpoint_3', restore_dataset=True)
    assert iterator.position == 41


def test_a_position_that_was_not_saved_is_told_or_refused(saved, state):
    manager = make_manager(saved, state, dataset_iterator=Numbers())
    with pytest.warns(UserWarning, match='from its start: .*checkpoint_3 has no dataset/train_ds-000-of-001'):
        manager.restore()
    with pytest.raises(errors.CheckpointError, match='checkpoint_3 has no dataset/train_ds-000-of-001'):
        manager.restore(restore_dataset=True)


def test_a_position_that_json_cannot_hold_is_refused_before_anything_is_saved(tmp_path, state):
    manager = make_manager(tmp_path, state, dataset_iterator=Numbers(object()))
    with pytest.raises(errors.DataError, match='position of Numbers: .* dict that JSON cannot hold'):
        manager.save(state)
    assert manager.all_steps() == []


def test_transformations_on_saving_see_names_and_change_what_is_saved(tmp_path, state):
    seen = []

    def drop(state_dict, infos):
        seen.append(infos['target']['embedding'])
        return {**state_dict, 'target': {'embedding': state_dict['target']['embedding']}}, infos

    manager = make_manager(tmp_path, state)
    manager.save(state, state_transformation_fns=[drop])
    manager.close()
    assert seen == [checkpoints.StoredLeaf('target/embedding', (12, 4), np.dtype('float32'))]
    expected = State({**state.tree, 'target': {'embedding': state.tree['target']['embedding']}})
    assert_same(make_manager(tmp_path, expected).restore(), expected)


def test_an_inference_state_reads_the_params_and_the_step_alone(saved, state):
    wanted = State({'target': state.tree['target'], 'state': {'step': state.tree['state']['step']}})
    assert_same(make_manager(saved, wanted).restore(), wanted)


def test_restoring_touches_nothing_on_disk(tmp_path, state):
    (tmp_path / 'checkpoint_4.orbax-checkpoint-tmp-1').mkdir()
    save(tmp_path / 'model', state)
    manager = make_manager(tmp_path, state)
    manager.restore(path=tmp_path / 'model/checkpoint_3')
    manager.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['checkpoint_4.orbax-checkpoint-tmp-1', 'model']


def test_what_a_killed_save_left_does_not_count_and_goes_with_the_next_save(tmp_path, state):
    left = tmp_path / 'checkpoint_9.orbax-checkpoint-tmp-1'
    (left / 'state').mkdir(parents=True)
    assert checkpoints.all_steps(tmp_path) == []
    save(tmp_path, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['checkpoint_3']


@pytest.mark.parametrize(
    ('option', 'value'),
    [
        ('keep_dataset_checkpoints', 2),
        ('metric_name_to_monitor', 'train/loss'),
        ('metric_mode', 'min'),
        ('keep_checkpoints_without_metrics', False),
        ('keep', 0),
        ('period', 0),
        ('force_keep_period', -1),
        ('checkpoint_steps', [-5]),
    ],
)
def test_options_that_cannot_be_honoured_are_named(tmp_path, state, option, value):
    with pytest.raises(errors.ConfigError, match=rf'{option}={value!r}'.replace('[', r'\[')):
        make_manager(tmp_path, state, **{option: value})


def test_lazy_parameters_are_refused(saved, state):
    with pytest.raises(errors.ConfigError, match='lazy_parameters=True'):
        make_manager(saved, state).restore(lazy_parameters=True)
