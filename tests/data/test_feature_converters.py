import numpy as np
import pytest

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.data import EncDecFeatureConverter, LMFeatureConverter, PrefixLMFeatureConverter

EXAMPLE = {'inputs': np.array([9, 4, 6, 1], np.int32), 'targets': np.array([3, 8, 1], np.int32)}


@pytest.mark.parametrize(
    'cls, expected',
    [
        (
            EncDecFeatureConverter,
            {
                'encoder_input_tokens': [9, 4, 6, 1],
                'decoder_target_tokens': [3, 8, 1],
                'decoder_input_tokens': [0, 3, 8],
                'decoder_loss_weights': [1, 1, 1],
            },
        ),
        (
            LMFeatureConverter,
            {
                'decoder_target_tokens': [3, 8, 1],
                'decoder_input_tokens': [0, 3, 8],
                'decoder_loss_weights': [1, 1, 1],
            },
        ),
        (
            PrefixLMFeatureConverter,
            {
                'decoder_target_tokens': [9, 4, 6, 1, 3, 8, 1],
                'decoder_input_tokens': [0, 9, 4, 6, 1, 3, 8],
                'decoder_loss_weights': [0, 0, 0, 0, 1, 1, 1],
                'decoder_causal_attention': [1, 1, 1, 1, 1, 0, 0],
            },
        ),
    ],
)
def test_example_becomes_model_features(cls, expected):
    found = cls().convert_example(EXAMPLE)
    assert {name: ids.tolist() for name, ids in found.items()} == expected
    assert {name: ids.dtype for name, ids in found.items()} == cls.MODEL_FEATURES


@pytest.mark.parametrize(
    'cls, lengths, encoder, decoder',
    [
        (EncDecFeatureConverter, {'inputs': 6, 'targets': 4}, 6, 4),
        (LMFeatureConverter, {'targets': 4}, None, 4),
        (PrefixLMFeatureConverter, {'inputs': 6, 'targets': 4}, None, 10),
    ],
)
def test_element_spec_has_the_lengths_of_each_side(cls, lengths, encoder, decoder):
    plain, packed = (cls(pack).element_spec(8, lengths) for pack in (False, True))
    sides = {'encoder': encoder, 'decoder': decoder}
    assert list(plain) == list(cls.MODEL_FEATURES)
    assert all(spec.shape == (8, sides[name.split('_')[0]]) for name, spec in packed.items())
    segments = {f'{side}_{kind}' for side in cls.SIDES for kind in ('segment_ids', 'positions')}
    assert set(packed) - set(plain) == segments


@pytest.mark.parametrize(
    'cls, names, message',
    [
        (EncDecFeatureConverter, ['targets'], 'of targets with EncDec.*\n  inputs: the converter needs it'),
        (
            LMFeatureConverter,
            ['inputs', 'targets'],
            'LMFeature.*takes targets.*\n  inputs: the converter does not',
        ),
        (LMFeatureConverter, [], 'of no features'),
    ],
)
def test_features_that_do_not_fit_are_errors(cls, names, message):
    with pytest.raises(errors.DataError, match=message):
        cls().check_features(dict.fromkeys(names, 4))
