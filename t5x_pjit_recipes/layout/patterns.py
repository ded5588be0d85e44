"""Patterns on leaf names and what they lead to: how rules are spelled, read and checked, in each dialect."""

import ast
import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from jax.sharding import PartitionSpec

from t5x_pjit_recipes.errors import RuleError, offenders
from t5x_pjit_recipes.layout.axes import AxisMetadata, AxisNames
from t5x_pjit_recipes.layout.paths import SEPARATOR

Pattern = str | tuple[str, ...]
Target = PartitionSpec | AxisNames
Rule = tuple[Pattern, Target]

FULLMATCH, SEARCH, WINDOWS = DIALECTS = ('fullmatch', 'search', 'windows')


def is_scalar(shape: Iterable[int]) -> bool:
    """Tells whether an array has one element, so that there is nothing to divide and it needs no rule.

    >>> is_scalar(()), is_scalar((1, 1)), is_scalar((2,))
    (True, True, False)
    """
    return math.prod(shape) == 1


def parse_spec(text: str) -> PartitionSpec:
    """Reads a spec from the text that spells it.

    Raises:
      RuleError: if the text spells none.

    >>> parse_spec("P(('replica', 'data'), None, 'model')") == PartitionSpec(('replica', 'data'), None, 'model')
    True
    """
    try:
        call = ast.parse(text.strip(), mode='eval').body
        if isinstance(call, ast.Call) and not call.keywords and ast.unparse(call.func).endswith(_SPEC_NAMES):
            return _read_spec(PartitionSpec(*map(ast.literal_eval, call.args)))
    except (SyntaxError, ValueError, TypeError):
        pass
    raise RuleError(f"Cannot read {text!r} as a spec. Write PartitionSpec('data', None), or P('data', None).")


_SPEC_NAMES = ('PartitionSpec', 'PS', 'P')


def _read_spec(spec: PartitionSpec) -> PartitionSpec:
    for entry in spec:
        axes = entry if isinstance(entry, tuple | list) else (entry,)
        if entry is not None and not all(isinstance(axis, str) for axis in axes):
            raise ValueError(f'{entry!r} is no mesh axis')
    return spec


def read_rules(rules: list[Any], dialect: str) -> tuple[Rule, ...]:
    """Reads pairs of a pattern and a target, in the spellings that `RegexRules` documents.

    Raises:
      RuleError: listing by number every rule that cannot be read, and why.
    """
    read, faults = [], []
    for number, rule in enumerate(rules, 1):
        try:
            pattern, target = _pair(rule)
            read.append((_read_pattern(pattern, dialect), _read_target(target)))
        except (ValueError, re.error) as error:
            faults.append(f'rule {number}, {rule!r}: {error}')
    if faults:
        raise RuleError(f'Cannot read {len(faults)} of {len(rules)} rules. Correct them:\n{offenders(faults)}')
    return tuple(read)


def _pair(rule: Any) -> Any:
    if isinstance(rule, tuple | list) and len(rule) == 2:
        return rule
    raise ValueError("it is no pair of a pattern and a target, such as ('.*/kernel', PartitionSpec('data', None))")


def _read_pattern(pattern: Any, dialect: str) -> Pattern:
    parts = tuple(pattern) if isinstance(pattern, tuple | list) else (pattern,)
    if dialect == WINDOWS and isinstance(pattern, str):
        raise ValueError(f"in windows a pattern is a tuple of parts, such as ({pattern!r}, 'kernel')")
    if dialect != WINDOWS and not isinstance(pattern, str):
        raise ValueError(f'a pattern is a text, not {pattern!r}; RegexRules.from_windows reads tuples of parts')
    if not parts or not all(isinstance(part, str) for part in parts):
        raise ValueError(f'{pattern!r} has parts that are no text')
    for part in parts:
        try:
            re.compile(part)
        except re.error as error:
            raise ValueError(f'{part!r} is no regular expression: {error}') from error
    return pattern if isinstance(pattern, str) else parts


def _read_target(target: Any) -> Target:
    if target is None:
        return PartitionSpec()
    if isinstance(target, PartitionSpec):
        return _read_spec(target)
    if isinstance(target, str):
        if '(' in target:
            return parse_spec(target)
        raise ValueError(f'{target!r} is no target; write ({target!r},) for logical axes, or PartitionSpec({target!r})')
    names = target.names if isinstance(target, AxisMetadata) else target
    if not isinstance(names, tuple | list):
        raise ValueError(f'{target!r} is a {type(target).__name__}; write PartitionSpec(...) or a tuple of names')
    if not all(name is None or isinstance(name, str) for name in names):
        raise ValueError(f'{target!r} are no logical axes; write PartitionSpec(...) if mesh axes are meant')
    return AxisNames(*names)


def _fullmatch(pattern: Any) -> Callable[[str], Any]:
    return re.compile(pattern).fullmatch


def _search(pattern: Any) -> Callable[[str], Any]:
    return re.compile(pattern).search


def _window(parts: Any) -> Callable[[str], Any]:
    matchers = [re.compile(part).fullmatch for part in parts]

    def matches(name: str) -> bool:
        components = name.split(SEPARATOR)
        starts = range(len(components) - len(matchers) + 1)
        return any(all(m(c) for m, c in zip(matchers, components[i:], strict=False)) for i in starts)

    return matches


_MATCHERS = {FULLMATCH: _fullmatch, SEARCH: _search, WINDOWS: _window}


def matcher(pattern: Pattern, dialect: str) -> Callable[[str], Any]:
    """Returns a function that tells whether a leaf's name matches.

    >>> bool(matcher('wi/kernel', SEARCH)('mlp/wi/kernel')), bool(matcher('wi/kernel', FULLMATCH)('mlp/wi/kernel'))
    (True, False)
    """
    return _MATCHERS[dialect](pattern)


def likeness(name: str, pattern: Pattern) -> float:
    """Tells how much a name looks like a pattern, from 0 to 1; what only a regular expression has is left out."""
    text = pattern if isinstance(pattern, str) else SEPARATOR.join(pattern)
    return difflib.SequenceMatcher(None, re.sub(r'\\[a-zA-Z]|[^\w/]', '', text), name).ratio()
