import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict, freeze
from flax.linen.partitioning import AxisMetadata
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.errors import PlanError, RuleError
from t5x_pjit_recipes.layout import AxisNames, LogicalRules, Plan, RegexRules, abstract_mesh
from t5x_pjit_recipes.layout.patterns import parse_spec

LOGICAL = LogicalRules([('embed', None), ('mlp', 'model'), ('vocab', ('data', 'model'))])


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


PARAMS = {
    'shared': {'embedding': shape(64, 8)},
    'mlp': {'wi': {'kernel': shape(8, 16), 'bias': shape(16)}, 'wo': {'kernel': shape(16, 8)}},
    'temperature': shape(),
}
RULES = [
    ('shared/embedding', P('model', None)),
    (r'.*/wi/kernel', P(None, 'model')),
    (r'.*/wo/kernel', P('model', None)),
    (r'.*', P()),
]


def flat(specs):
    return {jax.tree_util.keystr(path, simple=True, separator='/'): spec for path, spec in
            jax.tree_util.tree_flatten_with_path(specs, is_leaf=lambda x: isinstance(x, P))[0]}  # fmt: skip


def test_the_first_rule_that_matches_the_whole_name_decides():
    rules = RegexRules(RULES)
    assert flat(rules.specs(PARAMS)) == {
        'mlp/wi/bias': P(),
        'mlp/wi/kernel': P(None, 'model'),
        'mlp/wo/kernel': P('model', None),
        'shared/embedding': P('model', None),
        'temperature': P(),
    }
    assert rules.deciding('mlp/wi/kernel') == 2
    assert rules.matching('mlp/wi/kernel') == (2, 4)
    assert RegexRules(RULES[:3]).deciding('mlp/wi/kernel/v') is None
    assert rules.spec('x/wo/kernel', (4, 4)) == P('model', None)


def test_reasons_tell_what_decided():
    rules = RegexRules([*RULES[:1], (r'.*/kernel', ('embed', 'mlp')), (r'.*/bias', None)])
    assert rules.reasons(PARAMS, LOGICAL) == {
        'mlp/wi/bias': "rule 3 '.*/bias'",
        'mlp/wi/kernel': "rule 2 '.*/kernel' embed: rule 1, mlp: rule 2",
        'mlp/wo/kernel': "rule 2 '.*/kernel' embed: rule 1, mlp: rule 2",
        'shared/embedding': "rule 1 'shared/embedding'",
        'temperature': 'a scalar',
    }
    assert RegexRules([('shared/embedding', P())]).reasons({'w': shape(2)}) == {'w': 'no rule'}


def test_containers_are_kept():
    for params in (freeze(PARAMS), [PARAMS, (shape(2, 2),)]):
        specs = RegexRules([(r'.*', P())]).specs(params)
        assert type(specs) is type(params)
        assert jax.tree.structure(specs, is_leaf=lambda x: isinstance(x, P)) == jax.tree.structure(params)
    assert isinstance(RegexRules(RULES).specs(freeze(PARAMS))['mlp'], FrozenDict)


def test_searching_finds_a_pattern_anywhere():
    rules = RegexRules([('embedding', P('model')), ('wi/kernel$', P(None, 'model')), ('.', P())], dialect='search')
    assert rules.spec('a/embedding/b', (4, 4)) == P('model')
    assert rules.spec('mlp/wi/kernel', (4, 4)) == P(None, 'model')
    assert rules.spec('mlp/wi/kernel_2', (4, 4)) == P()


@pytest.mark.parametrize(
    ('name', 'decided'),
    [
        ('encoder/0/SelfAttention/q/kernel', 1),
        ('SelfAttention/q/kernel/extra', 1),
        ('encoder/MySelfAttention/q/kernel', None),  # a part must match a whole component
        ('encoder/SelfAttention/qq/kernel', None),
        ('encoder/SelfAttention/x/q/kernel', None),  # the parts must be neighbours
        ('kernel', None),
    ],
)
def test_windows_match_whole_components_that_are_neighbours(name, decided):
    rules = RegexRules.from_windows([(('SelfAttention', '(q|k|v)', 'kernel'), P(None, 'mp'))])
    assert rules.deciding(name) == decided


