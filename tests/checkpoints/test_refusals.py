"""A checkpoint that cannot be restored is refused before its arrays are read, with everything that is wrong."""

import json
import tarfile
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.checkpoints import OrbaxCheckpointManagerInterface, matching, stored
from t5x_pjit_recipes.layout import paths

from .doubles import Partitioner, State, assert_same, make_manager, make_tree, save

GOLDENS = Path(__file__).parents[1] / 'goldens'


@pytest.fixture
def saved(tmp_path):
    """A model directory with the steps 1, 2 and 3."""
    for step in (1, 2, 3):
        save(tmp_path, State(make_tree(step)))
    return tmp_path


def another_model():
    """The tree with one leaf renamed, one of another shape, one that is an integer, and one more."""
    tree = make_tree()
    tree['target']['mlp'] = {'wi_0': tree['target']['mlp']['wi'], 'scale': jnp.ones(17, jnp.bfloat16)}
    tree['state']['param_states']['count'] = jnp.ones((), jnp.float32)
    return tree


def test_all_differences_are_listed_at_once(saved):
    with pytest.raises(errors.CheckpointError) as raised:
        make_manager(saved, State(another_model())).restore()
    message = str(raised.value)
    assert f'Cannot restore {saved}/checkpoint_3 ' in message
    assert message.endswith(
        '1 missing in the checkpoint:\n'
        "  target/mlp/wi_0 (8, 16) float32 (did you mean 'target/mlp/wi'?)\n"
        '1 left over in the checkpoint:\n'
        '  target/mlp/wi (8, 16) float32\n'
        '2 of another shape or kind:\n'
        '  state/param_states/count () int32 in the checkpoint, () float32 in the train state\n'
        '  target/mlp/scale (16,) bfloat16 in the checkpoint, (17,) bfloat16 in the train state'
    )


class Stateless(State):
    """The train state of an optimizer that keeps nothing but the step."""

    param_states = ()


def test_an_optimizer_without_state_does_not_drop_that_of_another_in_silence(saved):
    tree = make_tree()
    wanted = Stateless({'target': tree['target'], 'state': {'step': tree['state']['step']}})
    manager = OrbaxCheckpointManagerInterface(saved, wanted, Partitioner())
    with pytest.raises(errors.CheckpointError, match=r'5 left over in the checkpoint:\n  state/param_states/count'):
        manager.restore()


def test_differences_are_found_without_reading_an_array(saved, monkeypatch):
    monkeypatch.delattr(stored, 'read_arrays')
    with pytest.raises(errors.CheckpointError, match='target/mlp/wi_0'):
        make_manager(saved, State(another_model())).restore()


def test_at_most_ten_of_each_are_listed():
    leaf = jax.ShapeDtypeStruct((2,), jnp.float32)
    differences = matching.compare({f'old{i}': leaf for i in range(12)}, {f'new{i}': leaf for i in range(14)})
    lines = str(differences).splitlines()
    assert len(lines) == 2 * (1 + 10 + 1)
    assert [line for line in lines if 'more' in line] == ['  and 4 more', '  and 2 more']


def test_a_fallback_fills_up_what_is_missing_and_a_warning_says_so(saved):
    tree = make_tree()
    tree['target']['head'] = jnp.ones((4, 2), jnp.float32)
    del tree['target']['embedding']
    fallback = jax.tree.map(lambda x: jnp.zeros_like(x) + 9, tree)
    with pytest.warns(UserWarning) as warned:
        restored = make_manager(saved, State(tree)).restore(fallback_state=fallback)
    message = str(warned.list[0].message)
    assert 'target/head (4, 2)' in message
    assert 'target/embedding (12, 4)' in message
    tree['target']['head'] = fallback['target']['head']
    assert_same(restored, State(tree))


def test_a_fallback_mends_no_shapes(saved):
    tree = another_model()
    with pytest.raises(errors.CheckpointError, match=r'target/mlp/scale \(16,\) bfloat16 in the checkpoint, \(17,\)'):
        make_manager(saved, State(tree)).restore(fallback_state=tree)


