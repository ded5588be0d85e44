"""Hugging Face's folders, `config.json` and safetensors files: read straight into shards, and written.

Each part that a device holds is read by itself, so beside the shards the host holds one such part at most. The extra
`hf` brings what this needs; PyTorch is not needed.
"""

import functools
import json
import operator
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_pjit_recipes.errors import CheckpointError, ConfigError, did_you_mean, offenders
from t5x_pjit_recipes.interop.tensors import Index, Source, Stack, Weight, is_source, linear, stack
from t5x_pjit_recipes.layout import Plan, place_parts
from t5x_pjit_recipes.layout.paths import named_leaves

__all__ = ['Folder', 'Stack', 'Weight', 'folder_shapes', 'linear', 'load_params', 'read_config', 'save_folder', 'stack']

CONFIG, SINGLE, INDEX = 'config.json', 'model.safetensors', 'model.safetensors.index.json'
MAX_FILE_BYTES = 2 * 2**30
BLOCK_BYTES = 2**24
DTYPES = {
    'F64': jnp.float64, 'F32': jnp.float32, 'F16': jnp.float16, 'BF16': jnp.bfloat16, 'BOOL': jnp.bool_,
    'I64': jnp.int64, 'I32': jnp.int32, 'I16': jnp.int16, 'I8': jnp.int8, 'U8': jnp.uint8,
}  # fmt: skip


class Folder:
    """A model as `transformers` saves it.

    Attributes:
      path: the folder.
      config: what its config.json says.
      shapes: each tensor's name to its jax.ShapeDtypeStruct.

    Raises:
      CheckpointError: if there is no such folder, or it lacks config.json or weights as safetensors.
      ConfigError: if safetensors is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        self.config: dict[str, Any] = read_config(self.path)
        self._files = dict(self._find_files())
        self.shapes: dict[str, jax.ShapeDtypeStruct] = dict(self._read_shapes())

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Reads a tensor, or of it what slices, one for each dim, say; the rest stays on disk."""
        if any(part.start == part.stop for part in index):  # Those safetensors refuses.
            return np.empty([part.stop - part.start for part in index], self.shapes[name].dtype)
        # A file stays mapped, and its pages in memory, for as long as it is open.
        with _open(self._files[name]) as file:
            return np.asarray(file.get_slice(name)[index or ...])

    def are_equal(self, name: str, other: str) -> bool:
        """Tells whether two matrices are equal, reading a block of rows at a time."""
        shape = self.shapes[name].shape
        if shape != self.shapes[other].shape or len(shape) != 2:
            return False
        rows = max(1, BLOCK_BYTES // max(1, shape[1] * self.shapes[name].dtype.itemsize))
        blocks = ((slice(start, min(start + rows, shape[0])), slice(0, shape[1])) for start in range(0, shape[0], rows))
        return all(np.array_equal(self.read(name, block), self.read(other, block)) for block in blocks)

    def _find_files(self) -> Iterator[tuple[str, pathlib.Path]]:
        index, single = self.path / INDEX, self.path / SINGLE
        if index.is_file():
            yield from ((name, self.path / file) for name, file in _weight_map(index).items())
        elif single.is_file():
            with _open(single) as file:
                yield from ((name, single) for name in file.keys())  # noqa: SIM118
        else:
            there = ', '.join(sorted(path.name for path in self.path.iterdir())) or 'nothing'
            raise CheckpointError(
                f'Cannot read weights from {str(self.path)!r}: it has neither {SINGLE} nor {INDEX}, but {there}. Save '
                'the model again with save_pretrained, which writes safetensors; pickled weights are not read.'
            )

    def _read_shapes(self) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
        absent = set(self._files)
        for path in sorted(set(self._files.values())):
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118
                    tensor = file.get_slice(name)
                    if self._files.get(name) == path:
                        absent.remove(name)
                        yield name, jax.ShapeDtypeStruct(tuple(tensor.get_shape()), _dtype(tensor, name))
        if absent:
            raise CheckpointError(
                f'Cannot read weights from {str(self.path)!r}: {len(absent)} of {len(self._files)} tensors are not in '
                f'the files that {INDEX} names for them. Copy all files again, from one model:\n'
                f'{offenders(f"{name}: not in {self._files[name].name}" for name in sorted(absent))}'
            )


def _dtype(tensor: Any, name: str) -> Any:
    stored = tensor.get_dtype()
    if stored not in DTYPES:
        raise CheckpointError(
            f'Cannot read {name!r}: it is stored as {stored}, and only {", ".join(DTYPES)} are known. Save the model '
            'in one of them; quantised weights must be dequantised first.'
        )
    return np.dtype(DTYPES[stored])


def _open(path: pathlib.Path) -> Any:
    safetensors = _import_safetensors()
    try:
        return safetensors.safe_open(path, framework='numpy')
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f'Cannot read weights from {str(path)!r}: {error}. Copy the file again.') from error


