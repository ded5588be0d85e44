"""State dicts are flattened, renamed, merged and restored."""

import re

import jax
import numpy as np
import optax
import pytest
from flax.core import freeze
from flax.traverse_util import empty_node

from t5x_pjit_recipes import state_utils
from t5x_pjit_recipes.errors import StateError

TENSORSTORE = {'driver': 'zarr', 'kvstore': {'driver': 'file'}, 'metadata': {'shape': [2]}}


@pytest.mark.parametrize(
    ('value', 'is_leaf'),
    [
        (TENSORSTORE, True),
        (TENSORSTORE | {'dtype': 'float32'}, True),
        ({'driver': {'kernel': 1}}, False),
        ({}, False),
    ],
)
def test_a_tensorstore_spec_is_a_leaf(value: dict, is_leaf: bool) -> None:
    assert state_utils.tensorstore_leaf(('any',), value) is is_leaf


def test_flattening_stops_at_tensorstore_leaves() -> None:
    state = {'target': {'w': TENSORSTORE, 'driver': {'b': 1}}, 'empty': {}}
    flat = {'target/w': TENSORSTORE, 'target/driver/b': 1}
    assert state_utils.flatten_state_dict(state) == flat
    assert state_utils.flatten_state_dict(state, keep_empty_nodes=True) == flat | {'empty': empty_node}


def test_name_trees_hold_paths() -> None:
    state = {'a': {'b': 1, 'c': {}}, 'd': TENSORSTORE}
    assert state_utils.get_name_tree(state) == {'a': {'b': 'a/b'}, 'd': 'd'}
    assert state_utils.get_name_tree(state, keep_empty_nodes=True) == {'a': {'b': 'a/b', 'c': 'a/c'}, 'd': 'd'}


def test_intersecting_drops_and_names_what_the_other_lacks() -> None:
    with pytest.warns(UserWarning, match='2 leaves are dropped.*\n  a/c\n  d'):
        assert state_utils.intersect_state({'a': {'b': 1, 'c': 2}, 'd': 3}, {'a': {'b': 9}}) == {'a': {'b': 1}}


@pytest.mark.parametrize(('overwrite', 'b'), [(False, 1), (True, 7)])
def test_merging_adds_and_names_what_is_missing(overwrite: bool, b: int) -> None:
    with pytest.warns(UserWarning, match='taken from scratch:\n(?s:.*)a/c'):
        merged = state_utils.merge_state({'a': {'b': 1}}, {'a': {'b': 7, 'c': 8}}, overwrite=overwrite)
    assert merged == {'a': {'b': b, 'c': 8}}


OLD = {'dec': {'wi': 1, 'wo': 2}, 'step': 3}


@pytest.mark.parametrize(
    ('new', 'rules', 'result'),
    [
        ({'dec': {'wi': 0, 'wo': 0}, 'step': 0}, [], OLD),
        ({'d': {'wi': 0, 'wo': 0}, 'step': 0}, [(r'd/(.*)', r'dec/\1')], {'d': {'wi': 1, 'wo': 2}, 'step': 3}),
        ({'x': 0, 'y': 0}, [(re.compile('[xy]'), 'dec/wi')], {'x': 1, 'y': 1, 'dec': {'wo': 2}, 'step': 3}),
        ({'dec': {'wi': 0, 'wo': 0}, 'step': 0}, [('dec/wi', None)], {'dec': {'wo': 2}, 'step': 3}),
        ({'dec': {'wi': 0}, 'x': 0}, [('x', 'dec/wi')], {'dec': {'wi': 1, 'wo': 2}, 'x': 1, 'step': 3}),
        ({'a': 0, 'b': 0}, [('a', 'step'), ('.', 'dec/wo')], {'a': 3, 'b': 2, 'dec': {'wi': 1}}),
    ],
)
def test_assignment_maps_rename(new: dict, rules: list, result: dict) -> None:
    assert state_utils.apply_assignment_map(OLD, new, rules) == result


def test_a_leaf_without_a_source_is_named_and_stays_absent() -> None:
    with pytest.warns(UserWarning, match='absent from the checkpoint(?s:.*)  new'):
        assert state_utils.apply_assignment_map(OLD, {'new': 0}, []) == OLD


def test_an_assignment_from_nowhere_lists_what_there_is() -> None:
    with pytest.raises(StateError, match=r"x from dec/wy \(did you mean 'dec/wo'\?\)(?s:.*)dec/wi\n  dec/wo\n  step"):
        state_utils.apply_assignment_map(OLD, {'x': 0}, [('x', 'dec/wy')])


def test_an_unused_rule_is_an_error_unless_allowed() -> None:
    rules = [('step', 'step'), ('nothing', 'step'), ('step', 'step')]
    with pytest.raises(StateError, match="2 of 3(?s:.*)rule 1: \\('nothing'(?s:.*)rule 2"):
        state_utils.apply_assignment_map(OLD, {'step': 0}, rules)
    assert state_utils.apply_assignment_map(OLD, {'step': 0}, rules, require_all_rules_match=False) == OLD


def test_resuming_renames_nothing() -> None:
    assert state_utils.apply_assignment_map(OLD, {'x': 0}, [('x', None)], is_resuming=True) is OLD


REFERENCE = {'target': freeze({'w': np.zeros((2, 3))}), 'state': optax.adam(0.1).init({'w': np.zeros((2, 3))})}
STATE_DICT = {
    'target': {'w': np.ones((2, 3))},
    'state': {'0': {'count': 4, 'mu': {'w': np.ones((2, 3))}, 'nu': {'w': None}}},
}


def test_restoring_keeps_containers_and_takes_any_leaf() -> None:
    restored = state_utils.restore_like(REFERENCE, STATE_DICT)
    assert jax.tree.structure(restored['target']) == jax.tree.structure(REFERENCE['target'])
    scaled, empty = restored['state']
    assert (scaled.count, scaled.nu, empty) == (4, {'w': None}, optax.EmptyState())
    assert scaled.mu['w'] is STATE_DICT['state']['0']['mu']['w']


def test_every_absent_or_reshaped_leaf_is_named() -> None:
    wrong = {'target': {'w': np.ones((3, 2))}, 'state': {'0': STATE_DICT['state']['0'] | {'mu': {}}}}
    with pytest.raises(
        StateError, match=r'target/w has shape \(2, 3\) and the state dict has \(3, 2\)\n  state/0/mu/w is absent'
    ):
        state_utils.restore_like(REFERENCE, wrong)


def test_all_that_is_left_over_is_named_in_one_warning() -> None:
    extra = STATE_DICT | {'target': {'w': np.ones((2, 3)), 'x': 1, 'y': 2}}
    with pytest.warns(UserWarning, match='2 leaves are left over.*\n  target/x\n  target/y') as warned:
        assert set(state_utils.restore_like(REFERENCE, extra)['target']) == {'w'}
    assert len(warned) == 1


def test_what_the_reference_holds_as_none_may_be_absent() -> None:
    assert state_utils.restore_like({'a': {'b': None, 'c': 0}}, {'a': {'c': 1}}) == {'a': {'b': None, 'c': 1}}
