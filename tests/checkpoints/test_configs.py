"""Configs say only what can be done, and the checkpoint that is chosen is the one that T5X would choose."""

import jax
import numpy as np
import pytest

from t5x_pjit_recipes import checkpoints, errors
from t5x_pjit_recipes.checkpoints import CheckpointConfig, RestoreCheckpointConfig, SaveCheckpointConfig

from .doubles import Numbers, Partitioner, State, assert_same, make_tree, save, shapes


def test_defaults_are_those_of_t5x():
    assert vars(SaveCheckpointConfig()) == {
        'dtype': 'float32',
        'period': None,
        'checkpoint_steps': None,
        'keep': None,
        'keep_dataset_checkpoints': None,
        'save_dataset': False,
        'checkpointer_cls': None,
        'state_transformation_fns': (),
        'checkpoint_manager_cls': checkpoints.OrbaxCheckpointManagerInterface,
    }
    assert vars(RestoreCheckpointConfig('/model')) == {
        'path': '/model',
        'mode': 'latest',
        'assignment_map': None,
        'strict': True,
        'fallback_to_scratch': False,
        'dtype': None,
        'restore_dataset': False,
        'checkpointer_cls': None,
        'state_transformation_fns': (),
        'checkpoint_manager_cls': checkpoints.OrbaxCheckpointManagerInterface,
    }


