"""Vocabularies of Hugging Face's folders: T5's kind is read, others are refused."""

import json

import numpy as np
import pytest
import tokenizers

from t5x_pjit_recipes import data
from t5x_pjit_recipes.data import pydoc
from t5x_pjit_recipes.errors import DataError
from t5x_pjit_recipes.interop.vocabularies import HuggingFaceVocabulary, retokenize
from t5x_pjit_recipes.recipes import bloom

PIECES = ['▁', *'abcdefghijklmnopqrstuvwxyz.', '▁the', '▁of', 'ing']


def write_tokenizer(folder, special=('<pad>', '</s>', '<unk>'), sentinels=range(7, -1, -1)):
    """Writes a tokenizer of T5's kind: pieces with word boundaries, then the sentinels, the first one last."""
    pieces = [(token, 0.0) for token in special] + [(piece, -float(len(PIECES) - i)) for i, piece in enumerate(PIECES)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.add_special_tokens([*special, *(f'<extra_id_{n}>' for n in sentinels)])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f'$A {special[1]}', special_tokens=[(special[1], 1)]
    )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / 'tokenizer.json'))
    return folder


def test_a_t5_vocabulary_has_its_ids_where_the_pipeline_looks_for_them(tmp_path):
    vocabulary = HuggingFaceVocabulary(write_tokenizer(tmp_path))
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (0, 1, 2)
    assert (vocabulary.extra_ids, vocabulary.vocab_size) == (8, 3 + len(PIECES) + 8)
    ids = vocabulary.encode('the king of')
    assert ids.dtype == np.int32
    assert 1 not in ids
    assert vocabulary.decode([*ids, 1, 5]) == 'the king of'
    sentinel = vocabulary.vocab_size - 1
    ids = [sentinel, *vocabulary.encode('a'), sentinel - 1, 0]
    assert vocabulary.decode(ids) == '<extra_id_0> a<extra_id_1>'


def test_special_tokens_may_have_other_names(tmp_path):
    write_tokenizer(tmp_path, special=('[PAD]', '[END]', '<unk>'))
    (tmp_path / 'tokenizer_config.json').write_text(
        json.dumps({'pad_token': '[PAD]', 'eos_token': {'content': '[END]'}, 'unk_token': None})
    )
    vocabulary = HuggingFaceVocabulary(tmp_path)
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (0, 1, 2)


def test_texts_are_whole_whatever_the_file_says_of_truncation_and_padding(tmp_path):
    whole = HuggingFaceVocabulary(write_tokenizer(tmp_path)).encode('the king of')
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=20)
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    assert HuggingFaceVocabulary(tmp_path).encode('the king of').tolist() == whole.tolist()
    assert bloom.load_tokenizer(tmp_path).encode('the king of') == [*whole, 1]


@pytest.mark.parametrize('read', [HuggingFaceVocabulary, bloom.load_tokenizer])
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path, read):
    (tmp_path / 'tokenizer.json').write_text('{}')
    with pytest.raises(DataError, match=r"Cannot read '.*tokenizer\.json': "):
        read(tmp_path)


def test_two_of_one_folder_are_equal(tmp_path):
    write_tokenizer(tmp_path)
    assert HuggingFaceVocabulary(tmp_path) == HuggingFaceVocabulary(tmp_path)


def test_a_task_can_be_tokenized_otherwise(tmp_path):
    vocabulary = HuggingFaceVocabulary(write_tokenizer(tmp_path, sentinels=range(99, -1, -1)))
    task = retokenize('pydoc_span_corruption', vocabulary)
    cfg = data.DatasetConfig(task, {'inputs': 64, 'targets': 24}, 'train', 2, False, seed=0)
    batch = next(data.get_dataset(cfg, 0, 1, data.EncDecFeatureConverter))
    first = vocabulary.vocab_size - 1
    assert batch['decoder_target_tokens'][0, 0] == first
    assert first in batch['encoder_input_tokens'][0]
    assert data.TaskRegistry.get('pydoc_span_corruption').output_features == pydoc.BYTE_FEATURES


@pytest.mark.parametrize(
    ('written', 'message'),
    [
        ({'sentinels': range(8)}, r'8 of 8 sentinels: <extra_id_0> has id 34, and .* it would have 41'),
        ({'special': ('</s>', '<pad>', '<unk>')}, r'pad_token: its id is 1, and padding is 0 here'),
        ({'special': ('<pad>', '<end>', '<unk>')}, r'eos_token: it has none such as </s>'),
    ],
)
def test_a_vocabulary_of_another_kind_is_an_error(tmp_path, written, message):
    with pytest.raises(DataError, match=message):
        HuggingFaceVocabulary(write_tokenizer(tmp_path, **written))


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises(DataError, match='tokenizer.json.: there is no such file. For a ByT5 use data.ByteVocabulary'):
        HuggingFaceVocabulary(tmp_path)
