import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.errors import PlanError
from t5x_pjit_recipes.layout import Derivation, LogicalRules, Plan, RegexRules, abstract_mesh, explain

MESH = abstract_mesh(data=4, model=2)
LOGICAL = LogicalRules([('vocab', 'model'), ('embed', 'model'), ('mlp', 'model'), ('embed', 'data'), ('embed', None)])


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def outcomes(attempts):
    return [(attempt.number, attempt.outcome) for attempt in attempts]


def test_each_dim_tells_which_logical_rules_were_tried():
    axes = {'w': ('embed', 'mlp'), 'n': None}
    shapes = {'w': shape(8, 16), 'n': shape(8)}
    plan = Plan(shapes, LOGICAL.specs(axes), MESH, rules=Derivation(LOGICAL, axes))
    explanation = explain('w', plan)
    embed, mlp = explanation.dims
    assert outcomes(embed.attempts) == [(2, 'decides'), (4, 'shadowed by rule 2'), (5, 'shadowed by rule 2')]
    assert outcomes(mlp.attempts) == [(3, "mesh axis 'model' is taken by rule 2")]
    assert (embed.size, embed.logical_axis, embed.mesh_axes, embed.ways) == (8, 'embed', ('model',), 2)
    assert (mlp.mesh_axes, mlp.ways) == ((), 1)
    assert str(explanation).splitlines() == [
        "w (8, 16) float32: spec ('model',), 256 B of 512 B on each device",
        "logical axes of its own: ('embed', 'mlp')",
        "dim 0 of 8, 'embed': divided 2 ways, by 'model'",
        "  rule 2 ('embed', 'model'): decides",
        "  rule 4 ('embed', 'data'): shadowed by rule 2",
        "  rule 5 ('embed', None): shadowed by rule 2",
        "dim 1 of 16, 'mlp': not divided",
        "  rule 3 ('mlp', 'model'): mesh axis 'model' is taken by rule 2",
    ]


def test_patterns_tell_what_shadowed_them():
    shapes = {'mlp': {'wi': shape(8, 16)}, 's': shape()}
    rules = RegexRules(
        [('other', P()), ('.*/w.', P(('data', 'model'))), ('mlp/.*', P()), ('s', P())], allow_unused=True
    )
    plan = Plan(shapes, rules.specs(shapes), MESH, rules=rules)
    explanation = explain('mlp/wi', plan)
    assert outcomes(explanation.patterns) == [
        (1, 'no match'),
        (2, 'decides'),
        (3, 'shadowed by rule 2'),
        (4, 'no match'),
    ]
    assert str(explanation).splitlines()[1:] == [
        'patterns, of the whole name:',
        "  rule 2 '.*/w.' -> PartitionSpec(('data', 'model'),): decides",
        "  rule 3 'mlp/.*' -> PartitionSpec(): shadowed by rule 2",
        '  no match: rules 1, 4',
        "dim 0 of 8: divided 8 ways, by 'data' and 'model'",
        'dim 1 of 16: not divided',
    ]
    assert 'a scalar, replicated whatever rules say' in str(explain('s', plan))
    assert plan.rows[0].rule == "rule 2 '.*/w.'"


def test_patterns_that_name_logical_axes_show_both_stages():
    shapes = {'wi': shape(8, 16), 'wo': shape(16, 8)}
    rules = RegexRules([('wi', ('embd', 'mlp')), ('w.', ('mlp', 'embed'))])
    logical = LogicalRules([('mlp', 'model'), ('embed', None)])
    plan = Plan(shapes, {'wi': P(None, 'model'), 'wo': P('model')}, MESH, rules=Derivation(logical, None, rules))
    text = str(explain('wi', plan))
    assert "  rule 1 'wi' -> ('embd', 'mlp'): decides" in text
    assert "dim 0 of 8, 'embd': not divided\n  no rule has the name 'embd'\ndim 1 of 16, 'mlp': divided 2 ways" in text
    assert plan.rows[1].rule == "rule 2 'w.' mlp: rule 1, embed: rule 2"


def test_axes_of_its_own_come_before_patterns():
    shapes = {'w': shape(8, 16), 'v': shape(8)}
    derivation = Derivation(LOGICAL, {'w': ('embed', None), 'v': None}, RegexRules([('.', P('data'))]))
    plan = Plan(shapes, {'w': P('model'), 'v': P('data')}, MESH, rules=derivation)
    assert explain('w', plan).patterns == ()
    assert outcomes(explain('v', plan).patterns) == [(1, 'decides')]
    assert [row.rule for row in plan.rows] == ["rule 1 '.'", 'embed: rule 2, -']


def test_faults_are_part_of_it():
    plan = Plan({'w': shape(6)}, {'w': P('data')}, MESH)
    assert str(explain('w', plan)).endswith("fault: w (6,): dim 0 is 6, which ('data',) splits 4 ways; 8 would fit")


@pytest.mark.parametrize(
    ('rules', 'says'), [(None, 'the plan does not know its rules'), ({'w': 'by hand'}, 'decided by: by hand')]
)
def test_a_plan_may_not_know_its_rules(rules, says):
    assert says in str(explain('w', Plan({'w': shape(8)}, {'w': P('data')}, MESH, rules=rules)))


def test_an_unknown_leaf_is_refused_with_near_misses():
    plan = Plan({'mlp': {'wi': shape(8)}}, None, MESH)
    with pytest.raises(PlanError, match=r"Cannot explain 'mlp/w': the plan has 1 arrays.*Did you mean 'mlp/wi'\?"):
        explain('mlp/w', plan)
    with pytest.raises(PlanError, match='Take a name from its table'):
        explain('zzz', plan)
