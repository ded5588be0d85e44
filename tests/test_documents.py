"""What a newcomer reads is run: the code in the README, and the notebooks."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))
# These need an extra, and run where it is installed: in tests/extras.
NEED_EXTRAS = {'05_bloom_inference', '06_hugging_face_t5'}


def run_in_a_new_process(code, tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(code, encoding='utf-8')
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(
        [sys.executable, '-W', 'error', str(script)], cwd=ROOT, env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_code_in_the_readme_runs(tmp_path):
    blocks = re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(encoding='utf-8'), flags=re.DOTALL)
    assert len(blocks) == 5
    said = run_in_a_new_process('\n'.join(blocks), tmp_path)
    assert "P(None, 'model') P(None, 'model')" in said or "PartitionSpec(None, 'model')" in said
    assert '2 arrays, 8.0 MiB; each device holds 128.0 KiB' in said


def test_the_readme_names_what_exists():
    text = (ROOT / 'README.md').read_text(encoding='utf-8')
    for path in re.findall(r'(?:gin|notebooks)/[\w/]+\.(?:gin|ipynb)', text):
        assert (ROOT / path).is_file(), path
    for target in re.findall(r'^make ([\w-]+)', text, flags=re.MULTILINE):
        assert re.search(rf'^{target}:', (ROOT / 'Makefile').read_text(), flags=re.MULTILINE), target


def check_notebook(notebook, tmp_path):
    cells = json.loads(notebook.read_text(encoding='utf-8'))['cells']
    code = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']
    assert not any(cell.get('outputs') for cell in cells)
    assert len(code) <= 12
    assert all(len(source.splitlines()) <= 15 for source in code)
    assert code[-1].splitlines()[-1].startswith('assert ')
    if any('matplotlib' in source for source in code):
        pytest.importorskip('matplotlib')
    run_in_a_new_process('\n'.join(code), tmp_path)


@pytest.mark.parametrize('notebook', [n for n in NOTEBOOKS if n.stem not in NEED_EXTRAS], ids=lambda path: path.stem)
def test_a_notebook_runs_and_is_short(notebook, tmp_path):
    check_notebook(notebook, tmp_path)
