"""How much of the host's memory reading a folder takes, beside the shards themselves."""

import json
import os
import subprocess
import sys

import jax
import numpy as np

from t5x_pjit_recipes.interop import hugging_face
from t5x_pjit_recipes.recipes import hf_t5_names

# The width, heads and words of a large T5 1.1, with fewer layers.
LARGE = {
    'model_type': 't5', 'vocab_size': 32128, 'd_model': 1024, 'd_kv': 64, 'd_ff': 2816, 'num_layers': 4,
    'num_decoder_layers': 2, 'num_heads': 16, 'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False,
}  # fmt: skip
SMALL = {**LARGE, 'vocab_size': 64, 'd_model': 32, 'd_kv': 2, 'd_ff': 64}
MEBI = 2**20

# Its own process: a peak belongs to one. What the first call of all loads and compiles is not counted.
READER = """
import json, pathlib, re, sys
import jax
jax.config.update('jax_num_cpu_devices', 8)
from t5x_pjit_recipes import partitioning
from t5x_pjit_recipes.recipes import hf_t5

def resident(which):
    return int(re.search(which + r':\\s+(\\d+) kB', pathlib.Path('/proc/self/status').read_text())[1]) * 1024

rules = partitioning.standard_logical_axis_rules(activation_partitioning_dims=1, parameter_partitioning_dims=2)
partitioner = partitioning.PjitPartitioner(2, logical_axis_rules=rules, strict=True)
small, large = sys.argv[1:]
jax.block_until_ready(hf_t5.load_params(small, partitioner))
before = resident('VmRSS')
pathlib.Path('/proc/self/clear_refs').write_text('5')
leaves = jax.tree.leaves(jax.block_until_ready(hf_t5.load_params(large, partitioner)))
print(json.dumps({
    'peak': resident('VmHWM') - before,
    'shards': sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards),
    'folder': sum(leaf.nbytes for leaf in leaves),
    'largest': max(leaf.nbytes for leaf in leaves),
}))
"""


def write(path, config):
    """Writes a folder of several files with random weights."""
    rng = np.random.default_rng(0)
    sources = hf_t5_names.sources(hf_t5_names.network_config(config))

    def make(weight):
        shape = weight.shape(weight.split)
        return rng.standard_normal(shape[::-1], np.float32).T if len(shape) == 2 else np.ones(shape, np.float32)

    params = jax.tree.map(make, sources, is_leaf=lambda x: isinstance(x, hugging_face.Weight))
    hugging_face.save_folder(path, config, sources, params, max_file_bytes=200 * MEBI)
    return path


def test_reading_takes_little_more_than_the_shards_and_the_largest_tensor(tmp_path, record_property):
    folders = [write(tmp_path / 'small', SMALL), write(tmp_path / 'large', LARGE)]
    assert len(list(folders[1].glob('*.safetensors'))) > 2
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
    done = subprocess.run([sys.executable, '-c', READER, *folders], text=True, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    print({name: f'{size / MEBI:.0f} MiB' for name, size in got.items()})
    record_property('bytes', got)
    assert got['folder'] >= 500e6
    # The smallest arrays alone are whole on every device.
    assert got['shards'] < 1.01 * got['folder']
    assert got['peak'] - got['shards'] <= 1.1 * got['largest']
