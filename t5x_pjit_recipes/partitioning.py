"""T5X's partitioner API, composed from the engine: meshes, rules, feeding and programs come from `layout`.

A partitioner holds a mesh and rules. It says where each part of a train state lies (`get_mesh_axes`), how a batch is
divided among processes (`get_data_layout`), and compiles functions with layouts (`partition`).
"""

import abc
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from t5x_pjit_recipes.errors import MeshError, RecipeError, RuleError, did_you_mean, warn_or_raise
from t5x_pjit_recipes.layout import feeding, meshes
from t5x_pjit_recipes.layout.axes import (
    AxisNames,
    axis_names,
    constraint_rules,
    is_axes_leaf,
    is_spec_leaf,
    spec_axes,
)
from t5x_pjit_recipes.layout.explain import Derivation
from t5x_pjit_recipes.layout.feeding import DataLayout, LocalChunker, LocalChunkInfo
from t5x_pjit_recipes.layout.logical_rules import LogicalRules
from t5x_pjit_recipes.layout.paths import map_named, named_leaves
from t5x_pjit_recipes.layout.programs import Program
from t5x_pjit_recipes.layout.regex_rules import RegexRules
from t5x_pjit_recipes.layout.slots import divide_further
from t5x_pjit_recipes.layout.tiles import bounds_from_last_device, get_coords
from t5x_pjit_recipes.param_rules import ParamRules, StandIns, complete_axes, own_axes, read_param_rules
from t5x_pjit_recipes.standard_rules import LogicalAxisRules, standard_logical_axis_rules
from t5x_pjit_recipes.train_state import TrainState

__all__ = [
    'AxisNames',
    'BasePartitioner',
    'BasePjitPartitioner',
    'DataLayout',
    'LocalChunkInfo',
    'LocalChunker',
    'Mesh',
    'PartitionSpec',
    'PjitPartitioner',
    'PjittedFnWithContext',
    'TrainState',
    'bounds_from_last_device',
    'default_mesh',
    'get_coords',
    'get_cpu_mesh',
    'get_gpu_mesh',
    'get_mesh',
    'global_mesh_defined',
    'host_local_array_to_global_array',
    'standard_logical_axis_rules',
    'with_sharding_constraint',
]

JaxDevice = jax.Device
TpuMesh = tuple[int, int, int, int]
OtherMesh = tuple[int, int]
HardwareMesh = TpuMesh | OtherMesh
PartitionedCallable = Callable[..., Any]
CompiledPartitionedCallable = Callable[..., Any]


def global_mesh_defined() -> bool:
    """Tells whether a mesh is in scope, as it is inside a partitioned function."""
    return not jax.sharding.get_abstract_mesh().empty


def with_sharding_constraint(x: Any, axis_resources: Any) -> Any:
    """Constrains `x` to a spec of mesh axes where a mesh is in scope, on every platform."""
    return jax.lax.with_sharding_constraint(x, axis_resources) if global_mesh_defined() else x


def get_mesh(
    model_parallel_submesh: HardwareMesh,
    input_devices: Sequence[JaxDevice] = (),
    input_local_devices: Sequence[JaxDevice] = (),
    tile_by_host_if_needed: bool = True,
    backend: str | None = None,
) -> Mesh:
    """Builds a ('data', 'model') mesh of tiles of neighbouring devices.

    Args:
      model_parallel_submesh: devices of one model-parallel group along x, y, z and core.
      input_devices: all devices; those of the backend by default.
      input_local_devices: the devices of one host; those of the lowest process by default.
      tile_by_host_if_needed: whether tiles keep to hosts where they can.
      backend: platform whose devices are meant.

    Raises:
      MeshError: if the submesh does not divide the machine.
    """
    devices = list(input_devices) or jax.devices(backend)
    return meshes.tiled_mesh(model_parallel_submesh, devices, input_local_devices, by_host=tile_by_host_if_needed)


