import json
import math
import os
import threading

import jax
import jax.numpy as jnp
import pytest

from t5x_pjit_recipes import summaries
from t5x_pjit_recipes.metrics import AveragePerStep, LastValue, Scalar, Step, StepsPerTime, Sum, TimeRate
from t5x_pjit_recipes.summaries import MetricsManager


def read_lines(summary_dir):
    with open(os.path.join(summary_dir, 'metrics.jsonl'), encoding='utf-8') as file:
        return [json.loads(line) for line in file]


def read_events(summary_dir):
    """Reads back with TensorBoard itself: (tag, step, value) of every scalar."""
    from tensorboard.backend.event_processing import event_accumulator

    events = event_accumulator.EventAccumulator(summary_dir)
    events.Reload()
    return [(tag, event.step, event.value) for tag in events.Tags()['scalars'] for event in events.Scalars(tag)]


def train_metrics():
    return {
        'loss': AveragePerStep(total=jnp.float32(6.0), steps=jnp.int32(4)),
        'timing/seqs_per_second': TimeRate(numerator=jnp.float32(30.0)),
        'timing/steps_per_second': StepsPerTime(steps=jnp.int32(4)),
        'tokens': Sum(total=jnp.int32(7)),
    }


def test_a_summary_sets_steps_and_duration(monkeypatch):
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(summaries, '_time', lambda: next(clock))
    with MetricsManager('train') as manager:
        manager.start_duration_timer()
        summary = manager.write_metrics_summary(train_metrics(), step=5, num_steps=2).result()
    assert summary == {
        'loss': Scalar(3.0),
        'timing/seqs_per_second': Scalar(3.0),
        'timing/steps_per_second': Scalar(pytest.approx(0.2)),
        'tokens': Scalar(7.0),
    }
    assert all(type(scalar.value) is float for scalar in summary.values())


def test_the_clock_starts_when_the_last_metrics_were_ready(monkeypatch):
    # Asked at 100 and 101, while the first metrics are ready at 110 only, and the second at 130.
    clock = iter([100.0, 101.0, 110.0, 130.0])
    monkeypatch.setattr(summaries, '_time', lambda: next(clock))
    free = threading.Event()
    with MetricsManager('train') as manager:
        manager._worker.submit(free.wait, 10)
        futures = []
        for step in (1, 2):
            manager.start_duration_timer()
            futures.append(manager.write_metrics_summary(train_metrics(), step, 1))
        free.set()
        assert [future.result()['timing/seqs_per_second'].value for future in futures] == [3.0, 1.5]


def test_a_summary_goes_to_lines_and_event_files(tmp_path):
    with MetricsManager('train', str(tmp_path)) as train, MetricsManager('training_eval/copy', str(tmp_path)) as evals:
        train.write_metrics_summary({'loss': Sum(total=jnp.float32(2.5))}, 10, 10).result()
        evals.write_scalar('loss', Scalar(jnp.float32(3.5)), 10)
        train.write_scalars(20, {'loss': math.nan, 'z': 1})
        assert evals.summary_dir == str(tmp_path / 'training_eval' / 'copy')
    assert read_lines(tmp_path) == [
        {'step': 10, 'collection': 'train', 'loss': 2.5},
        {'step': 10, 'collection': 'training_eval/copy', 'loss': 3.5},
        {'step': 20, 'collection': 'train', 'loss': None, 'z': 1.0},
    ]
    assert read_events(evals.summary_dir) == [('loss', 10, 3.5)]
    assert [event[:2] for event in read_events(train.summary_dir)] == [('loss', 10), ('loss', 20), ('z', 20)]


def test_texts_go_to_the_event_file_alone(tmp_path):
    with MetricsManager('train', str(tmp_path)) as manager:
        manager.summary_writer.write_texts(0, {'config': 'lr = 1.0'})
    (event_file,) = (tmp_path / 'train').iterdir()
    assert b'lr = 1.0' in event_file.read_bytes()
    assert read_lines(tmp_path) == []


def test_summaries_are_written_in_the_order_they_were_asked_for(tmp_path):
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: y @ y / jnp.linalg.norm(y), x))
    with MetricsManager('train', str(tmp_path)) as manager:
        manager.write_metrics_summary({'x': LastValue(slow(jnp.ones((200, 200)))[0, 0])}, 1, 1)
        for step in range(2, 12):
            manager.write_metrics_summary({'x': LastValue(jnp.float32(step))}, step, 1)
        manager.flush()
        assert [line['step'] for line in read_lines(tmp_path)] == list(range(1, 12))


def test_asking_for_a_summary_does_not_wait():
    free = threading.Event()
    with MetricsManager('train') as manager:
        manager._worker.submit(free.wait, 60)
        manager.start_duration_timer(block_on=jnp.ones(3))
        future = manager.write_metrics_summary(train_metrics(), 1, 1)
        assert not future.done()
        free.set()
        assert future.result()['loss'] == Scalar(6.0)


def test_a_donated_array_does_not_stop_the_timer():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = jnp.zeros(8)
    with MetricsManager('train') as manager:
        for _ in range(3):
            manager.start_duration_timer(block_on={'a': state, 'b': 1})
            state = step(state)
            future = manager.write_metrics_summary({'timing/seqs_per_second': TimeRate(numerator=state[0])}, 1, 1)
            assert future.result()['timing/seqs_per_second'].value > 0


def test_no_metrics_make_an_empty_summary(tmp_path):
    with MetricsManager('train', str(tmp_path)) as manager:
        manager.start_duration_timer()
        assert manager.write_metrics_summary({}, 1, 0).result() == {}
    assert read_lines(tmp_path) == []


def test_a_rate_without_a_timer_is_an_error():
    with MetricsManager('train') as manager:
        future = manager.write_metrics_summary({'rate': TimeRate(numerator=jnp.float32(1.0)), 'n': Step()}, 1, 1)
        with pytest.raises(ValueError, match='TimeRate with duration=None'):
            future.result()


def test_closing_twice_is_closing_once(tmp_path):
    manager = MetricsManager('train', str(tmp_path))
    manager.write_metrics_summary({'x': Sum(total=jnp.float32(1.0))}, 1, 1)
    manager.close()
    manager.close()
    assert read_lines(tmp_path) == [{'step': 1, 'collection': 'train', 'x': 1.0}]


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(summaries, 'on_process_0', lambda: False)
    with MetricsManager('train', str(tmp_path)) as manager:
        assert manager.write_metrics_summary({'x': Sum(total=jnp.float32(1.0))}, 1, 1).result() == {'x': Scalar(1.0)}
        manager.write_scalar('y', 2, 1)
        manager.summary_writer.write_texts(0, {'config': ''})
        manager.flush()
    assert list(tmp_path.iterdir()) == []
