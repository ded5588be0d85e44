"""The commands plan, explain, lint and diff: each in a process of its own, as one gives them."""

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys

import jax
import pytest

from t5x_pjit_recipes import figures, gin_utils, lint, planning
from t5x_pjit_recipes.errors import ConfigError

ENVIRONMENT = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
PYDOC = ['gin/runs/pretrain_pydoc.gin']
RUN, MESH = '--gin_file=gin/runs/pretrain_pydoc.gin', '--mesh=data=4,model=2'
XXL = ['gin/models/t5_1_1/xxl.gin', 'gin/runs/pretrain.gin']


@pytest.fixture(autouse=True)
def fresh_config():
    gin_utils.clear_config()
    yield
    gin_utils.clear_config()


def load(bindings, mesh='data=4,model=2'):
    return planning.load_run(PYDOC, bindings, mesh=mesh)


def give(command, *args):
    """Gives a command in a process of its own."""
    return subprocess.run(
        [sys.executable, '-m', f't5x_pjit_recipes.{command}', *args],
        env=ENVIRONMENT, text=True, capture_output=True,
    )  # fmt: skip


def output(command, *args):
    done = give(command, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(command, *args):
    done = give(command, *args)
    assert done.returncode == 1, done.stdout
    assert 'Traceback' not in done.stderr
    return done.stderr


def test_plan_prints_what_training_prints(tmp_path):
    flags = [RUN, f"--gin.MODEL_DIR='{tmp_path}/run'", '--cpu_devices=8']
    planned = output('plan', *flags)
    assert not (tmp_path / 'run').exists()  # Planning starts no training.
    command = [sys.executable, '-m', 't5x_pjit_recipes.train', *flags]
    with subprocess.Popen(command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE) as training:
        said = ''.join(itertools.takewhile(lambda line: 'starting from scratch' not in line, training.stdout))
        training.kill()
    assert said == planned
    assert planned.startswith('mesh data=4, model=2 on 8 CPU devices\n')


def test_the_largest_t5_is_planned_for_a_pod_in_seconds():
    code = (
        'import sys, time\n'
        'from t5x_pjit_recipes import planning\n'
        "files = ['gin/models/t5_1_1/xxl.gin', 'gin/runs/pretrain.gin']\n"
        "parts = planning.load_run(files, ['DROPOUT_RATE = 0.0'], mesh='data=64,model=64').parts()\n"
        "print(parts['params'].num_bytes, parts['params'].bytes_per_device, time.process_time())"
    )
    done = subprocess.run([sys.executable, '-c', code], env=ENVIRONMENT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    num_bytes, held, seconds = done.stdout.splitlines()[0].split()
    assert int(num_bytes) == 4 * 11_135_332_352
    assert int(held) < int(num_bytes) / 60
    assert float(seconds) < 20  # Of the processor, imports included; about 3 where nothing else runs.


def test_plan_as_data_says_the_same():
    data = json.loads(output('plan', RUN, MESH, '--json'))
    assert data['mesh'] == {'data': 4, 'model': 2}
    parts = load([]).parts()
    assert data['bytes_per_device'] == {title: plan.bytes_per_device for title, plan in parts.items()}
    assert sum(row['bytes_per_device'] for row in data['arrays']) == data['bytes_per_device']['params']
    assert {row['rule'] for row in data['arrays'] if row['name'].endswith('mlp/wo/kernel')} == {
        'mlp: rule 4, embed: rule 3'
    }


@pytest.mark.parametrize(
    ('bindings', 'mesh'),
    [
        (['NUM_PARTITIONS = 3'], {'data': 1, 'model': 3}),
        (['PjitPartitioner.model_parallel_submesh = (4, 4, 1, 1)', 'NUM_PARTITIONS = None'], {'data': 1, 'model': 16}),
        (
            ['PjitPartitioner.ici_mesh_shape = (1, 4, 4)', 'PjitPartitioner.dcn_mesh_shape = (2, 1, 1)'],
            {'replica': 2, 'data': 4, 'model': 4},
        ),
    ],
)
def test_a_mesh_that_is_not_here_is_planned_without_devices(bindings, mesh):
    with pytest.warns(UserWarning, match='which the 8 devices here cannot make. Give --mesh'):
        run = load(bindings, mesh=None)
    assert dict(run.mesh.shape) == mesh
    assert isinstance(run.mesh, jax.sharding.AbstractMesh)


def test_a_mesh_that_is_here_is_the_partitioners_own():
    run = load(['NUM_PARTITIONS = 4'], mesh=None)
    assert dict(run.mesh.shape) == {'data': 2, 'model': 4}
    assert isinstance(run.mesh, jax.sharding.Mesh)


def test_explain_says_why():
    text = output('explain', RUN, MESH, 'encoder/layers_*/mlp/wi_*/kernel', 'token_embedder/embedding')
    first, second = text.split('\n\n')
    assert first.startswith("encoder/layers_0/mlp/wi_0/kernel (128, 256) float32: spec (None, 'model')")
    assert "dim 1 of 256, 'mlp': divided 2 ways, by 'model'\n  rule 4 ('mlp', 'model'): decides" in first
    assert second.startswith('token_embedder/embedding (384, 128)')
    table = output('explain', RUN, MESH)
    assert re.search(r'token_embedder/embedding .* vocab: rule 2, embed: rule 3', table)
    data = json.loads(output('explain', RUN, MESH, '--json', 'token_embedder/embedding'))
    assert data[0]['dims'][0]['attempts'] == [{'number': 2, 'rule': ['vocab', 'model'], 'outcome': 'decides'}]
    assert "Did you mean 'token_embedder/embedding'" in refusal('explain', RUN, MESH, 'token_embedder/embeding')


def test_lint_looks_at_rules_of_both_kinds():
    rules = "[('.*/wi_./kernel', \"P(None, 'modle')\"), ('.*/wo/kernle', ('mpl', 'embed')), ('.*/decoder.*', None)]"
    run = load([f'PjitPartitioner.param_rules = {rules}'])
    state = run.state.replace(params_axes=None)
    findings = [str(finding) for finding in lint.find(dataclasses.replace(run, state=state))]
    for says in (
        'no rule matches ',
        "rule 2 '.*/wo/kernle' matches nothing",
        "names 'modle', which the mesh (data, model) lacks (did you mean 'model'?)",
        "has the name 'mpl' (did you mean 'mlp'?)",
        "no array has the name 'kv'",
    ):
        assert any(says in finding for finding in findings), says


def test_lint_tells_of_faulty_rules_and_ends_with_1():
    sound = give('lint', RUN, MESH)
    assert sound.returncode == 0
    assert "note: dead: rule 6 ('kv', None): no array has the name 'kv'" in sound.stdout
    faulty = give('lint', RUN, '--mesh=data=4,modl=2', '--json')
    assert faulty.returncode == 1
    first = json.loads(faulty.stdout)[0]
    assert (first['level'], first['kind'], first['rule']) == ('error', 'mesh axis', 2)
    assert "did you mean 'modl'" in first['text']


def test_diff_tells_what_another_layout_changes():
    added = ('--with_gin_file=gin/partitioning/2d_parameters.gin',)
    text = output('diff', RUN, MESH, *added)
    assert re.search(
        r"token_embedder/embedding +\(384, 128\) +\('model',\) +\('model', 'data'\) +96.0 KiB -> 24.0 KiB", text
    )
    assert re.search(r'(?m)^gradients +1.7 MiB -> +434.5 KiB per device', text)
    same = output('diff', RUN, MESH, '--with_gin.PARAMETER_PARTITIONING_DIMS=2')
    assert same == text
    data = json.loads(output('diff', RUN, MESH, '--with_mesh=data=4,model=4', '--json'))
    assert data['params']['meshes'] == ['mesh data=4, model=2 on 8 devices', 'mesh data=4, model=4 on 16 devices']
    assert data['bytes_per_device']['params'][0] > data['bytes_per_device']['params'][1]
    assert 'Cannot compare a plan with itself' in refusal('diff', RUN, MESH)


@pytest.mark.parametrize(
    ('files', 'bindings', 'mesh', 'says'),
    [
        (XXL, [], 'data=64,model=64', r'required \(1\). Set them:\n  DROPOUT_RATE, .*--gin.DROPOUT_RATE=...'),
        (XXL, ['DROPOUT_RATE = 0.0'], '64x64', "Cannot read the mesh '64x64': it is no list of sizes. Write --mesh"),
        ([], [], None, 'Cannot (plan without model|run train from gin).* Give a run file'),
        (PYDOC, ['TRAIN_STEPZ = 2'], None, 'nothing refers to %TRAIN_STEPZ'),
        (PYDOC, ['train.model = None', 'train.partitioner = None'], None, 'Cannot plan without model and partitioner'),
    ],
)
def test_what_cannot_be_planned_is_told(files, bindings, mesh, says):
    with pytest.raises(ConfigError, match=says):
        planning.load_run(files, bindings, mesh=mesh)


def test_a_refused_plan_ends_in_one_readable_error():
    flags = [f'--gin_file={name}' for name in XXL]
    error = refusal('plan', *flags, '--gin.DROPOUT_RATE=0.0', '--mesh=data=8,model=3')
    assert error.startswith('PlanError: Cannot shard ')
    assert "(4096, 4096): dim 1 is 4096, which ('model',) splits 3 ways; 4098 would fit" in error


def test_settings_that_only_a_run_needs_may_be_missing():
    run = planning.load_run(XXL, ['DROPOUT_RATE = 0.0'], mesh='data=4,model=2')
    assert run.parts()['params'].num_bytes == 4 * 11_135_332_352


@pytest.mark.parametrize('files', [['gin/runs/finetune.gin', 'gin/models/pydoc_mini.gin'], PYDOC])
def test_inputs_are_those_of_the_run(files):
    assert planning.load_run(files, [], mesh='data=4,model=2').parts()['params'].bytes_per_device == 1776640


@pytest.mark.parametrize('text', ['data', 'data=', 'data=0', 'data=2,data=2', '=3', 'data=-1', 'da ta=2'])
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(ConfigError, match=f'Cannot read the mesh {text!r}'):
        planning.read_mesh(text)


def test_figures_need_matplotlib(tmp_path):
    done = give('plan', RUN, MESH, f'--figure={tmp_path}/plan.png')
    if 'matplotlib is not installed' in done.stderr:
        assert "pip install 't5x_pjit_recipes[notebooks]'" in done.stderr
    else:
        assert (tmp_path / 'plan.png').stat().st_size > 1000
        assert 'in a folder that is there' in refusal('plan', RUN, MESH, f'--figure={tmp_path}/none/plan.png')


def test_figures_group_what_a_device_holds():
    parts = load([]).parts()
    groups = figures.group_bytes(parts)
    assert list(groups)[:2] == ['decoder mlp', 'encoder mlp']
    assert set(groups['decoder mlp']) == {'params', 'gradients', 'optimizer state'}
    for title, plan in parts.items():
        assert sum(held.get(title, 0) for held in groups.values()) == plan.bytes_per_device
