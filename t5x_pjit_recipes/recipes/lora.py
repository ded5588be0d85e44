"""LoRA (Hu et al. 2021, arXiv:2106.09685): a frozen base, and trained adapters of low rank for some of its kernels.

A kernel W counts as W + alpha / rank * A B (section 4.1). A is drawn from a normal distribution of variance 1 / fan-in,
B is zero, so training starts at the base, bit for bit. The base's parameters keep their names, so that its checkpoints
fit; the adapters of `decoder/mlp/wi/kernel` are `lora/decoder/mlp/wi/kernel/a` and `.../b`, in float32.

The network runs on merged kernels, which is why it may be any network. While a step goes back through a kernel, that
kernel's full gradient exists, as it does not where adapters are layers of their own; the slots are those of A and B.
"""

import dataclasses
import math
import numbers
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from flax.core import FrozenDict
from flax.core import freeze as frozen
from flax.linen.partitioning import AxisMetadata

from t5x_pjit_recipes.errors import ConfigError, StateError, offenders
from t5x_pjit_recipes.layout.axes import axis_names
from t5x_pjit_recipes.layout.paths import SEPARATOR, map_named, named_leaves
from t5x_pjit_recipes.models import BaseModel
from t5x_pjit_recipes.param_axes import AXES_SUFFIX, axes_lookup
from t5x_pjit_recipes.recipes.freeze import match_names, read_patterns, train_only

ADAPTERS = 'lora'
# Input dims, output dims, and dims such as scanned layers, along which each part has an adapter of its own.
IN, OUT, LAYER = 'i', 'o', 'l'
MATRIX = IN + OUT

Pattern = str | tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Lora:
    """Which kernels have adapters, of which rank, and how much these count.

    Attributes:
      patterns: each a regular expression that must match the whole of a kernel's name, or a pair of one and a text with
        a letter for each dim of the kernel: 'i' for input, 'o' for output, 'l' for layers. A matrix is 'io' without
        being told; (embed, heads, kv) is 'ioo', (heads, kv, embed) 'iio', (embed, layers, mlp) 'ilo'.
      rank: the rank of A B.
      alpha: A B counts alpha / rank times; None for once.

    Raises:
      ConfigError: for numbers that are not above zero or a rank that is not whole, and texts that are no dims.

    >>> Lora(['.*/out/kernel', ('.*/query/kernel', 'ioo')], rank=4, alpha=8).patterns
    (('.*/out/kernel', 'io'), ('.*/query/kernel', 'ioo'))
    """

    patterns: tuple[Pattern, ...]
    rank: int
    alpha: float | None = None

    def __post_init__(self) -> None:
        kinds = {'rank': numbers.Integral, 'alpha': numbers.Real}
        given = {'rank': self.rank, 'alpha': 1 if self.alpha is None else self.alpha}
        faults = [f'{name}={x!r}' for name, x in given.items() if not isinstance(x, kinds[name]) or not x > 0]
        faults += [] if self.patterns else [f'patterns={self.patterns!r}']
        if faults:
            raise ConfigError(
                f'Cannot make adapters with {" and ".join(faults)}. Use numbers above zero, for the rank a whole one, '
                'and at least one pattern.'
            )
        written = [self.patterns] if isinstance(self.patterns, str) else list(self.patterns)
        pairs = tuple((p, MATRIX) if isinstance(p, str) else tuple(p) for p in written)
        read_patterns(self.patterns if isinstance(self.patterns, str) else [p for p, *_ in pairs], 'make adapters')
        lines = [f'{pair}: {_dims_fault(pair)}' for pair in pairs if _dims_fault(pair)]
        if lines:
            raise ConfigError(
                f'Cannot read {len(lines)} of {len(pairs)} patterns of adapters. Write a pattern, or a pair such as '
                f"('.*/query/kernel', 'ioo'):\n{offenders(lines)}"
            )
        object.__setattr__(self, 'patterns', pairs)

    @property
    def scale(self) -> float:
        """What A B is multiplied with."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def dims(self, params: Any) -> dict[str, str]:
        """Maps the name of each kernel that has adapters to the letters of its dims.

        Raises:
          ConfigError: listing each pattern that matches nothing, or each kernel that has not a dim for each letter.
        """
        shapes = {name: np.shape(leaf) for name, leaf in named_leaves(params).items()}
        found: dict[str, str] = {}
        match_names(tuple(pattern for pattern, _ in self.patterns), shapes, 'make adapters')
        for pattern, dims in self.patterns:
            found = dict.fromkeys(match_names((pattern,), shapes, 'make adapters'), dims) | found
        faults = [
            f'{name} {shapes[name]}: {len(dims)} letters {dims!r} for {len(shapes[name])} dims'
            for name, dims in sorted(found.items())
            if len(dims) != len(shapes[name])
        ]
        if faults:
            raise ConfigError(
                f'Cannot make adapters for {len(faults)} of {len(found)} kernels: what is input and what is output is '
                "said for another number of dims. Write pairs such as ('.*/query/kernel', 'ioo') for (embed, heads, "
                f"kv), with 'l' for layers, or narrow the patterns:\n{offenders(faults)}"
            )
        return {name: found[name] for name in shapes if name in found}


def _dims_fault(pair: tuple[Any, ...]) -> str:
    if len(pair) != 2 or not isinstance(pair[1], str):
        return 'no pair of a pattern and a text of dims'
    others = set(pair[1]) - {IN, OUT, LAYER}
    if others:
        return f'{sorted(others)} are none of the letters {IN!r}, {OUT!r} and {LAYER!r}'
    return '' if IN in pair[1] and OUT in pair[1] else f'{pair[1]!r} lacks {IN!r} or {OUT!r}'


def _arranged(dims: str, entries: Sequence[Any], rank: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arranges what a kernel has for each dim (sizes, axes) as A and B have it, with `rank` for the rank's dim.

    >>> _arranged('ilo', (512, 12, 2048), rank=4)  # A is (layers, embed, rank) and B (layers, rank, mlp).
    ((12, 512, 4), (12, 4, 2048))
    """
    layers, inputs, outputs = (
        tuple(entry for entry, dim in zip(entries, dims, strict=True) if dim == kind) for kind in (LAYER, IN, OUT)
    )
    return (*layers, *inputs, rank), (*layers, rank, *outputs)


