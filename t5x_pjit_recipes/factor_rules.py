"""Which dims of a parameter Adafactor factors: rules from parameter paths or from logical axes."""

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax.core import FrozenDict, freeze

from t5x_pjit_recipes.errors import ConfigError, did_you_mean, offenders
from t5x_pjit_recipes.layout.axes import axis_names, is_axes_leaf
from t5x_pjit_recipes.layout.paths import map_named, named_leaves


class FactorDim(enum.Enum):
    """What a dim is to the factored second moment: ROW and COLUMN dims are factored, BATCH dims are kept apart."""

    NONE = None
    BATCH = 1
    ROW = 2
    COLUMN = 3


class HeuristicRule(enum.Enum):
    """The type of `HEURISTIC_RULE`."""

    TOKEN = 1


HEURISTIC_RULE = HeuristicRule.TOKEN

FactorRule = tuple[FactorDim, ...] | HeuristicRule | None
Factoring = tuple[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]] | None]

_BY_NAME = {
    'row': FactorDim.ROW,
    'col': FactorDim.COLUMN,
    'column': FactorDim.COLUMN,
    'batch': FactorDim.BATCH,
    'none': FactorDim.NONE,
    'unfactorized': FactorDim.NONE,
}


class UnmatchedPathError(ConfigError, KeyError):
    """A path that no pattern of an `HParamMap` matches."""

    __str__ = ConfigError.__str__  # KeyError would print the repr


def factor_name_to_factordim(name: Any) -> Any:
    """Reads a `FactorDim` from its name in any case; passes on what is not a string.

    >>> factor_name_to_factordim('Col')
    <FactorDim.COLUMN: 3>
    """
    if not isinstance(name, str):
        return name
    if name.lower() not in _BY_NAME:
        raise ConfigError(
            f'Cannot factor a dim as {name!r}{did_you_mean(name.lower(), _BY_NAME)}. Use one of {sorted(_BY_NAME)}.'
        )
    return _BY_NAME[name.lower()]


def standard_logical_factor_rules() -> FrozenDict:
    """Returns the `FactorDim` of each logical axis that T5's models use."""
    return freeze(
        {
            'vocab': FactorDim.COLUMN,
            'embed': FactorDim.ROW,
            'mlp': FactorDim.COLUMN,
            'heads': FactorDim.COLUMN,
            'kv': FactorDim.COLUMN,
            'joined_kv': FactorDim.COLUMN,
            'relpos_buckets': FactorDim.NONE,
            'layers': FactorDim.BATCH,
            'stack': FactorDim.BATCH,
            'q_wi_fused': FactorDim.COLUMN,
            'o_wo_fused': FactorDim.COLUMN,
            'multiquery_heads': FactorDim.COLUMN,
            'kv_fused': FactorDim.COLUMN,
            'layer_norm_scale': FactorDim.NONE,
            'mlp_activations': FactorDim.COLUMN,
        }
    )


class HParamMap:
    r"""Hyperparameters by parameter path: the value of the first pattern found anywhere in the path.

    >>> scale = HParamMap([('bias$', False), ('.*', True)])
    >>> scale['mlp/bias'], scale({'mlp': {'bias': 1, 'kernel': 2}})
    (False, {'mlp': {'bias': False, 'kernel': True}})
    """

    def __init__(self, rules: Sequence[tuple[str | re.Pattern[str], Any]]) -> None:
        self.rules = tuple((re.compile(pattern), value) for pattern, value in rules)

    def __getitem__(self, path: str) -> Any:
        for pattern, value in self.rules:
            if pattern.search(path):
                return value
        patterns = [pattern.pattern for pattern, _ in self.rules]
        raise UnmatchedPathError(
            f'Cannot find the hyperparameter of {path!r}: none of the patterns {patterns} is in it. '
            "Add a pattern, or end the rules with ('.*', value)."
        )

    def __call__(self, params: Any) -> Any:
        """Returns a tree like `params` with the value of each parameter's path."""
        return map_named(lambda path, _: self[path], params)

    def __len__(self) -> int:
        return len(self.rules)

    def __iter__(self) -> Iterator[tuple[re.Pattern[str], Any]]:
        return iter(self.rules)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HParamMap) and other.rules == self.rules

    def __hash__(self) -> int:
        return hash(tuple(pattern for pattern, _ in self.rules))


