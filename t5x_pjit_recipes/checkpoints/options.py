"""Options: checks that configurations and managers share."""

from typing import Any

from t5x_pjit_recipes import errors


def check_choice(owner: str, name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raises ConfigError, with a near miss, unless `value` is one of `choices`."""
    if value not in choices:
        listed = ', '.join(map(repr, choices))
        raise errors.ConfigError(
            f'Cannot make {owner} with {name}={value!r}{errors.did_you_mean(value, choices)}: '
            f'it is one of {listed}. Choose one of them.'
        )


def check_count(owner: str, name: str, value: Any) -> None:
    """Raises ConfigError unless `value` is None or an integer of 1 or more."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise errors.ConfigError(
            f'Cannot make {owner} with {name}={value!r}: it counts something, from 1 up. Give an integer, or None.'
        )


def check_steps(owner: str, name: str, value: Any) -> None:
    """Raises ConfigError unless `value` is None or a collection of steps, integers of 0 or more."""
    wrong = [] if value is None else [step for step in value if not isinstance(step, int) or step < 0]
    if wrong:
        raise errors.ConfigError(
            f'Cannot make {owner} with {name}={value!r}: {wrong} are not steps. Give integers from 0 up.'
        )


def check_unset(owner: str, unset: dict[str, Any], given: dict[str, Any]) -> None:
    """Raises ConfigError naming every option of T5X's that has no effect here and yet is set.

    Args:
      owner: who has the options.
      unset: name of each such option to the value that leaves it alone.
      given: name to value.
    """
    wrong = [f'{name}={given[name]!r}; leave it at {value!r}' for name, value in unset.items() if given[name] != value]
    if wrong:
        raise errors.ConfigError(
            f'Cannot make {owner} with options that are not supported here. Take them out:\n{errors.offenders(wrong)}'
        )
