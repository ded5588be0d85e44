"""What a run says of itself before it starts: the mesh, what each device will hold, and the list of all variables."""

import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from absl import logging

from t5x_pjit_recipes.layout.axes import axis_names, is_axes_leaf, is_spec_leaf
from t5x_pjit_recipes.layout.meshes import describe_mesh
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.layout.plan import Plan, format_bytes
from t5x_pjit_recipes.layout.slot_report import count_slots


def describe_train_state(train_state_shape: Any, train_state_axes: Any, mesh: Any, *, width: int | None = None) -> str:
    """Describes a laid-out train state: the mesh, a table of its parameters, and what a device holds.

    Args:
      train_state_shape: the state, of arrays or shapes.
      train_state_axes: the state, of specs.
      mesh: the mesh, which may be abstract.
      width: columns that the table may take; None for as many as it needs.
    """
    return describe_parts(plan_parts(train_state_shape, train_state_axes, mesh), width=width)


def plan_parts(train_state_shape: Any, train_state_axes: Any, mesh: Any, *, param_rules: Any = None) -> dict[str, Plan]:
    """Plans each part of a train state: 'params', 'gradients' where it is trained, 'optimizer state' and others.

    Parameters that the optimizer leaves as they are have no gradients.

    Args:
      train_state_shape: the state, of arrays or shapes.
      train_state_axes: the state, of specs.
      mesh: the mesh, which may be abstract.
      param_rules: what decided the specs of the parameters; see `Plan`.
    """
    shapes, specs = train_state_shape.state_dict(), train_state_axes.state_dict()
    params = Plan(shapes['target'], specs['target'], mesh, rules=param_rules)
    others = {name: Plan(shapes[name], specs[name], mesh) for name in shapes if name != 'target'}
    trained = 'param_states' in shapes['state']
    titles = {'state': 'optimizer state' if trained else 'step', 'flax_mutables': 'mutables'}
    parts = {'params': params} | ({'gradients': _plan_gradients(train_state_shape, params)} if trained else {})
    return parts | {titles.get(name, name): plan for name, plan in others.items()}


def _plan_gradients(train_state: Any, params: Plan) -> Plan:
    optimizer_def = _optimizer_def(train_state)
    if not hasattr(optimizer_def, 'trained_names'):
        return params
    trained, shapes = optimizer_def.trained_names(params.shapes), named_leaves(params.shapes)
    specs = {row.name: row.spec for row in params.rows if row.name in trained}
    return Plan({name: shapes[name] for name in specs}, specs, params.mesh)


def describe_savings(train_state_shape: Any, partitioner: Any) -> str:
    """Says what an optimizer that trains a part alone saves, if the state has one that can say so; else ''."""
    optimizer_def = _optimizer_def(train_state_shape)
    if not hasattr(optimizer_def, 'describe_savings'):
        return ''
    return optimizer_def.describe_savings(train_state_shape, partitioner)


def _optimizer_def(train_state: Any) -> Any:
    return getattr(getattr(train_state, '_optimizer', None), 'optimizer_def', None)


def describe_parts(parts: Mapping[str, Plan], *, width: int | None = None) -> str:
    """Describes the plans of a state's parts: the mesh, a table of the parameters, and what a device holds."""
    params = parts['params']
    return '\n'.join([describe_mesh(params.mesh), '', params.table(width), '', *_budget(parts)])


def _budget(parts: Mapping[str, Plan]) -> Iterator[str]:
    for title, plan in parts.items():
        copies = sum(row.num_bytes for row in plan.replicated)
        whole = f', of which {format_bytes(copies)} replicated' if copies else ''
        yield f'{title:<16}{format_bytes(plan.bytes_per_device):>10} per device{whole}'
        if title == 'optimizer state':
            slots, specs = plan.shapes['param_states'], plan.specs['param_states']
            params = parts['params']
            yield ' ' * 16 + count_slots(slots, specs, params.shapes, params.specs)
    total = sum(plan.bytes_per_device for plan in parts.values())
    yield f'{"together":<16}{format_bytes(total):>10} per device, activations not counted'


def log_model_info(log_file: str | None, full_train_state: Any, partitioner: Any) -> None:
    """Lists every variable with its size, shape, logical axes and spec, in T5X's format.

    Args:
      log_file: where to write the list; None only logs it. Process 0 alone writes.
      full_train_state: the state, of arrays or shapes, with global shapes.
      partitioner: has `get_logical_axes` and `get_mesh_axes`.
    """
    if jax.process_index() != 0:
        return
    lines = list(_model_info(full_train_state, partitioner))
    for line in lines:
        logging.info('%s', line)
    if log_file is not None:
        pathlib.Path(log_file).write_text('\n'.join(lines) + '\n', encoding='utf-8')


def _model_info(state: Any, partitioner: Any) -> Iterator[str]:
    arrays = named_leaves(state.state_dict(), is_leaf=lambda x: x is None)
    logical = named_leaves(partitioner.get_logical_axes(state).state_dict(), is_leaf=is_axes_leaf)
    specs = named_leaves(partitioner.get_mesh_axes(state).state_dict(), is_leaf=is_spec_leaf)
    params = {name: leaf for name, leaf in arrays.items() if name.startswith('target/')}
    for name, leaf in params.items():
        yield _variable(name, leaf, logical.get(name), specs.get(name))
    yield f'Total number of parameters: {sum(math.prod(jax.numpy.shape(leaf)) for leaf in params.values())}'
    yield ''
    for name, leaf in arrays.items():
        if name.startswith('state/'):
            yield _variable(name, leaf, logical.get(name), specs.get(name))


def _variable(name: str, leaf: Any, logical: Any, spec: Any) -> str:
    title = f'Variable {name.partition("/")[2]:<80}'
    if leaf is None:
        return f'{title} None'
    shape = tuple(jax.numpy.shape(leaf))
    shown = str(shape)
    names = axis_names(logical)
    if names is not None and len(names) == len(shape):
        shown = '(' + ', '.join(f'{axis}={size}' for axis, size in zip(names, shape, strict=True)) + ')'
    entries = None if spec is None else tuple(spec)
    return f'{title} size {math.prod(shape):<12} shape {shown:<40} partition spec {entries}'
