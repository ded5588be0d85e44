import numpy as np
import pytest

from t5x_pjit_recipes import data
from t5x_pjit_recipes.data import pydoc

LENGTHS = {'inputs': 128, 'targets': 40}


def test_held_out_text_does_not_occur_in_train():
    splits = {split: [text.split('\n\n') for text in texts] for split, texts in pydoc.topics().items()}
    train, validation = ({p for text in splits[split] for p in text} for split in ('train', 'validation'))
    assert not train & validation
    sizes = {split: sum(len(p) for text in texts for p in text) for split, texts in splits.items()}
    assert 0.02 < sizes['validation'] / sum(sizes.values()) < 0.25
    assert sizes['train'] > 100_000


@pytest.mark.parametrize('split', ['train', 'validation'])
def test_span_corruption_gives_full_rows_of_the_documentation(split):
    cfg = data.DatasetConfig('pydoc_span_corruption', LENGTHS, split, 8, False, 0)
    batch = next(data.get_dataset(cfg, 0, 1, data.EncDecFeatureConverter))
    assert batch['encoder_input_tokens'].all()
    assert batch['decoder_loss_weights'].mean() > 0.7
    merged = [merge(*row) for row in zip(batch['encoder_input_tokens'], batch['decoder_target_tokens'], strict=True)]
    assert ''.join(merged) in ''.join(pydoc.topics()[split])


def merge(inputs, targets):
    """Puts the text of each sentinel back into its place."""
    vocabulary = data.ByteVocabulary()
    text = vocabulary.decode(inputs)
    noise = vocabulary.decode(targets)
    for i in range(vocabulary.extra_ids - 1, -1, -1):
        mark = f'<extra_id_{i}>'
        if mark in noise:
            noise, cut = noise.split(mark)
            text = text.replace(mark, cut)
    return text


def test_language_model_rows_are_full():
    cfg = data.DatasetConfig('pydoc_lm', {'targets': 64}, 'train', 8, True, 0)
    batch = next(data.get_dataset(cfg, 0, 1, data.LMFeatureConverter))
    assert batch['decoder_target_tokens'].shape == (8, 64)
    assert batch['decoder_target_tokens'].all()
    np.testing.assert_array_equal(batch['decoder_input_tokens'][:, 1:], batch['decoder_target_tokens'][:, :-1])