def test_a_part_of_a_window_does_not_cross_components():
    assert RegexRules.from_windows([(('a.*', 'c'), P())]).deciding('a/b/c') is None


@pytest.mark.parametrize(
    'target', [('embed', 'mlp'), ['embed', 'mlp'], AxisNames('embed', 'mlp'), AxisMetadata(names=('embed', 'mlp'))]
)
def test_logical_axes_in_any_spelling_are_finished_by_logical_rules(target):
    rules = RegexRules([('w', target)])
    assert rules.target('w', (4, 8)) == AxisNames('embed', 'mlp')
    assert rules.specs({'w': shape(4, 8)}, LOGICAL) == {'w': P(None, 'model')}
    assert rules.spec('w', (4, 8), [('embed', 'data'), ('mlp', None)]) == P('data', None)
    assert rules.is_logical
    assert not RegexRules(RULES).is_logical


@pytest.mark.parametrize('text', ["P(None, ('data', 'model'))", "PartitionSpec(None, ('data', 'model'))"])
def test_a_text_may_spell_a_spec(text):
    assert parse_spec(text) == P(None, ('data', 'model'))
    assert RegexRules([('w', text)]).specs({'w': shape(4, 8)}) == {'w': P(None, ('data', 'model'))}


def test_scalars_are_replicated_whatever_rules_say():
    rules = RegexRules([('w', P('model')), ('one', P('model'))])
    assert rules.specs({'w': shape(4), 'one': shape(1, 1), 's': 3.0}) == {'w': P('model'), 'one': P(), 's': P()}


def test_unmatched_leaves_and_dead_rules_are_told_at_once():
    rules = RegexRules([('wi/kernel', P()), (r'.*/wo/kernl', P('model')), (r'shared/embedding', P())])
    with pytest.raises(RuleError) as caught:
        rules.specs(PARAMS)
    message = str(caught.value)
    assert 'Cannot lay out 5 arrays by 3 rules: no rule matches 3, 2 rules match nothing.' in message
    assert "\n  mlp/wi/kernel (8, 16): no rule; rule 1 'wi/kernel' matches a part of it only" in message
    assert "\n  mlp/wo/kernel (16, 8): no rule; the nearest: rule 2 '.*/wo/kernl' and rule" in message
    assert '\n  mlp/wi/bias (16,): no rule' in message
    assert 'temperature (' not in message
    assert "\n  rule 1 'wi/kernel' matches no whole name, but a part of mlp/wi/kernel" in message
    assert "\n  rule 2 '.*/wo/kernl' matches nothing; the nearest: mlp/wo/kernel" in message


def test_more_than_ten_unmatched_leaves_are_counted():
    with pytest.raises(RuleError, match='no rule matches 14.*\n(.*\n)*  and 4 more'):
        RegexRules([]).specs([shape(2)] * 14)


def test_a_dead_rule_is_an_error_unless_allowed_and_a_shadowed_one_is_none():
    rules = [(r'.*', P()), (r'mlp/.*', P()), (r'nothing', P())]
    with pytest.raises(RuleError, match=r"5 arrays by 3 rules: 1 rules match nothing.*\n  rule 3 'nothing'"):
        RegexRules(rules).specs(PARAMS)
    assert set(flat(RegexRules(rules, allow_unused=True).specs(PARAMS)).values()) == {P()}
    with pytest.raises(RuleError, match=r"rule 1 \('a', 'b'\) matches nothing; the nearest: w"):
        RegexRules.from_windows([(('a', 'b'), P()), (('w',), P())]).specs({'w': shape(2)})


@pytest.mark.parametrize('empty', [{}, [], {'a': {}}, None])
def test_an_empty_tree_is_refused(empty):
    with pytest.raises(RuleError, match='Cannot match 4 rules with a tree of no arrays'):
        RegexRules(RULES, allow_unused=True).specs(empty)


