"""What the ready rules share: the names of the mesh axes can be changed, and the spelling of the parameters' names."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from t5x_pjit_recipes.layout.axes import spec_axes
from t5x_pjit_recipes.layout.regex_rules import RegexRules

Rule = tuple[str, PartitionSpec]


def make_rules(family: Sequence[Rule]) -> Callable[..., RegexRules]:
    """Makes the function `rules` of a family of models.

    Args:
      family: its rules, for the names that Flax models have, on mesh axes 'data' and 'model'; each spec has an entry
        for each dim. Some may match nothing, since models of one family differ (not all have a head of their own);
        arrays without a rule are an error as ever.

    >>> rules = make_rules([('.*/wi/kernel', PartitionSpec('data', 'model'))])
    >>> tuple(rules(model='mp', torch=True).spec('mlp/wi/weight', (8, 4)))
    ('mp', 'data')
    """

    def rules(*, data: str | None = 'data', model: str | None = 'model', torch: bool = False) -> RegexRules:
        """Returns the rules, on mesh axes of these names.

        Args:
          data: mesh axis that fully shards the parameters; None leaves those dims whole.
          model: mesh axis that splits heads, MLPs and, where their number allows it, words; it should divide the number
            of heads, that of keys and values too. None as for `data`.
          torch: whether names and shapes are those of a checkpoint for PyTorch, with '/' in place of '.'.
        """
        spelled = map(torch_rule, family) if torch else family
        names = {'data': data, 'model': model}
        renamed = [(pattern, PartitionSpec(*(_renamed(e, names) for e in spec))) for pattern, spec in spelled]
        return RegexRules(renamed, allow_unused=True)

    return rules


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