def add_lora(params: Any, params_axes: Any = None, *, lora: Lora, rng: jax.Array) -> tuple[Any, Any]:
    """Adds adapters to parameters, under 'lora'.

    The axes of A and B are those of the dims that they have of their kernel, None (replicated) for the rank.

    Args:
      params: the base's parameters, as nested dicts.
      params_axes: their logical axes as Flax collects them, `<name>_axes`; or None.
      lora: which adapters.
      rng: the key that A is drawn from; each kernel has a key of its own by its name.

    Returns:
      Parameters and axes with the adapters.

    Raises:
      StateError: if the parameters are no dict, or there are some called 'lora' already; or listing each kernel that
        is no real number.
    """
    if not isinstance(params, Mapping):
        raise StateError(
            f'Cannot add adapters under {ADAPTERS!r} to a {type(params).__name__}: it takes no other entries. Give the '
            'parameters as nested dicts.'
        )
    if ADAPTERS in params:
        raise StateError(
            f'Cannot add adapters under {ADAPTERS!r}: parameters have that name already, {list(params)}. Merge them '
            'first, with merge_lora.'
        )
    kernels, axes, flat, flat_axes = named_leaves(params), axes_lookup(params_axes or {}), {}, {}
    dims_by_name = lora.dims(params)
    _check_real({name: kernels[name] for name in dims_by_name})
    for name, dims in dims_by_name.items():
        key = jax.random.fold_in(rng, zlib.crc32(name.encode()))
        shape_a, shape_b = _arranged(dims, np.shape(kernels[name]), lora.rank)
        fan_in = math.prod(size for size, dim in zip(np.shape(kernels[name]), dims, strict=True) if dim == IN)
        flat[name, 'a'] = jax.random.normal(key, shape_a, jnp.float32) * fan_in**-0.5
        flat[name, 'b'] = jnp.zeros(shape_b, jnp.float32)
        names = axis_names(axes.get(name)) or ()
        both = _arranged(dims, names, None) if names else ((), ())
        flat_axes |= {(name, f'{leaf}{AXES_SUFFIX}'): AxisMetadata(names=n) for leaf, n in zip('ab', both, strict=True)}
    added_axes = None if params_axes is None else _with_adapters(params_axes, flat_axes)
    return _with_adapters(params, flat), added_axes


def _check_real(kernels: Mapping[str, Any]) -> None:
    others = [f'{n} {np.shape(x)}: {x.dtype}' for n, x in kernels.items() if not jnp.issubdtype(x.dtype, jnp.floating)]
    if others:
        raise StateError(
            f'Cannot add adapters to {len(others)} of {len(kernels)} kernels: they are no real numbers, and would lose '
            f'what is added. Dequantise them, or narrow the patterns:\n{offenders(others)}'
        )


def _with_adapters(tree: Any, flat: Mapping[tuple[str, str], Any]) -> Any:
    adapters = traverse_util.unflatten_dict({(*name.split(SEPARATOR), leaf): x for (name, leaf), x in flat.items()})
    added = {**tree, ADAPTERS: adapters}
    return frozen(added) if isinstance(tree, FrozenDict) else added


