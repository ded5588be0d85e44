"""What a call through `partition` costs beside the bare jitted call, and how deriving mesh axes grows.

Command: python benchmarks/dispatch.py

Prints ratios: the calls are interleaved in one process, and each figure is a median of many. Where T5X is importable
its own partitioner is measured beside ours.
"""

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)

import numpy as np  # noqa: E402
from flax.core import freeze  # noqa: E402
from flax.linen.partitioning import AxisMetadata  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402

from t5x_pjit_recipes import optimizers  # noqa: E402
from t5x_pjit_recipes.partitioning import PjitPartitioner  # noqa: E402
from t5x_pjit_recipes.train_state import FlaxOptimTrainState, InferenceState  # noqa: E402

ROUNDS = 200


def state_of(leaves: int) -> FlaxOptimTrainState:
    """Makes a state with about as many leaves: parameters, and two moments of each."""
    count = (leaves - 2) // 3
    params = {f'layer_{i}': {'kernel': np.ones((8, 4), np.float32)} for i in range(count)}
    axes = {name: {'kernel': AxisMetadata(names=('embed', 'mlp'))} for name in params}
    return FlaxOptimTrainState.create(optimizers.adam(1e-3), {'params': params, 'params_axes': axes})


def interleaved(calls: dict[str, Callable[[Any], Any]], states: dict[str, Any]) -> dict[str, float]:
    """Calls each function in turn on its own state; returns the median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(ROUNDS + 10):
        for name, call in calls.items():
            start = time.perf_counter()
            states[name] = jax.block_until_ready(call(states[name]))
            if round_number >= 10:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def dispatch(leaves: int = 500) -> None:
    """Compares a no-op step on a donated state: ours, the bare jitted call, and T5X's where it is there."""
    partitioner = PjitPartitioner(2)
    state = state_of(leaves)
    axes = partitioner.get_mesh_axes(state)

    def step(state: Any) -> Any:
        return state

    calls = {'ours': partitioner.partition(step, (axes,), axes, donate_argnums=(0,))}
    placed = calls['ours'](state)
    shardings = jax.tree.map(lambda x: NamedSharding(partitioner.mesh, x.sharding.spec), placed)
    calls['bare jit'] = jax.jit(step, in_shardings=(shardings,), out_shardings=shardings, donate_argnums=(0,))
    if theirs := t5x_partitioner():
        calls['T5X'] = theirs.partition(step, (axes,), axes, donate_argnums=(0,))
    gc.disable()
    medians = interleaved(calls, {name: jax.tree.map(jax.numpy.copy, placed) for name in calls})
    print(f'a no-op step on a state of {len(jax.tree.leaves(placed))} leaves, in calls of the bare jitted function:')
    for name, seconds in medians.items():
        print(f'  {name:<9} {seconds / medians["bare jit"]:.3f}')


def t5x_partitioner() -> Any:
    """Makes T5X's own partitioner on the same mesh; None where T5X is not importable."""
    if importlib.util.find_spec('t5x') is None:
        return None
    from t5x import partitioning

    return partitioning.PjitPartitioner(model_parallel_submesh=(1, 1, 1, 2))


def derivation() -> None:
    """Times `get_mesh_axes` on states of growing size, ours and T5X's where it is there."""
    print('deriving mesh axes, in seconds:')
    partitioners = {'ours': PjitPartitioner(2), 'T5X': t5x_partitioner()}
    for leaves in (1_250, 2_500, 5_000, 10_000):
        params = {f'layer_{i}': {'kernel': jax.ShapeDtypeStruct((8, 4), np.float32)} for i in range(leaves)}
        axes = {name: {'kernel': AxisMetadata(names=('embed', 'mlp'))} for name in params}
        state = InferenceState.create(freeze({'params': params, 'params_axes': axes}))
        figures = [f'{name} {seconds(p, state):.3f}' for name, p in partitioners.items() if p is not None]
        print(f'  {leaves:>6} leaves  {"  ".join(figures)}')


def seconds(partitioner: Any, state: Any) -> float:
    """Times one derivation, as the median of five."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        partitioner.get_mesh_axes(state)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == '__main__':
    dispatch()
    derivation()
