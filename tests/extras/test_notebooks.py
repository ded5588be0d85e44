"""The notebooks that need an extra."""

import pytest

from tests.test_documents import NEED_EXTRAS, NOTEBOOKS, check_notebook


@pytest.mark.parametrize('notebook', [n for n in NOTEBOOKS if n.stem in NEED_EXTRAS], ids=lambda path: path.stem)
def test_a_notebook_runs_and_is_short(notebook, tmp_path):
    check_notebook(notebook, tmp_path)
