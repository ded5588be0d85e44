"""What a run file describes, planned and not run: the commands plan, explain, lint and diff share this.

A run's model and partitioner are built from gin, its train state is shaped, never computed. The mesh is the
partitioner's, or one without devices, so that pods are planned on laptops.
"""

import contextlib
import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import flags, logging
from jax.sharding import PartitionSpec

from t5x_pjit_recipes import gin_utils, reports
from t5x_pjit_recipes.errors import ConfigError, RecipeError, warn
from t5x_pjit_recipes.initialization import train_state_shape
from t5x_pjit_recipes.layout import meshes
from t5x_pjit_recipes.layout.axes import AxisNames
from t5x_pjit_recipes.layout.plan import Plan
from t5x_pjit_recipes.train import emulate_cpu_devices, train

# Lengths for a run file that sets none: parameters seldom depend on them.
DEFAULT_LENGTH = 16
DEFAULT_BATCH_SIZE = 8


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run file describes: a model, a partitioner with a mesh, and the shapes of the train state."""

    model: Any
    partitioner: Any
    state: Any

    @property
    def mesh(self) -> Any:
        """The mesh that it is planned on."""
        return self.partitioner.mesh

    def parts(self, *, with_rules: bool = False) -> dict[str, Plan]:
        """Plans parameters, gradients, optimizer state; `with_rules` the parameters' plan knows what decided."""
        axes = self.partitioner.get_mesh_axes(self.state)
        known = with_rules and hasattr(self.partitioner, 'get_derivation')
        rules = self.partitioner.get_derivation(self.state) if known else None
        return reports.plan_parts(self.state, axes, self.mesh, param_rules=rules)


def load_run(
    gin_files: Sequence[str],
    gin_bindings: Sequence[str] = (),
    gin_search_paths: Sequence[str] = ('.',),
    mesh: str | None = None,
) -> Run:
    """Builds the model and the partitioner that gin files describe for `train`, and shapes the train state.

    Args:
      gin_files: the files, as for `train`; settings that only a run needs, such as MODEL_DIR, may be missing.
      gin_bindings: settings such as `NUM_PARTITIONS = 4`.
      gin_search_paths: folders to look for gin files in.
      mesh: sizes such as 'data=64,model=64', to plan on a mesh without devices; the partitioner's own by default.

    Raises:
      ConfigError: for gin settings or a mesh that cannot be read, or settings that are missing.
    """
    gin_utils.clear_config()
    gin_utils.parse_gin_flags(gin_search_paths, gin_files, gin_bindings, finalize_config=False)
    gin_utils.check_all_used(train)
    built = gin_utils.build_arguments(train, ['model', 'partitioner'])
    if absent := [name for name in ('model', 'partitioner') if built.get(name) is None]:
        raise ConfigError(
            f'Cannot plan without {" and ".join(absent)}: gin gives train none. Give a run file, as '
            '--gin_file=gin/runs/pretrain_pydoc.gin.'
        )
    model, partitioner = built['model'], built['partitioner']
    partitioner.mesh = read_mesh(mesh) if mesh else _mesh_of(partitioner)
    shapes, types = _inputs(model)
    return Run(model, partitioner, train_state_shape(model.optimizer_def, model.get_initial_variables, shapes, types))


def read_mesh(text: str) -> Any:
    """Reads the sizes of a mesh that need not exist.

    Raises:
      ConfigError: for what is no list of sizes.

    >>> read_mesh('data=64,model=32').shape['model']
    32
    """
    pairs = [part.partition('=') for part in text.split(',')]
    if not all(name.strip().isidentifier() and size.strip().isdecimal() and int(size) for name, _, size in pairs):
        raise ConfigError(f'Cannot read the mesh {text!r}: it is no list of sizes. Write --mesh=data=64,model=64.')
    sizes = {name.strip(): int(size) for name, _, size in pairs}
    if len(sizes) < len(pairs):
        raise ConfigError(f'Cannot read the mesh {text!r}: an axis is named twice. Give each axis one size.')
    return meshes.abstract_mesh(**sizes)


