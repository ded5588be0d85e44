"""Shards parameters that you hold, makes a train state beside them, and trains it.

    state = create_train_state(partitioner, optimizers.adamw(1e-3), params, rules)
    step = make_train_step(partitioner, state, loss_fn)
    state, loss = step(state, batch)

These three lines do what one would otherwise spell out with `partition`, `AxisMetadata`, `FlaxOptimTrainState.create`
and `apply_gradient`; the results are the same, bit for bit.
"""

import functools
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax.sharding import NamedSharding

from t5x_pjit_recipes.errors import (
    ConfigError,
    PlacementError,
    RuleError,
    StateError,
    TrainingError,
    offenders,
)
from t5x_pjit_recipes.initialization import TrainStateInitializer
from t5x_pjit_recipes.interop import hugging_face
from t5x_pjit_recipes.layout.axes import AxisMetadata, is_spec_leaf, specs_by_name
from t5x_pjit_recipes.layout.meshes import describe_mesh
from t5x_pjit_recipes.layout.paths import map_named, named_leaves
from t5x_pjit_recipes.layout.placement import check_placement, describe_placement, place
from t5x_pjit_recipes.layout.plan import Plan, format_bytes
from t5x_pjit_recipes.layout.regex_rules import RegexRules
from t5x_pjit_recipes.param_axes import PARAMS_AXES, split_variables
from t5x_pjit_recipes.recipes.any_optimizer import read_optimizer
from t5x_pjit_recipes.recipes.param_layouts import RulesOrSpecs, is_shape, plan_params, read_layout, ruled_by

Init = Callable[[jax.Array], Any]
LossFn = Callable[..., Any]


def shard_params(partitioner: Any, params: Any, rules_or_specs: RulesOrSpecs = None) -> Any:
    """Lays parameters out on a partitioner's mesh.

    Args:
      partitioner: has the mesh.
      params: a tree of arrays, wherever they are; its containers come back as they are.
      rules_or_specs: how they lie: rules, specs or logical axes; see `param_layouts.plan_params`.

    Returns:
      The parameters, each device with its part; an array that lies right already is the same object.

    Raises:
      RuleError, StateError, PlanError: as `plan_params`; or listing each array that its spec does not fit.
      PlacementError: listing each leaf that is a shape without values, or no array at all.

    >>> from jax.sharding import PartitionSpec as P
    >>> from t5x_pjit_recipes.partitioning import PjitPartitioner
    >>> partitioner = PjitPartitioner(num_partitions=jax.device_count())
    >>> params = {'wi': np.ones((4, 8), np.float32), 'scale': np.ones(4, np.float32)}
    >>> placed = shard_params(partitioner, params, [('wi', P(None, 'model')), ('scale', P())])
    >>> placed['wi'].sharding.spec == P(None, 'model')
    True
    """
    _check_values(params)
    return place(params, plan_params(partitioner, params, rules_or_specs))


def _check_values(params: Any) -> None:
    named = named_leaves(params)
    others = [f'{name}: a {type(leaf).__name__}' for name, leaf in named.items() if not _is_array(leaf)]
    if others:
        raise PlacementError(
            f'Cannot place {len(others)} of {len(named)} leaves: they are neither arrays nor numbers. Give the arrays '
            f'alone, as nested dicts:\n{offenders(others)}'
        )
    shapes = [f'{name} {leaf.shape}: a ShapeDtypeStruct' for name, leaf in named.items() if is_shape(leaf)]
    if shapes:
        raise PlacementError(
            f'Cannot place {len(shapes)} of {len(named)} arrays: they are shapes without values. Give arrays, or to '
            f'create_train_state the function that makes them of a key:\n{offenders(shapes)}'
        )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, numbers.Number) or hasattr(leaf, 'shape') and hasattr(leaf, 'dtype')