def _import_safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise ConfigError(
            "Cannot read or write Hugging Face's folders without safetensors, which is not installed. "
            "Install the extra: pip install 't5x_pjit_recipes[hf]'."
        ) from error
    return safetensors


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the config.json of a folder."""
    return read_json(pathlib.Path(path) / CONFIG)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a file of a folder that holds one JSON object; raises CheckpointError if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
        if not isinstance(content, dict):
            raise ValueError(f'it holds a {type(content).__name__}, not an object')
        return content
    except (OSError, ValueError) as error:
        why = 'there is no such file' if isinstance(error, FileNotFoundError) else str(error)
        raise CheckpointError(
            f'Cannot read {str(path)!r}: {why}. Name a folder that save_pretrained of transformers has written.'
        ) from error


def _weight_map(path: pathlib.Path) -> dict[str, str]:
    names = read_json(path).get('weight_map')
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(
            f'Cannot read {str(path)!r}: it has no weight_map, which names the file of each tensor. Copy it again.'
        )
    return names


def folder_shapes(folder: Folder, sources: Any, *, ignored: Sequence[str] = (), dtype: Any = None) -> Any:
    """Returns the shapes of arrays that a folder's tensors make, once every tensor is accounted for.

    Args:
      folder: the folder.
      sources: a tree of Weight and Stack, like the parameters wanted.
      ignored: patterns, for whole names, of tensors that are not wanted.
      dtype: what the arrays are to be; by default as they are stored, of 64 bits only where JAX is set to have that.

    Returns:
      A tree of jax.ShapeDtypeStruct like `sources`.

    Raises:
      CheckpointError: listing all tensors that are missing, of another shape, or neither wanted nor ignored.
    """
    named = named_leaves(sources, is_source)
    wanted = {weight.name for source in named.values() for weight in source.weights}
    missing = wanted - set(folder.shapes)
    extra = sorted(name for name in folder.shapes if name not in wanted and not _matches(name, ignored))
    faults = [f'{name} {folder.shapes[name].shape}: not wanted{did_you_mean(name, missing)}' for name in extra]
    faults += [fault for name, source in named.items() for fault in _faults(folder, name, source, extra)]
    if faults:
        raise CheckpointError(
            f'Cannot read the parameters from {str(folder.path)!r}: {len(faults)} tensors do not fit what '
            f'{CONFIG} and this recipe make of it. Use the folder of the model that is meant:\n{offenders(faults)}'
        )

    def shape(source: Source) -> jax.ShapeDtypeStruct:
        stored = folder.shapes[source.weights[0].name]
        return jax.ShapeDtypeStruct(source.shape(stored.shape), dtype or jax.dtypes.canonicalize_dtype(stored.dtype))

    return jax.tree.map(shape, sources, is_leaf=is_source)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _faults(folder: Folder, name: str, source: Source, extra: Sequence[str]) -> Iterator[str]:
    first = folder.shapes.get(source.weights[0].name)
    for weight in source.weights:
        stored = folder.shapes.get(weight.name)
        if stored is None:
            yield f'{weight.name}: missing, for {name}{did_you_mean(weight.name, extra)}'
            continue
        try:
            weight.shape(stored.shape)
        except CheckpointError as error:
            yield f'{weight.name}: for {name}, {error}'
        else:
            if first is not None and stored.shape != first.shape:
                yield f'{weight.name} {stored.shape}: for {name}, where the first layer has {first.shape}'


def load_params(folder: Folder, sources: Any, plan: Plan) -> Any:
    """Reads parameters straight into the parts that devices hold, each array in the dtype that is planned.

    Args:
      folder: where from.
      sources: a tree of Weight and Stack, checked by `folder_shapes`.
      plan: a plan for what `folder_shapes` returned, or for a tree with the same names and shapes.

    Returns:
      A tree like the plan's, placed.

    Raises:
      CheckpointError: listing arrays of floats that are stored as integers, or the reverse; or naming one of integers
        that do not fit the dtype that is planned.
      PlanError: if the plan has faults.
    """
    named = named_leaves(sources, is_source)
    dtypes = {row.name: row.dtype for row in plan.rows}
    _check_kinds(folder, named, dtypes)

    def read(name: str, index: Index) -> np.ndarray:
        source = named[name]
        part = source.read(folder.read, folder.shapes[source.weights[0].name].shape, index)
        _check_fits(part, name, dtypes[name])
        return part

    return place_parts(read, plan)


def _check_kinds(folder: Folder, sources: Mapping[str, Source], dtypes: Mapping[str, Any]) -> None:
    faults = [
        f'{weight.name}: stored as {stored}, and {name} is to be {dtype}'
        for name, dtype in dtypes.items()
        for weight in sources[name].weights
        if _has_fractions(stored := folder.shapes[weight.name].dtype) != _has_fractions(dtype)
    ]
    if faults:
        raise CheckpointError(
            f'Cannot read {len(faults)} tensors of {str(folder.path)!r} in the dtypes that are planned: their numbers '
            'would be others. Quantised weights must be dequantised first; otherwise plan for another dtype:\n'
            f'{offenders(faults)}'
        )


def _check_fits(part: np.ndarray, name: str, dtype: Any) -> None:
    if part.dtype.kind in 'iu' and part.dtype != dtype and (part != part.astype(dtype)).any():
        raise CheckpointError(
            f'Cannot read {name!r}, stored as {part.dtype}, as {dtype}: some of its numbers do not fit. Let JAX have '
            "64 bits, with jax.config.update('jax_enable_x64', True), and plan for them."
        )


def _has_fractions(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def save_folder(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    sources: Any,
    params: Any,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a folder that `transformers` loads; beside the parameters the host holds one file at most.

    Args:
      path: the folder; it is made, and must not hold weights already.
      config: what config.json is to say.
      sources: a tree of Weight and Stack.
      params: a tree of arrays with the same names; all of each must be addressable from this process.
      max_file_bytes: a file is closed before it would be larger, unless it has one tensor only.

    Raises:
      CheckpointError: if the trees differ, if an array is not addressable, or if there are weights in the folder.
      ConfigError: if safetensors is not installed.
    """
    _import_safetensors()
    from safetensors.numpy import save_file

    named, folder = named_leaves(sources, is_source), pathlib.Path(path)
    leaves = named_leaves(params)
    _check_writable(folder, named, leaves)
    folder.mkdir(parents=True, exist_ok=True)
    files = list(_files(named, leaves, max_file_bytes))
    weight_map, total = {}, 0
    for number, file in enumerate(files, start=1):
        title = SINGLE if len(files) == 1 else f'model-{number:05}-of-{len(files):05}.safetensors'
        tensors = {weight.name: np.ascontiguousarray(weight.stored(np.asarray(part()))) for weight, part in file}
        save_file(tensors, folder / title, metadata={'format': 'pt'})
        weight_map |= dict.fromkeys(tensors, title)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        _write_json(folder / INDEX, {'metadata': {'total_size': total}, 'weight_map': weight_map})
    _write_json(folder / CONFIG, config)


