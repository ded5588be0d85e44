"""The loop of a training run: train to the next stop, report, save, evaluate, until the last step."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import rich.console
from jax.experimental import multihost_utils

from t5x_pjit_recipes import progress
from t5x_pjit_recipes.actions import check_finite
from t5x_pjit_recipes.errors import ConfigError, did_you_mean
from t5x_pjit_recipes.stops import Stops
from t5x_pjit_recipes.trainer import ActionMode, BaseAction, PreemptionError

Summary = Mapping[str, Any]
TRAIN_METRIC_KEY = 'train'


@dataclasses.dataclass
class TrainingLoop:
    """A run under way.

    Attributes:
      trainer: holds the state and steps it.
      stops: when to do what.
      train_iter: batches, without end.
      eval_datasets: name of an evaluation to its batches, an iterable that can be read again.
      manager: saves checkpoints; None saves none.
      actions: ActionMode names to actions that may end the run.
      console: where the run speaks; it is silent on processes other than 0.
    """

    trainer: Any
    stops: Stops
    train_iter: Iterator[Any]
    eval_datasets: Mapping[str, Any]
    manager: Any
    console: rich.console.Console
    actions: Mapping[str, Sequence[BaseAction]] = dataclasses.field(default_factory=dict)
    state_transformation_fns: Sequence[Callable[..., Any]] = ()
    _unread: list[tuple[int, Any]] = dataclasses.field(default_factory=list)
    _last_saved: int | None = None

    def run(self, first_step: int) -> int:
        """Trains from `first_step` to the last step, or until an action stops it; returns the step reached."""
        with self._progress(first_step) as bar, self._collected():
            step = first_step
            try:
                while step < self.stops.total_steps and not self.trainer.stop_training:
                    step = self._advance(step, bar)
                self._read_reports(bar)
            except PreemptionError:
                self.save()
                raise
        if self.manager is not None and step > first_step:
            self.save()
            self.manager.wait_until_finished()
            self._say(f'checkpoint: {self.manager.directory / f"checkpoint_{step}"}')
        return step

    def _advance(self, step: int, bar: progress.Progress) -> int:
        stop = self.stops.after(step)
        self._unread.append((stop, self.trainer.train(self.train_iter, stop - step, start_step=step)))
        # Reports are read one stop late, so that the device has work while they are waited for.
        self._read_reports(bar, keep=1)
        if self.stops.saves(stop):
            self._read_reports(bar)
            self.save()
        if self.stops.evaluates(stop):
            self._read_reports(bar)
            self.evaluate()
        if self.stops.collects(stop):
            gc.collect()
        return stop

    def _read_reports(self, bar: progress.Progress, keep: int = 0) -> None:
        while len(self._unread) > keep:
            step, future = self._unread.pop(0)
            summary = future.result()
            check_finite(summary, step, self._last_checkpoint())
            bar.report(step, summary)
            self._act(ActionMode.TRAIN, {TRAIN_METRIC_KEY: summary})

    def evaluate(self) -> None:
        """Evaluates the state as it is now, and says the held-out loss."""
        if not self.eval_datasets:
            return
        summaries = self.trainer.eval({name: iter(batches) for name, batches in self.eval_datasets.items()})
        for name, summary in summaries.items():
            if progress.LOSS in summary:
                loss = float(summary[progress.LOSS].value)
                step = int(self.trainer.train_state.step)
                self._say(f'step {step}  held-out loss {loss:.4f} nats per target token ({name})')
        self._act(ActionMode.TRAIN_EVAL, summaries)

    def save(self) -> None:
        """Starts saving the state as it is now."""
        state = self.trainer.train_state
        self.manager.save(state, self.state_transformation_fns)
        self._last_saved = int(state.step)

    def _last_checkpoint(self) -> str | None:
        step = self._last_saved if self.manager is None or self._last_saved is not None else self.manager.latest_step()
        return None if step is None else f'checkpoint_{step}'

    def _act(self, mode: ActionMode, summaries: Mapping[str, Summary]) -> None:
        """Runs the actions of a mode; once one has asked to stop, no other takes that back."""
        answers = [action.run(self.trainer.train_state, summaries) for action in self.actions.get(mode.name, ())]
        stop = any(answers)
        if jax.process_count() > 1 and self.actions.get(mode.name):
            stop = bool(multihost_utils.broadcast_one_to_all(jnp.array(stop)))
        self.trainer.stop_training = self.trainer.stop_training or stop

    def _say(self, line: str) -> None:
        if jax.process_index() == 0:
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _progress(self, first_step: int) -> progress.Progress:
        return progress.Progress(self.stops.total_steps, first_step, console=self.console)

    @contextlib.contextmanager
    def _collected(self) -> Iterator[None]:
        """Keeps the garbage collector from running in the middle of a step where the run collects by itself."""
        if not self.stops.collect:
            yield
            return
        gc.disable()
        try:
            yield
        finally:
            gc.enable()


def check_actions(actions: Mapping[str, Sequence[BaseAction]] | None) -> dict[str, Sequence[BaseAction]]:
    """Checks that actions are for modes that exist; returns them by name.

    Raises:
      ConfigError: naming the modes that do not.
    """
    known = [mode.name for mode in (ActionMode.TRAIN, ActionMode.TRAIN_EVAL)]
    actions = dict(actions or {})
    for name in actions:
        if name not in known:
            raise ConfigError(
                f'Cannot run actions {name!r}{did_you_mean(name, known)}: a training run has {known}. Use one of these.'
            )
    return actions
