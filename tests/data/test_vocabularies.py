import numpy as np
import pytest

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.data.vocabularies import ByteVocabulary

VOCABULARY = ByteVocabulary()


@pytest.mark.parametrize('text', ['', 'hello', 'naïve — 漢字 🙂', 'a\x00b\r\n\t'])
def test_decoding_undoes_encoding(text):
    ids = VOCABULARY.encode(text)
    assert ids.dtype == np.int32
    assert len(ids) == len(text.encode())
    assert VOCABULARY.decode(ids) == text


def test_ids_are_those_of_byt5():
    assert VOCABULARY.encode('\x00a').tolist() == [3, 100]
    assert (VOCABULARY.pad_id, VOCABULARY.eos_id, VOCABULARY.unk_id) == (0, 1, 2)
    assert VOCABULARY.vocab_size == 384
    assert ByteVocabulary(extra_ids=0).vocab_size == 259


@pytest.mark.parametrize(
    'ids, text',
    [
        ([100, 101, 1, 102], 'ab'),
        ([0, 100, 2, 101, 0], 'ab'),
        ([383, 100, 382, 259], '<extra_id_0>a<extra_id_1><extra_id_124>'),
        ([100, 384, 9999, -1], 'a'),
        ([3 + 0xC3, 100], '\ufffda'),
        (np.array([100, 101], np.int64), 'ab'),
    ],
)
def test_decoding_stops_at_eos_and_shows_sentinels(ids, text):
    assert VOCABULARY.decode(ids) == text


def test_vocabularies_are_equal_by_value():
    assert ByteVocabulary(100) == ByteVocabulary(100) != VOCABULARY


def test_negative_number_of_sentinels_is_an_error():
    with pytest.raises(errors.DataError, match='extra_ids=-1'):
        ByteVocabulary(extra_ids=-1)
