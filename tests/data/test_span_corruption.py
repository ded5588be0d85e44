import numpy as np
import pytest

from t5x_pjit_recipes import errors
from t5x_pjit_recipes.data import span_corruption
from t5x_pjit_recipes.data.span_corruption import SpanCorruption

FIRST_SENTINEL = 383
T5 = SpanCorruption()


def merged(inputs, targets):
    """Puts what follows each sentinel in the targets into its place in the inputs."""
    spans, result = {}, []
    for token in targets:
        if token > FIRST_SENTINEL - 125:
            span = spans.setdefault(token, [])
        else:
            span.append(token)
    for token in inputs:
        result += spans.pop(token) if token in spans else [token]
    # A text too short to be corrupted has a sentinel that stands for nothing.
    assert all(not span for span in spans.values())
    return result


@pytest.mark.parametrize('length', [1, 2, 3, 7, 50, 283, 568])
@pytest.mark.parametrize('noise', [T5, SpanCorruption(0.5), SpanCorruption(0.9), SpanCorruption(0.15, 20.0)])
def test_merging_inputs_and_targets_gives_the_text(length, noise):
    tokens = np.random.default_rng(length).integers(3, 258, length, dtype=np.int32)
    example = noise.corrupt(tokens, np.random.default_rng(0), FIRST_SENTINEL)
    assert merged(example['inputs'].tolist(), example['targets'].tolist()) == tokens.tolist()
    assert {name: len(ids) for name, ids in example.items()} == noise.lengths(length)
    assert {ids.dtype for ids in example.values()} == {np.dtype(np.int32)}


def test_sentinels_count_down_and_appear_in_both():
    example = T5.corrupt(np.full(100, 5, np.int32), np.random.default_rng(3), FIRST_SENTINEL)
    expected = [FIRST_SENTINEL - i for i in range(5)]
    for ids in example.values():
        assert ids[ids != 5].tolist() == expected


def test_noise_has_the_density_and_span_length_of_the_paper():
    rng = np.random.default_rng(0)
    masks = np.stack([T5.mask(568, rng) for _ in range(2000)])
    starts = masks & ~np.pad(masks, ((0, 0), (1, 0)))[:, :-1]
    assert masks.mean() == pytest.approx(0.15, abs=0.001)
    assert masks.sum() / starts.sum() == pytest.approx(3.0, abs=0.05)
    # Spans are everywhere: each tenth of the text has its share of the noise.
    assert np.allclose(masks[:, 28:-28].reshape(2000, 8, 64).mean((0, 2)), 0.15, atol=0.015)


def test_span_lengths_follow_a_uniform_choice_of_compositions():
    rng = np.random.default_rng(0)
    draws = np.stack([span_corruption.random_parts(5, 3, rng) for _ in range(6000)])
    values, counts = np.unique(draws, axis=0, return_counts=True)
    assert values.tolist() == [[1, 1, 3], [1, 2, 2], [1, 3, 1], [2, 1, 2], [2, 2, 1], [3, 1, 1]]
    assert np.all(abs(counts - 1000) < 120)


# 512 with 114 and 1024 with 229 are the lengths that T5 and mT5 were pre-trained with.
@pytest.mark.parametrize('inputs, raw, targets', [(512, 568, 114), (1024, 1137, 229), (256, 284, 58), (4, 3, 3)])
def test_raw_length_fills_the_inputs(inputs, raw, targets):
    assert T5.raw_length(inputs, eos=1) == raw
    assert T5.lengths(raw) == {'inputs': inputs - 1, 'targets': targets - 1}
    assert T5.lengths(raw + 1)['inputs'] > inputs - 1


@pytest.mark.parametrize('density, mean', [(0.0, 3.0), (1.0, 3.0), (0.15, 0.0)])
def test_noise_that_cannot_be_is_an_error(density, mean):
    with pytest.raises(errors.DataError, match=f'noise_density={density}, mean_noise_span_length={mean}'):
        SpanCorruption(density, mean)


def test_inputs_too_short_to_corrupt_are_an_error():
    with pytest.raises(errors.DataError, match='inputs of 2 tokens.*need 3'):
        T5.raw_length(2, eos=1)


def test_targets_and_sentinels_must_suffice():
    with pytest.raises(errors.DataError, match='568 raw tokens into 511 inputs and 63 targets.*need 113'):
        span_corruption.check_room(T5, 568, {'inputs': 511, 'targets': 63}, 100)
    with pytest.raises(errors.DataError, match='28 spans of 568 raw tokens: the vocabulary has 10 sentinels'):
        span_corruption.check_room(T5, 568, {'inputs': 511, 'targets': 113}, 10)
