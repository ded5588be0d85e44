import dataclasses
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import gin
import pytest
from absl import flags

from t5x_pjit_recipes import gin_faults, gin_utils
from t5x_pjit_recipes.errors import ConfigError

# A small project for gin files to configure: `from tests import test_gin_utils as shop`.


@dataclasses.dataclass
class Dataset:
    name: str
    split: str = 'train'
    module: str | None = None


class Partitioner:
    def __init__(self, num_partitions: int | None = None, rules: Sequence[Any] | None = None, *, strict: bool = False):
        self.num_partitions, self.rules, self.strict = num_partitions, rules, strict


class Server:
    def __init__(self, learning_rate_fn: Callable[[int], float], num_microbatches: int | None = None):
        self.learning_rate_fn, self.num_microbatches = learning_rate_fn, num_microbatches


class Model:
    def __init__(self, vocabulary, dropout=0.1):
        self.vocabulary, self.dropout = vocabulary, dropout

    def predict(self, num_decodes=1):
        return num_decodes


class Vocabulary: ...


def standard_rules(dims: int = 1) -> list[tuple[str, str]]:
    return [('batch', 'data')] * dims


def make_schedule(base: float = 1.0) -> Callable[[int], float]:
    return lambda step: base * step


def plain_schedule(step: int) -> float:
    return 3.0 * step


def serve(*, model, train_cfg, eval_cfg, partitioner, server_cls, total_steps: int, seed: int | None = None):
    return dict(locals())


IMPORTS = """
from __gin__ import dynamic_registration
from tests import test_gin_utils as shop
"""

RUN = (
    IMPORTS
    + """
TASK = %gin.REQUIRED
STEPS = %gin.REQUIRED
DROPOUT = 0.5
MODEL = @shop.Model()
shop.Model.vocabulary = @shop.Vocabulary()
shop.Model.dropout = %DROPOUT
shop.Model.predict.num_decodes = 4
shop.serve:
  model = %MODEL
  train_cfg = @train/shop.Dataset()
  eval_cfg = @eval/shop.Dataset()
  partitioner = @shop.Partitioner()
  server_cls = @shop.Server
  total_steps = %STEPS
shop.Dataset.name = %TASK
eval/shop.Dataset.split = 'validation'
shop.Partitioner.rules = @shop.standard_rules()
shop.standard_rules.dims = 2
shop.Server.learning_rate_fn = @shop.make_schedule()
shop.make_schedule.base = 2.0
"""
)
SET = ["TASK = 'wiki'", 'STEPS = 3']


@pytest.fixture(autouse=True)
def fresh_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'run.gin').write_text(RUN)
    gin_utils.clear_config()
    yield
    gin_utils.clear_config()


def write(name: str, text: str) -> str:
    pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(name).write_text(text)
    return name


def parse(*files: str, bindings: Sequence[str] = SET, **kwargs: Any) -> Callable[..., dict[str, Any]]:
    gin_utils.parse_gin_flags(['.'], files, bindings, **kwargs)
    return gin_utils.configured(serve)


def refusal(*files: str, bindings: Sequence[str] = SET) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*files, bindings=bindings)
    return str(caught.value)


def test_settings_become_arguments():
    got = parse('run.gin')()
    assert (got['total_steps'], got['seed'], got['model'].dropout) == (3, None, 0.5)
    assert (got['train_cfg'], got['eval_cfg']) == (Dataset('wiki', 'train'), Dataset('wiki', 'validation'))
    assert got['partitioner'].rules == [('batch', 'data')] * 2
    assert got['server_cls']().learning_rate_fn(5) == 10.0
    assert got['model'].predict() == 4  # A method's settings hold as well.


def test_later_settings_win_and_callers_have_the_last_word():
    later = write('later.gin', IMPORTS + 'shop.make_schedule.base = 7.0\nSTEPS = 5')
    run = parse('run.gin', later, bindings=["TASK = 'wiki'", 'DROPOUT = 0.1', 'DROPOUT = 0.2'])
    got = run(seed=11)
    assert (got['total_steps'], got['seed'], got['model'].dropout) == (5, 11, 0.2)
    assert got['server_cls']().learning_rate_fn(1) == 7.0


@pytest.mark.parametrize('name', ['gin/runs/own.gin', 'runs/own.gin'])
@pytest.mark.parametrize('folder', ['gin', 't5x_pjit_recipes/gin_files'])
def test_own_files_are_found_in_a_checkout_and_in_a_wheel(folder, name):
    write(f'elsewhere/{folder}/runs/own.gin', '')
    found = gin_faults.find_gin_file(name, ['.'], pathlib.Path('elsewhere', folder), '--gin_file')
    assert found == pathlib.Path('elsewhere', folder, 'runs/own.gin')


