import random

import pytest
from flax.core import freeze
from flax.linen.partitioning import AxisMetadata, logical_to_mesh_axes
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.errors import RuleError
from t5x_pjit_recipes.layout import AxisNames, LogicalRules, canonical

RULES = LogicalRules([('batch', 'data'), ('embed', 'model'), ('embed', 'data'), ('mlp', 'model'), ('kv', None)])


@pytest.mark.parametrize(
    ('names', 'spec'),
    [
        (('batch', 'length', 'embed'), P('data', None, 'model')),
        (('embed', 'mlp'), P('model', None)),  # 'model' is taken when the rule for mlp is tried
        (('mlp',), P('model')),
        (('kv', None), P(None, None)),
        ((), P()),
        (None, None),
    ],
)
def test_first_free_rule_wins(names, spec):
    assert RULES.spec(names) == spec


def test_a_taken_mesh_axis_sends_a_name_to_its_next_rule():
    rules = LogicalRules([('vocab', 'model'), ('embed', 'model'), ('embed', 'data')])
    assert rules.spec(('vocab', 'embed')) == P('model', 'data')
    assert rules.deciding(('vocab', 'embed', None)) == (1, 3, None)


def test_specs_are_those_of_flax_for_any_rules():
    rng = random.Random(0)
    names, targets = ['a', 'b', 'c', 'd'], [None, 'x', 'y', ('x', 'y'), 'z']
    for _ in range(500):
        rules = [(rng.choice(names), rng.choice(targets)) for _ in range(rng.randint(0, 7))]
        array = tuple(n if rng.random() < 0.8 else None for n in rng.sample(names, rng.randint(1, 4)))
        assert LogicalRules(rules).spec(array) == logical_to_mesh_axes(array, rules), (rules, array)


def test_every_spelling_of_names_gives_the_same_specs():
    names = ('batch', 'embed')
    for spelled in (names, AxisNames(*names), P(*names), AxisMetadata(names=names)):
        assert RULES.specs({'a': {'b': spelled, 'c': None}}) == {'a': {'b': P('data', 'model'), 'c': None}}
    assert RULES.specs(freeze({'a': AxisMetadata(names=names)})) == freeze({'a': P('data', 'model')})


def test_a_name_for_two_dims_is_an_error_naming_every_leaf():
    with pytest.raises(RuleError, match=r"2 leaves.*\n  a/q: \('embed', 'embed'\) has 'embed' more.*\n  b: .*'kv'"):
        RULES.specs({'a': {'q': ('embed', 'embed'), 'r': ('embed',)}, 'b': ('kv', 'kv', 'mlp')})


def test_unknown_names_are_described_with_near_misses():
    text = RULES.describe_unknown({'w': ('embedd', 'mlp'), 'v': ('kv',), 'u': ('zzz', None)})
    assert 'names of 2 arrays' in text
    assert "w: 'embedd' (did you mean 'embed'?)" in text
    assert "u: 'zzz'" in text
    assert RULES.describe_unknown({'v': ('kv',)}) == ''


@pytest.mark.parametrize(
    ('rules', 'says'),
    [
        ([('a', 'data'), 'embed'], r"rule 2, 'embed': it is not a pair"),
        ([('a',)], r"rule 1, \('a',\)"),
        ([('a', 'None')], r"'None' is not a mesh axis"),
        ([('a', 3)], r"rule 1, \('a', 3\)"),
    ],
)
def test_what_is_no_rule_is_refused_by_number(rules, says):
    with pytest.raises(RuleError, match=says):
        LogicalRules(rules)


def test_rules_for_absent_mesh_axes_are_refused_all_at_once():
    with pytest.raises(RuleError, match=r"(?s)2 rules.*\('dp', 'mp'\).*rule 1 \('batch', 'data'\).*rule 4.*'modle'"):
        LogicalRules([('batch', 'data'), ('b', 'dp'), ('c', ('dp', 'mp')), ('d', ('dp', 'modle'))]).check_mesh(
            ['dp', 'mp']
        )


def test_reasons_name_the_deciding_rules():
    reasons = RULES.reasons({'w': ('batch', 'foo', None), 'v': ('embed', 'mlp'), 'n': None})
    assert reasons == {
        'w': 'batch: rule 1, foo: no rule, -',
        'v': 'embed: rule 2, mlp: mesh axis taken',
        'n': 'no names',
    }


@pytest.mark.parametrize(('spec', 'short'), [(P('x', None), P('x')), (P(None, None), P()), (P(('x',), ()), P('x'))])
def test_canonical_specs_have_no_empty_tail(spec, short):
    assert canonical(spec) == short
