"""Rules for factoring: from logical axes, from patterns, from names."""

from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.adafactor import (
    Adafactor,
    FactorDim,
    HParamMap,
    factor_name_to_factordim,
    standard_logical_factor_rules,
)
from t5x_pjit_recipes.errors import ConfigError

NONE, BATCH, ROW, COLUMN = FactorDim.NONE, FactorDim.BATCH, FactorDim.ROW, FactorDim.COLUMN


@pytest.mark.parametrize(
    ('axes', 'rule'),
    [
        (('vocab', 'embed'), (COLUMN, ROW)),
        (('embed',), (NONE,)),
        (('layers', 'embed', 'mlp'), (BATCH, ROW, COLUMN)),
        (('layers', 'embed'), (BATCH, NONE)),
        (('embed', 'heads', 'kv'), (ROW, COLUMN, COLUMN)),
        (('heads', 'relpos_buckets'), (NONE, NONE)),
        (None, None),
    ],
)
def test_axes_make_rules(axes: Any, rule: Any) -> None:
    definition = Adafactor(logical_factor_rules=standard_logical_factor_rules())
    definition.set_param_axes({'w': axes})
    assert definition.hyper_params.factor_map == {'w': rule}


@pytest.mark.parametrize(
    ('axes', 'message'),
    [
        (
            {'a': P('embed', 'abspos_buckets'), 'b': P('embedd'), 'c': P('mlp')},
            r"2 faults(?s:.*)a \('embed', 'abspos_buckets'\): no rule for axis 'abspos_buckets'.*\n"
            r"  b \('embedd',\): no rule for axis 'embedd' \(did you mean 'embed'\?\)",
        ),
        ({'a': P('embed', 'relpos_buckets', 'mlp')}, r"a \('embed', 'relpos_buckets', 'mlp'\): ROW, COLUMN and NONE"),
    ],
)
def test_every_axis_without_a_meaning_is_named(axes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Adafactor(logical_factor_rules=standard_logical_factor_rules()).set_param_axes(axes)


def test_patterns_are_searched_in_order() -> None:
    scale = HParamMap([('bias', 0), ('layers_[0-3]/', 1), ('.*', 2)])
    params = {'layers_2': {'bias': 0, 'kernel': 0}, 'layers_7': {'kernel': 0}}
    assert scale(params) == {'layers_2': {'bias': 0, 'kernel': 1}, 'layers_7': {'kernel': 2}}
    assert scale == HParamMap([('bias', 0), ('layers_[0-3]/', 1), ('.*', 2)])
    with pytest.raises(KeyError, match="hyperparameter of 'kernel': none of the patterns \\['bias'\\]"):
        HParamMap([('bias', 0)])['kernel']


@pytest.mark.parametrize(
    ('name', 'dim'), [('ROW', ROW), ('col', COLUMN), ('Column', COLUMN), ('unfactorized', NONE), (BATCH, BATCH)]
)
def test_names_of_factor_dims(name: Any, dim: FactorDim) -> None:
    assert factor_name_to_factordim(name) is dim
