"""Suggested rules: on published models' trees, on several meshes, and as what they are printed."""

import functools
import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes import layout
from t5x_pjit_recipes.errors import RuleError
from t5x_pjit_recipes.layout.generalize import few_patterns
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.layout.suggest import suggest
from tests import trees

MESH = layout.abstract_mesh(data=8, model=8)
load = functools.cache(trees.load)


@functools.cache
def suggestion(name):
    return suggest(load(name), MESH)


def shapes_of(**shapes):
    tree = {}
    for name, shape in shapes.items():
        *above, last = name.split('__')
        at = functools.reduce(lambda node, part: node.setdefault(part, {}), above, tree)
        at[last] = jax.ShapeDtypeStruct(shape, np.float32)
    return tree


def specs_of(tree, mesh=MESH, **axes):
    return {name: tuple(spec) for name, spec in named_leaves(suggest(tree, mesh, **axes).plan.specs).items()}


@pytest.mark.parametrize('name', trees.NAMES)
def test_less_than_two_per_cent_stay_replicated_and_every_dim_divides(name):
    proposed = suggestion(name)
    proposed.plan.check()
    assert sum(row.num_bytes for row in proposed.replicated) < 0.02 * proposed.plan.num_bytes
    assert all(math.prod(row.shape) < 2**18 for row in proposed.replicated)
    assert proposed.plan.bytes_per_device < 0.02 * proposed.plan.num_bytes


@pytest.mark.parametrize('name', trees.NAMES)
def test_rules_are_few_and_each_decides_something(name):
    rules = suggestion(name).rules
    deciding = {rules.deciding(leaf) for leaf in named_leaves(load(name))}
    assert deciding == set(range(1, len(rules) + 1))
    assert len(rules) <= 14


@pytest.mark.parametrize('sizes', [(1, 8), (8, 1), (4, 2), (2, 3), (5, 7), (64, 64)], ids=str)
@pytest.mark.parametrize('name', trees.NAMES)
def test_no_mesh_gets_a_spec_that_does_not_divide(name, sizes):
    plan = suggest(load(name), layout.abstract_mesh(data=sizes[0], model=sizes[1])).plan
    assert plan.faults == ()


@pytest.mark.parametrize(
    ('flax', 'torch'),
    [
        ('flax_t5_v1_1_base', 'torch_t5_v1_1_base'),
        ('flax_gpt2', 'torch_gpt2'),
        ('flax_bloom_560m', 'torch_bloom_560m'),
        ('flax_vit_base', 'torch_vit_base'),
    ],
)
def test_the_spelling_of_a_model_changes_nothing_for_its_devices(flax, torch):
    """PyTorch's matrices are transposed, GPT-2's are so in Flax: shapes tell."""

    def split_sizes(name):
        rows = suggestion(name).plan.rows
        sizes = [zip(row.shape, [*row.spec, *[None] * 4], strict=False) for row in rows]
        return sorted(sorted((size, str(entry)) for size, entry in row if entry) for row in sizes)

    assert split_sizes(flax) == split_sizes(torch)


@pytest.mark.parametrize(
    ('stacked', 'dim', 'plain'),
    [('scanned_llama_7b', 0, 'flax_llama_7b'), ('t5x_scanned_t5_1_1_base', 1, 't5x_t5_1_1_base')],
)
def test_stacked_layers_lie_as_single_ones(stacked, dim, plain):
    def by_end(name):
        return {
            '/'.join(leaf.split('/')[-2:]): spec for leaf, spec in named_leaves(suggestion(name).plan.specs).items()
        }

    singles, stacks = by_end(plain), by_end(stacked)
    for end in ('q_proj/kernel', 'down_proj/kernel', 'query/kernel', 'wo/kernel'):
        if end in singles:
            entries = [*singles[end]]
            assert stacks[end] == P(*entries[:dim], None, *entries[dim:])


