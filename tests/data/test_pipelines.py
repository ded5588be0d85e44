import gc
import json
import subprocess
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest

from t5x_pjit_recipes import data, errors
from t5x_pjit_recipes.data import pipelines
from t5x_pjit_recipes.data.packing import PACKING_ROWS

LENGTHS = {'inputs': 24, 'targets': 12}
LM_LENGTHS = {'targets': 12}
NUM_EXAMPLES = 50


def example(i):
    """Text that says which example it is, of varying length."""
    return {'inputs': f'{i} ' + 'x' * (i % 7), 'targets': f'{i}'}


SOURCE = data.SequenceSource(
    {'train': [example(i) for i in range(NUM_EXAMPLES)], 'validation': [example(i) for i in range(5)]}
)
TASK = data.Task('numbers', SOURCE, data.BYTE_FEATURES, data.TEXT_TO_TEXT)
VOCABULARY = data.ByteVocabulary()


def config(task=TASK, **changed):
    given = {'task_feature_lengths': LENGTHS, 'split': 'train', 'batch_size': 8, 'shuffle': True, 'seed': 0}
    return data.DatasetConfig(task, **given | changed)


def dataset(cfg, shard_id=0, num_shards=1, converter=data.EncDecFeatureConverter, **kwargs):
    return data.get_dataset(cfg, shard_id, num_shards, converter, **kwargs)


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def assert_equal(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert list(a) == list(b)
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def numbers(batches):
    """Reads the examples' numbers off padded batches, in order."""
    return [int(VOCABULARY.decode(row)) for batch in batches for row in batch['decoder_target_tokens']]


RESUMED = [
    config(),
    config(shuffle=False),
    config(pack=True),
    config(pack=True, shuffle=False, seed=3),
    config('pydoc_span_corruption', task_feature_lengths={'inputs': 64, 'targets': 20}),
    config('pydoc_span_corruption', task_feature_lengths={'inputs': 64, 'targets': 20}, pack=True),
]

RESUMED_IDS = ['padded', 'padded in order', 'packed', 'packed in order', 'corrupted', 'corrupted and packed']


@pytest.mark.parametrize('cfg', RESUMED, ids=RESUMED_IDS)
def test_resumed_iterator_goes_on_with_the_same_batches(cfg):
    whole = dataset(cfg)
    states, batches = [whole.get_state()], []
    for _ in range(24):
        batches.append(next(whole))
        states.append(json.loads(json.dumps(whole.get_state())))
    resumed = dataset(cfg)
    for position in (7, 0, 13, 1, 20, 14):
        resumed.set_state(states[position])
        assert resumed.get_state() == states[position]
        assert_equal(take(resumed, 4), batches[position : position + 4])
    assert len(json.dumps(states[-1])) < 1000


@pytest.mark.parametrize('num_epochs', [1, 2])
@pytest.mark.parametrize('pack', [False, True])
def test_resumed_iterator_ends_where_the_data_end(pack, num_epochs):
    cfg = config(pack=pack, batch_size=4)
    batches = list(dataset(cfg, num_epochs=num_epochs))
    resumed = dataset(cfg, num_epochs=num_epochs)
    first = take(resumed, 3)
    state = resumed.get_state()
    rest = list(resumed)
    assert next(resumed, None) is None
    assert_equal(first + rest, batches)
    resumed.set_state(state)
    assert_equal(list(resumed), rest)


def test_state_does_not_count_batches_that_are_only_prefetched():
    iterator = dataset(config())
    next(iterator)
    state = iterator.get_state()
    time.sleep(0.05)
    assert iterator.get_state() == state
    assert state['num_batches'] == 1


@pytest.mark.parametrize('num_shards', [2, 4, 8])
@pytest.mark.parametrize('num_epochs', [None, 3])
def test_shards_together_are_the_whole(num_shards, num_epochs):
    cfg = config()
    whole = take(dataset(cfg, num_epochs=num_epochs), 12)
    shards = [take(dataset(cfg, i, num_shards, num_epochs=num_epochs), 12) for i in range(num_shards)]
    for step, batch in enumerate(whole):
        for name in batch:
            dealt = np.stack([shard[step][name] for shard in shards], axis=1)
            np.testing.assert_array_equal(dealt.reshape(batch[name].shape), batch[name])


def test_packed_shards_are_disjoint_and_together_everything():
    cfg = config(pack=True, batch_size=4, task_feature_lengths={'inputs': 40, 'targets': 30})
    batches = PACKING_ROWS // 2
    read = lambda i: [text for batch in take(dataset(cfg, i, 2), batches) for text in texts(batch)]
    order = epoch_order(cfg, 10)
    for shard_id in range(2):
        shard = read(shard_id)
        assert sorted(shard) == sorted(order[shard_id::2][: len(shard)])
        assert len(shard) > 2 * PACKING_ROWS


def texts(packed):
    """Reads the targets of every example off a packed batch, row by row."""
    for ids, segments in zip(packed['decoder_target_tokens'], packed['decoder_segment_ids'], strict=True):
        yield from (VOCABULARY.decode(ids[segments == i]) for i in range(1, segments.max() + 1))


def epoch_order(cfg, num_epochs):
    examples = pipelines.make_examples(TASK, cfg, cfg.seed).repeat(num_epochs)
    return [VOCABULARY.decode(examples[i]['targets']) for i in range(len(examples))]


def test_finite_packed_epochs_give_all_shards_equally_many_batches():
    cfg = config(pack=True, batch_size=4)
    shards = [list(dataset(cfg, i, 2, num_epochs=2)) for i in range(2)]
    assert len(shards[0]) == len(shards[1]) > 3


def test_epochs_have_every_example_each_in_another_order():
    cfg = config(batch_size=10)
    read = numbers(take(dataset(cfg), 15))
    epochs = [read[i : i + NUM_EXAMPLES] for i in range(0, 150, NUM_EXAMPLES)]
    assert all(sorted(epoch) == list(range(NUM_EXAMPLES)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert numbers(take(dataset(config(batch_size=10, shuffle=False)), 10)) == [*range(NUM_EXAMPLES)] * 2


def test_seed_alone_decides_the_order():
    first = numbers(take(dataset(config()), 5))
    assert first == numbers(take(dataset(config()), 5))
    assert first != numbers(take(dataset(config(seed=1)), 5))


def test_number_of_epochs_ends_the_data():
    assert len(list(dataset(config(batch_size=8), num_epochs=1))) == NUM_EXAMPLES // 8
    assert len(list(dataset(config(batch_size=8), num_epochs=3))) == 3 * NUM_EXAMPLES // 8


@pytest.mark.parametrize('pack', [False, True])
@pytest.mark.parametrize(
    'task, lengths, converter',
    [
        (TASK, LENGTHS, data.EncDecFeatureConverter),
        (TASK, LENGTHS, data.PrefixLMFeatureConverter),
        ('pydoc_span_corruption', {'inputs': 64, 'targets': 20}, data.EncDecFeatureConverter),
        ('pydoc_lm', LM_LENGTHS, data.LMFeatureConverter),
    ],
)
def test_batches_are_as_the_element_spec_says(task, lengths, converter, pack):
    iterator = dataset(config(task, task_feature_lengths=lengths, pack=pack), 1, 2, converter)
    batch = next(iterator)
    assert set(batch) == set(iterator.element_spec)
    for name, spec in iterator.element_spec.items():
        assert isinstance(spec, jax.ShapeDtypeStruct)
        assert (batch[name].shape, batch[name].dtype) == (spec.shape, spec.dtype)
        assert spec.shape[0] == 4


def test_seed_from_the_clock_comes_with_the_state(monkeypatch):
    clock = iter([100.0, 200.0])
    monkeypatch.setattr(pipelines, 'time', types.SimpleNamespace(time=lambda: next(clock)))
    first, second = dataset(config(seed=None)), dataset(config(seed=None))
    batches = take(first, 2)
    state = first.get_state()
    batches = take(first, 3)
    second.set_state(state)
    assert (state['seed'], second.get_state()['seed']) == (100, 100)
    assert_equal(take(second, 3), batches)


def test_state_of_other_data_is_an_error():
    iterator = dataset(config())
    next(iterator)
    other = dataset(config(batch_size=16, seed=1))
    with pytest.raises(errors.DataError, match=r'batch 1:.*\n  seed: saved 0, now 1\n  batch_size: saved 8, now 16'):
        other.set_state(iterator.get_state())


def test_state_of_a_source_that_grew_is_an_error():
    sources = [data.SequenceSource({'train': [example(i) for i in range(n)]}) for n in (20, 21)]
    old, new = (dataset(config(data.Task('t', s, data.BYTE_FEATURES, data.TEXT_TO_TEXT))) for s in sources)
    with pytest.raises(errors.DataError, match='num_source_examples: saved 20, now 21'):
        new.set_state(old.get_state())


def test_long_examples_are_cut_or_errors():
    lengths = {'inputs': 4, 'targets': 1}
    task = data.Task('plain', SOURCE, data.BYTE_FEATURES, [data.preprocessors.tokenize])
    batch = next(dataset(config(task, task_feature_lengths=lengths)))
    assert batch['encoder_input_tokens'].all(axis=1).any()
    with pytest.raises(errors.DataError, match=r"'plain'.*trim_output_features=False.*\n.*: \d+ tokens, room for"):
        take(dataset(config(task, task_feature_lengths=lengths, trim_output_features=False)), 10)


@pytest.mark.parametrize(
    'changed, kwargs, message',
    [
        ({'batch_size': 10}, {'num_shards': 4}, 'a batch of 10 rows between 4 shards: 2 are left'),
        ({}, {'shard_id': 2, 'num_shards': 2}, 'shard 2 of 2'),
        ({'split': 'valid'}, {}, "'valid'.*has train, validation"),
        ({'task': 'pydoc_span_corruptoin'}, {}, "Near: 'pydoc_span_corruption'"),
        ({'task_feature_lengths': {'inputs': 8}}, {}, 'of inputs with EncDec.*\n  targets: the converter needs it'),
        ({}, {'converter': data.LMFeatureConverter}, '\n  inputs: the converter does not take it'),
        ({}, {'continue_from_last_checkpoint': True}, 'continue_from_last_checkpoint=True'),
    ],
)
def test_data_that_cannot_be_made_are_errors(changed, kwargs, message):
    with pytest.raises(errors.DataError, match=message):
        dataset(config(**changed), **kwargs)


def test_batch_that_never_gets_full_is_an_error():
    with pytest.raises(errors.DataError, match="'batch_size': 64.*the data end before the first one is full"):
        next(dataset(config(batch_size=64), num_epochs=1))


def test_task_without_the_features_it_promises_is_an_error():
    task = data.Task('half', data.SequenceSource({'train': [{'inputs': 'a'}]}), data.BYTE_FEATURES, data.TEXT_TO_TEXT)
    with pytest.raises(errors.DataError, match="'half': targets are needed, it has inputs"):
        next(dataset(config(task)))


def test_nothing_left_after_preprocessing_is_an_error():
    task = data.Task('blank', data.SequenceSource({'train': ['', '']}), data.BYTE_FEATURES, data.SPAN_CORRUPTION)
    with pytest.raises(errors.DataError, match="'train' of task 'blank': 0 examples are left"):
        dataset(config(task))


def test_evaluation_repeats_the_same_batches_of_a_small_split():
    for use_memory_cache in (True, False):
        cfg = config(split='validation', shuffle=False, batch_size=4, use_memory_cache=use_memory_cache)
        ((name, batches),) = data.get_training_eval_datasets(cfg, 0, 1, 3, data.EncDecFeatureConverter).items()
        assert name == 'numbers'
        assert len(batches) == 3
        assert numbers(batches) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
        assert_equal(list(batches), list(batches))
        assert batches.element_spec['decoder_target_tokens'].shape == (4, 12)


def test_evaluation_without_a_seed_is_the_same_in_every_run():
    lengths = {'inputs': 64, 'targets': 20}
    cfg = config('pydoc_span_corruption', split='validation', seed=None, task_feature_lengths=lengths)
    runs = [data.get_training_eval_datasets(cfg, 0, 1, 2, data.EncDecFeatureConverter) for _ in range(2)]
    assert_equal(*[list(run['pydoc_span_corruption']) for run in runs])


@pytest.mark.parametrize('pack', [False, True])
def test_evaluation_reads_the_same_rows_on_any_number_of_shards(pack):
    cfg = config(split='validation', batch_size=4, pack=pack)
    read = lambda i, n: list(data.get_training_eval_datasets(cfg, i, n, 3, data.EncDecFeatureConverter)['numbers'])
    whole, shards = read(0, 1), [read(i, 2) for i in range(2)]
    for step, batch in enumerate(whole):
        for name in batch:
            dealt = np.stack([shard[step][name] for shard in shards], axis=1)
            np.testing.assert_array_equal(dealt.reshape(batch[name].shape), batch[name])


def test_task_without_the_split_is_not_evaluated():
    with pytest.warns(UserWarning, match=r"on numbers: .* no split 'valdation' \(did you mean 'validation'\?\)"):
        assert not data.get_training_eval_datasets(config(split='valdation'), 0, 1, 3, data.EncDecFeatureConverter)


def test_own_text_files_are_a_task_in_three_lines(tmp_path):
    (tmp_path / 'notes.txt').write_text('\n\n'.join(f'note number {i}' for i in range(40)))
    source = data.TextFileSource(f'{tmp_path}/*.txt', unit='paragraph', held_out=0.2)
    data.TaskRegistry.add('notes_span_corruption', source, data.BYTE_FEATURES, data.SPAN_CORRUPTION)
    try:
        for split in ('train', 'validation'):
            batch = next(dataset(config('notes_span_corruption', split=split)))
            assert batch['encoder_input_tokens'].shape == (8, 24)
            assert (batch['encoder_input_tokens'] > 258).any()
    finally:
        data.TaskRegistry.remove('notes_span_corruption')


def test_vocabularies_of_a_task():
    small, large = data.ByteVocabulary(10), data.ByteVocabulary(20)
    task = lambda **vocabularies: data.Task('t', SOURCE, {k: data.Feature(v) for k, v in vocabularies.items()})
    lengths = {'task_feature_lengths': {}}
    assert data.get_vocabulary(config(task(inputs=small, targets=large), **lengths)) == (small, large)
    assert data.get_vocabulary(config(task(text=small, more=small), **lengths)) == (small, small)
    with pytest.raises(errors.DataError, match=r'2 other features.*\n  text: .*extra_ids=10.*\n  more: .*=20'):
        data.get_vocabulary(config(task(text=small, more=large), **lengths))
    with pytest.raises(errors.DataError, match='0 other features'):
        data.get_vocabulary(config(task(), **lengths))


def test_model_must_have_the_vocabularies_of_the_task():
    model = types.SimpleNamespace(input_vocabulary=VOCABULARY, output_vocabulary=VOCABULARY)
    data.verify_matching_vocabs(config(), model)
    model.output_vocabulary = data.ByteVocabulary(0)
    with pytest.raises(errors.DataError, match=r'output: task .*extra_ids=125\), model .*extra_ids=0\)$'):
        data.verify_matching_vocabs(config(), model)


def test_dropped_iterator_stops_its_thread():
    iterator = dataset(config())
    next(iterator)
    running = [thread for thread in threading.enumerate() if 'prefetch' in thread.name]
    assert running
    del iterator
    gc.collect()
    assert not any(thread.is_alive() for thread in running)


def test_closed_iterator_is_an_error():
    iterator = dataset(config())
    next(iterator)
    iterator.close()
    with pytest.raises(errors.DataError, match='after 1 batches: the iterator was closed'):
        next(iterator)


def test_process_may_end_while_batches_are_being_made():
    code = (
        'from t5x_pjit_recipes import data\n'
        "lengths = {'inputs': 256, 'targets': 64}\n"
        "cfg = data.DatasetConfig('pydoc_span_corruption', lengths, 'train', 64, True, 0)\n"
        'iterator = data.get_dataset(cfg, 0, 1, data.EncDecFeatureConverter)\n'
        'next(iterator)\n'
    )
    ended = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, '')
