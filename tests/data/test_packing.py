import grain
import numpy as np
import pytest

from t5x_pjit_recipes.data import EncDecFeatureConverter, LMFeatureConverter, PrefixLMFeatureConverter
from t5x_pjit_recipes.data.packing import pack_rows, pad_rows

LENGTHS = {'inputs': 20, 'targets': 12}
CASES = [
    (EncDecFeatureConverter, LENGTHS),
    (LMFeatureConverter, {'targets': 12}),
    (PrefixLMFeatureConverter, LENGTHS),
]


@pytest.fixture(scope='module')
def examples():
    rng = np.random.default_rng(0)
    draw = lambda most: rng.integers(3, 259, rng.integers(1, most + 1), dtype=np.int32)
    return [{'inputs': draw(15), 'targets': draw(8)} for _ in range(100)]


def rows_of(examples, converter, lengths):
    dataset = grain.MapDataset.source(examples).map(converter.convert_example).to_iter_dataset()
    model_lengths = converter.get_model_feature_lengths(lengths)
    if converter.pack:
        return list(pack_rows(dataset, model_lengths, converter.SIDES))
    return list(pad_rows(dataset, model_lengths))


def unpacked(row, names):
    """Takes one row's examples apart by their segment ids."""
    segments = {name: row[f'{name.split("_")[0]}_segment_ids'] for name in names}
    count = max(ids.max() for ids in segments.values())
    return [{name: row[name][segments[name] == i].tolist() for name in names} for i in range(1, count + 1)]


def key(example):
    return sorted((name, list(ids)) for name, ids in example.items())


@pytest.mark.parametrize('cls, lengths', CASES)
def test_packed_rows_hold_every_example_once_and_whole(examples, cls, lengths):
    converter = cls(pack=True)
    rows = rows_of(examples, converter, lengths)
    found = [example for row in rows for example in unpacked(row, converter.MODEL_FEATURES)]
    expected = [converter.convert_example(example) for example in examples]
    assert sorted(map(key, found)) == sorted(map(key, expected))
    assert len(rows) <= 0.6 * len(examples)


@pytest.mark.parametrize('cls, lengths', CASES)
def test_packed_rows_have_positions_segments_and_zero_padding(examples, cls, lengths):
    converter = cls(pack=True)
    spec = converter.element_spec(1, lengths)
    for row in rows_of(examples, converter, lengths):
        assert {name: (1, *ids.shape) for name, ids in row.items()} == {name: s.shape for name, s in spec.items()}
        assert {name: ids.dtype for name, ids in row.items()} == {name: s.dtype for name, s in spec.items()}
        for side in converter.SIDES:
            segments, positions = row[f'{side}_segment_ids'], row[f'{side}_positions']
            assert np.all(np.isin(np.diff(segments[segments > 0]), (0, 1)))
            starts = np.flatnonzero(np.diff(segments, prepend=0) > 0)
            assert np.all(positions[starts] == 0)
            assert np.all(np.diff(positions)[(segments[1:] > 0) & (np.diff(segments) == 0)] == 1)
            padding = segments == 0
            assert all(not row[name][padding].any() for name in row if name.startswith(side))


def test_decoder_inputs_start_anew_in_each_segment(examples):
    for row in rows_of(examples, EncDecFeatureConverter(pack=True), LENGTHS):
        starts = (row['decoder_positions'] == 0) & (row['decoder_segment_ids'] > 0)
        inside = row['decoder_positions'] > 0
        shifted = np.roll(row['decoder_target_tokens'], 1)
        assert np.all(row['decoder_input_tokens'][starts] == 0)
        assert np.all(row['decoder_input_tokens'][inside] == shifted[inside])
        assert np.all(row['decoder_loss_weights'] == (row['decoder_segment_ids'] > 0))


@pytest.mark.parametrize('cls, lengths', CASES)
def test_padded_rows_hold_one_example_each(examples, cls, lengths):
    converter = cls()
    rows = rows_of(examples, converter, lengths)
    assert len(rows) == len(examples)
    for row, example in zip(rows, examples, strict=True):
        for name, ids in converter.convert_example(example).items():
            assert row[name][: len(ids)].tolist() == ids.tolist()
            assert not row[name][len(ids) :].any()
            assert (1, *row[name].shape) == converter.element_spec(1, lengths)[name].shape
