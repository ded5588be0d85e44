"""Ready rules on the parameter trees of published models."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes import layout
from t5x_pjit_recipes.errors import RuleError
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.recipes import bloom, gpt2, hf_t5, llama, opt, whisper
from tests import trees

TREES = [
    (hf_t5, 'flax_t5_small'),
    (hf_t5, 'flax_t5_v1_1_base'),
    (hf_t5, 'torch_t5_v1_1_base'),
    (bloom, 'flax_bloom_560m'),
    (bloom, 'torch_bloom_560m'),
    (gpt2, 'flax_gpt2'),
    (gpt2, 'torch_gpt2'),
    (opt, 'flax_opt_125m'),
    (opt, 'torch_opt_350m'),
    (llama, 'flax_llama_7b'),
    (llama, 'torch_llama_3_8b'),
    (whisper, 'flax_whisper_tiny'),
    (whisper, 'torch_whisper_base'),
]
MODULES = list(dict.fromkeys(module for module, _ in TREES))
MESHES = [layout.abstract_mesh(data=8, model=8), layout.abstract_mesh(data=16, model=4)]


def rules_for(module, tree, **axes):
    return module.rules(torch=tree.startswith('torch'), **axes)


@pytest.mark.parametrize('mesh', MESHES, ids=repr)
@pytest.mark.parametrize(('module', 'tree'), TREES, ids=[tree for _, tree in TREES])
def test_every_array_has_a_rule_every_big_one_is_split_and_every_dim_divides(module, tree, mesh):
    shapes = trees.load(tree)
    plan = layout.Plan(shapes, rules_for(module, tree).specs(shapes), mesh)
    plan.check()
    assert [row.name for row in plan.replicated if math.prod(row.shape) >= 8192] == []
    assert sum(row.num_bytes for row in plan.replicated) < 0.02 * plan.num_bytes


@pytest.mark.parametrize('module', MODULES, ids=lambda module: module.__name__.rpartition('.')[2])
def test_no_rule_is_dead_nor_shadowed(module):
    """Of some model of the family, that is; heads that share the embedding are no arrays of their own."""
    deciding = {
        rules.deciding(name)
        for other, tree in TREES
        if other is module
        for rules in [rules_for(module, tree)]
        for name in named_leaves(trees.load(tree))
    }
    deciding |= {module.rules().deciding(name) for name in ('lm_head/kernel', 'proj_out/kernel')}
    assert set(range(1, len(module.RULES) + 1)) <= deciding


@pytest.mark.parametrize(
    ('module', 'flax', 'torch'),
    [
        (hf_t5, 'flax_t5_v1_1_base', 'torch_t5_v1_1_base'),
        (bloom, 'flax_bloom_560m', 'torch_bloom_560m'),
        (gpt2, 'flax_gpt2', 'torch_gpt2'),
    ],
)
def test_both_spellings_of_a_model_give_each_device_as_much(module, flax, torch):
    plans = [
        layout.Plan(shapes, rules_for(module, tree).specs(shapes), MESHES[0])
        for tree in (flax, torch)
        for shapes in [trees.load(tree)]
    ]
    assert plans[0].num_bytes == plans[1].num_bytes
    assert plans[0].bytes_per_device == plans[1].bytes_per_device


def test_mesh_axes_may_have_other_names():
    rules = hf_t5.rules(data='fsdp', model='mp')
    assert rules.spec('encoder/block/3/layer/0/SelfAttention/q/kernel', (512, 512)) == P('fsdp', 'mp')
    assert gpt2.rules(data='fsdp', model='mp').spec('transformer/wte/embedding', (50257, 768)) == P(
        None, ('mp', 'fsdp')
    )


@pytest.mark.parametrize(('axes', 'spec'), [({'data': None}, P(None, 'model')), ({'model': None}, P(None, 'data'))])
def test_an_axis_can_be_left_out(axes, spec):
    assert gpt2.rules(**axes).spec('transformer/wte/embedding', (50257, 768)) == spec


def test_parameters_of_another_model_are_an_error():
    shapes = {'transformer': {'h': {'0': {'attn': {'c_attn': {'kernel': np.zeros((96, 32))}}}}}}
    with pytest.raises(RuleError, match=r'no rule matches 1.*\n  transformer/h/0/attn/c_attn/kernel \(96, 32\)'):
        llama.rules().specs(shapes)


def test_parameters_may_stand_below_others():
    shapes = {'params': trees.load('flax_t5_small')}
    specs = hf_t5.rules().specs(shapes)
    assert specs['params'] == hf_t5.rules().specs(shapes['params'])
    assert len(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))) == len(named_leaves(shapes))