def test_transformations_rename_double_and_replace_leaves_before_they_are_read(saved):
    partitioner = Partitioner()
    tree = make_tree()
    wi, embedding = tree['target']['mlp']['wi'], tree['target']['embedding']
    wanted = State({**tree, 'target': {'mlp': {'wi_0': wi, 'wi_1': wi}, 'embedding': embedding}})

    def rename(stored_tree, target):
        assert set(target['target']['mlp']) == {'wi_0', 'wi_1'}
        old = stored_tree['target']['mlp']['wi']
        assert isinstance(old, stored.StoredLeaf)
        assert (old.name, old.shape, old.dtype) == ('target/mlp/wi', (8, 16), np.float32)
        new = {'mlp': {'wi_0': old, 'wi_1': old}, 'embedding': np.zeros((12, 4), 'f4')}
        return {**stored_tree, 'target': new}

    restored = make_manager(saved, wanted, partitioner).restore(state_transformation_fns=[rename])
    expected = {**wanted.tree, 'target': {**wanted.tree['target'], 'embedding': jnp.zeros((12, 4))}}
    assert_same(restored, State(expected))
    assert restored.tree['target']['embedding'].sharding.spec == jax.sharding.PartitionSpec('model')
    donated = jax.jit(lambda t: jax.tree.map(jnp.negative, t), donate_argnums=0)(restored.tree['target'])
    np.testing.assert_array_equal(donated['mlp']['wi_1'], -wi)


@pytest.mark.parametrize(
    ('arguments', 'pattern'),
    [
        ({'step': 7}, r'checkpoint_7: there is no such directory. \S+ holds other steps 1, 2, 3\.'),
        ({'step': 2, 'path': '/x'}, "step=2 and path='/x' at once"),
        ({'path': '{saved}'}, r'holds steps 1, 2, 3. Name one of them: \S+/checkpoint_3$'),
        ({'path': '{saved}/none'}, 'none: there is no such directory'),
    ],
)
def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(saved, arguments, pattern):
    arguments = {k: v.format(saved=saved) if isinstance(v, str) else v for k, v in arguments.items()}
    with pytest.raises(errors.CheckpointError, match=pattern):
        make_manager(saved, State(make_tree())).restore(**arguments)


def test_an_empty_directory_has_no_latest_step(tmp_path):
    with pytest.raises(errors.CheckpointError, match=f'{tmp_path} holds no steps'):
        make_manager(tmp_path, State(make_tree())).restore()


def lose_metadata(directory):
    (directory / 'state/_METADATA').unlink()


def cut_metadata(directory):
    (directory / 'state/_METADATA').write_text('{"tree_metadata": ')


@pytest.mark.parametrize('harm', [lose_metadata, cut_metadata])
def test_a_damaged_checkpoint_is_named_with_those_that_are_whole(saved, harm):
    harm(saved / 'checkpoint_3')
    manager = make_manager(saved, State(make_tree()))
    with pytest.raises(errors.CheckpointError, match=r'checkpoint_3: .* holds other steps 1, 2\.'):
        manager.restore()
    assert_same(manager.restore(step=2), State(make_tree(2)))


def test_other_formats_are_refused_by_name(tmp_path):
    (tmp_path / 'checkpoint_5').mkdir()
    (tmp_path / 'checkpoint_5/checkpoint').write_bytes(b'')
    (tmp_path / 'model.ckpt-7.index').write_bytes(b'')
    manager = make_manager(tmp_path, State(make_tree()))
    with pytest.raises(errors.CheckpointError, match="checkpoint_5: its file 'checkpoint' shows T5X's legacy format"):
        manager.restore()
    with pytest.raises(errors.CheckpointError, match=r'model.ckpt-7: model.ckpt-7.index .* TensorFlow wrote it'):
        manager.restore(path=tmp_path / 'model.ckpt-7')


def test_a_checkpoint_that_t5x_wrote_is_read_bit_for_bit(tmp_path):
    with tarfile.open(GOLDENS / 't5x_orbax_12.tar.xz') as archive:
        archive.extractall(tmp_path, filter='data')
    directory = epath.Path(tmp_path / 'checkpoint_12')
    as_struct = lambda _, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    template = State(paths.map_named(as_struct, stored.read_tree(directory)))
    restored = paths.named_leaves(make_manager(tmp_path, template, Partitioner(specs={})).restore().tree)
    described = {
        name: [list(leaf.shape), str(leaf.dtype), zlib.crc32(np.asarray(leaf).tobytes())]
        for name, leaf in restored.items()
    }
    assert described == json.loads((GOLDENS / 't5x_orbax_12.json').read_text())
