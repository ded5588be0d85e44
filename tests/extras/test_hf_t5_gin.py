"""The gin files of the recipe for Hugging Face's T5: their commands can be given where the folders are."""

import dataclasses
import pathlib
import re

import gin
import jax
import jax.numpy as jnp
import pytest

from t5x_pjit_recipes import gin_utils
from t5x_pjit_recipes.examples.t5.network import T5Config
from t5x_pjit_recipes.interop.vocabularies import HuggingFaceVocabulary
from t5x_pjit_recipes.recipes import hf_t5
from tests import test_gin_files
from tests.extras.test_vocabularies import write_tokenizer

CONFIG = T5Config(384, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, num_encoder_layers=1, num_decoder_layers=1)


@pytest.fixture(autouse=True)
def in_a_folder_of_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(pathlib.Path('t5-small'), sentinels=range(99, -1, -1))
    for name, ids in {'runs/pydoc_hf': 384, 't5-small': 160}.items():
        config = dataclasses.replace(CONFIG, vocab_size=ids)
        params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), hf_t5.variable_shapes(config)['params'])
        hf_t5.save(name, config, params)
    gin_utils.clear_config()
    yield
    gin_utils.clear_config()


def header_of(name):
    header = re.match(r'(#.*\n)+', (gin_utils.gin_root() / name).read_text())[0]
    assert all(word in header for word in ('Required macros:', 'Commonly changed:', 'Command', 'Expect: ')), header
    return header


@pytest.mark.parametrize('name', ['recipes/finetune_hf_t5.gin', 'recipes/hf_vocabulary.gin'])
def test_the_command_that_trains_can_be_given(name):
    (command,) = test_gin_files.commands_of(header_of(name))
    test_gin_files.check_command(*command)


def test_the_vocabulary_of_a_folder_is_that_of_task_and_model():
    ((_, given),) = test_gin_files.commands_of(header_of('recipes/hf_vocabulary.gin'))
    test_gin_files.parse(*given['gin_file'], bindings=given['gin_bindings'])
    got = test_gin_files.build_arguments()
    assert got['model'].input_vocabulary == HuggingFaceVocabulary('t5-small')
    assert got['train_dataset_cfg'].resolve_task().output_features['targets'].vocabulary.extra_ids == 100


def test_the_command_that_exports_can_be_given():
    (command,) = test_gin_files.commands_of(header_of('recipes/export_hf_t5.gin'))
    test_gin_files.check_command(*command)
    got = gin.get_bindings(hf_t5.export)
    assert (got['checkpoint'], got['folder'], got['like']) == ('runs/pydoc/checkpoint_100', 'runs/pydoc_hf', None)
    assert got['model'].module.config.emb_dim == 128