def rules_from_axes(param_logical_axes: Any, logical_factor_rules: Mapping[str, FactorDim]) -> dict[str, FactorRule]:
    """Gives each parameter the rule that its logical axes make.

    A parameter that has no ROW or no COLUMN is not factored. One without axes (None) has the rule None.

    Args:
      param_logical_axes: a tree of logical axes, spelled in any way.
      logical_factor_rules: the `FactorDim` of each logical axis.

    Returns:
      Parameter path to rule.

    Raises:
      ConfigError: naming every axis without a rule, and every parameter that mixes ROW, COLUMN and NONE.
    """
    named = {path: axis_names(axes) for path, axes in named_leaves(param_logical_axes, is_leaf=is_axes_leaf).items()}
    faults = [
        f'{path} {axes}: no rule for axis {axis!r}{did_you_mean(axis, logical_factor_rules)}'
        for path, axes in named.items()
        for axis in axes or ()
        if axis not in logical_factor_rules
    ]
    if not faults:
        rules = {path: axes and tuple(logical_factor_rules[axis] for axis in axes) for path, axes in named.items()}
        faults = [
            f'{path} {named[path]}: ROW, COLUMN and NONE together; call the last BATCH to keep such dims apart'
            for path, rule in rules.items()
            if rule and {FactorDim.ROW, FactorDim.COLUMN, FactorDim.NONE} <= set(rule)
        ]
    if faults:
        raise ConfigError(
            f'Cannot make factor rules for {len(named)} parameters from their logical axes: {len(faults)} faults. '
            f'Mend or add entries in logical_factor_rules:\n{offenders(faults)}'
        )
    return {path: rule and _unfactored_unless_both(rule) for path, rule in rules.items()}


def _unfactored_unless_both(rule: tuple[FactorDim, ...]) -> tuple[FactorDim, ...]:
    if {FactorDim.ROW, FactorDim.COLUMN} <= set(rule):
        return rule
    return tuple(dim if dim is FactorDim.BATCH else FactorDim.NONE for dim in rule)


def rule_fault(rule: FactorRule, shape: tuple[int, ...]) -> str:
    """Says why `rule` does not fit an array of `shape`, or nothing where it does."""
    if rule is None:
        return ''
    if rule is HEURISTIC_RULE:
        return f'rank {len(shape)} is above 2 and has no rule of its own' if len(shape) > 2 else ''
    names = tuple(factor_name_to_factordim(dim).name for dim in rule)
    return f'rule {names} has {len(rule)} entries for {len(shape)} dims' if len(rule) != len(shape) else ''


def is_ignored(rule: FactorRule) -> bool:
    """Tells whether the heuristic decides in place of `rule`: as in T5X, for up to two dims, none of them BATCH."""
    if rule is None or rule is HEURISTIC_RULE:
        return False
    return len(rule) <= 2 and FactorDim.BATCH not in map(factor_name_to_factordim, rule)


def dims_of_rule(rule: tuple[FactorDim, ...]) -> Factoring:
    """Returns the dims that statistics are averaged over, and the (row dims, column dims) or None if not factored."""
    dims = [factor_name_to_factordim(dim) for dim in rule]
    rows, columns, kept = (
        tuple(i for i, dim in enumerate(dims) if dim is kind)
        for kind in (FactorDim.ROW, FactorDim.COLUMN, FactorDim.BATCH)
    )
    averaged = tuple(i for i in range(len(dims)) if i not in kept)
    return averaged, (rows, columns) if rows or columns else None


def heuristic_dims(shape: tuple[int, ...], min_dim_size: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the second largest and the largest dim, or None if the second largest is below `min_dim_size`.

    >>> heuristic_dims((256, 512), 128), heuristic_dims((256, 100), 128)
    (((0,), (1,)), None)
    """
    if len(shape) < 2:
        return None
    order = np.argsort(shape)
    rows, columns = int(order[-2]), int(order[-1])
    return ((rows,), (columns,)) if shape[rows] >= min_dim_size else None
