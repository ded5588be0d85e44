"""Small T5 models, as many tests want them."""

import jax
import jax.numpy as jnp
import numpy as np

from t5x_pjit_recipes import adafactor, models
from t5x_pjit_recipes.data import ByteVocabulary
from t5x_pjit_recipes.examples.t5 import network

TINY = {
    'vocab_size': 384,
    'emb_dim': 32,
    'num_heads': 4,
    'num_encoder_layers': 2,
    'num_decoder_layers': 2,
    'head_dim': 8,
    'mlp_dim': 64,
    'mlp_activations': ('gelu', 'linear'),
    'dropout_rate': 0.0,
}
LENGTHS = {'encoder_input_tokens': 16, 'decoder_input_tokens': 8}


def make_adafactor(**kwargs):
    return adafactor.Adafactor(decay_rate=0.8, logical_factor_rules=adafactor.standard_logical_factor_rules(), **kwargs)


def make_model(optimizer_def=None, **config):
    return models.EncoderDecoderModel(
        module=network.Transformer(network.T5Config(**{**TINY, **config})),
        input_vocabulary=ByteVocabulary(),
        output_vocabulary=ByteVocabulary(),
        optimizer_def=make_adafactor() if optimizer_def is None else optimizer_def,
        z_loss=1e-4,
    )


def input_shapes(batch_size):
    return {name: (batch_size, length) for name, length in LENGTHS.items()}


def initializer_arguments(model, batch_size=8):
    return {
        'optimizer_def': model.optimizer_def,
        'init_fn': model.get_initial_variables,
        'input_shapes': input_shapes(batch_size),
        'input_types': dict.fromkeys(LENGTHS, jnp.int32),
    }


def make_batch(batch_size=8, seed=0):
    rng = np.random.default_rng(seed)
    targets = rng.integers(3, 384, (batch_size, LENGTHS['decoder_input_tokens']), dtype=np.int32)
    return {
        'encoder_input_tokens': rng.integers(3, 384, (batch_size, LENGTHS['encoder_input_tokens']), dtype=np.int32),
        'decoder_input_tokens': np.pad(targets[:, :-1], ((0, 0), (1, 0))),
        'decoder_target_tokens': targets,
        'decoder_loss_weights': np.ones(targets.shape, np.float32),
    }


def key(seed=0):
    return jax.random.PRNGKey(seed)
