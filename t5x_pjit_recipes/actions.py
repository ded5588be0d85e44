"""What may stop a training run: actions that read the metrics of an evaluation, and the check for a loss gone NaN."""

import abc
import enum
import math
import numbers
import warnings
from collections.abc import Mapping
from typing import Any, TypeAlias

from t5x_pjit_recipes.errors import ConfigError, TrainingError

MetricValues: TypeAlias = Mapping[str, Any]


class ActionMode(enum.Enum):
    """After which phase an action runs."""

    TRAIN = 1
    TRAIN_EVAL = 2
    INFER_EVAL = 3


class BaseAction(abc.ABC):
    """Something to do after a phase of the run, which may end the run."""

    @abc.abstractmethod
    def run(self, train_state: Any, metrics_by_task: Mapping[str, MetricValues]) -> bool:
        """Acts on a phase's metrics.

        Args:
          train_state: the train state as it is after the phase.
          metrics_by_task: task name to metric name to value, a `Scalar` or a float.

        Returns:
          Whether training should stop.
        """


class EarlyStoppingAction(BaseAction):
    """Stops when a metric has not improved over the last `patience` evaluations."""

    def __init__(
        self, metric: tuple[str, str], mode: str, patience: int = 3, atol: float = 0.0, rtol: float = 0.0
    ) -> None:
        """Takes what to watch.

        Args:
          metric: task name and metric name.
          mode: 'min' where lower is better, 'max' where higher is.
          patience: how many values, the current one included, must show no improvement from each to the next.
          atol: a change up to this much is no improvement.
          rtol: a change up to this fraction of the earlier value is no improvement; adds to `atol`.

        Raises:
          ConfigError: if an argument is outside its range.
        """
        _check_early_stopping(mode, patience, atol, rtol)
        self._task, self._metric = metric
        self._mode, self._patience, self._atol, self._rtol = mode, patience, atol, rtol
        self._history: list[float] = []

    def run(self, train_state: Any, metrics_by_task: Mapping[str, MetricValues]) -> bool:
        """Adds the metric's value to the history and tells whether `patience` values showed no improvement."""
        value = _find_value(metrics_by_task, self._task, self._metric)
        if value is None:
            return False
        self._history = [*self._history, value][-self._patience :]
        if len(self._history) < self._patience:
            return False
        return not any(map(self._improves, self._history, self._history[1:]))

    def _improves(self, previous: float, current: float) -> bool:
        delta = self._atol + self._rtol * abs(previous)
        return current < previous - delta if self._mode == 'min' else current > previous + delta


class TerminateOnNanAction(BaseAction):
    """Stops when a metric is NaN or infinite."""

    def __init__(self, task: str, metric: str = 'loss') -> None:
        """Takes the names of the task and of the metric to watch."""
        self._task, self._metric = task, metric

    def run(self, train_state: Any, metrics_by_task: Mapping[str, MetricValues]) -> bool:
        """Tells whether the metric's value is NaN or infinite."""
        value = _find_value(metrics_by_task, self._task, self._metric)
        return value is not None and not math.isfinite(value)


def check_finite(summary: MetricValues, step: int, last_checkpoint: str | None, metric: str = 'loss') -> None:
    """Checks that a run may go on: the metric of the summary just written is a finite number, or absent.

    Args:
      summary: metric name to value, as the future of `Trainer.train` returns it.
      step: the step up to which the summary reports.
      last_checkpoint: name of the last checkpoint saved from finite metrics; None where there is none.
      metric: the metric to check.

    Raises:
      TrainingError: if the metric is NaN or infinite.
    """
    value = _number(summary.get(metric))
    if value is None or math.isfinite(value):
        return
    good = f'The last good checkpoint is {last_checkpoint}' if last_checkpoint else 'There is no checkpoint yet'
    raise TrainingError(
        f'Cannot train on from step {step}: {metric} is {value} in the steps reported there. {good}. '
        'Lower the learning rate, lengthen its warm-up, or look at the batches of these steps.'
    )


def _check_early_stopping(mode: str, patience: int, atol: float, rtol: float) -> None:
    if mode not in ('min', 'max'):
        raise ConfigError(f"Cannot stop early with mode {mode!r}: it is neither 'min' nor 'max'. Write one of the two.")
    if patience < 2:
        raise ConfigError(
            f'Cannot stop early with patience {patience}: it takes 2 values to see that none improved. Give 2 or more.'
        )
    for name, value in (('atol', atol), ('rtol', rtol)):
        if value < 0:
            raise ConfigError(f'Cannot stop early with {name} {value}: a tolerance is 0 or more. Give its size.')


def _find_value(metrics_by_task: Mapping[str, MetricValues], task: str, metric: str) -> float | None:
    """Returns the metric's value, or warns and returns None where there is none that an action can read."""
    if task not in metrics_by_task:
        found = f'there is no task {task!r} among {sorted(metrics_by_task)}'
    elif metric not in metrics_by_task[task]:
        found = f'task {task!r} has no metric {metric!r} among {sorted(metrics_by_task[task])}'
    else:
        raw = metrics_by_task[task][metric]
        value = _number(raw)
        if value is not None:
            return value
        found = f'{task}/{metric} is {raw!r}, neither a Scalar nor a float'
    warnings.warn(f'Cannot decide whether to stop training: {found}. Training goes on.', UserWarning, stacklevel=3)
    return None


def _number(value: Any) -> float | None:
    if hasattr(value, 'value'):
        return float(value.value)
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral) else None
