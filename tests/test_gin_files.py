import math
import pathlib
import re
import shlex
from typing import Any

import gin
import jax
import jax.numpy as jnp
import pytest

from t5x_pjit_recipes import data, gin_utils, models, optimizers, partitioning, train, trainer
from t5x_pjit_recipes.errors import ConfigError
from t5x_pjit_recipes.examples.t5 import network
from t5x_pjit_recipes.recipes import bloom, hf_t5, shard

# What the modules that are commands run.
COMMANDS = {
    'train': train.train,
    'recipes.bloom': bloom.complete,
    'recipes.shard': shard.shard_folder,
    'recipes.hf_t5': hf_t5.export,
}

ROOT = gin_utils.gin_root()
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob('*.gin'))
MODELS = [name for name in FILES if name.startswith('models/')]
LAYOUTS = [name for name in FILES if name.startswith('partitioning/')]
# Their commands need a Hugging Face folder, which the tests of the extras give them.
IN_EXTRAS = ['recipes/export_hf_t5.gin', 'recipes/finetune_hf_t5.gin', 'recipes/hf_vocabulary.gin']
RUN = ["MIXTURE_OR_TASK_NAME = 'pydoc_span_corruption'", "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 32}"]
RUN += ['TRAIN_STEPS = 5', "MODEL_DIR = 'runs/test'"]

# emb_dim, num_heads, num_encoder_layers, num_decoder_layers, head_dim, mlp_dim: of the published checkpoints.
SIZES = {
    'models/t5_1_1/tiny': (8, 4, 2, 2, 3, 16),
    'models/t5_1_1/small': (512, 6, 8, 8, 64, 1024),
    'models/t5_1_1/base': (768, 12, 12, 12, 64, 2048),
    'models/t5_1_1/large': (1024, 16, 24, 24, 64, 2816),
    'models/t5_1_1/xl': (2048, 32, 24, 24, 64, 5120),
    'models/t5_1_1/xxl': (4096, 64, 24, 24, 64, 10240),
    'models/byt5/small': (1472, 6, 12, 4, 64, 3584),
    'models/byt5/base': (1536, 12, 18, 6, 64, 3968),
    'models/byt5/large': (1536, 16, 36, 12, 64, 3840),
    'models/byt5/xl': (2560, 32, 36, 12, 64, 6720),
    'models/byt5/xxl': (4672, 64, 36, 12, 64, 12352),
}

# num_partitions, activation and parameter partitioning dims.
LAYOUT_SIZES = {
    'data_parallel': (1, 1, 1),
    'zero1': (1, 1, 1),
    'model_parallel_2': (2, 1, 1),
    'model_parallel_4': (4, 1, 1),
    'model_parallel_8': (8, 1, 1),
    '2d_parameters': (1, 1, 2),
    '2d_parameters_and_activations': (2, 2, 2),
}


@pytest.fixture(autouse=True)
def fresh_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Our files are found from any working directory.
    gin_utils.clear_config()
    yield
    gin_utils.clear_config()


def parse(*files: str, bindings: Any = ()) -> None:
    gin_utils.parse_gin_flags(['.'], files, bindings)


def build_arguments() -> dict[str, Any]:
    """Checks that every setting is used, and builds what `train` would be called with."""
    gin_utils.check_all_used(train.train)
    return gin.get_bindings(train.train)


def commands_of(text):
    """Yields the module and the flags of each command in a header or a document."""
    modules = '|'.join(map(re.escape, COMMANDS))
    for module, command in re.findall(rf'python -m t5x_pjit_recipes\.({modules})\b((?:[^\n\\]|\\\n#?)*)', text):
        args = shlex.split(re.sub(r'\\\n#?', ' ', command), comments=True)
        flags = [arg.removeprefix('--').partition('=') for arg in gin_utils.rewrite_gin_args(args)]
        yield module, {flag: [value for other, _, value in flags if other == flag] for flag, *_ in flags}


