import inspect
import re

import pytest

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.data import DatasetConfig, TaskRegistry

GIVEN = {
    'mixture_or_task_name': 'pydoc_span_corruption',
    'task_feature_lengths': {'inputs': 64, 'targets': 32},
    'split': 'train',
    'batch_size': 8,
    'shuffle': True,
    'seed': 0,
}


def test_fields_and_defaults_are_those_of_t5x():
    parameters = inspect.signature(DatasetConfig).parameters
    assert {name: p.default for name, p in parameters.items() if p.default is not p.empty} == {
        'use_cached': False,
        'pack': False,
        'use_custom_packing_ops': False,
        'module': None,
        'use_memory_cache': True,
        'trim_output_features': True,
        'runtime_preprocessors': None,
        'num_prefetch_threads': None,
        'num_workers': 0,
    }
    assert [name for name, p in parameters.items() if p.default is p.empty] == list(GIVEN)


@pytest.mark.parametrize(
    'changed, message',
    [
        ({'batch_size': 0}, 'batch_size=0: a whole number above 0'),
        ({'batch_size': 8.0}, r'batch_size=8\.0: a whole number'),
        ({'task_feature_lengths': {'inputs': 0, 'targets': -3}}, r"\['inputs'\]=0.*\n.*\['targets'\]=-3"),
        ({'task_feature_lengths': {'inputs': None, 'targets': 3}}, r"\['inputs'\]=None"),
        ({'seed': -1}, 'seed=-1: a whole number from 0'),
        ({'seed': 0.5}, r'seed=0\.5: a whole number from 0'),
        ({'use_custom_packing_ops': True}, 'use_custom_packing_ops=True: rows are packed by Grain'),
        ({'runtime_preprocessors': [len]}, 'runtime_preprocessors=.*: all preprocessors belong to the task'),
        ({'batch_size': 0, 'seed': -1}, '2 of its values.*\n  batch_size=0.*\n  seed=-1'),
    ],
)
def test_values_that_cannot_be_are_errors(changed, message):
    with pytest.raises(errors.DataError, match=message):
        DatasetConfig(**GIVEN | changed)


@pytest.mark.parametrize('changed', [{'use_cached': True}, {'num_prefetch_threads': 4}, {'num_workers': 2}])
def test_values_without_effect_are_warned_about(changed):
    ((name, value),) = changed.items()
    with pytest.warns(UserWarning, match=rf'pydoc_span_corruption:\n  {name}={value}') as caught:
        DatasetConfig(**GIVEN | changed)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_lengths_of_unknown_features_are_errors():
    cfg = DatasetConfig(**GIVEN | {'task_feature_lengths': {'inputs': 64, 'target': 32, 'x': 1}})
    with pytest.raises(errors.DataError, match=r"2 features.*inputs, targets.*\n  target \(did you mean 'targets'\?\)"):
        cfg.resolve_task()


def test_module_registers_its_tasks(tmp_path, monkeypatch):
    (tmp_path / 'my_notes_tasks.py').write_text(
        'from t5x_pjit_recipes import data\n'
        "source = data.SequenceSource({'train': ['some text']})\n"
        "data.TaskRegistry.add('my_notes', source, data.BYTE_FEATURES, data.SPAN_CORRUPTION)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cfg = DatasetConfig(**GIVEN | {'mixture_or_task_name': 'my_notes', 'module': 'my_notes_tasks'})
    try:
        assert cfg.resolve_task().name == 'my_notes'
    finally:
        TaskRegistry.remove('my_notes')


def test_absent_module_is_an_error():
    cfg = DatasetConfig(**GIVEN | {'module': 'no.such.tasks'})
    with pytest.raises(errors.DataError, match=re.escape("module 'no.such.tasks'")):
        cfg.resolve_task()
