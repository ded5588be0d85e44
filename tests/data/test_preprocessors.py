import grain
import numpy as np
import pytest

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.data import BYTE_FEATURES, ByteVocabulary, Feature, preprocessors

VOCABULARY = ByteVocabulary()
NO_EOS = {name: Feature(VOCABULARY, add_eos=False) for name in BYTE_FEATURES}


def run(examples, *steps, features=BYTE_FEATURES, lengths=None, seed=0):
    dataset = grain.MapDataset.source(examples).seed(seed)
    for step in steps:
        dataset = step(dataset, features, lengths or {'inputs': 8, 'targets': 8})
    return [{name: np.asarray(ids).tolist() for name, ids in dataset[i].items()} for i in range(len(dataset))]


def test_rekey_keeps_what_it_names():
    assert run([{'text': 'ab', 'id': 7}], preprocessors.rekey(targets='text', inputs='id')) == [
        {'targets': 'ab', 'inputs': 7}
    ]


def test_map_examples_applies_a_function():
    assert run([{'x': 1}, {'x': 2}], preprocessors.map_examples(lambda e: {'x': e['x'] * 10})) == [{'x': 10}, {'x': 20}]


def test_tokenize_encodes_text_and_leaves_ids():
    assert run([{'inputs': 'ab', 'targets': [5, 6], 'id': 7}], preprocessors.tokenize) == [
        {'inputs': [100, 101], 'targets': [5, 6]}
    ]


def test_tokenizing_nothing_is_an_error():
    with pytest.raises(errors.DataError, match='example that has text: the features of the task are inputs, targets'):
        run([{'text': 'a'}], preprocessors.tokenize)


@pytest.mark.parametrize(
    'step, features, targets',
    [
        (preprocessors.append_eos, BYTE_FEATURES, [5, 6, 7, 8, 1]),
        (preprocessors.append_eos_after_trim, BYTE_FEATURES, [5, 6, 1]),
        (preprocessors.append_eos_after_trim, NO_EOS, [5, 6, 7, 8]),
    ],
)
def test_eos_is_appended_where_it_is_wanted(step, features, targets):
    found = run([{'targets': np.array([5, 6, 7, 8])}], step, features=features, lengths={'inputs': 3, 'targets': 3})
    assert found == [{'targets': targets}]


def test_language_model_rows_join_examples_at_eos():
    rows = run([{'text': 'abcd'}, {'text': 'efg'}, {'text': ''}], *preprocessors.LANGUAGE_MODEL, lengths={'targets': 4})
    assert [VOCABULARY.encode('abcd').tolist(), [1, 104, 105, 106], [1, 1]] == [row['targets'] for row in rows]


def test_span_corruption_gives_full_rows_but_the_last():
    texts = [{'text': 'some text of a few words'}] * 20
    rows = run(texts, *preprocessors.SPAN_CORRUPTION, lengths={'inputs': 32, 'targets': 9})
    assert {len(row['inputs']) for row in rows[:-1]} == {32}
    assert all(row['inputs'][-1] == row['targets'][-1] == VOCABULARY.eos_id for row in rows)
    # 34 raw tokens make a row of 31 tokens and sentinels: 5 of them are noise, in 2 spans.
    assert len(rows) == -(-20 * 24 // 34)


def test_span_corruption_depends_on_seed_and_index():
    texts = [{'text': 'the same thirty-four bytes of text'}] * 3
    step = {'lengths': {'inputs': 32, 'targets': 9}}
    rows = run(texts, *preprocessors.SPAN_CORRUPTION, **step)
    assert rows == run(texts, *preprocessors.SPAN_CORRUPTION, **step)
    assert rows != run(texts, *preprocessors.SPAN_CORRUPTION, **step, seed=1)
    assert len({tuple(row['inputs']) for row in rows}) == 3


@pytest.mark.parametrize(
    'lengths, vocabulary, message',
    [
        ({'inputs': 512, 'targets': 64}, VOCABULARY, '568 raw tokens into 511 inputs and 63 targets .*need 113'),
        ({'inputs': 512, 'targets': 114}, ByteVocabulary(10), '28 spans .* has 10 sentinels'),
        ({'inputs': 2, 'targets': 8}, VOCABULARY, 'inputs of 2 tokens.*need 3'),
    ],
)
def test_span_corruption_without_room_is_an_error(lengths, vocabulary, message):
    features = {name: Feature(vocabulary) for name in lengths}
    with pytest.raises(errors.DataError, match=message):
        run([{'text': 'abc'}], *preprocessors.SPAN_CORRUPTION, features=features, lengths=lengths)