def check_command(module, given):
    assert set(given) <= {'gin_file', 'gin_bindings', 'cpu_devices'}
    gin_utils.clear_config()
    parse(*given['gin_file'], bindings=given.get('gin_bindings', ()))
    if module != 'train':
        gin_utils.check_all_used(COMMANDS[module])
        return
    got = build_arguments()
    assert got['total_steps'] > 0
    for cfg in (got['train_dataset_cfg'], got['train_eval_dataset_cfg']):
        data.get_dataset(cfg, 0, 1, got['model'].FEATURE_CONVERTER_CLS).close()


@pytest.mark.parametrize('name', [name for name in FILES if name not in IN_EXTRAS])
def test_the_command_that_a_file_opens_with_can_be_given(name):
    header = re.match(r'(#.*\n)+', (ROOT / name).read_text())[0]
    assert all(word in header for word in ('Required macros:', 'Commonly changed:', 'Command', 'Expect: ')), header
    (command,) = commands_of(header[: header.index('# Expect')])
    check_command(*command)


def test_the_commands_of_the_readme_can_be_given():
    found = list(commands_of((ROOT.parent / 'README.md').read_text()))
    assert len(found) >= 2
    for command in found:
        check_command(*command)


def test_no_init_file_hides_the_gin_package():
    assert FILES
    assert not list(ROOT.rglob('__init__.py'))


@pytest.mark.parametrize('name', SIZES)
def test_a_model_has_the_published_sizes(name):
    got = _parse_network(f'{name}.gin').config
    sizes = (got.emb_dim, got.num_heads, got.num_encoder_layers, got.num_decoder_layers, got.head_dim, got.mlp_dim)
    assert sizes == SIZES[name]
    assert (got.vocab_size, got.mlp_activations) == (32128 if 't5_1_1' in name else 384, ('gelu', 'linear'))


@pytest.mark.parametrize('name', MODELS)
def test_a_model_has_as_many_parameters_as_its_file_promises(name):
    promised = re.search(r'Expect: ([\d,]+) parameters', (ROOT / name).read_text())[1]
    assert f'{_count_parameters(_parse_network(name)):,}' == promised


def _parse_network(name: str) -> network.Transformer:
    parse(name, bindings=['DROPOUT_RATE = 0.0'])
    return gin.get_configurable(models.EncoderDecoderModel)().module


def _count_parameters(module: network.Transformer) -> int:
    tokens = jnp.ones((1, 2), jnp.int32)
    shapes = jax.eval_shape(
        lambda key: module.init(key, tokens, tokens, tokens, enable_dropout=False), jax.random.key(0)
    )
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes['params']))


@pytest.mark.parametrize('name', MODELS)
def test_every_model_pre_trains_with_every_setting_in_use(name):
    parse(f'gin/{name}', 'gin/runs/pretrain.gin', bindings=[*RUN, 'DROPOUT_RATE = 0.0'])
    got = build_arguments()
    assert (got['total_steps'], got['eval_period'], got['trainer_cls'].__name__) == (5, 1000, 'Trainer')
    assert (got['train_dataset_cfg'].split, got['train_eval_dataset_cfg'].split) == ('train', 'validation')
    assert got['checkpoint_cfg'].restore.path == []


@pytest.mark.parametrize('name', LAYOUTS)
def test_a_layout_replaces_the_one_of_the_run(name):
    parse('runs/pretrain_pydoc.gin', name)
    build_arguments()
    partitions, activations, parameters = LAYOUT_SIZES[pathlib.PurePath(name).stem]
    got = gin.get_bindings(partitioning.PjitPartitioner)
    assert (got['num_partitions'], got['strict']) == (partitions, True)
    assert got['logical_axis_rules'] == partitioning.standard_logical_axis_rules(activations, parameters)
    assert got.get('optimizer_rules') == ('zero1' if 'zero1' in name else None)


