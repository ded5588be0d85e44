"""Train states born placed: shapes first, then a plan, then one compiled init that writes each part in its place."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from t5x_pjit_recipes import checkpoints
from t5x_pjit_recipes.errors import CheckpointError
from t5x_pjit_recipes.layout import Plan
from t5x_pjit_recipes.train_state import FlaxOptimTrainState, InferenceState

InitFnCallable = Callable[..., Mapping[str, Any]]


class TrainStateInitializer:
    """Makes laid-out train states, from scratch or from a checkpoint.

    Attributes:
      global_train_state_shape: the state with a ShapeDtypeStruct for each array.
      train_state_axes: the state with a spec for each array.
      plan: both, checked on the partitioner's mesh, by the names that checkpoints use.
      origin: what a state comes from that is not restored; `train` says it.
    """

    origin = 'scratch'

    def __init__(
        self,
        optimizer_def: Any,
        init_fn: InitFnCallable,
        input_shapes: Mapping[str, Sequence[int]],
        partitioner: Any,
        input_types: Mapping[str, Any] | None = None,
    ):
        """Takes what a state is made of, and plans it.

        Args:
          optimizer_def: the optimizer; None makes states for inference.
          init_fn: called with the keywords rng, input_shapes and input_types; returns the model's variables.
          input_shapes: name of an input to its global shape.
          partitioner: lays the state out.
          input_types: name of an input to its dtype; floats by default.

        Raises:
          PlanError: if specs do not fit the arrays or the mesh.
        """
        self._partitioner = partitioner
        self._make = functools.partial(make_train_state, optimizer_def, init_fn, input_shapes, input_types)
        self.global_train_state_shape = train_state_shape(optimizer_def, init_fn, input_shapes, input_types)
        self.train_state_axes = partitioner.get_mesh_axes(self.global_train_state_shape)
        self.plan = Plan(
            self.global_train_state_shape.state_dict(), self.train_state_axes.state_dict(), partitioner.mesh
        )
        self.plan.check()

    def from_scratch(self, init_rng: jax.Array) -> Any:
        """Initialises a state from a key; no array is ever whole on one device that is to hold a part."""
        make = self._partitioner.partition(self._make, in_axis_resources=None, out_axis_resources=self.train_state_axes)
        return make(init_rng)

    def from_checkpoints(
        self,
        restore_cfgs: Sequence[checkpoints.RestoreCheckpointConfig],
        ds_iter: Any = None,
        init_rng: jax.Array | None = None,
    ) -> Iterator[tuple[Any, str]]:
        """Restores every checkpoint that the first config with any means; yields states and their directories."""
        cfg, paths = checkpoints.get_first_valid_restore_config_and_paths(restore_cfgs)
        for path in paths:
            state, _ = checkpoints.create_checkpoint_manager_and_restore(
                self, self._partitioner, cfg, path, init_rng, ds_iter=ds_iter
            )
            yield state, path

    def from_checkpoint(
        self,
        ckpt_cfgs: Sequence[checkpoints.RestoreCheckpointConfig],
        *,
        ds_iter: Any = None,
        init_rng: jax.Array | None = None,
    ) -> Any:
        """Restores the one checkpoint that the configs mean; None if there is none.

        Raises:
          CheckpointError: if they mean several.
        """
        _, paths = checkpoints.get_first_valid_restore_config_and_paths(ckpt_cfgs)
        if len(paths) > 1:
            raise CheckpointError(
                f'Cannot restore one state from {len(paths)} checkpoints, {paths[0]} to {paths[-1]}. '
                "Use mode='latest', or mode='specific' with one path."
            )
        return next((state for state, _ in self.from_checkpoints(ckpt_cfgs, ds_iter, init_rng)), None)

    def from_checkpoint_or_scratch(
        self,
        ckpt_cfgs: Sequence[checkpoints.RestoreCheckpointConfig],
        *,
        init_rng: jax.Array,
        ds_iter: Any = None,
    ) -> Any:
        """Restores the one checkpoint that the configs mean, or initialises a state where there is none."""
        restored = self.from_checkpoint(ckpt_cfgs, ds_iter=ds_iter, init_rng=init_rng)
        return self.from_scratch(init_rng) if restored is None else restored


def train_state_shape(
    optimizer_def: Any, init_fn: InitFnCallable, input_shapes: Mapping[str, Sequence[int]], input_types: Any = None
) -> Any:
    """Returns a train state of ShapeDtypeStructs, without computing it; see `TrainStateInitializer`."""
    make = functools.partial(make_train_state, optimizer_def, init_fn, input_shapes, input_types)
    return jax.eval_shape(make, jax.random.PRNGKey(0))


def make_train_state(
    optimizer_def: Any, init_fn: InitFnCallable, input_shapes: Any, input_types: Any, rng: jax.Array
) -> Any:
    """Makes a train state as it comes; see `TrainStateInitializer`."""
    variables = init_fn(rng=rng, input_shapes=input_shapes, input_types=input_types)
    if optimizer_def is None:
        return InferenceState.create(variables)
    return FlaxOptimTrainState.create(optimizer_def, variables)
