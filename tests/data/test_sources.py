import re

import pytest

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.data.sources import SequenceSource, TextFileSource, is_held_out

TEXT = 'first line\r\nsecond line\n \t\n\n  indented\nlast ünïcode'


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'a.txt').write_bytes(TEXT.encode())
    (tmp_path / 'empty.txt').write_text('')
    (tmp_path / 'deep').mkdir()
    (tmp_path / 'deep' / 'b.txt').write_text('\n'.join(f'number {i}' for i in range(200)))
    return tmp_path


@pytest.mark.parametrize(
    'unit, examples',
    [
        ('line', ['first line', 'second line', '  indented', 'last ünïcode']),
        ('paragraph', ['first line\r\nsecond line', '  indented\nlast ünïcode']),
        ('file', [TEXT]),
    ],
)
def test_text_file_is_cut_into_units(folder, unit, examples):
    found = TextFileSource({'train': f'{folder}/*.txt'}, unit=unit).examples('train')
    assert [found[i] for i in range(len(found))] == examples
    assert found[-1] == examples[-1]


def test_several_globs_and_folders_make_one_split(folder):
    by_list = TextFileSource([f'{folder}/a.txt', f'{folder}/deep/*']).examples('train')
    by_stars = TextFileSource(f'{folder}/**/*.txt').examples('train')
    assert len(by_list) == 204
    assert list(by_list) == list(by_stars)


def test_held_out_examples_are_not_in_train(folder):
    source = TextFileSource(f'{folder}/deep/*.txt', held_out=0.2)
    train, validation = (set(source.examples(split)) for split in source.splits)
    assert source.splits == ('train', 'validation')
    assert train | validation == {f'number {i}' for i in range(200)}
    assert not train & validation
    assert 20 <= len(validation) <= 60


def test_nothing_is_read_before_it_is_asked_for(folder):
    source = TextFileSource({'train': f'{folder}/a.txt', 'test': f'{folder}/*.csv'})
    assert len(source.examples('train')) == 4
    with pytest.raises(errors.DataError, match=re.escape(f"{folder}/*.csv': 0 files match")):
        source.examples('test')


def test_split_without_examples_is_an_error(folder):
    with pytest.raises(errors.DataError, match=r"'train': 0 examples are in it \(splits: train\)"):
        TextFileSource(f'{folder}/empty.txt').examples('train')


def test_unknown_split_names_those_that_exist():
    source = SequenceSource({'train': ['a'], 'validation': ['b']})
    with pytest.raises(errors.DataError, match=r"'valdation' \(did you mean 'validation'\?\).* has train, validation"):
        source.examples('valdation')


def test_text_that_is_not_utf8_is_named_by_file_and_byte(tmp_path):
    (tmp_path / 'latin.txt').write_bytes(b'good\nna\xefve\n')
    examples = TextFileSource(f'{tmp_path}/latin.txt').examples('train')
    assert examples[0] == 'good'
    with pytest.raises(errors.DataError, match=r'latin.txt.*byte 7 is 0xef'):
        examples[1]


@pytest.mark.parametrize(
    'patterns, kwargs, message',
    [
        ('*.txt', {'unit': 'lines'}, r"unit='lines' \(did you mean 'line'\?\).*line, paragraph, file"),
        ('*.txt', {'held_out': 1.5}, r'hold out 1\.5'),
        ({'train': 'a', 'test': 'b'}, {'held_out': 0.1}, r'hold out 0\.1 with the splits train, test'),
    ],
)
def test_wrong_arguments_are_errors(patterns, kwargs, message):
    with pytest.raises(errors.DataError, match=message):
        TextFileSource(patterns, **kwargs)


def test_functions_of_a_sequence_source_are_called_once():
    calls = []
    source = SequenceSource({'train': lambda: calls.append(1) or ['a', 'b']})
    assert not calls
    assert source.examples('train') is source.examples('train')
    assert calls == [1]


def test_holding_out_is_stable():
    assert [is_held_out(key, 0.5) for key in ('a', 'b', 'c', b'a')] == [False, True, True, False]
