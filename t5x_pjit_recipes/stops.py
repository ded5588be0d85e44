"""Stops: the steps at which a run does something besides training."""

import dataclasses
from collections.abc import Collection

from t5x_pjit_recipes.errors import ConfigError, offenders


@dataclasses.dataclass(frozen=True)
class Stops:
    """When a run reports, saves, evaluates and collects garbage; the last step does all that is done at all.

    Periods are in steps and count from step 0, so that a resumed run stops where an uninterrupted one does; None or 0
    means never.

    Attributes:
      total_steps: the last step.
      report: period of reports.
      save: period of checkpoints.
      save_steps: further steps to save at.
      evaluate: period of evaluations.
      collect: period of garbage collections.
    """

    total_steps: int
    report: int | None = None
    save: int | None = None
    save_steps: Collection[int] = ()
    evaluate: int | None = None
    collect: int | None = None

    def __post_init__(self):
        periods = {'report': self.report, 'save': self.save, 'evaluate': self.evaluate, 'collect': self.collect}
        wrong = [
            f'{name}: {value!r}' for name, value in periods.items() if value and (type(value) is not int or value < 0)
        ]
        if wrong or type(self.total_steps) is not int or self.total_steps < 0:
            raise ConfigError(
                f'Cannot train for total_steps={self.total_steps!r} with these periods: steps are whole numbers, and '
                f'not negative. Correct them:\n{offenders(wrong or [f"total_steps: {self.total_steps!r}"])}'
            )

    def after(self, step: int) -> int:
        """Returns the first stop after `step`.

        >>> stops = Stops(total_steps=25, report=10, save_steps=(12,))
        >>> stops.after(0), stops.after(10), stops.after(20)
        (10, 12, 25)
        """
        periods = [p for p in (self.report, self.save, self.evaluate, self.collect) if p]
        following = [step - step % period + period for period in periods]
        return min([self.total_steps, *following, *(s for s in self.save_steps if s > step)])

    def saves(self, step: int) -> bool:
        """Tells whether a checkpoint is due at `step`."""
        return step in self.save_steps or self._due(step, self.save) or bool(self.save_steps and self._last(step))

    def evaluates(self, step: int) -> bool:
        """Tells whether an evaluation is due at `step`."""
        return self._due(step, self.evaluate)

    def collects(self, step: int) -> bool:
        """Tells whether garbage is to be collected at `step`."""
        return self._due(step, self.collect)

    def _due(self, step: int, period: int | None) -> bool:
        return bool(period) and (step % period == 0 or self._last(step))

    def _last(self, step: int) -> bool:
        return step == self.total_steps
