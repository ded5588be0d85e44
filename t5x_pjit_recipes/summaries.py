"""Where metrics go: TensorBoard's event files and `metrics.jsonl`, written by a worker thread that nobody waits for."""

import concurrent.futures
import contextlib
import json
import math
import pathlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import tensorboardX

from t5x_pjit_recipes import metrics as metrics_lib
from t5x_pjit_recipes.metrics import MetricsMap, Scalar

METRICS_FILE = 'metrics.jsonl'

Summary: TypeAlias = Mapping[str, Scalar]
SummaryFuture: TypeAlias = concurrent.futures.Future


class SummaryWriter(Protocol):
    """What can be written about a run, wherever it goes."""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the numbers known at a step."""

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts (Markdown) known at a step."""

    def flush(self) -> None:
        """Brings everything written so far to disk."""

    def close(self) -> None:
        """Flushes and closes."""


class MultiWriter:
    """Writes to several writers, or to none."""

    def __init__(self, writers: Sequence[SummaryWriter]) -> None:
        """Takes the writers; with none, everything is dropped."""
        self._writers = tuple(writers)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the numbers known at a step."""
        for writer in self._writers:
            writer.write_scalars(step, scalars)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts known at a step."""
        for writer in self._writers:
            writer.write_texts(step, texts)

    def flush(self) -> None:
        """Brings everything written so far to disk."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Closes all writers."""
        for writer in self._writers:
            writer.close()


class TensorBoardWriter:
    """Writes TensorBoard's event files."""

    def __init__(self, logdir: pathlib.Path | str) -> None:
        """Takes the directory for the event files; it is made if absent."""
        self._writer = tensorboardX.SummaryWriter(logdir=str(logdir))

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the numbers known at a step."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, global_step=step)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts (Markdown) known at a step."""
        for name, text in texts.items():
            self._writer.add_text(name, text, global_step=step)

    def flush(self) -> None:
        """Brings everything written so far to disk."""
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class JsonLinesWriter:
    """Appends one JSON object for each set of numbers: `{"step": 100, "collection": "train", "loss": 3.21}`.

    What JSON has no number for (NaN, infinity) is written as null. Texts are left to TensorBoard.
    """

    def __init__(self, path: pathlib.Path | str, collection: str) -> None:
        """Takes the file to append to and the name that marks this writer's lines."""
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._collection = collection
        # Several collections share the file, so each line goes out whole, when it is written.
        self._file = path.open('a', buffering=1, encoding='utf-8')

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the numbers known at a step as one line."""
        numbers = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        line = json.dumps({'step': step, 'collection': self._collection, **numbers}, allow_nan=False)
        self._file.write(line + '\n')

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes nothing."""

    def flush(self) -> None:
        """Brings everything written so far to disk."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class MetricsManager:
    """Turns one collection's metrics into summaries, in order, without holding up the caller or the device."""

    def __init__(self, name: str, summary_dir: str | None = None) -> None:
        """Starts the worker thread and, on process 0, the writers.

        Args:
          name: the collection: 'train', 'training_eval/TASK'.
          summary_dir: event files go to its subdirectory `name`, lines to its `metrics.jsonl`; None writes nothing.
        """
        self._name = name
        self.summary_dir = None if summary_dir is None else str(pathlib.Path(summary_dir) / name)
        self._writer = MultiWriter(self._make_writers(summary_dir))
        self._writer_lock = threading.Lock()
        self._worker = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix='metrics')
        self._started: SummaryFuture | None = None
        self._stopped = 0.0
        self._closed = False

    def _make_writers(self, summary_dir: str | None) -> list[SummaryWriter]:
        if summary_dir is None or not on_process_0():
            return []
        lines = JsonLinesWriter(pathlib.Path(summary_dir) / METRICS_FILE, self._name)
        return [TensorBoardWriter(self.summary_dir), lines]

    @property
    def summary_writer(self) -> SummaryWriter:
        """The writer of this collection; on processes other than 0 it writes nothing."""
        return self._writer

    def write_scalar(self, key: str, val: Any, step: int) -> None:
        """Writes one number known at a step."""
        self.write_scalars(step, {key: val})

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes numbers known at a step; each is a `Scalar`, a number or an array of one."""
        numbers = {name: float(getattr(value, 'value', value)) for name, value in scalars.items()}
        with self._writer_lock:
            self._writer.write_scalars(int(step), numbers)

    def start_duration_timer(self, block_on: Any = ()) -> None:
        """Starts the clock of the next summary; returns at once.

        Args:
          block_on: arrays to wait for before the clock starts; they may be donated meanwhile. The metrics of earlier
            summaries are waited for in any case.
        """
        self._started = self._worker.submit(self._start, _time(), block_on)

    def _start(self, asked: float, block_on: Any) -> float:
        # An array that was donated, or that failed, is done with too; a failure shows in the metrics made from it.
        with contextlib.suppress(RuntimeError):
            jax.block_until_ready(block_on)
            asked = _time() if jax.tree.leaves(block_on) else asked
        # The device was free as soon as the last metrics were ready, however long it took to write them.
        return max(asked, self._stopped)

    def write_metrics_summary(self, metrics: MetricsMap, step: int, num_steps: int) -> SummaryFuture:
        """Computes and writes metrics as soon as the device has them; returns at once.

        The clock stops when `metrics` are ready; all metrics that are rates count from where it started.

        Args:
          metrics: name to metric, merged over the steps; empty metrics give an empty summary and write nothing.
          step: the step that the summary stands at.
          num_steps: how many train steps the metrics cover.

        Returns:
          A future of name to `Scalar`, numbers on the host.
        """
        started, self._started = self._started, None
        return self._worker.submit(self._summarize, dict(metrics), int(step), num_steps, started)

    def _summarize(self, metrics: MetricsMap, step: int, num_steps: int, started: SummaryFuture | None) -> Summary:
        if not metrics:
            return {}
        jax.block_until_ready(metrics)
        self._stopped = _time()
        metrics = metrics_lib.set_step_metrics_num_steps(jax.device_get(metrics), num_steps)
        if started is not None:
            metrics = metrics_lib.set_time_metrics_duration(metrics, self._stopped - started.result())
        summary = {name: Scalar(float(metric.compute_value().value)) for name, metric in metrics.items()}
        self.write_scalars(step, summary)
        return summary

    def flush(self) -> None:
        """Waits until every summary asked for so far is on disk."""
        self._worker.submit(lambda: None).result()
        with self._writer_lock:
            self._writer.flush()

    def close(self) -> None:
        """Waits for all summaries and closes the files; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._worker.shutdown(wait=True)
        self._writer.close()

    def __enter__(self) -> 'MetricsManager':
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def __del__(self) -> None:
        # An __init__ that raised leaves nothing to close.
        if hasattr(self, '_closed'):
            self.close()


def on_process_0() -> bool:
    """Tells whether this is the one process that writes summaries and speaks to whoever watches."""
    return jax.process_index() == 0


def _time() -> float:
    return time.time()
