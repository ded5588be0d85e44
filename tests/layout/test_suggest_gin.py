"""Suggested rules as gin bindings, in a process of its own: gin has one registry for each."""

import os
import subprocess
import sys

SCRIPT = """
import jax
jax.config.update('jax_num_cpu_devices', 8)
import gin
from tests import trees
from t5x_pjit_recipes import layout, partitioning

proposed = layout.suggest(trees.load('linen_vit_b16'), layout.abstract_mesh(data=4, model=2))
gin.parse_config(proposed.as_gin() + '\\npartitioning.PjitPartitioner.num_partitions = 2\\n')
partitioner = gin.get_configurable(partitioning.PjitPartitioner)()
print(partitioner._param_rules.rules == proposed.rules.rules)
"""


def test_printed_as_gin_they_are_the_same():
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
    done = subprocess.run([sys.executable, '-c', SCRIPT], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 'True\n'
