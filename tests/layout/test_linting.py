import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.errors import RuleError
from t5x_pjit_recipes.layout import LogicalRules, RegexRules, abstract_mesh, lint

MESH = abstract_mesh(data=4, model=2)


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


SHAPES = {
    'emb': {'embedding': shape(64, 8)},
    'mlp': {'wi': {'kernel': shape(8, 16), 'bias': shape(16)}, 'wo': {'kernel': shape(16, 8)}},
    'count': shape(),
}
NET = ('.*', P())


def found(rules, tree=SHAPES, mesh=MESH, **kwargs):
    return [(f.level, f.kind, f.rule) for f in lint(rules, tree, mesh, **kwargs)]


def test_sound_rules_have_no_findings():
    assert found(RegexRules([('emb/embedding', P('model')), ('mlp/w[io]/kernel', P(None, 'model')), NET])) == []


@pytest.mark.parametrize(
    ('rules', 'finding', 'says'),
    [
        ([('zzz', P()), NET], ('error', 'dead', 1), "rule 1 'zzz' matches nothing"),
        (
            [('mlp/.*/kernel', P('model')), ('mlp/wi/kernel', P('data')), NET],
            ('warning', 'shadowed', 2),
            "rule 2 'mlp/wi/kernel' decides nothing: its mlp/wi/kernel went to rule 1 'mlp/.*/kernel'",
        ),
        (
            [('mlp/.*', P('model')), NET],
            ('warning', 'over-broad', 1),
            "rule 1 'mlp/.*' -> ('model',) decides arrays of 1 and 2 dims: mlp/wi/bias, mlp/wi/kernel, mlp/wo/kernel",
        ),
        (
            [NET, ('emb/.*', P('model'))],
            ('warning', 'over-broad', 1),
            "rule 1 '.*' -> () decides all 5 arrays",
        ),
        (
            [('mlp/wi/bias', P(None, 'model')), NET],
            ('error', 'rank', 1),
            "rule 1 'mlp/wi/bias' -> (None, 'model') does not fit the dims of mlp/wi/bias",
        ),
        (
            [('emb/embedding', P(('data', 'modle'))), NET],
            ('error', 'mesh axis', 1),
            "names 'modle', which the mesh (data, model) lacks (did you mean 'model'?)",
        ),
        (
            [('wi/kernel', P(None, 'model')), NET],
            ('note', 'dialect', 1),
            "rule 1 'wi/kernel' matches 0 arrays, and 1 where patterns match anywhere (search): mlp/wi/kernel",
        ),
        ([('mlp/.*', P())], ('error', 'unmatched', None), 'no rule matches emb/embedding'),
    ],
)
def test_each_kind_of_fault_is_found(rules, finding, says):
    findings = {(f.level, f.kind, f.rule): f for f in lint(RegexRules(rules), SHAPES, MESH)}
    assert finding in findings
    assert says in str(findings[finding])
    assert str(findings[finding]).startswith(f'{finding[0]}: {finding[1]}: ')


def test_searching_rules_tell_where_a_full_match_differs():
    rules = RegexRules([('bias', P('model')), ('kernel$', P('model')), ('.', P())], dialect='search')
    first = lint(rules, SHAPES)[0]
    assert str(first) == (
        "note: dialect: rule 1 'bias' matches 1 arrays, and 0 where patterns match whole names (full match): "
        'mlp/wi/bias'
    )
    assert first.leaves == ('mlp/wi/bias',)
    assert not any(f.kind == 'dialect' for f in lint(RegexRules.from_windows([(('wi', 'kernel'), P())]), SHAPES))


def test_without_a_mesh_mesh_axes_are_not_looked_at():
    assert found(RegexRules([('.*/.*', P('modle'))]), {'a': {'b': shape(4)}, 'c': {'d': shape(4)}}, None) == [
        ('warning', 'over-broad', 1)
    ]


def test_unused_rules_that_are_allowed_are_warnings_and_errors_come_first():
    rules = RegexRules([('zzz', P()), ('emb.*', P('modle')), NET], allow_unused=True)
    assert found(rules) == [('error', 'mesh axis', 2), ('warning', 'dead', 1)]


def test_logical_axes_of_patterns_are_looked_up():
    rules = RegexRules([('mlp/wi/kernel', ('embed', 'mpl')), ('mlp/wo/kernel', ('mlp',)), NET])
    findings = lint(rules, SHAPES, MESH, logical_rules=LogicalRules([('embed', None), ('mlp', 'model')]))
    assert [(f.kind, f.rule) for f in findings] == [('logical axis', 1), ('rank', 2)]
    assert "has the name 'mpl' (did you mean 'mlp'?) of rule 1 'mlp/wi/kernel'" in str(findings[0])


def test_logical_rules_are_linted_against_axes():
    rules = LogicalRules([('embed', 'model'), ('mlp', 'model'), ('kv', 'dta'), ('embed', None), ('unused', None)])
    axes = {'w': ('embed', 'mlp'), 'v': ('kv', 'embd'), 'n': None}
    findings = lint(rules, axes, MESH)
    assert [(f.level, f.kind, f.rule) for f in findings] == [
        ('error', 'logical axis', None),
        ('error', 'mesh axis', 3),
        ('warning', 'shadowed', 2),
        ('warning', 'shadowed', 4),
        ('note', 'dead', 5),
    ]
    text = '\n'.join(map(str, findings))
    assert "no logical rule has the name 'embd' (did you mean 'embed'?) of v" in text
    assert "rule 2 ('mlp', 'model') decides nothing: mesh axis 'model' is taken by rule 1" in text
    assert "rule 3 ('kv', 'dta') names 'dta', which the mesh (data, model) lacks (did you mean 'data'?)" in text
    assert findings[2].leaves == ('w',)


def test_an_empty_tree_is_refused():
    with pytest.raises(RuleError, match='Cannot lint rules on a tree without leaves'):
        lint(RegexRules([NET]), {})