def test_user_search_paths_come_before_our_own_folder():
    write('mine/runs/pretrain.gin', '')
    found = gin_faults.find_gin_file('runs/pretrain.gin', ['mine'], gin_utils.gin_root(), '--gin_file')
    assert found == pathlib.Path('mine/runs/pretrain.gin')


def test_includes_are_read_in_place():
    write('parts/sizes.gin', 'DROPOUT = 0.25\nSTEPS = 8')
    write('all.gin', "include 'run.gin'\ninclude 'parts/sizes.gin'\nSTEPS = 9")
    got = parse('all.gin', bindings=["TASK = 'wiki'"])()
    assert (got['model'].dropout, got['total_steps']) == (0.25, 9)


# Each row: a setting, and what the refusal must say. File settings stand in line 5 of extra.gin.
NAMES = {
    'shop.Server.num_microbatch = 2': "shop.Server has no parameter 'num_microbatch' (did you mean 'num_microb",
    'shop.serve.modle = %MODEL': "shop.serve has no parameter 'modle' (did you mean 'model'?)",
    'shop.Servr.num_microbatches = 2': "shop has no 'Servr' (did you mean 'Server'?)",
    'shop.serve.partitioner = @shop.Partitoner()': "shop has no 'Partitoner' (did you mean 'Partitioner'?)",
    'shop.serve.seed = [{"a": @shop.Modle()}]': "shop has no 'Modle' (did you mean 'Model'?)",
    'shopp.train.seed = 3': "'shopp' is not imported in this file (did you mean 'shop'?)",
    'shop.num_microbatches = 2': 'shop is neither a function nor a class',
}


@pytest.mark.parametrize(('setting', 'said'), NAMES.items())
def test_misspelt_names_are_refused_with_line_and_near_miss(setting, said):
    assert f'extra.gin:5: {said}' in refusal('run.gin', write('extra.gin', f'{IMPORTS}\n{setting}\n'))


def test_all_misspelt_names_are_listed_at_once():
    message = refusal('run.gin', write('extra.gin', IMPORTS + '\n'.join(NAMES)))
    assert all(said in message for said in NAMES.values())


def test_a_misspelt_name_in_a_flag_is_refused_with_a_near_miss():
    said = "--gin.shop.Servr.num_microbatches=2: nothing is called 'shop.Servr' here (did you mean 'shop.Server'?)"
    assert said in refusal('run.gin', bindings=[*SET, 'shop.Servr.num_microbatches = 2'])


VALUES = {
    'shop.Partitioner.rules = @shop.standard_rules': 'rules takes what it makes: write @shop.standard_rules()',
    'shop.serve.partitioner = @shop.Partitioner': 'partitioner takes what it makes: write @shop.Partitioner()',
    'shop.Server.learning_rate_fn = @shop.make_schedule': 'learning_rate_fn takes what it makes: write @shop.make_s',
    'MODEL = @shop.Model': 'model takes what it makes: write @shop.Model()',
    'shop.serve.seed = "None"': "'None' in quotes is text: write None",
    'shop.Model.vocabulary = "None"': "'None' in quotes is text: write None",
    'STEPS = "3"': "'3' in quotes is text: write 3",
    'shop.Partitioner.num_partitions = "2"': "'2' in quotes is text: write 2",
    'shop.Partitioner.strict = "True"': "'True' in quotes is text: write True",
    'shop.Partitioner.rules = "(1, 2)"': "'(1, 2)' in quotes is text: write (1, 2)",
    'DROPOUT = "0.1"': "'0.1' in quotes is text: write 0.1",
}


@pytest.mark.parametrize(('setting', 'said'), VALUES.items())
def test_values_that_cannot_be_meant_are_refused(setting, said):
    extra = write('extra.gin', f'{IMPORTS}STEPS = 3\n{setting}\n')
    message = refusal('run.gin', extra, bindings=["TASK = 'wiki'"])
    assert f'extra.gin:5: {setting.split(" = ")[0]}: ' in message
    assert said in message


@pytest.mark.parametrize(
    'setting',
    [
        'shop.serve.server_cls = @shop.Server',
        'shop.Server.learning_rate_fn = @shop.plain_schedule',
        'TASK = "2"',
        'shop.Dataset.module = "tests.module"',
        'shop.serve.seed = None',
    ],
)
def test_references_and_texts_that_are_meant_are_taken(setting):
    assert parse('run.gin', write('extra.gin', f'{IMPORTS}\n{setting}\n'))()['total_steps'] == 3