@pytest.mark.parametrize(
    ('make', 'pattern'),
    [
        (lambda: SaveCheckpointConfig(dtype='bfloat'), r"dtype='bfloat' \(did you mean 'bfloat16'\?\)"),
        (lambda: SaveCheckpointConfig(dtype='float16'), "dtype='float16'"),
        (lambda: SaveCheckpointConfig(period=0), 'period=0'),
        (lambda: SaveCheckpointConfig(period='100'), "period='100'"),
        (lambda: SaveCheckpointConfig(keep=True), 'keep=True'),
        (lambda: SaveCheckpointConfig(checkpoint_steps=[10, 2.5]), r'\[2.5\] are not steps'),
        (lambda: SaveCheckpointConfig(keep_dataset_checkpoints=3), 'keep_dataset_checkpoints=3'),
        (lambda: SaveCheckpointConfig(checkpointer_cls=dict), 'checkpointer_cls='),
        (lambda: RestoreCheckpointConfig('/model', mode='newest'), "mode='newest'.*'specific', 'latest', 'all'"),
        (lambda: RestoreCheckpointConfig('/model', dtype='float64'), "dtype='float64'"),
        (lambda: RestoreCheckpointConfig('/model', checkpointer_cls=dict), 'checkpointer_cls='),
        (lambda: CheckpointConfig(save=SaveCheckpointConfig), r'save=.*@utils.SaveCheckpointConfig\(\)'),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_value(make, pattern):
    with pytest.raises(errors.ConfigError, match=pattern):
        make()


@pytest.fixture(scope='module')
def model_dirs(tmp_path_factory):
    """An empty directory, one with the steps 0 and 10, and one with step 7."""
    root = tmp_path_factory.mktemp('models')
    (root / 'empty').mkdir()
    for name, step in (('a', 0), ('a', 10), ('b', 7)):
        save(root / name, State(make_tree(step)), dataset_iterator=Numbers(step))
    return root


@pytest.mark.parametrize(
    ('cfgs', 'chosen', 'found'),
    [
        ([], None, []),
        ([{'path': []}], None, []),
        ([{'path': 'empty'}], None, []),
        ([{'path': 'a'}], 0, ['a/checkpoint_10']),
        ([{'path': 'a', 'mode': 'all'}], 0, ['a/checkpoint_0', 'a/checkpoint_10']),
        ([{'path': ['empty', 'b', 'a'], 'mode': 'all'}], 0, ['b/checkpoint_7']),
        ([{'path': 'empty'}, {'path': 'b'}, {'path': 'a'}], 1, ['b/checkpoint_7']),
        ([{'path': 'never/seen', 'mode': 'specific'}, {'path': 'a'}], 0, ['never/seen']),
    ],
)
def test_the_first_config_that_has_something_counts(model_dirs, cfgs, chosen, found):
    whole = lambda path: [str(model_dirs / p) for p in path] if isinstance(path, list) else str(model_dirs / path)
    cfgs = [RestoreCheckpointConfig(**{**cfg, 'path': whole(cfg['path'])}) for cfg in cfgs]
    expected = None if chosen is None else cfgs[chosen]
    assert checkpoints.get_first_valid_restore_config_and_paths(cfgs) == (expected, whole(found))


def test_directories_that_cannot_be_searched_are_named(tmp_path):
    with pytest.raises(errors.CheckpointError, match=f'{tmp_path}/none.: there is no such directory'):
        checkpoints.get_first_valid_restore_config_and_paths([RestoreCheckpointConfig(f'{tmp_path}/none')])
    (tmp_path / 'checkpoint').write_text('model_checkpoint_path: "model.ckpt-1"')
    with pytest.raises(errors.CheckpointError, match=f"{tmp_path}.: its file 'checkpoint' shows that TensorFlow"):
        checkpoints.get_first_valid_restore_config_and_paths([RestoreCheckpointConfig(str(tmp_path))])


def test_a_fallback_is_initialised_only_if_it_is_asked_for():
    key = jax.random.key(0)
    scratch = RestoreCheckpointConfig('/model', fallback_to_scratch=True, assignment_map=[('a', None)])
    init = lambda rng: {'rng': rng}
    assert checkpoints.get_fallback_state(None, init, key) is None
    assert checkpoints.get_fallback_state(RestoreCheckpointConfig('/model'), init, key) is None
    assert checkpoints.get_fallback_state(scratch, init, key) == {'rng': key}
    with pytest.raises(errors.ConfigError, match="'/model' with fallback_to_scratch=True: it needs init_rng"):
        checkpoints.get_fallback_state(scratch, init, None)
    bare = RestoreCheckpointConfig('/model', fallback_to_scratch=True)
    with pytest.raises(errors.ConfigError, match='it needs state_transformation_fns. '):
        checkpoints.get_fallback_state(bare, init, key)


class Initializer:
    def __init__(self, tree):
        self.tree = tree
        self.global_train_state_shape = shapes(State(tree))

    def from_scratch(self, rng):
        return State(jax.tree.map(lambda x: np.zeros_like(x) - 1, self.tree))


def restore(tree, *args, **kwargs):
    return checkpoints.create_checkpoint_manager_and_restore(Initializer(tree), Partitioner(), *args, **kwargs)


def test_nothing_to_restore_is_none_and_never_an_empty_list(tmp_path):
    save_cfg = SaveCheckpointConfig(period=5, checkpoint_steps=[3], dtype='bfloat16', keep=1)
    restore_cfg = RestoreCheckpointConfig([])
    for cfg in (None, restore_cfg):
        state, manager = restore(make_tree(), cfg, None, None, save_checkpoint_cfg=save_cfg, model_dir=str(tmp_path))
        assert state is None
        assert [step for step in range(11) if manager.should_save(step)] == [0, 3, 5, 10]
    manager.save(State(make_tree(step=3)))
    manager.save(State(make_tree(step=5)))
    manager.close()
    assert manager.all_steps() == [5]


@pytest.mark.parametrize(('restore_dataset', 'position'), [(False, 99), (True, 10)])
def test_a_run_starts_from_another_models_checkpoint(model_dirs, tmp_path, restore_dataset, position):
    iterator = Numbers(99)
    state, manager = restore(
        make_tree(),
        RestoreCheckpointConfig(str(model_dirs / 'a'), restore_dataset=restore_dataset),
        str(model_dirs / 'a/checkpoint_10'),
        None,
        save_checkpoint_cfg=SaveCheckpointConfig(save_dataset=True),
        model_dir=str(tmp_path),
        ds_iter=iterator,
    )
    assert_same(state, State(make_tree(10)))
    assert manager.directory == tmp_path
    assert iterator.position == position


def test_a_run_resumes_with_the_position_of_its_data(model_dirs):
    iterator = Numbers(99)
    cfg = RestoreCheckpointConfig(str(model_dirs / 'a'))
    path = str(model_dirs / 'a/checkpoint_0')
    restore(make_tree(), cfg, path, None, SaveCheckpointConfig(save_dataset=True), str(model_dirs / 'a'), iterator)
    assert iterator.position == 0


def test_a_step_given_as_the_path_leaves_its_model_directory_as_the_managers(model_dirs):
    cfg = RestoreCheckpointConfig(str(model_dirs / 'a/checkpoint_0'), mode='specific', dtype='bfloat16')
    state, manager = restore(make_tree(), cfg, cfg.path, None)
    assert state.tree['target']['embedding'].dtype == 'bfloat16'
    assert int(state.tree['state']['step']) == 0
    assert manager.directory == model_dirs / 'a'


def test_an_assignment_map_renames_and_scratch_fills_up(model_dirs):
    tree = make_tree()
    tree['target'] = {'tower': tree['target']['mlp'], 'embedding': tree['target']['embedding']}
    cfg = RestoreCheckpointConfig(
        str(model_dirs / 'a'),
        assignment_map=[(r'target/tower/(.*)', r'target/mlp/\1'), ('target/embedding', None)],
        fallback_to_scratch=True,
    )
    with pytest.warns(UserWarning, match=r'restored in part(.|\n)*target/embedding \(12, 4\) float32'):
        state, _ = restore(tree, cfg, str(model_dirs / 'a/checkpoint_10'), jax.random.key(0))
    expected = make_tree(10)
    expected['target'] = {'tower': expected['target']['mlp'], 'embedding': -np.ones((12, 4), 'f4')}
    assert_same(state, State(expected))


@pytest.mark.parametrize(
    ('kwargs', 'pattern'),
    [
        ({}, 'of 0 classes: no config'),
        (
            {
                'save_cfg': SaveCheckpointConfig(),
                'restore_cfg': RestoreCheckpointConfig('/a', checkpoint_manager_cls=dict),
            },
            'of 2 classes: SaveCheckpointConfig has .*RestoreCheckpointConfig has',
        ),
        ({'save_cfg': SaveCheckpointConfig()}, 'model_dir=None and no path'),
        ({'save_cfg': SaveCheckpointConfig(save_dataset=True), 'model_dir': '/a'}, 'save_dataset=True.*ds_iter=None'),
    ],
)
def test_configs_that_do_not_go_together_are_refused(kwargs, pattern):
    with pytest.raises(errors.ConfigError, match=pattern):
        checkpoints.create_orbax_checkpoint_manager(
            train_state=shapes(State(make_tree())), partitioner=Partitioner(), **kwargs
        )


def test_the_legacy_checkpointer_is_refused():
    with pytest.raises(errors.ConfigError, match='use_orbax=False'):
        restore(make_tree(), None, None, None, use_orbax=False)
