"""The parameter trees that tests of rules use are those of the published models."""

import doctest

import jax
import pytest

from t5x_pjit_recipes.layout.paths import named_leaves
from tests import t5_models, trees

# As their model cards and Hugging Face's `num_parameters` tell.
PUBLISHED = {
    't5_small': 60_506_624,
    't5_v1_1_base': 247_577_856,
    't5_1_1_base': 247_577_856,
    'bloom_560m': 559_214_592,
    'gpt2': 124_439_808,
    'opt_125m': 125_239_296,
    'opt_350m': 331_196_416,
    'llama_7b': 6_738_415_616,
    'llama_3_8b': 8_030_261_248,
    'whisper_tiny': 37_760_640,
    'whisper_base': 72_593_920,
    'vit_base': 86_567_656,
    'vit_b16': 86_567_656,
}


@pytest.mark.parametrize('name', trees.NAMES)
def test_a_tree_has_as_many_parameters_as_the_model(name):
    assert trees.num_parameters(trees.load(name)) == next(n for end, n in PUBLISHED.items() if name.endswith(end))


def test_braces():
    assert doctest.testmod(trees).failed == 0


def test_t5_is_spelled_as_this_package_spells_it():
    sizes = {'vocab_size': 32128, 'emb_dim': 768, 'num_heads': 12, 'head_dim': 64, 'mlp_dim': 2048}
    model = t5_models.make_model(**sizes, num_encoder_layers=12, num_decoder_layers=12, logits_via_embedding=False)
    variables = jax.eval_shape(lambda: model.get_initial_variables(t5_models.key(), t5_models.input_shapes(1)))
    shapes = {name: leaf.shape for name, leaf in named_leaves(variables['params']).items()}
    assert shapes == {name: leaf.shape for name, leaf in named_leaves(trees.load('t5x_t5_1_1_base')).items()}