def get_cpu_mesh(num_partitions: int | None = None) -> Mesh:
    """Builds a ('data', 'model') mesh of all CPU devices; without a number, 'model' spans each process."""
    return meshes.cpu_mesh(num_partitions or jax.local_device_count(), jax.devices())


def get_gpu_mesh(num_partitions: int) -> Mesh:
    """Builds a ('data', 'model') mesh of all devices that keeps 'model' within hosts where it can."""
    return meshes.gpu_mesh(num_partitions, jax.devices())


def default_mesh(
    num_partitions: int | None,
    model_parallel_submesh: HardwareMesh | None = None,
    backend: str | None = None,
    ici_mesh_shape: HardwareMesh | None = None,
    dcn_mesh_shape: HardwareMesh | None = None,
    *,
    devices: Sequence[JaxDevice] | None = None,
) -> Mesh:
    """Builds the mesh that the partitioner's arguments ask for; see `layout.meshes.default_mesh`."""
    devices = jax.devices(backend) if devices is None else list(devices)
    return meshes.default_mesh(num_partitions, model_parallel_submesh, ici_mesh_shape, dcn_mesh_shape, devices=devices)


def _id_fn(x: Any, ix: int) -> tuple[Any, jax.Array]:
    """Returns its input, with keys that keep the copy from being optimised away."""
    return x, jax.random.split(jax.random.PRNGKey(ix))


def host_local_array_to_global_array(arr_tree: Any, mesh: Mesh, pspecs: Any) -> Any:
    """Builds global arrays from each process's local ones; None specs mean replicated."""
    specs = jax.tree.map(lambda s: PartitionSpec() if s is None else s, pspecs, is_leaf=is_spec_leaf)
    return multihost_utils.host_local_array_to_global_array(arr_tree, mesh, specs)