def _mesh_of(partitioner: Any) -> Any:
    """Returns the mesh that a partitioner asks for: of the devices here, or where they do not suffice without any."""
    ici, dcn = (getattr(partitioner, f'_{kind}_mesh_shape', None) for kind in ('ici', 'dcn'))
    submesh, number = (getattr(partitioner, f'_{kind}', None) for kind in ('model_parallel_submesh', 'num_partitions'))
    here = jax.device_count()
    if ici is not None and dcn is not None:
        names = (meshes.REPLICA, meshes.DATA, meshes.MODEL)
        sizes = {name: i * d for name, i, d in zip(names, ici, dcn, strict=True)}
        suffices = math.prod(sizes.values()) == here
    else:
        sizes = {meshes.DATA: 1, meshes.MODEL: math.prod(submesh) if submesh else number or 1}
        suffices = here % sizes[meshes.MODEL] == 0
    if suffices:
        return partitioner.mesh
    warn(
        f'Planning for a mesh of {meshes.describe_sizes(sizes)}, which the {here} device{"s" * (here > 1)} here cannot '
        'make. Give --mesh=data=64,model=64 to plan for others.'
    )
    return meshes.abstract_mesh(**sizes)


def _inputs(model: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Returns shapes and dtypes of the model's inputs, by the run's data set where it is set in full."""
    try:
        built = gin_utils.build_arguments(train, ['train_dataset_cfg', 'get_dataset_fn'])
    except ConfigError:  # What is missing matters to a run, and not to the shapes of its parameters.
        built = {}
    cfg, converter_cls = built.get('train_dataset_cfg'), model.FEATURE_CONVERTER_CLS
    if converter_cls is None or 'get_dataset_fn' in built:
        spec = built['get_dataset_fn'](cfg, 0, 1, converter_cls).element_spec
    elif cfg is None:
        spec = converter_cls().element_spec(
            DEFAULT_BATCH_SIZE, dict.fromkeys(converter_cls.TASK_FEATURES, DEFAULT_LENGTH)
        )
    else:
        spec = converter_cls(pack=cfg.pack).element_spec(cfg.batch_size, cfg.task_feature_lengths)
    return {name: x.shape for name, x in spec.items()}, {name: x.dtype for name, x in spec.items()}


def define_flags() -> None:
    """Defines the flags that the commands share."""
    gin_utils.define_flags()
    flags.DEFINE_string(
        'mesh', None, "Sizes of a mesh without devices, as data=64,model=64; without it, the run file's."
    )
    flags.DEFINE_bool('json', False, 'Whether to print JSON in place of a table.')
    flags.DEFINE_integer('cpu_devices', None, 'How many CPU devices to emulate.', lower_bound=1)


def run_of_flags() -> Run:
    """Builds the run that the flags describe."""
    given = flags.FLAGS
    return load_run(given.gin_file or (), given.gin_bindings, given.gin_search_paths, given.mesh)


def run_command(main: Callable[[Sequence[str]], int | None]) -> None:
    """Runs a command with the flags; an error of ours ends it with its message alone."""

    def guarded(argv: Sequence[str]) -> None:
        logging.set_verbosity(logging.WARNING)
        if flags.FLAGS.cpu_devices:
            emulate_cpu_devices(flags.FLAGS.cpu_devices)
        elif flags.FLAGS.mesh:
            jax.config.update('jax_platforms', 'cpu')  # Nothing is placed: leave accelerators to those who train.
        with ending_readably():
            sys.exit(main(argv))

    define_flags()
    gin_utils.run(guarded)


@contextlib.contextmanager
def ending_readably() -> Iterator[None]:
    """Ends a command with the message alone of an error of ours, and quietly where nobody reads on."""
    try:
        yield
    except RecipeError as error:
        sys.exit(f'{type(error).__name__}: {gin_utils.without_traces(str(error))}')
    except BrokenPipeError:  # As when the output is piped to head.
        sys.exit(0)


def width() -> int | None:
    """Returns the columns of the terminal, or None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_json(data: Any) -> None:
    """Prints dataclasses, specs and plain values as JSON."""
    print(json.dumps(_plain(data), indent=1))


def _plain(x: Any) -> Any:
    if isinstance(x, PartitionSpec | AxisNames):
        return [_plain(entry) for entry in x]
    if dataclasses.is_dataclass(x):
        return {field.name: _plain(getattr(x, field.name)) for field in dataclasses.fields(x)}
    if isinstance(x, Mapping):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, tuple | list):
        return [_plain(entry) for entry in x]
    return x if x is None or isinstance(x, str | int | float | bool) else str(x)
