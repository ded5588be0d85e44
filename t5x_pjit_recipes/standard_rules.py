"""The standard rules: T5X's, from the axis names of its models to the mesh axes 'data' and 'model'."""

from collections.abc import Sequence
from typing import Any

from t5x_pjit_recipes.errors import RuleError

LogicalAxisRules = Sequence[tuple[str, Any]]

_SHARED_RULES = (
    ('relpos_buckets', None),
    ('abspos_buckets', None),
    ('length', None),
    ('layers', None),
    ('stack', None),
    ('mlp_activations', None),
)
_RULES = {
    (1, 1): [
        ('batch', 'data'), ('vocab', 'model'), ('embed', None), ('mlp', 'model'),
        ('heads', 'model'), ('kv', None), ('joined_kv', 'model'),
    ],
    (2, 1): [
        ('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('heads', 'model'),
        ('kv', None), ('joined_kv', 'model'), ('embed', 'model'),
    ],
    (1, 2): [
        ('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('heads', 'model'),
        ('kv', None), ('joined_kv', 'model'), ('embed', 'data'),
    ],
    (2, 2): [
        ('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('heads', 'model'),
        ('kv', None), ('joined_kv', 'model'), ('embed', 'model'), ('embed', 'data'),
    ],
}  # fmt: skip


def standard_logical_axis_rules(
    activation_partitioning_dims: int = 1,
    parameter_partitioning_dims: int = 1,
    additional_rules: LogicalAxisRules | None = None,
) -> LogicalAxisRules:
    """Lists T5X's rules for the axis names of its models.

    Args:
      activation_partitioning_dims: 1 splits activations over the batch, 2 over the batch and 'embed'.
      parameter_partitioning_dims: 1 splits parameters over 'model', 2 over 'model' and 'data' (fully sharded).
      additional_rules: rules for further names, tried after all others.

    Raises:
      RuleError: for dims other than 1 or 2.
    """
    dims = (activation_partitioning_dims, parameter_partitioning_dims)
    if dims not in _RULES:
        raise RuleError(
            f'Cannot make standard rules for activation_partitioning_dims={dims[0]!r} and '
            f'parameter_partitioning_dims={dims[1]!r}: each is 1 or 2. Use 1 or 2, or give a list of your own.'
        )
    return [*_RULES[dims], *_SHARED_RULES, *(additional_rules or ())]
