"""What a run tells whoever watches it: a progress bar on a terminal, one line per report anywhere else."""

import math
from collections.abc import Mapping
from typing import Any

import rich.console
import rich.progress

from t5x_pjit_recipes.summaries import on_process_0

LOSS = 'loss_per_nonpadding_target_token'
LEARNING_RATES = ('learning_rate/current', 'learning_rate')
TOKENS_PER_SECOND = 'timing/target_tokens_per_second'


class Progress:
    """Shows how far a run is and how it does, on process 0 only.

    >>> from t5x_pjit_recipes.metrics import Scalar
    >>> with Progress(300, console=rich.console.Console(force_terminal=False)) as progress:
    ...     progress.report(100, {'loss_per_nonpadding_target_token': Scalar(3.2071), 'learning_rate': Scalar(0.01)})
    step 100/300  loss 3.21  lr 0.0100
    """

    def __init__(self, total_steps: int, start_step: int = 0, *, console: rich.console.Console | None = None) -> None:
        """Takes the last step of the run, the step it starts at, and where to write (standard output by default)."""
        self._total_steps = total_steps
        self._console = rich.console.Console() if console is None else console
        self._shown = on_process_0()
        self._bar = _make_bar(self._console) if self._shown and self._console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task('', total=total_steps, completed=start_step, status='')

    def report(self, step: int, summary: Mapping[str, Any]) -> None:
        """Shows the summary of the steps up to `step`, a mapping of metric name to `Scalar` or number."""
        status = describe_summary(summary)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=status)
        elif self._shown:
            self._console.print(
                f'step {step}/{self._total_steps}  {status}'.rstrip(), soft_wrap=True, highlight=False, markup=False
            )

    def __enter__(self) -> 'Progress':
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe_summary(summary: Mapping[str, Any]) -> str:
    """Describes a training summary in one line: loss per target token, learning rate, target tokens per second.

    What the summary lacks is left out.

    >>> describe_summary({'loss_per_nonpadding_target_token': 3.2071, 'timing/target_tokens_per_second': 12345.0})
    'loss 3.21  12.3k tokens/s'
    """
    numbers = {name: float(getattr(value, 'value', value)) for name, value in summary.items()}
    rate = next((name for name in LEARNING_RATES if name in numbers), None)
    parts = []
    if LOSS in numbers:
        parts.append(f'loss {_three_digits(numbers[LOSS])}')
    if rate is not None:
        parts.append(f'lr {_three_digits(numbers[rate])}')
    if TOKENS_PER_SECOND in numbers:
        parts.append(f'{_count(numbers[TOKENS_PER_SECOND])} tokens/s')
    return '  '.join(parts)


def _three_digits(value: float) -> str:
    return f'{value:#.3g}'.rstrip('.')


def _count(value: float) -> str:
    for unit in ('', 'k', 'M', 'G'):
        # 999.5 would be written as 1.00e+03.
        if value < 999.5 or not math.isfinite(value):
            return _three_digits(value) + unit
        value /= 1000
    return _three_digits(value) + 'T'


def _make_bar(console: rich.console.Console) -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn('step {task.completed:.0f}/{task.total:.0f}'),
        rich.progress.BarColumn(),
        rich.progress.TextColumn('{task.fields[status]}', markup=False),
        rich.progress.TimeRemainingColumn(),
        console=console,
    )