@pytest.mark.parametrize('name', ['muon', 'nadamw', 'optax_adafactor', 'prodigy'])
def test_any_optimizer_of_optax_can_be_named(name):
    lines = ['from __gin__ import dynamic_registration', 'from t5x_pjit_recipes import optimizers']
    lines += [f'OPTIMIZER = @optimizers.{name}()', f'optimizers.{name}.learning_rate = 0.1']
    pathlib.Path('optimizer.gin').write_text('\n'.join(lines))
    parse('runs/pretrain_pydoc.gin', 'optimizer.gin')
    assert isinstance(build_arguments()['model'].optimizer_def, optimizers.OptaxWrapper)


def test_the_newcomers_run_needs_no_macro():
    parse('gin/runs/pretrain_pydoc.gin')
    got = build_arguments()
    assert got['partitioner'].mesh.shape == {'data': 4, 'model': 2}
    assert got['train_dataset_cfg'].mixture_or_task_name == 'pydoc_span_corruption'
    assert (got['model'].module.config.dropout_rate, got['random_seed']) == (0.0, 0)
    assert gin.get_bindings(trainer.Trainer)['learning_rate_fn'](1) == pytest.approx(1000**-0.5)


def test_another_model_can_take_the_newcomers_run():
    parse('runs/pretrain_pydoc.gin', 'models/t5_1_1/tiny.gin', bindings=['DROPOUT_RATE = 0.1'])
    assert build_arguments()['model'].module.config.emb_dim == 8


def test_fine_tuning_starts_from_a_given_checkpoint():
    parse('models/pydoc_mini.gin', 'runs/finetune.gin', bindings=[*RUN, "INITIAL_CHECKPOINT_PATH = 'c/checkpoint_3'"])
    got = build_arguments()
    assert (got['checkpoint_cfg'].restore.path, got['checkpoint_cfg'].restore.mode) == ('c/checkpoint_3', 'specific')
    assert got['model'].module.config.dropout_rate == 0.1


@pytest.mark.parametrize('name', ['pretrain', 'finetune'])
def test_a_run_file_requires_the_macros_that_it_announces(name):
    announced = re.search(r'Required macros: (.*?)\n# Comm', (ROOT / f'runs/{name}.gin').read_text(), re.DOTALL)[1]
    with pytest.raises(ConfigError) as caught:
        parse(f'runs/{name}.gin')
    missing = re.findall(r'--gin\.(\w+)=', str(caught.value))
    assert set(missing) == set(re.findall(r'\b[A-Z][A-Z_]+\b', announced)) - {'T5X'}


@pytest.mark.parametrize(
    'setting',
    [
        'PjitPartitioner.logical_axis_rules = @standard_logical_axis_rules',
        'trainer.Trainer.learning_rate_fn = @create_learning_rate_scheduler',
        'CheckpointConfig.save = @SaveCheckpointConfig',
        'EncoderDecoderModel.module = @Transformer',
        'Adafactor.logical_factor_rules = @standard_logical_factor_rules',
        'train_script.train.partitioner = @PjitPartitioner',
        'MODEL = @EncoderDecoderModel',
        'OPTIMIZER = @Adafactor',
        'VOCABULARY = @ByteVocabulary',
    ],
)
def test_a_maker_without_brackets_is_refused(setting):
    with pytest.raises(ConfigError, match=re.escape(f'write {setting.split(" = ")[1]}()')):
        parse('runs/pretrain_pydoc.gin', bindings=[setting])


@pytest.mark.parametrize('name', ['BATCH_SIZE', 'TRAIN_STEPS', 'RANDOM_SEED', 'DROPOUT_RATE', 'NUM_PARTITIONS'])
def test_a_number_in_quotes_is_refused(name):
    with pytest.raises(ConfigError, match=f'--gin.{name}="2": \'2\' in quotes is text: write 2'):
        parse('runs/pretrain_pydoc.gin', bindings=[f'{name} = "2"'])
