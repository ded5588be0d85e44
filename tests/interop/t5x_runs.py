"""Runs the real T5X, in a process of its own: its imports warn, and its gin configuration is the process's.

`python t5x_runs.py runs.json` does each run of a list of dicts and saves the train state it ends with.
"""

import json
import pathlib
import sys

import jax

jax.config.update('jax_num_cpu_devices', 8)

import gin  # noqa: E402
import numpy as np  # noqa: E402
import t5x.train  # noqa: E402
import tensorflow as tf  # noqa: E402
from absl import logging  # noqa: E402
from flax import traverse_util  # noqa: E402

LENGTHS = {'encoder_input_tokens': 16, 'decoder_input_tokens': 8, 'decoder_target_tokens': 8}
GIN = """
from __gin__ import dynamic_registration
import seqio
from t5x import adafactor
from t5x import checkpoints
from t5x import gin_utils
from t5x import models
from t5x import trainer
from t5x import utils
from t5x import train as train_script
from t5x.examples.t5 import network
from {partitioning} import partitioning

train_script.train:
  model = @models.EncoderDecoderModel()
  train_dataset_cfg = @utils.DatasetConfig()
  train_eval_dataset_cfg = None
  infer_eval_dataset_cfg = None
  checkpoint_cfg = @utils.CheckpointConfig()
  partitioner = @partitioning.PjitPartitioner()
  trainer_cls = @trainer.Trainer
  total_steps = {steps}
  eval_steps = 0
  eval_period = 0
  stats_period = 1
  random_seed = 0
  use_orbax = {use_orbax}
  summarize_config_fn = @gin_utils.summarize_gin_config

partitioning.PjitPartitioner:
  model_parallel_submesh = (1, 1, 1, 2)
  logical_axis_rules = @partitioning.standard_logical_axis_rules()

utils.DatasetConfig:
  mixture_or_task_name = 'made_up'
  task_feature_lengths = None
  split = 'train'
  batch_size = 8
  shuffle = False
  seed = None
utils.CheckpointConfig.save = @utils.SaveCheckpointConfig()
utils.SaveCheckpointConfig:
  period = 2
  save_dataset = True
  checkpointer_cls = @checkpoints.SaveBestCheckpointer
  checkpoint_manager_cls = @checkpoints.OrbaxCheckpointManagerInterface

trainer.Trainer:
  num_microbatches = {microbatches}
  learning_rate_fn = @utils.create_learning_rate_scheduler()
utils.create_learning_rate_scheduler:
  factors = 'constant * rsqrt_decay'
  base_learning_rate = 1.0
  warmup_steps = 10

models.EncoderDecoderModel:
  module = @network.Transformer()
  input_vocabulary = @seqio.ByteVocabulary()
  output_vocabulary = @seqio.ByteVocabulary()
  optimizer_def = @adafactor.Adafactor()
  z_loss = 0.0001
adafactor.Adafactor:
  decay_rate = 0.8
  min_dim_size_to_factor = 8
  logical_factor_rules = @adafactor.standard_logical_factor_rules()
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = 384
  dtype = 'float32'
  emb_dim = 16
  num_heads = 4
  num_encoder_layers = 1
  num_decoder_layers = 1
  head_dim = 4
  mlp_dim = 32
  mlp_activations = ('gelu', 'linear')
  dropout_rate = 0.1
"""


def make_dataset(cfg, shard_id, num_shards, converter_cls):
    """Endless batches of tokens; the data set's place is what T5X saves and restores."""
    del shard_id, num_shards, converter_cls
    rng = np.random.default_rng(0)
    tokens = {name: rng.integers(3, 384, (64, length), dtype=np.int32) for name, length in LENGTHS.items()}
    tokens['decoder_loss_weights'] = np.ones((64, LENGTHS['decoder_target_tokens']), np.float32)
    return tf.data.Dataset.from_tensor_slices(tokens).repeat().batch(cfg.batch_size, drop_remainder=True)


def named_arrays(tree):
    """A state dict as a flat dict of numpy arrays."""
    return {'/'.join(path): np.asarray(x) for path, x in traverse_util.flatten_dict(tree).items()}


def train(model_dir, result, *, partitioning, steps, microbatches=None, use_orbax=True, bindings=()):
    """Trains with T5X's `train`, the partitioner taken from the package that gin names."""
    text = GIN.format(partitioning=partitioning, steps=steps, microbatches=microbatches, use_orbax=use_orbax)
    gin.clear_config()
    gin.parse_config([text, *bindings])
    step, state = gin.get_configurable(t5x.train.train)(
        model_dir=model_dir, get_dataset_fn=make_dataset, verify_matching_vocabs_fn=None
    )
    np.savez(result, **named_arrays(state.state_dict()))
    kernel = state.params['encoder']['layers_0']['mlp']['wi_0']['kernel']
    print(model_dir, 'step', step, kernel.sharding)


def main(runs):
    """Does each run."""
    logging.set_verbosity(logging.ERROR)
    for run in runs:
        train(**run)


if __name__ == '__main__':
    main(json.loads(pathlib.Path(sys.argv[1]).read_text()))