def test_all_unset_macros_are_listed_with_the_flag_that_sets_them():
    message = refusal('run.gin', bindings=['STEP = 3', 'shop.serve.seed = %SEED'])
    assert 'TASK, required by run.gin:5: --gin.TASK=...' in message
    assert 'STEPS, required by run.gin:6: --gin.STEPS=... (STEP is set, and nothing uses it)' in message
    assert 'SEED, used by --gin.shop.serve.seed=%SEED: --gin.SEED=...' in message


def test_an_unset_parameter_is_listed_like_a_macro():
    said = 'shop.serve.seed, required by --gin.shop.serve.seed=%gin.REQUIRED: --gin.shop.serve.seed=...'
    assert said in refusal('run.gin', bindings=[*SET, 'shop.serve.seed = %gin.REQUIRED'])


UNUSED = {
    'STEPZ = 3': "STEPZ: nothing refers to %STEPZ (did you mean 'STEPS'?)",
    'evl/shop.Dataset.split = "x"': "evl/shop.Dataset.split: nothing is built in scope 'evl' (did you mean 'eval'?)",
    'shop.plain_schedule.step = 3': 'shop.plain_schedule.step: nothing that runs refers to it',
}


@pytest.mark.parametrize(('setting', 'said'), UNUSED.items())
def test_a_setting_without_effect_is_refused(setting, said):
    message = refusal('run.gin', write('extra.gin', f'{IMPORTS}\n{setting}\n'))
    assert f'settings that have no effect on it (1). Correct or remove them:\n  extra.gin:5: {said}' in message


@pytest.mark.parametrize(
    'settings',
    [
        'shop.serve.model = @shop.Vocabulary()',  # MODEL and all below it were in use until this line.
        'MODEL = 3',
        'shop.serve.eval_cfg = None',
        'shop.Dataset.split = "x"\ntrain/shop.Dataset.split = "y"',  # Both scopes have one of their own.
        'outer/shop.Dataset.split = "x"\nshop.serve.train_cfg = @outer/inner/shop.Dataset()',
        'MODEL/shop.Model.dropout = 0.7',  # gin calls what a macro holds in the macro's scope.
        'shop.serve.seed = @gin_utils.sum_fn()\ngin_utils.sum_fn.var1 = 3\ngin_utils.sum_fn.var2 = %STEPS',
    ],
)
def test_replaced_and_inherited_settings_count_as_used(settings):
    text = f'{IMPORTS}from t5x_pjit_recipes import gin_utils\n{settings}\n'
    assert parse('run.gin', write('extra.gin', text))()['total_steps'] == 3  # and nothing was refused


def test_a_function_that_no_file_names_is_refused():
    with pytest.raises(ConfigError, match='Cannot run refusal from gin: none of 0 settings names it'):
        gin_utils.configured(refusal)


FILES = {
    "include 'rum.gin'": "'rum.gin', which extra.gin:1 names: none of 2 places has it. Did you mean 'run.gin'?",
    "include 'parts/x.gin'": "parts/x.gin', which extra.gin:1 names",  # A folder without __init__.py.
    'import shopp': "Cannot import what extra.gin:1 asks for, 'import shopp': No module named 'shopp'",
    'from t5x import gin_utils': "No module named 't5x' (did you mean 't5x_pjit_recipes.gin_utils'?)",
    'STEPS = three': "three is no number, no quoted text and no reference. If it is text, quote it: STEPS = 'three'",
    'STEPS ! 3': "Cannot read extra.gin:1: Couldn't parse statement",
    'STEPS = [1,': 'a bracket or a quote is never closed',
}


@pytest.mark.parametrize(('text', 'said'), FILES.items())
def test_a_file_that_cannot_be_read_is_named_with_its_line(text, said):
    assert said in refusal('run.gin', write('extra.gin', text))


def test_a_missing_file_is_named_with_the_places_searched():
    message = refusal('gin/runs/absent.gin')
    assert 'which --gin_file=gin/runs/absent.gin names: none of 3 places has it' in message
    assert f'  {gin_utils.gin_root() / "runs/absent.gin"}' in message


def test_a_method_named_without_its_class_is_refused():
    said = "--gin.predict.num_decodes=2: Method 'predict' referenced without class name 'Model'"
    assert said in refusal('run.gin', bindings=[*SET, 'predict.num_decodes = 2'])


def test_text_without_quotes_in_a_flag_is_shown_with_quotes_that_the_shell_leaves():
    assert """quote it: --gin.TASK="'/data/wiki'".""" in refusal('run.gin', bindings=['TASK = /data/wiki'])


def test_macros_in_a_circle_are_refused():
    assert 'Cannot follow %MODEL, set by --gin.MODEL=%MODEL' in refusal('run.gin', bindings=[*SET, 'MODEL = %MODEL'])