def merge_lora(params: Any, lora: Lora) -> Any:
    """Returns the base's parameters with the adapters merged into their kernels, each in its own dtype.

    Raises:
      StateError: if the adapters in `params` are not those that `lora` describes, listing each that is not.
    """
    base = {name: tree for name, tree in params.items() if name != ADAPTERS}
    kernels, adapters = named_leaves(base), named_leaves(params.get(ADAPTERS, {}))
    dims = lora.dims(base)
    _check_adapters({name: np.shape(kernels[name]) for name in dims}, dims, adapters, lora)

    def merged(name: str, kernel: Any) -> Any:
        if name not in dims:
            return kernel
        a, b = (adapters[f'{name}{SEPARATOR}{leaf}'] for leaf in 'ab')
        update = lora.scale * jnp.einsum(_subscripts(dims[name]), a, b, precision='highest')
        return (kernel + update).astype(kernel.dtype)

    result = map_named(merged, base)
    return frozen(result) if isinstance(params, FrozenDict) else result


def _subscripts(dims: str) -> str:
    """Spells the product of A and B for `einsum`.

    >>> _subscripts('ilo')
    'baz,bzc->abc'
    """
    letters = 'abcdefghijklmnopqrstuvwxy'[: len(dims)]
    a, b = (''.join(part) for part in _arranged(dims, letters, 'z'))
    return f'{a},{b}->{letters}'


def _check_adapters(
    shapes: Mapping[str, Sequence[int]], dims: Mapping[str, str], adapters: Mapping[str, Any], lora: Lora
) -> None:
    wanted = {
        f'{name}{SEPARATOR}{leaf}': shape
        for name in shapes
        for leaf, shape in zip('ab', _arranged(dims[name], shapes[name], lora.rank), strict=True)
    }
    found = {name: np.shape(leaf) for name, leaf in adapters.items()}
    lines = [
        f'{ADAPTERS}/{name}: wants {wanted.get(name, "none")}, has {found.get(name, "none")}'
        for name in dict.fromkeys([*wanted, *found])
        if wanted.get(name) != found.get(name)
    ]
    if lines:
        raise StateError(
            f'Cannot merge adapters: {len(lines)} arrays are not what patterns {[p for p, _ in lora.patterns]} and '
            f'rank={lora.rank} describe. Use the settings that made them, and parameters that have adapters:\n'
            f'{offenders(lines)}'
        )


class LoraModel(BaseModel):
    """A model of which adapters alone are trained, by the optimizer of the model that it is made of.

    Its parameters are those of `add_lora`; loss, evaluation and scores are those of the merged parameters. To start
    from a checkpoint of the plain model, restore with `state_transformation_fns=[freeze.drop_other_slots]` and
    `fallback_to_scratch=True`, which makes the adapters and their slots (in a whole new state, so that for a moment the
    base is held twice).
    """

    def __init__(self, model: BaseModel, patterns: Sequence[Pattern], rank: int, alpha: float | None = None) -> None:
        """Puts the model together.

        Args:
          model: the base; its optimizer, if it has one, trains the adapters.
          patterns: which kernels have adapters, see `Lora`.
          rank: see `Lora`.
          alpha: see `Lora`.
        """
        self.lora = Lora(patterns, rank, alpha)
        self.model = model
        definition = model.optimizer_def
        super().__init__(None if definition is None else train_only(definition, [f'{ADAPTERS}/.*']))
        self.FEATURE_CONVERTER_CLS = model.FEATURE_CONVERTER_CLS

    @property
    def input_vocabulary(self) -> Any:
        """The base's vocabulary of inputs."""
        return self.model.input_vocabulary

    @property
    def output_vocabulary(self) -> Any:
        """The base's vocabulary of targets."""
        return self.model.output_vocabulary

    def get_initial_variables(self, rng: jax.Array, input_shapes: Any, input_types: Any = None) -> FrozenDict:
        """Initialises the base as it initialises itself, and the adapters."""
        variables = self.model.get_initial_variables(rng, input_shapes, input_types)
        params, params_axes = add_lora(
            variables['params'], variables.get('params_axes'), lora=self.lora, rng=jax.random.fold_in(rng, 1)
        )
        axes = {} if params_axes is None else {'params_axes': params_axes}
        return frozen({**variables, 'params': params, **axes})

    def merged(self, params: Any) -> Any:
        """Returns parameters that the base takes, see `merge_lora`."""
        return merge_lora(params, self.lora)

    def loss_fn(self, params: Any, batch: Any, dropout_rng: jax.Array | None, *mutables: Any) -> Any:
        """Computes the base's loss; gradients of the base's parameters are zero."""
        held = {name: tree if name == ADAPTERS else jax.lax.stop_gradient(tree) for name, tree in params.items()}
        return self.model.loss_fn(self.merged(held), batch, dropout_rng, *mutables)

    def eval_fn(self, params: Any, batch: Any, *mutables: Any) -> Any:
        """Computes the base's loss and metrics without dropout."""
        return self.model.eval_fn(self.merged(params), batch, *mutables)

    def score_batch(self, params: Any, batch: Any, return_intermediates: bool = False) -> Any:
        """Computes the base's scores."""
        return self.model.score_batch(self.merged(params), batch, return_intermediates)