@pytest.mark.parametrize(
    ('name', 'shape', 'spec'),
    [
        ('wte__embedding', (512, 64), ('model', 'data')),
        ('wte__embedding', (50257, 768), (None, ('model', 'data'))),
        ('wte__embedding', (50257, 776), (None, 'model')),
        ('lm_head__kernel', (64, 512), ('data', 'model')),
        ('mlp__wi__kernel', (64, 256), ('data', 'model')),
        ('mlp__wo__kernel', (256, 64), ('model', 'data')),
        ('mlp__wo__weight', (64, 256), ('data', 'model')),
        ('mlp__wi__bias', (256,), ('model',)),
        ('mlp__wo__bias', (64,), ()),
        ('attn__query__kernel', (64, 16, 32), ('data', 'model')),
        ('attn__query__kernel', (64, 12, 32), ('data', None, 'model')),
        ('attn__out__kernel', (16, 32, 64), ('model', None, 'data')),
        ('attention__output__dense__kernel', (64, 64), ('model', 'data')),
        ('expert__wi__kernel', (16, 64, 256), (None, 'data', 'model')),
        ('mystery__u', (64, 999, 3, 256), ('data', None, None, 'model')),
        ('mystery__u', (1 << 16,), (('model', 'data'),)),
        ('mystery__u', (999, 777), ()),
        ('mystery__u', (64, 64), ()),
        ('norm__scale', (1 << 16,), ()),
        ('scalar', (), ()),
    ],
)
def test_what_an_array_gets(name, shape, spec):
    expected = {name.replace('__', '/'): spec}
    assert specs_of(shapes_of(**{name: shape})) == expected


def test_axes_may_have_other_names_or_be_absent():
    tree = shapes_of(mlp__wi__kernel=(64, 256))
    mesh = layout.abstract_mesh(dp=4, mp=2)
    assert specs_of(tree, mesh, data='dp', model='mp') == {'mlp/wi/kernel': ('dp', 'mp')}
    assert specs_of(tree, mesh, data=None, model='mp') == {'mlp/wi/kernel': (None, 'mp')}
    assert specs_of(tree, mesh, data='dp', model=None) == {'mlp/wi/kernel': ('dp',)}


def test_axes_that_the_mesh_has_not_are_an_error():
    with pytest.raises(RuleError, match=r"on mesh dta=4, model=2: it has no axis 'data' \(did you mean 'dta'\?\)"):
        suggest(shapes_of(w=(8, 8)), layout.abstract_mesh(dta=4, model=2))


def test_an_empty_tree_is_an_error():
    with pytest.raises(RuleError, match='a tree of no arrays'):
        suggest({'params': {}}, MESH)


def test_what_is_left_whole_is_told():
    proposed = suggest(shapes_of(mystery__u=(999, 777), mlp__wi__kernel=(64, 256)), MESH)
    assert [row.name for row in proposed.replicated] == ['mystery/u']
    assert '# others, by their largest dims: no dim of (999, 777) divides' in str(proposed)
    assert 'left whole on every device: 1 of 2 arrays, 3.0 MiB (97.93 %)' in str(proposed)


@pytest.mark.parametrize('name', trees.NAMES)
def test_printed_as_python_it_is_the_same(name):
    scope = {}
    exec(str(suggestion(name)), scope)
    assert scope['rules'].rules == suggestion(name).rules.rules


@pytest.mark.parametrize('name', trees.NAMES)
def test_nothing_is_found_wrong_with_the_rules(name):
    assert layout.lint(suggestion(name).rules, load(name), MESH) == ()


@pytest.mark.parametrize('name', ['flax_t5_v1_1_base', 'linen_vit_b16'])
def test_patterns_give_each_name_what_it_must_get(name):
    patterns = few_patterns({row.name: row.spec for row in suggestion(name).plan.rows})
    assert layout.RegexRules(patterns).specs(load(name)) == suggestion(name).plan.specs


def test_layer_numbers_count_only_where_they_must():
    choices = {'a/0/w': 1, 'a/1/w': 1, 'b/0/w': 2, 'b/1/w': 3}
    assert few_patterns(choices) == [(r'a/\d+/w', 1), ('b/0/w', 2), ('b/1/w', 3)]