def test_a_final_configuration_takes_no_more_files():
    parse('run.gin')
    assert "Cannot parse ['run.gin']: the configuration of this process is final" in refusal('run.gin')


def test_unknown_settings_can_be_skipped():
    extra = write('extra.gin', IMPORTS + 'shop.Absent.x = 3\nshop.serve.seed = 5')
    absent = write('absent.gin', 'import absent_module')
    assert parse('run.gin', extra, absent, skip_unknown=True)()['seed'] == 5
    gin_utils.clear_config()
    assert parse('run.gin', extra, skip_unknown=['shop.Absent'])()['seed'] == 5
    gin_utils.clear_config()
    with pytest.raises(ConfigError, match="extra.gin:4: shop has no 'Absent'"):
        parse('run.gin', extra, skip_unknown=['shop.Other'])


def test_the_written_configuration_parses_to_the_same(tmp_path):
    written: dict[int, dict[str, str]] = {}

    class Writer:
        def write_texts(self, step, texts):
            written[step] = texts

        def flush(self):
            written[-1] = {}

    parse('run.gin')
    before = gin.config_str()
    gin_utils.summarize_gin_config(str(tmp_path / 'model'), Writer(), 7)
    assert written == {7: {'config': gin.markdown(before)}, -1: {}}
    gin_utils.clear_config()
    parse('model/config.gin', bindings=[])
    assert gin.config_str() == before


def test_provenance_names_the_line_of_each_setting():
    parse('run.gin')
    lines = gin_utils.get_gin_config_str(show_provenance=True).splitlines()
    assert {'# STEPS: --gin.STEPS=3', '# DROPOUT: run.gin:7', '# eval/shop.Dataset.split: run.gin:20'} <= set(lines)


@pytest.mark.parametrize(
    ('arg', 'rewritten'),
    [
        ('--gin.value=3', '--gin_bindings=value = 3'),
        ("--gin.a/b.c='x=y'", "--gin_bindings=a/b.c = 'x=y'"),
        ('--gin.value=', '--gin_bindings=value = '),
        ('gin.value=3', 'gin.value=3'),
        ('--gin_bindings=value=3', '--gin_bindings=value=3'),
        ('--gin_file=x.gin', '--gin_file=x.gin'),
    ],
)
def test_gin_flags_are_rewritten(arg, rewritten):
    assert gin_utils.rewrite_gin_args(['script.py', arg]) == ['script.py', rewritten]


def test_a_gin_flag_without_value_is_refused():
    with pytest.raises(ConfigError, match='Cannot read flag --gin.x: it has no value'):
        gin_utils.rewrite_gin_args(['--gin.x'])


def test_flags_can_be_defined_twice():
    gin_utils.define_flags()
    gin_utils.define_flags()
    assert (flags.FLAGS['gin_search_paths'].default, flags.FLAGS['gin_bindings'].default) == (['.'], [])


def test_helpers_for_gin_files():
    assert gin_utils.sum_fn(1, 2) == 3
    assert gin_utils.bool_fn('') is False
    assert gin_utils.string_split_fn('a/b/c', '/', maxsplit=1) == ['a', 'b/c']
    assert gin_utils.string_split_fn('a/b/c', '/', index=-1) == 'c'


def test_a_script_run_as_main_takes_our_files_and_t5x_style_files(tmp_path):
    write('project/__init__.py', '')
    script = """
        def train(*, steps, name):
            print(f'{steps} {name} {__name__}')

        if __name__ == '__main__':
            from absl import flags
            from project.script import train
            from t5x_pjit_recipes import gin_utils

            def main(_):
                given = flags.FLAGS
                gin_utils.parse_gin_flags(given.gin_search_paths, given.gin_file, given.gin_bindings)
                gin_utils.configured(train)()

            gin_utils.define_flags()
            gin_utils.run(main)
    """
    write('project/script.py', textwrap.dedent(script))
    first = 'from __gin__ import dynamic_registration\n'
    write('ours.gin', first + 'from project import script as train_script\ntrain_script.train.steps = 1')
    main = 'import __main__ as train_script\ntrain_script.train.steps = 2\ntrain_script.train.name = %NAME'
    write('theirs.gin', first + main)
    command = [sys.executable, '-m', 'project.script', '--gin_file=ours.gin', '--gin_file=theirs.gin', "--gin.NAME='n'"]
    path = os.pathsep.join([str(tmp_path), str(pathlib.Path(gin_utils.__file__).parents[1])])
    done = subprocess.run(command, env=os.environ | {'PYTHONPATH': path}, capture_output=True, text=True)
    assert done.stdout == '2 n project.script\n', done.stderr
