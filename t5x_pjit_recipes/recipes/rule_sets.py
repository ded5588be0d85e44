"""What the ready rules share: the names of the mesh axes can be changed, and the spelling of the parameters' names."""

import re
from collections.abc import Iterable
from typing import Any

from jax.sharding import PartitionSpec

from t5x_pjit_recipes.layout.axes import spec_axes
from t5x_pjit_recipes.layout.regex_rules import RegexRules

Rule = tuple[str, PartitionSpec]


def make_rules(rules: Iterable[Rule], *, data: str | None, model: str | None, torch: bool) -> RegexRules:
    """Makes rules for a mesh and a spelling of names from a family's own, which say 'data' and 'model'.

    Rules may match nothing, since models of one family differ (not all have a head of their own); arrays without a rule
    are an error as ever.

    Args:
      rules: a family's rules, for the names that Flax models have; each spec has an entry for each dim.
      data: the mesh axis for 'data', by which parameters are fully sharded; None leaves those dims whole.
      model: the mesh axis for 'model', by which heads, MLPs and words are split; None leaves those dims whole.
      torch: whether names and shapes are those of a checkpoint for PyTorch, with '/' in place of '.'.
    """
    rules = [torch_rule(rule) for rule in rules] if torch else rules
    names = {'data': data, 'model': model}
    renamed = [(pattern, PartitionSpec(*(_renamed(e, names) for e in spec))) for pattern, spec in rules]
    return RegexRules(renamed, allow_unused=True)


def _renamed(entry: Any, names: dict[str, str | None]) -> Any:
    axes = tuple(axis for name in spec_axes(entry) if (axis := names[name]) is not None)
    return axes if len(axes) > 1 else next(iter(axes), None)


def torch_rule(rule: Rule) -> Rule:
    """Turns a rule for a Flax model's names into one for a PyTorch checkpoint's, where all are weights or biases.

    Matrices and kernels of one-dimensional convolutions have their dims in reverse there; embeddings do not.

    >>> pattern, spec = torch_rule(('.*/wi/kernel', PartitionSpec('data', 'model')))
    >>> pattern, tuple(spec)
    ('.*/wi/weight', ('model', 'data'))
    """
    pattern, spec = rule
    if pattern.endswith('kernel'):
        return pattern.removesuffix('kernel') + 'weight', PartitionSpec(*reversed(spec))
    return re.sub(r'\b(embedding|scale)\b', 'weight', pattern), spec
