"""The order of the house: imports go one way, and importing the package starts nothing."""

import ast
import importlib
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import t5x_pjit_recipes

PACKAGE = pathlib.Path(t5x_pjit_recipes.__file__).parent

# Rooms from the ground up: a module may import from its own room and from those below.
ROOMS = [
    {'errors'},
    {'layout'},
    {
        'state_utils',
        'schedules',
        'factor_rules',
        'adafactor_hyper_params',
        'standard_rules',
        'param_axes',
        'param_rules',
    },
    {'optimizer_defs', 'multi_optimizer', 'optimizers', 'adafactor'},
    {'train_state'},
    {'partitioning'},
    {'losses', 'metrics', 'models', 'data', 'checkpoints', 'examples', 'decoding_states', 'beams', 'decoding'},
    {'initialization', 'reports', 'actions', 'summaries', 'progress', 'weight_metrics', 'train_steps', 'stops'},
    {'trainer', 'training_loop', 'gin_faults', 'gin_settings', 'gin_utils'},
    {'utils'},
    {'train'},
    {'figures', 'planning', 'plan', 'explain', 'lint', 'diff'},
    {'interop'},
    {'recipes'},
]
FLOOR = {name: floor for floor, names in enumerate(ROOMS) for name in names}
# Inside the engine likewise.
ENGINE = [
    'paths',
    'axes',
    'tiles',
    'meshes',
    'logical_rules',
    'patterns',
    'regex_rules',
    'provenance',
    'slots',
    'plan',
    'slot_report',
    'explain',
    'linting',
    'differences',
    'generalize',
    'suggest',
    'placement',
    'feeding',
    'constraints',
    'programs',
]


def modules():
    for path in sorted(PACKAGE.rglob('*.py')):
        name = path.relative_to(PACKAGE).with_suffix('').as_posix().replace('/', '.').removesuffix('.__init__')
        if name != '__init__':
            yield name, ast.parse(path.read_text(encoding='utf-8'))


def imported(tree):
    """Yields the dotted names that a module imports, its functions' own imports included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def own(names):
    prefix = 't5x_pjit_recipes.'
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def test_every_module_has_a_room():
    assert {name.split('.')[0] for name, _ in modules()} - set(FLOOR) == set()


def test_imports_go_down():
    climbs = [
        f'{name} imports {target}'
        for name, tree in modules()
        for target in own(imported(tree))
        if FLOOR[target.split('.')[0]] > FLOOR[name.split('.')[0]] and name != 'train'
    ]
    assert climbs == []


def test_imports_inside_the_engine_go_down():
    climbs = [
        f'{name} imports {target}'
        for name, tree in modules()
        for target in own(imported(tree))
        if name.startswith('layout.') and target.startswith('layout.')
        and ENGINE.index(target.split('.')[1]) > ENGINE.index(name.split('.')[1])
    ]  # fmt: skip
    assert climbs == []


def test_the_engine_knows_no_training_and_flax_in_one_module_only():
    outsiders = {
        (name, target.split('.')[0])
        for name, tree in modules()
        for target in imported(tree)
        if name.startswith('layout')
        and target.split('.')[0] not in {'jax', 'numpy', 't5x_pjit_recipes', *sys.stdlib_module_names}
    }
    assert outsiders == {('layout.axes', 'flax')}


def test_gin_is_imported_in_one_module_only():
    assert {name for name, tree in modules() for target in imported(tree) if target.split('.')[0] == 'gin'} == {
        'gin_utils'
    }


def test_importing_starts_no_device_and_loads_nothing_heavy():
    code = (
        'import sys, t5x_pjit_recipes;'
        'assert "jax" not in sys.modules;'
        'from t5x_pjit_recipes import partitioning, train_state, optimizers, layout;'
        'heavy = {"tensorflow", "seqio", "gin", "t5x", "grain", "orbax"} & set(sys.modules); assert not heavy, heavy;'
        'from jax._src import xla_bridge; assert not xla_bridge._backends'
    )
    subprocess.run([sys.executable, '-c', code], check=True)


@pytest.mark.parametrize('name', [m.name for m in pkgutil.walk_packages([str(PACKAGE)], 't5x_pjit_recipes.')])
def test_every_module_is_documented_and_its_public_names_exist(name):
    module = importlib.import_module(name)
    assert module.__doc__
    for public in getattr(module, '__all__', []):
        assert hasattr(module, public), public