def _files(
    sources: Mapping[str, Source], leaves: Mapping[str, Any], max_bytes: int
) -> Iterator[list[tuple[Weight, Any]]]:
    """Deals tensors to files; a tensor is a Weight and a function that returns its array."""
    file, size = [], 0
    for weight, part, num_bytes in _tensors(sources, leaves):
        if file and size + num_bytes > max_bytes:
            yield file
            file, size = [], 0
        file.append((weight, part))
        size += num_bytes
    if file:
        yield file


def _tensors(sources: Mapping[str, Source], leaves: Mapping[str, Any]) -> Iterator[tuple[Weight, Any, int]]:
    for name, source in sources.items():
        leaf = leaves[name]
        if isinstance(source, Weight):
            yield source, functools.partial(np.asarray, leaf), leaf.nbytes
        else:
            for layer, weight in enumerate(source.weights):
                yield weight, functools.partial(operator.getitem, leaf, layer), leaf.nbytes // len(source.weights)


def _check_writable(folder: pathlib.Path, sources: Mapping[str, Source], leaves: Mapping[str, Any]) -> None:
    if differ := sorted(set(sources) ^ set(leaves)):
        raise CheckpointError(
            f'Cannot write {len(leaves)} arrays as the tensors of {len(sources)}: these are in one of the two only. '
            f'Give the parameters of the model that the config describes:\n{offenders(differ)}'
        )
    far = [name for name, leaf in leaves.items() if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable]
    if far:
        raise CheckpointError(
            f'Cannot write {len(far)} arrays that other processes hold parts of. Write a checkpoint, and turn that '
            f'into a folder in one process:\n{offenders(far)}'
        )
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f'Cannot write weights to {str(folder)!r}: it is a file. Name a new folder.')
    if there := sorted(file.name for file in folder.glob('*.safetensors*')):
        raise CheckpointError(
            f'Cannot write weights to {str(folder)!r}: it has some already, {", ".join(there[:3])}. Name a new folder.'
        )


def _write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + '\n', encoding='utf-8')
