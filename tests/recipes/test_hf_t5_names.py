"""Hugging Face's T5 in our words, as far as no tensors are needed."""

import jax
import pytest

from t5x_pjit_recipes.errors import ConfigError
from t5x_pjit_recipes.examples.t5.network import T5Config
from t5x_pjit_recipes.interop.tensors import is_source
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.recipes import hf_t5
from t5x_pjit_recipes.recipes.hf_t5_names import folder_config, network_config, sources
from tests import trees

# As published, without what our T5 does not ask for.
T5_SMALL = {
    'model_type': 't5', 'vocab_size': 32128, 'd_model': 512, 'd_kv': 64, 'd_ff': 2048, 'num_layers': 6, 'num_heads': 8,
    'dropout_rate': 0.1, 'is_encoder_decoder': True, 'layer_norm_epsilon': 1e-06, 'relative_attention_num_buckets': 32,
}  # fmt: skip
BYT5_SMALL = {
    **T5_SMALL, 'vocab_size': 384, 'd_model': 1472, 'd_ff': 3584, 'num_layers': 12, 'num_decoder_layers': 4,
    'num_heads': 6, 'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False,
}  # fmt: skip
# What a config.json says of head and scale, whether there is a head, and ours: via the table, scaled.
HEADS = [
    ({}, None, True, True),
    ({}, False, True, True),
    ({}, True, False, True),
    ({'tie_word_embeddings': False}, None, False, False),
    ({'tie_word_embeddings': False}, False, True, False),
    ({'tie_word_embeddings': True, 'scale_decoder_outputs': False}, True, False, False),
    ({'tie_word_embeddings': True, 'scale_decoder_outputs': False}, False, True, False),
    ({'tie_word_embeddings': False, 'scale_decoder_outputs': True}, True, False, True),
    ({'model_type': 'mt5', 'tie_word_embeddings': True}, True, False, False),
]


def test_published_models_have_the_sizes_that_we_know_them_by():
    assert network_config(T5_SMALL) == T5Config(vocab_size=32128, logits_via_embedding=True)
    assert network_config(BYT5_SMALL) == T5Config(
        vocab_size=384, emb_dim=1472, num_heads=6, num_encoder_layers=12, num_decoder_layers=4, mlp_dim=3584,
        mlp_activations=('gelu', 'linear'),
    )  # fmt: skip


@pytest.mark.parametrize(('entries', 'has_head', 'tied', 'scaled'), HEADS)
def test_head_and_scale_are_told_apart(entries, has_head, tied, scaled):
    config = network_config({**T5_SMALL, **entries}, has_head=has_head)
    assert (config.logits_via_embedding, config.logits_are_scaled) == (tied, scaled)


@pytest.mark.parametrize('like', [None, {'model_type': 'mt5', 'd_model': 5}, {'model_type': 't5'}])
@pytest.mark.parametrize('gate', [(), ('linear',)])
@pytest.mark.parametrize('activation', ['relu', 'gelu', 'silu'])
@pytest.mark.parametrize(('tied', 'scaled'), [(True, None), (True, False), (False, None), (False, True)])
def test_what_is_written_of_a_config_is_read_again(activation, gate, tied, scaled, like):
    config = T5Config(
        vocab_size=96, emb_dim=32, num_heads=4, head_dim=8, mlp_dim=48, num_encoder_layers=2, num_decoder_layers=3,
        mlp_activations=(activation, *gate), dropout_rate=0.2, logits_via_embedding=tied, scale_logits=scaled,
    )  # fmt: skip
    assert network_config(folder_config(config, like), has_head=not tied) == config


def test_entries_that_our_t5_does_not_decide_are_kept():
    like = {**BYT5_SMALL, 'task_specific_params': {'x': 1}, 'eos_token_id': 7, 'd_model': 5}
    written = folder_config(network_config(BYT5_SMALL), like)
    assert written['task_specific_params'] == {'x': 1}
    assert (written['eos_token_id'], written['pad_token_id'], written['d_model']) == (7, 0, 1472)


@pytest.mark.parametrize(
    ('tree', 'config'),
    [
        ('torch_t5_v1_1_base', T5Config(32128, emb_dim=768, num_heads=12, num_encoder_layers=12, num_decoder_layers=12,
                                        mlp_activations=('gelu', 'linear'))),
    ],
)  # fmt: skip
def test_parameters_are_the_tensors_of_a_published_model(tree, config):
    published = named_leaves(trees.load(tree))
    ours = named_leaves(sources(config), is_source)
    assert {weight.name.replace('.', '/') for weight in ours.values()} == set(published)
    wanted = {name: leaf.shape for name, leaf in named_leaves(hf_t5.variable_shapes(config)['params']).items()}
    shapes = {name: weight.shape(published[weight.name.replace('.', '/')].shape) for name, weight in ours.items()}
    assert shapes == wanted


@pytest.mark.parametrize('config', [network_config(T5_SMALL), network_config(BYT5_SMALL)])
def test_each_parameter_has_a_tensor(config):
    wanted = jax.tree.structure(dict(hf_t5.variable_shapes(config)['params']))
    assert jax.tree.structure(sources(config), is_leaf=is_source) == wanted


def test_all_entries_without_a_counterpart_are_named():
    config = {
        **T5_SMALL, 'model_type': 'long_t5', 'relative_attention_num_buckets': 64, 'layer_norm_epsilon': 1e-5,
        'is_encoder_decoder': False, 'd_kv': None, 'feed_forward_proj': 'gelu', 'num_decoder_layers': '3',
        'num_heads': 0, 'dropout_rate': 1.5,
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        network_config(config)
    assert str(caught.value).splitlines()[1:] == [
        "  model_type='long_t5': only 't5' and 'mt5' are known",
        '  is_encoder_decoder=False: it is True here',
        '  layer_norm_epsilon=1e-05: it is 1e-06 here',
        '  relative_attention_num_buckets=64: it is 32 here',
        '  num_heads=0: a number from 1 on is needed',
        '  d_kv=None: a number from 1 on is needed',
        "  num_decoder_layers='3': a number from 1 on is needed",
        '  dropout_rate=1.5: a number from 0 to less than 1 is needed',
        "  feed_forward_proj: its activation is 'gelu', and only relu, gelu_new, silu are known",
    ]


@pytest.mark.parametrize('activations', [('tanh',), ('gelu', 'gelu'), ('linear',)])
def test_a_feed_forward_block_that_transformers_lacks_is_not_written(activations):
    with pytest.raises(ConfigError, match='with mlp_activations='):
        folder_config(T5Config(384, mlp_activations=activations))