def params_axes_from_specs(specs: Any, params: Any = None) -> Any:
    """Makes a tree of AxisMetadata, as `FlaxOptimTrainState.create` takes it, from specs of mesh axes.

    The mesh axes serve as logical names, so the partitioner's rules must map each to itself:
    `PjitPartitioner(2, logical_axis_rules=[('batch', 'data'), ('data', 'data'), ('model', 'model')])`.

    Args:
      specs: a tree of PartitionSpecs; with `params` also a prefix of one, or one for all.
      params: the parameters or their shapes, by which specs shorter than the rank are filled up with None; without
        them a spec must have an entry for each dim, or none at all.

    Raises:
      RuleError: listing each spec that splits a dim by two mesh axes, which no logical name stands for.
      PlanError: as `plan_params`, of a tree that does not match `params`.

    >>> from jax.sharding import PartitionSpec as P
    >>> params_axes_from_specs({'wo': P('model')}, {'wo': np.ones((8, 4))})['wo'].names
    ('model', None)
    """
    if params is None:
        named, tree, ranks = named_leaves(specs, is_leaf=is_spec_leaf), specs, {}
    else:
        named, tree = specs_by_name(specs, params), params
        ranks = {name: len(np.shape(leaf)) for name, leaf in named_leaves(params).items()}
    names = {name: tuple(spec or ()) for name, spec in named.items()}
    _check_single(names)
    padded = {name: (*entries, *[None] * (ranks.get(name, 0) - len(entries))) for name, entries in names.items()}
    return map_named(lambda name, _: AxisMetadata(names=padded[name]), tree, is_leaf=is_spec_leaf)


def _check_single(names: Mapping[str, tuple[Any, ...]]) -> None:
    lines = [f'{name}: dim {dim} by {entry}' for name, entries in names.items() for dim, entry in enumerate(entries)
             if not isinstance(entry, str | None)]  # fmt: skip
    if lines:
        raise RuleError(
            f'Cannot make axis names of {len(lines)} of {len(names)} specs: they split a dim by several mesh axes. '
            f'Give the specs themselves to create_train_state, which needs no names:\n{offenders(lines)}'
        )


def create_train_state(
    partitioner: Any,
    optimizer_def: Any,
    params_or_init: Any,
    rules_or_specs: RulesOrSpecs = None,
    *,
    rng: jax.Array | None = None,
) -> Any:
    """Makes a train state that is born placed: nothing of it is ever whole on one device that is to hold a part.

    Args:
      partitioner: has the mesh; it is not changed.
      optimizer_def: an `OptimizerDef`, as those of `optimizers` and `adafactor`; or any optax transformation.
      params_or_init: the parameters; or all variables of a Flax module, a mapping in which 'params' is one, with
        'params_axes' or without, whose other collections become the state's `flax_mutables`; or a function of a key
        that returns either, and is compiled once, with the layout of what it makes.
      rules_or_specs: how the parameters lie, as for `shard_params`; the optimizer's state follows them. None means the
        partitioner's `param_rules`, or the axes in 'params_axes'.
      rng: key for the function.

    Returns:
      A `FlaxOptimTrainState`. Parameters that lay right already are shared with it, and end with its first donation.

    Raises:
      RuleError, StateError, PlanError, PlacementError: as `shard_params`; StateError also for parameters in containers
        of which Flax knows no state dict.
      ConfigError: if `optimizer_def` is no optimizer, or a function is given without a key.
    """
    optimizer_def = read_optimizer(optimizer_def)
    init = functools.partial(_variables, params_or_init)
    if not callable(params_or_init):
        _check_values(init(None))
    else:
        _check_init(params_or_init, rng)
    shapes = jax.eval_shape(init, rng)
    _check_containers(shapes['params'])
    partitioner, axes = _laid_out(partitioner, shapes, rules_or_specs)
    initializer = TrainStateInitializer(optimizer_def, lambda rng, **_: {**init(rng), **axes}, {}, partitioner)
    if callable(params_or_init):
        return initializer.from_scratch(rng)
    return _with_arrays(initializer, partitioner, {**init(None), **axes})


def _check_init(init: Any, rng: Any) -> None:
    name = getattr(init, '__name__', type(init).__name__)
    if isinstance(init, nn.Module):
        raise ConfigError(
            f'Cannot initialise parameters by {name}, a Flax module: its inputs are not known. Give a function of a '
            'key, as lambda key: module.init(key, inputs).'
        )
    if rng is None:
        raise ConfigError(
            f'Cannot initialise parameters by {name} without a key. Give rng=jax.random.key(0); or, of a model that '
            'holds parameters, these as nested dicts.'
        )
    _check_key(rng)


def _check_key(rng: Any) -> None:
    dtype, shape = getattr(rng, 'dtype', type(rng).__name__), getattr(rng, 'shape', ())
    is_typed = hasattr(rng, 'dtype') and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
    if not is_typed and (len(shape), dtype) != (1, np.uint32):
        raise ConfigError(
            f'Cannot draw random numbers by {dtype} of shape {shape}: that is no key. Give rng=jax.random.key(0).'
        )


