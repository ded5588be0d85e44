"""Rules on parameter names, as gin files spell them."""

import pytest
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes import gin_utils, planning
from t5x_pjit_recipes.errors import ConfigError, RuleError
from t5x_pjit_recipes.layout import RegexRules

HEAD = """
from __gin__ import dynamic_registration
from t5x_pjit_recipes import layout
from t5x_pjit_recipes import partitioning

include 'gin/runs/pretrain_pydoc.gin'

"""


@pytest.fixture(autouse=True)
def fresh_config():
    gin_utils.clear_config()
    yield
    gin_utils.clear_config()


def load(tmp_path, text):
    file = tmp_path / 'rules.gin'
    file.write_text(HEAD + text, encoding='utf-8')
    return planning.load_run([str(file)], mesh='data=4,model=2')


LITERAL = """
partitioning.PjitPartitioner.param_rules = [
    ('.*/wi_./kernel', ('embed', 'mlp')),
    ('.*/wo/kernel', "PartitionSpec('model', None)"),
    ('.*/(key|query|value)/kernel', "P(None, 'model')"),
    ('.*/out/kernel', ['joined_kv', 'embed']),
    ('.*/scale', None),
]
"""
MADE = """
partitioning.PjitPartitioner.param_rules = @layout.RegexRules()
layout.RegexRules.dialect = 'search'
layout.RegexRules.allow_unused = True
layout.RegexRules.rules = [
    ('wi_', ('embed', 'mlp')),
    ('mlp/wo', ('mlp', 'embed')),
    ('nothing', None),
]
"""


@pytest.mark.parametrize('text', [LITERAL, MADE])
def test_rules_in_a_gin_file_agree_with_the_model(text, tmp_path):
    run = load(tmp_path, text)
    assert isinstance(run.partitioner.param_rules, RegexRules)
    plain = planning.load_run(['gin/runs/pretrain_pydoc.gin'], mesh='data=4,model=2')
    specs = [{row.name: row.spec for row in each.parts()['params'].rows} for each in (run, plain)]
    assert specs[0] == specs[1]
    assert specs[0]['encoder/layers_0/mlp/wo/kernel'] == P('model')


def test_targets_mean_what_is_documented(tmp_path):
    rules = load(tmp_path, LITERAL).partitioner.param_rules
    assert [target for _, target in rules.rules] == [
        ('embed', 'mlp'), P('model', None), P(None, 'model'), ('joined_kv', 'embed'), P()
    ]  # fmt: skip


def test_rules_in_a_gin_file_that_contradict_the_model_are_told(tmp_path):
    run = load(tmp_path, 'partitioning.PjitPartitioner.param_rules = [(".*/wo/kernel", "P(None, \'model\')")]')
    with pytest.raises(RuleError, match=r"mlp/wo/kernel \(256, 128\): the model says \('mlp', 'embed'\).*rule 1"):
        run.parts()


@pytest.mark.parametrize(
    ('text', 'says'),
    [
        ("[('.*', 'model')]", r"rule 1, \('.\*', 'model'\): 'model' is no target; write \('model',\) for logical axes"),
        ("[('(', None)]", "'\\(' is no regular expression"),
        ('[(\'.*\', "PartitionSpec(1)")]', r'Cannot read .PartitionSpec\(1\). as a spec'),
    ],
)
def test_faulty_rules_in_a_gin_file_are_told(text, says, tmp_path):
    with pytest.raises(RuleError, match=says):
        load(tmp_path, f'partitioning.PjitPartitioner.param_rules = {text}')


def test_the_maker_of_rules_is_not_the_rules(tmp_path):
    with pytest.raises(ConfigError, match=r'param_rules takes what it makes: write @layout.RegexRules\(\)'):
        load(tmp_path, 'partitioning.PjitPartitioner.param_rules = @layout.RegexRules')
