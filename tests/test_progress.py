import io

import pytest
from rich.console import Console

from t5x_pjit_recipes import progress
from t5x_pjit_recipes.metrics import Scalar
from t5x_pjit_recipes.progress import Progress, describe_summary

SUMMARY = {
    'loss': Scalar(577.0),
    'loss_per_nonpadding_target_token': Scalar(3.2071),
    'learning_rate': Scalar(0.02),
    'learning_rate/current': Scalar(0.01),
    'timing/target_tokens_per_second': Scalar(12345.0),
}


def shown(*, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    with Progress(300, console=console) as bar:
        bar.report(100, SUMMARY)
        bar.report(200, {})
    return console.file.getvalue()


def test_without_a_terminal_each_report_is_a_line():
    assert shown(terminal=False) == 'step 100/300  loss 3.21  lr 0.0100  12.3k tokens/s\nstep 200/300\n'


def test_a_terminal_gets_a_bar():
    text = shown(terminal=True)
    assert 'step 200/300' in text
    assert '━' in text


def test_a_bar_shows_the_status():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Progress(300, start_step=50, console=console) as bar:
        bar.report(100, SUMMARY)
    assert 'step 100/300' in console.file.getvalue()
    assert 'loss 3.21  lr 0.0100  12.3k tokens/s' in console.file.getvalue()


@pytest.mark.parametrize('terminal', [True, False])
def test_only_process_0_speaks(monkeypatch, terminal):
    monkeypatch.setattr(progress, 'on_process_0', lambda: False)
    assert shown(terminal=terminal) == ''


@pytest.mark.parametrize(
    ('summary', 'expected'),
    [
        ({}, ''),
        ({'loss': 1.0}, ''),
        ({'loss_per_nonpadding_target_token': float('nan')}, 'loss nan'),
        ({'loss_per_nonpadding_target_token': 577.2}, 'loss 577'),
        ({'learning_rate': 1e-5}, 'lr 1.00e-05'),
        ({'timing/target_tokens_per_second': 0.0}, '0.00 tokens/s'),
        ({'timing/target_tokens_per_second': 999.7}, '1.00k tokens/s'),
        ({'timing/target_tokens_per_second': 3.21e6}, '3.21M tokens/s'),
    ],
)
def test_numbers_have_three_digits(summary, expected):
    assert describe_summary(summary) == expected