def _check_containers(params: Any) -> None:
    """Checks that all containers of arrays are such as states are saved and laid out by."""
    held = jax.tree.leaves(serialization.to_state_dict(params), is_leaf=lambda x: not isinstance(x, dict))
    sizes = [(type(x).__name__, len(jax.tree.leaves(x))) for x in held if not _is_array(x)]
    faults = [f'{name}: {size} arrays' for name, size in sizes if size]
    if faults:
        raise StateError(
            f'Cannot make a train state of {len(named_leaves(params))} parameters: Flax knows no state dict of their '
            'containers. Give nested dicts (of Flax NNX nnx.to_pure_dict(state)), or make them known with '
            f'flax.serialization.register_serialization_state:\n{offenders(faults)}'
        )


def _variables(params_or_init: Any, rng: Any) -> Any:
    """Returns a model's variables, of which 'params' may be the only ones."""
    made = params_or_init(rng) if callable(params_or_init) else params_or_init
    is_variables = isinstance(made, Mapping) and isinstance(made.get('params'), Mapping)
    return dict(made) if is_variables else {'params': made}


def _laid_out(partitioner: Any, variables: Mapping[str, Any], rules_or_specs: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a partitioner that lays out the parameters as is said, and the axes that they need for it."""
    params, own = variables['params'], variables.get(PARAMS_AXES)
    if rules_or_specs is None and own is not None:
        return partitioner, {}
    given = read_layout(partitioner, params, rules_or_specs)
    if isinstance(given, RegexRules):
        if own is None:  # Here each fault is told once, and not again for every slot.
            plan_params(partitioner, params, given).check()
        return ruled_by(partitioner, given), {}
    if own is not None:
        raise StateError(
            f'Cannot lay out {len(named_leaves(params))} parameters by two trees of axis names: the variables have '
            "'params_axes', and others were given besides. Give one of them."
        )
    plan_params(partitioner, params, given).check()
    return partitioner, {PARAMS_AXES: given}


def _with_arrays(initializer: TrainStateInitializer, partitioner: Any, variables: Mapping[str, Any]) -> Any:
    """Places given variables, and makes the optimizer's state beside them."""
    params, _, mutables, _ = split_variables(variables)
    shape, specs = initializer.global_train_state_shape, initializer.train_state_axes
    params = place(params, Plan(params, specs.params, partitioner.mesh))
    mutables = place(mutables, Plan(mutables, specs.flax_mutables, partitioner.mesh))
    optimizer = shape._optimizer
    make = partitioner.partition(optimizer.optimizer_def.init_state, (specs.params,), specs._optimizer.state)
    return shape.replace(_optimizer=optimizer.replace(state=make(params), target=params), flax_mutables=mutables)


def state_axes(partitioner: Any, state: Any) -> Any:
    """Returns a state of specs: how `state` lies on the mesh or, where it is not all there, how it is to lie by rules.

    Raises:
      StateError: if it is not all there, and neither its parameters have axis names nor the partitioner param_rules.
    """
    named = named_leaves(state)
    elsewhere = [name for name, leaf in named.items() if not _lies_on(leaf, partitioner.mesh)]
    if not elsewhere:
        state = state.replace(params_axes=None, flax_mutables_axes=None)  # Names of the past: the specs are known.
        return jax.tree.map(lambda leaf: leaf.sharding.spec, state)
    if getattr(state, PARAMS_AXES, None) is None and partitioner.param_rules is None:
        raise StateError(
            f'Cannot tell how a state is to lie: {len(elsewhere)} of its {len(named)} arrays are not on the '
            "partitioner's mesh, its parameters have no axis names, and the partitioner no param_rules. Make it with "
            f'create_train_state on this partitioner:\n{offenders(elsewhere)}'
        )
    return partitioner.get_mesh_axes(state)


def _lies_on(leaf: Any, mesh: Any) -> bool:
    sharding = getattr(leaf, 'sharding', None)
    return isinstance(leaf, jax.Array) and isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def make_train_step(partitioner: Any, state: Any, loss_fn: LossFn, *, learning_rate: Any = None) -> Any:
    """Compiles one training step, which keeps the layout that the state has.

    Args:
      partitioner: has the mesh that the state lies on.
      state: the train state, of which only the layout is used; see `state_axes`.
      loss_fn: called with (params, batch), or (params, batch, rng) where a key is given; returns the loss, one number,
        or (loss, aux). Mutables are not passed to it, and stay as they are.
      learning_rate: a number, or a schedule, a function of the step (from 0); None leaves it to the optimizer.

    Returns:
      A function step(state, batch, rng=None) that returns (state, loss), or (state, (loss, aux)). It donates its
      state: the old one must not be used again. The first dim of all arrays of the batch is divided over the data axis.
      Of `rng` each step makes a key of its own by its number, so that it may be the same for all.

    Raises:
      StateError: as `state_axes`.
      TrainingError: listing the parameters that are no real numbers. The function raises PlanError listing the arrays
        of a batch that do not divide, and TrainingError for a batch without rows and a loss that is not one real
        number.
    """
    axes = state_axes(partitioner, state)
    _check_trainable(state.params)

    def train_step(state: Any, batch: Any, rng: Any = None) -> Any:
        _check_rows(batch)
        if rng is not None:
            _check_key(rng)
        keys = () if rng is None else (jax.random.fold_in(rng, state.step),)
        objective = functools.partial(_loss_and_result, loss_fn)
        grads, result = jax.grad(objective, has_aux=True)(state.params, batch, *keys)
        rate = learning_rate(state.step) if callable(learning_rate) else learning_rate
        return _updated(state, grads, rate), result

    return partitioner.partition(
        train_step, (axes, partitioner.data_partition_spec, None), (axes, None), donate_argnums=(0,)
    )


def _check_trainable(params: Any) -> None:
    named = named_leaves(params)
    others = [f'{n} {x.shape}: {x.dtype}' for n, x in named.items() if not jnp.issubdtype(x.dtype, jnp.inexact)]
    if others:
        raise TrainingError(
            f'Cannot take gradients by {len(others)} of {len(named)} parameters: they are no real numbers. Keep them '
            f'out of the parameters: in the batch, in the loss function, or as another Flax collection:\n'
            f'{offenders(others)}'
        )


def _check_rows(batch: Any) -> None:
    empty = [f'{name} {x.shape}' for name, x in named_leaves(batch).items() if 0 in x.shape[:1]]
    if empty:
        raise TrainingError(
            f'Cannot take gradients over a batch without rows: their mean would be no number. Leave such batches '
            f'out:\n{offenders(empty)}'
        )


def _loss_and_result(loss_fn: LossFn, *args: Any) -> tuple[Any, Any]:
    """Returns the loss, and what the function returned."""
    result = loss_fn(*args)
    loss = result[0] if isinstance(result, tuple) and len(result) == 2 else result
    if not hasattr(loss, 'dtype') or loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        found = f'{loss.dtype} of shape {loss.shape}' if hasattr(loss, 'dtype') else f'a {type(loss).__name__}'
        raise TrainingError(
            f'Cannot take gradients of a loss that is {found}: it must be one real number. Return loss.mean(), or '
            '(loss, aux) where there is more to return.'
        )
    return loss, result


def _updated(state: Any, grads: Any, learning_rate: Any) -> Any:
    if learning_rate is None:  # The optimizer goes by whatever rate it has of its own.
        return state.replace(_optimizer=state._optimizer.apply_gradient(grads))
    return state.apply_gradient(grads, learning_rate=learning_rate)


def shard_folder(folder: str, partitioner: Any, rules: RulesOrSpecs) -> dict[str, jax.Array]:
    """Places the weights of a Hugging Face folder, each device's part read by itself, and prints how they then lie.

    Args:
      folder: as `transformers` saves models: config.json and safetensors.
      partitioner: has the mesh.
      rules: rules on the tensors' own names, with '/' in place of '.', such as `recipes.hf_t5.rules(torch=True)`.

    Returns:
      The tensors by these names.

    Raises:
      CheckpointError: if the folder cannot be read.
      RuleError, PlanError: as `shard_params`.
      PlacementError: listing each array that does not lie as planned.
    """
    from t5x_pjit_recipes import planning  # Brings all that training needs, and this alone needs it.

    opened = hugging_face.Folder(folder)
    sources = {name.replace('.', '/'): hugging_face.Weight(name) for name in opened.shapes}
    plan = plan_params(partitioner, hugging_face.folder_shapes(opened, sources), rules)
    params = hugging_face.load_params(opened, sources, plan)
    print(describe_mesh(partitioner.mesh))
    print(describe_placement(params, planning.width()))
    check_placement(params, plan)
    print(f'all {len(params)} arrays lie as planned; whole they take {format_bytes(plan.num_bytes)}')
    return params


if __name__ == '__main__':
    from t5x_pjit_recipes.recipes import scripts
    from t5x_pjit_recipes.recipes import shard as script  # gin knows the functions of this one, not of __main__.

    scripts.run(script.shard_folder)
