"""The partitioner as existing gin files configure it, in processes of their own: gin has one registry for each."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys, warnings
import jax
jax.config.update('jax_num_cpu_devices', 8)
import gin
from t5x_pjit_recipes import partitioning

if {decorated}:
    partitioning.PjitPartitioner = gin.configurable(partitioning.PjitPartitioner, module='partitioning')
    gin.configurable(partitioning.standard_logical_axis_rules, module='partitioning')
made = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    for text in json.loads(sys.argv[1]):
        gin.clear_config()
        gin.parse_config(text)
        make = partitioning.PjitPartitioner if {decorated} else gin.get_configurable(partitioning.PjitPartitioner)
        try:
            partitioner = make()
            made.append([dict(partitioner.mesh.shape), [list(r) for r in partitioner.logical_axis_rules][:2]])
        except ValueError as error:
            made.append(str(error))
print(json.dumps([made, [str(w.message) for w in caught if w.category is UserWarning]]))
"""
HEAD = 'from __gin__ import dynamic_registration\nfrom t5x_pjit_recipes import partitioning\n'
STOCK = """
partitioning.PjitPartitioner:
  num_partitions = 1
  model_parallel_submesh = None
  logical_axis_rules = @partitioning.standard_logical_axis_rules()
"""
CASES = {
    'stock': (STOCK, {'data': 8, 'model': 1}, ['vocab', 'model']),
    'partitions': ('partitioning.PjitPartitioner.num_partitions = 4', {'data': 2, 'model': 4}, ['vocab', 'model']),
    'literal rules': (
        "partitioning.PjitPartitioner.num_partitions = 2\n"
        "partitioning.PjitPartitioner.logical_axis_rules = [('batch', 'data'), ('embed', None), ('mlp', 'model')]",
        {'data': 4, 'model': 2},
        ['embed', None],
    ),
    'submesh': (
        'partitioning.PjitPartitioner.model_parallel_submesh = (1, 1, 1, 2)',
        {'data': 4, 'model': 2},
        ['vocab', 'model'],
    ),
    'empty submesh': (
        'partitioning.PjitPartitioner.num_partitions = 2\npartitioning.PjitPartitioner.model_parallel_submesh = ()',
        {'data': 4, 'model': 2},
        ['vocab', 'model'],
    ),
    'both': (STOCK.replace('= None', '= (1, 2, 1, 1)'), {'data': 4, 'model': 2}, ['vocab', 'model']),
}  # fmt: skip


@pytest.mark.parametrize('decorated', [False, True], ids=['dynamic registration', 'gin.configurable'])
def test_gin_makes_these_partitioners(decorated):
    texts = [text if decorated else HEAD + text for text, _, _ in CASES.values()]
    texts.append('' if decorated else HEAD + 'partitioning.PjitPartitioner.backend = None')
    done = subprocess.run(
        [sys.executable, '-c', SCRIPT.format(decorated=decorated), json.dumps(texts)],
        env={**os.environ, 'JAX_PLATFORMS': 'cpu'}, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made, warned = json.loads(done.stdout)
    for name, found, (_, mesh, rule) in zip(CASES, made, CASES.values(), strict=False):
        assert found == [mesh, [['batch', 'data'], rule]], name
    assert 'num_partitions=None and model_parallel_submesh=None' in made[-1]
    assert len(warned) == 1
    assert 'both num_partitions=1 and model_parallel_submesh=(1, 2, 1, 1)' in warned[0]
