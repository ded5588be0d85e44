"""A small train state, a partitioner and a dataset iterator, with what checkpoints need of them and no more."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_pjit_recipes.checkpoints import OrbaxCheckpointManagerInterface
from t5x_pjit_recipes.layout import axes, paths

SPECS = {'target/mlp/wi': P('data', 'model'), 'target/embedding': P('model'), 'state/param_states/mlp/wi': P('model')}


@dataclasses.dataclass(frozen=True)
class State:
    tree: Any

    def state_dict(self):
        return self.tree

    def restore_state(self, state_dict):
        return State(state_dict)


class Partitioner:
    def __init__(self, data=4, model=2, specs=SPECS):
        devices = np.array(jax.devices()[: data * model]).reshape(data, model)
        self.mesh = Mesh(devices, ('data', 'model'), axis_types=(AxisType.Auto, AxisType.Auto))
        self._specs = specs

    def get_mesh_axes(self, state):
        return State(paths.map_named(lambda name, _: self._specs.get(name), state.state_dict()))

    def place(self, state):
        shardings = jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec or P()),
            self.get_mesh_axes(state).tree,
            is_leaf=axes.is_spec_leaf,
        )
        leaves = paths.named_leaves(shardings)
        return State(paths.map_named(lambda name, leaf: jax.device_put(leaf, leaves[name]), state.tree))


class Numbers:
    """An iterator whose position is a number, and which can be told to return anything as its state."""

    def __init__(self, position=0):
        self.position = position

    def get_state(self):
        return {'position': self.position}

    def set_state(self, state):
        self.position = state['position']


def make_tree(step=3, seed=0):
    """A tree with every kind of leaf: floats, bfloat16, integers, 0-d, Python numbers, None and empty dicts."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {
        'target': {
            'mlp': {'wi': normal(8, 16), 'scale': normal(16).astype(jnp.bfloat16)},
            'embedding': normal(12, 4),
            'untouched': None,
        },
        'state': {
            'step': jnp.asarray(step, jnp.int32),
            'param_states': {
                'mlp': {'wi': normal(8, 16)},
                'count': jnp.asarray(7, jnp.int32),
                'decay': 0.5,
                'skipped': 2,
                'ema': np.float32(1.5),
                'empty': {},
            },
        },
    }


def make_manager(directory, state, partitioner=None, **kwargs):
    return OrbaxCheckpointManagerInterface(directory, shapes(state), partitioner or Partitioner(), **kwargs)


def shapes(state):
    return State(jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.result_type(x)), state.tree))


def save(directory, state, **kwargs):
    manager = make_manager(directory, state, **kwargs)
    saved = manager.save(state)
    manager.close()
    return saved


def assert_same(got, expected):
    """Bit for bit: structure, dtypes and values."""
    got, expected = got.tree, expected.tree
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    want = paths.named_leaves(expected)
    for name, leaf in paths.named_leaves(got).items():
        assert leaf.dtype == jax.dtypes.result_type(want[name]), name
        assert np.asarray(leaf).tobytes() == np.asarray(want[name], leaf.dtype).tobytes(), name
