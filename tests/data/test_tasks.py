import pytest

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.data import BYTE_FEATURES, SequenceSource, TaskRegistry

SOURCE = SequenceSource({'train': ['a']})


@pytest.fixture
def registered():
    yield TaskRegistry.add('toy_task', SOURCE, BYTE_FEATURES)
    TaskRegistry.remove('toy_task')


def test_task_is_found_by_its_name(registered):
    assert TaskRegistry.get('toy_task') is registered
    assert registered.splits == ('train',)
    assert {'toy_task', 'pydoc_lm', 'pydoc_span_corruption'} <= set(TaskRegistry.names())


def test_unknown_task_lists_near_and_all_names(registered):
    with pytest.raises(errors.DataError, match="'toy_tsk'.*Near: 'toy_task'.*") as caught:
        TaskRegistry.get('toy_tsk')
    assert all(f'\n  {name}' in str(caught.value) for name in TaskRegistry.names())


def test_taken_name_is_an_error(registered):
    with pytest.raises(errors.DataError, match=r"'toy_task': the name is taken.*remove\('toy_task'\)"):
        TaskRegistry.add('toy_task', SOURCE, BYTE_FEATURES)