@pytest.mark.parametrize(
    ('rule', 'says'),
    [
        (('(a', P()), r"rule 2, \('\(a', P\(\)\): '\(a' is no regular expression: missing \)"),
        (('a', 3), r"rule 2, \('a', 3\): 3 is a int; write PartitionSpec"),
        (('a', 'mlp'), r"'mlp' is no target; write \('mlp',\) for logical axes, or PartitionSpec\('mlp'\)"),
        (('a', (('data', 'model'), None)), 'are no logical axes; write PartitionSpec'),
        (('a', P(3)), '3 is no mesh axis'),
        (('a', 'P(3)'), r"Cannot read 'P\(3\)' as a spec"),
        (('a', 'list(3)'), r"Cannot read 'list\(3\)' as a spec. Write PartitionSpec\('data', None\)"),
        ((('a', 'b'), P()), 'RegexRules.from_windows reads tuples of parts'),
        (('a',), r"rule 2, \('a',\): it is no pair of a pattern and a target"),
        ('ab', "rule 2, 'ab': it is no pair"),
    ],
)
def test_what_is_no_rule_is_refused_by_number(rule, says):
    with pytest.raises(RuleError, match=f'(?s)Cannot read 2 of 3 rules.*{says}.*rule 3'):
        RegexRules([('ok', P()), rule, ('*', P())])


@pytest.mark.parametrize(
    ('pattern', 'says'), [('q', r"a tuple of parts, such as \('q', 'kernel'\)"), ((1,), r'\(1,\) has parts'),
                          ((), r'\(\) has parts'), (('a', '(b'), r"'\(b' is no regular")]
)  # fmt: skip
def test_what_is_no_window_is_refused(pattern, says):
    with pytest.raises(RuleError, match=says):
        RegexRules.from_windows([(pattern, P())])


def test_unknown_dialects_are_refused():
    with pytest.raises(RuleError, match=r"dialect 'serch' \(did you mean 'search'\?\)"):
        RegexRules(RULES, dialect='serch')


def test_logical_axes_must_be_as_many_as_dims():
    with pytest.raises(RuleError, match=r"w \(4, 8\): rule 1 names 1 logical axes \('embed',\) for 2 dims"):
        RegexRules([('.', ('embed',))]).specs({'w': shape(4, 8), 'v': shape(4)}, LOGICAL)
    assert RegexRules([('w', ())]).specs({'w': shape(4, 8)}, LOGICAL) == {'w': P()}


def test_logical_axes_without_logical_rules_are_told_by_leaf():
    with pytest.raises(RuleError, match=r"specs of 1 arrays.*logical_rules.*\n  w: \('embed', 'mlp'\)"):
        RegexRules([('w', ('embed', 'mlp'))]).specs({'w': shape(4, 8)})


def test_logical_axes_without_a_rule_are_told_with_what_they_may_be():
    rules = RegexRules([('w', ('embd', 'model')), ('v', ('mlp', 'mlp'))])
    with pytest.raises(RuleError, match=r"w: 'embd' \(did you mean 'embed'\?\), 'model' \(a mesh axis; PartitionSpec"):
        rules.spec('w', (4, 8), LOGICAL)
    with pytest.raises(RuleError, match=r"v: \('mlp', 'mlp'\) has 'mlp' more than once"):
        rules.specs({'w': shape(4, 8), 'v': shape(4, 8)}, LOGICAL)


def test_a_spec_longer_than_the_rank_is_a_fault_of_the_plan():
    specs = RegexRules([('w', P(None, None, 'model'))]).specs({'w': shape(4, 8)})
    with pytest.raises(PlanError, match=r'w \(4, 8\): spec .* has 3 entries for 2 dims'):
        Plan({'w': shape(4, 8)}, specs, abstract_mesh(data=2, model=2)).check()


def test_arrays_and_their_shapes_get_the_same_specs():
    arrays = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), PARAMS)
    assert RegexRules(RULES).specs(arrays) == RegexRules(RULES).specs(PARAMS)
