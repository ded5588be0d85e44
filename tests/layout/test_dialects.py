"""Three dialects, one spec tree: the same layout of Hugging Face's T5, as each would spell it."""

import ast
import pathlib
import re

import pytest
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes import layout
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.recipes import hf_t5
from tests import trees

# As this package has it: a pattern is the whole of a name.
FULL_MATCH = [
    (r'shared/embedding', P('model', 'data')),
    (r'lm_head/kernel', P('data', 'model')),
    (r'.*/(Self|EncDec)Attention/(q|k|v)/kernel', P('data', 'model')),
    (r'.*/(Self|EncDec)Attention/o/kernel', P('model', 'data')),
    (r'.*/DenseReluDense/wi(_\d)?/kernel', P('data', 'model')),
    (r'.*/DenseReluDense/wo/kernel', P('model', 'data')),
    (r'.*/relative_attention_bias/embedding', P()),
    (r'.*layer_norm/weight', P()),
]
# As EasyLM and scalax have it: a pattern is any part of a name, and the last one takes the rest.
SEARCH = [
    (r'shared/embedding', P('model', 'data')),
    (r'lm_head/kernel', P('data', 'model')),
    (r'Attention/(q|k|v)/kernel', P('data', 'model')),
    (r'Attention/o/kernel', P('model', 'data')),
    (r'DenseReluDense/wi', P('data', 'model')),
    (r'DenseReluDense/wo', P('model', 'data')),
    (r'.*', P()),
]
# As Flax's T5 example has it: a pattern is a tuple of neighbouring components, each matched whole.
WINDOWS = [
    (('shared', 'embedding'), P('model', 'data')),
    (('lm_head', 'kernel'), P('data', 'model')),
    (('(Self|EncDec)Attention', '(q|k|v)', 'kernel'), P('data', 'model')),
    (('(Self|EncDec)Attention', 'o', 'kernel'), P('model', 'data')),
    (('DenseReluDense', r'wi(_\d)?', 'kernel'), P('data', 'model')),
    (('DenseReluDense', 'wo', 'kernel'), P('model', 'data')),
    (('relative_attention_bias', 'embedding'), None),
    (('(final_)?layer_norm', 'weight'), None),
]
DIALECTS = {
    'fullmatch': layout.RegexRules(FULL_MATCH),
    'search': layout.RegexRules(SEARCH, dialect='search'),
    'windows': layout.RegexRules.from_windows(WINDOWS),
}


@pytest.mark.parametrize('dialect', DIALECTS)
def test_three_dialects_one_spec_tree(dialect):
    shapes = trees.load('flax_t5_v1_1_base')
    assert DIALECTS[dialect].specs(shapes) == hf_t5.rules().specs(shapes)


def test_what_is_meant_to_be_split_is():
    shapes = trees.load('flax_t5_v1_1_base')
    specs = DIALECTS['windows'].specs(shapes)
    block = specs['decoder']['block']['11']['layer']
    assert block['1']['EncDecAttention']['q']['kernel'] == P('data', 'model')
    assert block['2']['DenseReluDense']['wo']['kernel'] == P('model', 'data')
    assert specs['decoder']['final_layer_norm']['weight'] == P()


def test_the_table_in_the_readme_translates():
    readme = pathlib.Path(__file__).parents[2] / 'README.md'
    table = re.search(r'\n\| a pattern matches .*?\n\n', readme.read_text(encoding='utf-8'), flags=re.DOTALL)[0]
    names = named_leaves(trees.load('flax_t5_v1_1_base'))
    counts = {}
    for line in table.strip().splitlines()[1:]:
        title, *cells = [cell.strip().strip('`') for cell in line.replace(r'\|', '\0').strip('|').split('|')]
        pairs = zip(cells, DIALECTS, strict=True)
        patterns = [(ast.literal_eval(cell.replace('\0', '|')), dialect) for cell, dialect in pairs if cell[0] in "'r("]
        matched = [
            tuple(name for name in names if layout.RegexRules([(pattern, None)], dialect=dialect).deciding(name))
            for pattern, dialect in patterns
        ]
        assert len(set(matched)) <= 1, title
        counts[title] = [len(found) for found in matched]
    assert counts == {
        'queries, keys, values': [108, 108, 108],
        'wi`, `wi_0`, `wi_1': [48, 48, 48],
        'all norms': [62, 62, 62],
        'one array only': [1, 1],
        'what is left': [282, 282, 282],
        'replicated': [],
    }