class PjittedFnWithContext:
    """A jitted function that is called and lowered with a mesh and logical axis rules in scope."""

    def __init__(self, pjitted_fn: Any, partition_mesh: Mesh, logical_axis_rules: LogicalAxisRules = ()):
        self._pjitted_fn, self._mesh, self._logical_axis_rules = pjitted_fn, partition_mesh, tuple(logical_axis_rules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        with self._context():
            return self._pjitted_fn(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the function."""
        with self._context():
            return self._pjitted_fn.lower(*args, **kwargs)

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        try:
            scope = jax.set_mesh(self._mesh)
        except ValueError:  # Inside a trace no mesh can be set.
            scope = jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh)
        with scope, constraint_rules(self._logical_axis_rules):
            yield


class BasePartitioner(abc.ABC):
    """What T5X's training, evaluation and checkpoints ask of a partitioner.

    Args:
      num_partitions: size of the mesh axis 'model'; 'data' has the rest.
      model_parallel_submesh: devices of one model-parallel group along x, y, z and core; wins over `num_partitions`.
      params_on_devices: whether parameters stay in device memory between calls.
      backend: platform whose devices are meant.
      ici_mesh_shape: sizes of ('replica', 'data', 'model') within a slice; wins over all others.
      dcn_mesh_shape: sizes of the same axes across slices; given together with `ici_mesh_shape`.
      mesh: a mesh to use as it is, in place of all of these; its axes must be Auto.
      devices: the devices to build the mesh from; all of the backend's by default.
      strict: whether what is otherwise said in a warning is an error.
    """

    def __init__(
        self,
        num_partitions: int | None = None,
        model_parallel_submesh: HardwareMesh | None = None,
        params_on_devices: bool = True,
        backend: str | None = None,
        ici_mesh_shape: HardwareMesh | None = None,
        dcn_mesh_shape: HardwareMesh | None = None,
        *,
        mesh: Mesh | None = None,
        devices: Sequence[JaxDevice] | None = None,
        strict: bool = False,
    ):
        self._num_partitions = num_partitions
        self._model_parallel_submesh = model_parallel_submesh
        self._params_on_devices = params_on_devices
        self._backend = backend
        self._ici_mesh_shape, self._dcn_mesh_shape = ici_mesh_shape, dcn_mesh_shape
        self._devices = None if devices is None else tuple(devices)
        self._strict = strict
        self._data_axis: Any = meshes.DATA
        if ici_mesh_shape is not None and dcn_mesh_shape is not None:
            self._data_axis = (meshes.REPLICA, meshes.DATA)
        self._told: set[str] = set()
        self._mesh: Mesh | None = None
        if mesh is not None:
            self.mesh = mesh
        self._check_arguments(mesh)

    def _check_arguments(self, mesh: Mesh | None) -> None:
        num_partitions, submesh = self._num_partitions, self._model_parallel_submesh
        if (self._ici_mesh_shape is None) != (self._dcn_mesh_shape is None):
            raise MeshError(
                f'Cannot use ici_mesh_shape={self._ici_mesh_shape} with dcn_mesh_shape={self._dcn_mesh_shape}: one of '
                'them is missing. Give both, or neither.'
            )
        if not num_partitions and not submesh and mesh is None and self._ici_mesh_shape is None:
            raise MeshError(
                f'Cannot make a partitioner of num_partitions={num_partitions!r} and '
                f'model_parallel_submesh={submesh!r}: neither says how many devices share the model. '
                'Give num_partitions=1 for data parallelism.'
            )
        if submesh and len(submesh) != 4:
            self._tell(
                f'Cannot read model_parallel_submesh={tuple(submesh)} as x, y, z and core: it has {len(submesh)} '
                'numbers, not 4, and is used as it is. Give four numbers, such as (1, 2, 1, 1).'
            )
        if num_partitions and submesh:
            self._tell(
                f'Cannot use both num_partitions={num_partitions} and model_parallel_submesh={tuple(submesh)}: the '
                f'submesh of {math.prod(submesh)} devices wins. Set num_partitions=None, or remove the submesh.'
            )

    def _tell(self, message: str, error: type[RecipeError] = MeshError) -> None:
        """Says once what T5X would pass over, or in strict mode refuses it."""
        if self._strict or message not in self._told:
            self._told.add(message)
            warn_or_raise(message, strict=self._strict, error=error)

    @property
    def mesh(self) -> Mesh:
        """The mesh; built when first asked for, and assignable."""
        if self._mesh is None:
            self.mesh = self._build_mesh()
        return self._mesh

    @mesh.setter
    def mesh(self, mesh: Mesh) -> None:
        meshes.check_auto(mesh)
        self._mesh = mesh
        self.__dict__.pop('_local_chunker', None)

    def _build_mesh(self) -> Mesh:
        raise NotImplementedError(f'{type(self).__name__} has no mesh. Assign one to `mesh`.')

    @functools.cached_property
    def _local_chunker(self) -> LocalChunker:
        return LocalChunker(self.mesh)

    @property
    def data_partition_spec(self) -> PartitionSpec:
        """How a batch lies on the mesh: its first dim over the data axes."""
        return PartitionSpec(self._data_axis)

    @property
    def data_mesh_size(self) -> int:
        """Number of devices along the data axes."""
        return math.prod(self.mesh.shape[axis] for axis in spec_axes(self._data_axis))

    @property
    def data_shards(self) -> int:
        """Number of processes along the data axes."""
        return math.prod(self._local_chunker.num_chunks[axis] for axis in spec_axes(self._data_axis))

    @property
    def data_shard_id(self) -> int:
        """Which of the data shards this process feeds."""
        return self._local_chunker.get_shard_id(spec_axes(self._data_axis))

    def get_data_layout(self, batch_size: int | None = None, host_index: int | None = None) -> DataLayout:
        """Divides a global batch among the processes.

        Args:
          batch_size: global batch size; the number of devices along the data axes by default.
          host_index: not supported, as in T5X.

        Raises:
          DataError: if the batch does not divide among the devices along the data axes.
        """
        if host_index is not None:
            raise NotImplementedError(f'get_data_layout knows this process alone, not host_index={host_index}.')
        if self._data_axis is None:
            return DataLayout(batch_size, 0, 1, jax.process_index() == 0)  # type: ignore[arg-type]  (as T5X: None stays)
        return feeding.get_data_layout(self._local_chunker, spec_axes(self._data_axis), batch_size)

    def get_local_chunk_info(self, global_shape: tuple[int, ...], mesh_axes: Sequence[Any]) -> LocalChunkInfo:
        """Returns this process's part of a global array that is laid out by `mesh_axes`."""
        return self._local_chunker.get_local_chunk_info(global_shape, mesh_axes)

    @property
    def params_on_devices(self) -> bool:
        """Whether parameters stay in device memory between calls."""
        return self._params_on_devices

    @params_on_devices.setter
    def params_on_devices(self, value: bool) -> None:
        self._params_on_devices = value

    def move_params_to_devices(self, train_state: Any, train_state_axes: Any) -> Any:
        """Places a train state of host arrays on the devices; the state given must not be used again."""
        place = self.partition(
            _id_fn,
            in_axis_resources=(train_state_axes, None),
            out_axis_resources=(train_state_axes, None),
            donate_argnums=(0,),
        )
        if jax.process_count() > 1:
            train_state = host_local_array_to_global_array(train_state, self.mesh, train_state_axes)
        return place(train_state, 0)[0]

    def get_logical_axes(self, train_state: Any) -> Any:
        """Returns a state like `train_state` whose leaves are None: no logical axes are known."""
        return train_state.restore_state(jax.tree.map(lambda _: None, train_state.state_dict()))

    def get_mesh_axes(self, train_state: Any) -> Any:
        """Returns a state like `train_state` whose leaves are PartitionSpecs, or None for replicated."""
        raise NotImplementedError

    @abc.abstractmethod
    def partition(
        self,
        fn: Callable[..., Any],
        in_axis_resources: Any,
        out_axis_resources: Any,
        static_argnums: int | Sequence[int] = (),
        donate_argnums: int | Sequence[int] = (),
    ) -> Any:
        """Compiles a function with layouts for its inputs and outputs."""

    @abc.abstractmethod
    def compile(self, partitioned_fn: Any, *args: Any) -> CompiledPartitionedCallable:
        """Compiles a partitioned function for these arguments, ahead of its first call."""


class BasePjitPartitioner(BasePartitioner):
    """A partitioner that compiles with JAX's jit, without logical axis rules."""

    def _build_mesh(self) -> Mesh:
        mesh = default_mesh(
            self._num_partitions,
            self._model_parallel_submesh,
            self._backend,
            self._ici_mesh_shape,
            self._dcn_mesh_shape,
            devices=self._devices,
        )
        self._check_rules(mesh)
        return mesh

    def _check_rules(self, mesh: Mesh) -> None:
        """Checks the rules, if there are any, against the mesh."""

    @property
    def _rules_in_scope(self) -> LogicalAxisRules:
        return ()

    def partition(
        self,
        fn: Callable[..., Any],
        in_axis_resources: Any,
        out_axis_resources: Any,
        static_argnums: int | Sequence[int] = (),
        donate_argnums: int | Sequence[int] = (),
    ) -> Program:
        """Compiles a function with layouts for its inputs and outputs.

        Args:
          fn: the function.
          in_axis_resources: specs of the positional arguments, a tree or a prefix of one; None means replicated.
          out_axis_resources: specs of the result, likewise.
          static_argnums: arguments that are compiled in.
          donate_argnums: arguments whose memory the result may take.

        Returns:
          A callable with `lower` and `eval_shape`; its inputs may lie anywhere.
        """
        return Program(
            fn,
            self.mesh,
            in_axis_resources,
            out_axis_resources,
            rules=self._rules_in_scope,
            static_argnums=static_argnums,
            donate_argnums=donate_argnums,
        )

    def compile(self, partitioned_fn: Any, *args: Any) -> CompiledPartitionedCallable:
        """Compiles a partitioned function for these arguments, ahead of its first call."""
        if isinstance(partitioned_fn, Program):
            return partitioned_fn.compile(*args)
        return partitioned_fn.lower(*args).compile()


_ZERO1 = 'zero1'


class PjitPartitioner(BasePjitPartitioner):
    """T5X's partitioner: a mesh, and rules from logical axis names to its axes.

    Args are those of `BasePartitioner`, and:
      logical_axis_rules: ordered (logical axis, mesh axis) pairs; `standard_logical_axis_rules()` by default.
      param_rules: for parameters without axis names of their own, `layout.RegexRules` or a list of (pattern, target)
        pairs whose patterns match whole names. A target is a PartitionSpec of mesh axes, or the text that spells one
        ("PartitionSpec('data', None)", as gin files need it), or a plain tuple of *logical* axes, which
        `logical_axis_rules` turn into mesh axes. Rules that contradict a parameter's own names are an error.
      optimizer_rules: 'zero1' divides the optimizer's state over the data axes too, where a dim is free for them, and
        the parameters as before (https://arxiv.org/abs/1910.02054, stage 1); None divides it as the parameters.

    Raises:
      MeshError: if the mesh's arguments cannot be met.
      RuleError: if a rule is no rule, optimizer_rules is none of these, or in strict mode if 'batch' has no rule.
    """

    def __init__(
        self,
        num_partitions: int | None = None,
        model_parallel_submesh: HardwareMesh | None = None,
        params_on_devices: bool = True,
        backend: str | None = None,
        ici_mesh_shape: HardwareMesh | None = None,
        dcn_mesh_shape: HardwareMesh | None = None,
        logical_axis_rules: LogicalAxisRules | None = None,
        *,
        mesh: Mesh | None = None,
        devices: Sequence[JaxDevice] | None = None,
        param_rules: ParamRules | None = None,
        strict: bool = False,
        optimizer_rules: str | None = None,
    ):
        self._param_rules = read_param_rules(param_rules)
        super().__init__(
            num_partitions,
            model_parallel_submesh,
            params_on_devices,
            backend,
            ici_mesh_shape,
            dcn_mesh_shape,
            mesh=mesh,
            devices=devices,
            strict=strict,
        )
        given = standard_logical_axis_rules() if logical_axis_rules is None else logical_axis_rules
        rules = LogicalRules(given).rules
        if ici_mesh_shape is not None:
            rules = tuple((n, (meshes.REPLICA, meshes.DATA)) if n == 'batch' else (n, t) for n, t in rules)
        self._logical_axis_rules: tuple[Any, ...] = rules
        if 'batch' not in self._rules().names:
            self._tell(
                f"Cannot split the batch by rules that have none for 'batch', but for {list(self._rules().names)}: "
                "every device would work on the whole batch. Add ('batch', 'data'), or ('batch', None) to say "
                'that it is meant.',
                RuleError,
            )
        (self._data_axis,) = tuple(self._rules().spec(('batch',)))
        if optimizer_rules not in (None, _ZERO1):
            raise RuleError(
                f'Cannot lay out the optimizer by optimizer_rules={optimizer_rules!r}'
                f'{did_you_mean(optimizer_rules, [_ZERO1])}: there are no such rules. Use {_ZERO1!r}, or None.'
            )
        if optimizer_rules and self._data_axis is None:
            raise RuleError(
                f"Cannot lay out the optimizer by optimizer_rules={optimizer_rules!r}: the rules give 'batch' no mesh "
                "axis to divide it over. Add ('batch', 'data') to the rules."
            )
        self._optimizer_rules = optimizer_rules

    def _rules(self) -> LogicalRules:
        """The rules as they stand now: clients extend them after construction."""
        return LogicalRules(self._logical_axis_rules)

    def _check_rules(self, mesh: Mesh) -> None:
        self._rules().check_mesh(mesh.axis_names)
        if self._param_rules is not None:
            self._param_rules.check_mesh(mesh.axis_names)

    @property
    def _rules_in_scope(self) -> LogicalAxisRules:
        self._check_rules(self.mesh)
        return tuple(self._logical_axis_rules)

    @property
    def logical_axis_rules(self) -> LogicalAxisRules:
        """The rules from logical axis names to mesh axes."""
        return self._logical_axis_rules

    @property
    def param_rules(self) -> RegexRules | None:
        """The rules on parameter names, if there are any."""
        return self._param_rules

    @property
    def use_shardy_partitioner(self) -> bool:
        """Whether JAX partitions programs with Shardy."""
        return bool(jax.config.jax_use_shardy_partitioner)

    def get_logical_axes(self, train_state: Any) -> Any:
        """Returns a state like `train_state` whose leaves are logical axis names, or None where there are none."""
        if self._param_rules is None:
            return train_state.as_logical_axes()
        logical, stand_ins = self._complete_axes(train_state)
        return logical.restore_state(_without(stand_ins, logical.state_dict()))

    def get_mesh_axes(self, train_state: Any) -> Any:
        """Returns a state like `train_state` whose leaves are PartitionSpecs, or None for replicated.

        Names without a rule are told of in one warning, or in strict mode raise.
        """
        rules = self._rules()
        self._check_rules(self.mesh)
        if self._param_rules is None:
            logical, stand_ins = self.get_logical_axes(train_state), StandIns()
        else:
            logical, stand_ins = self._complete_axes(train_state)
        state_dict = logical.state_dict()
        axes = _without(stand_ins, state_dict)
        # Slots have their parameter's names: where parameters are told of, their slots need not be.
        params = {'target': axes.get('target')}
        for part in (params, axes):
            rules.check_names(part)
        if unknown := rules.describe_unknown(params) or rules.describe_unknown(axes):
            self._tell(unknown, RuleError)

        def spec(names: Any) -> PartitionSpec | None:
            known = stand_ins.spec(axis_names(names))
            return rules.spec(names) if known is None else known

        specs = _map_axes(spec, state_dict)
        if self._optimizer_rules == _ZERO1:
            self._divide_slots(specs.get('state', {}), train_state.state_dict().get('state', {}))
        return logical.restore_state(specs)

    def get_derivation(self, train_state: Any) -> Derivation:
        """Returns the rules that lay out the parameters of `train_state`, for a plan that can explain itself."""
        rules = self._rules()
        if self._param_rules is None:
            return Derivation(rules, self.get_logical_axes(train_state).state_dict()['target'])
        return Derivation(rules, own_axes(train_state), self._param_rules)

    def _complete_axes(self, train_state: Any) -> tuple[Any, StandIns]:
        """Returns the state's logical axes, with stand-ins for the specs that `param_rules` give."""
        state, stand_ins = complete_axes(train_state, self._param_rules, self._rules())
        return state.as_logical_axes(), stand_ins

    def _divide_slots(self, specs: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Divides the optimizer's arrays, all but random keys, over the data axes too."""
        slots, sizes = named_leaves(arrays.get('param_states', {})), dict(self.mesh.shape)

        def divided(name: str, spec: PartitionSpec | None) -> PartitionSpec | None:
            slot = slots.get(name)
            if getattr(slot, 'dtype', None) == np.uint32 or not hasattr(slot, 'shape'):
                return spec
            return divide_further(spec, slot.shape, spec_axes(self._data_axis), sizes)

        if 'param_states' in specs:
            specs['param_states'] = map_named(divided, specs['param_states'], is_leaf=is_spec_leaf)


def _without(stand_ins: StandIns, axes: Any) -> Any:
    """Puts None in place of names that stand for a spec."""
    return _map_axes(lambda names: names if stand_ins.spec(axis_names(names)) is None else None, axes)


def _map_axes(fn: Callable[[Any], Any], axes: Any) -> Any:
    """Maps over a state dict of axes, whose dicts are containers, empty ones included."""
    if isinstance(axes, dict):
        return {key: _map_axes(fn, value) for key, value in axes.items()}
    return fn(axes) if is_axes_leaf(axes) else axes
