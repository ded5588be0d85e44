"""Rules for a tree of parameters that has none: a first proposal from names and shapes, to read, correct and keep.

Names say what an array is, where they are among those that published models use: an embedding, a projection into
attention or an MLP, one out of it, a norm, a bias. What they do not say, shapes do: the largest dims are split. Layers
that are stacked in one array are found by their norms, which have a dim too many.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from t5x_pjit_recipes.errors import RuleError, did_you_mean
from t5x_pjit_recipes.layout.generalize import few_patterns
from t5x_pjit_recipes.layout.meshes import describe_sizes
from t5x_pjit_recipes.layout.paths import SEPARATOR, named_leaves
from t5x_pjit_recipes.layout.patterns import is_scalar
from t5x_pjit_recipes.layout.plan import Plan, Row, format_bytes
from t5x_pjit_recipes.layout.regex_rules import RegexRules

# What an array is; in this order the rules are listed.
_KINDS = (
    EMBEDDING := 'embeddings',
    HEAD := 'output heads',
    INWARD := 'projections into attention and MLP',
    OUTWARD := 'projections out of attention and MLP',
    SPLIT_BIAS := 'biases of the projections in, and of heads',
    OTHER := 'others, by their largest dims',
    NORM := 'norms',
    BIAS := 'other biases',
    SMALL := 'small',
)

_IN = 'q k v query key value q_proj k_proj v_proj wq wk wv gate'
_WIDE_IN = (  # These make more of less, so that their shapes tell which dim is which.
    'wi wi_0 wi_1 fc1 c_fc c_attn query_key_value qkv qkv_proj dense_h_to_4h gate_proj up_proj gate_up_proj up w1 w3 '
    'lin1 fc_in intermediate'
)
_OUT = 'o out wo o_proj out_proj c_proj fc2 dense_4h_to_h down_proj down w2 lin2 fc_out'
_HEADS = 'lm_head logits_dense head classifier score embed_out proj_out'
_MODULES = {
    module: kind
    for kind, modules in ((INWARD, f'{_IN} {_WIDE_IN}'), (OUTWARD, _OUT), (HEAD, _HEADS))
    for module in modules.split()
}
# `dense` and the like mean what the module around them says.
_DENSE = re.compile(r'dense(_\d+)?|linear(_\d+)?', re.IGNORECASE)
_AROUND = {'intermediate': INWARD, 'output': OUTWARD, 'attention': OUTWARD, 'self_attention': OUTWARD}
_NORM = re.compile(r'norm|(^|_)ln(_|$)', re.IGNORECASE)
_EMBEDDING = re.compile(r'embed|^wte$|^wpe$|^shared$', re.IGNORECASE)

_SMALL = 1 << 14  # Elements below which an array of another kind than a projection stays whole.
_LEAST_SHARE = 8  # Of an array that nothing is known of, no dim is cut into pieces smaller than this.


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """Proposed rules, why each was proposed, and the plan that they give.

    Prints as Python code.
    """

    rules: RegexRules
    reasons: tuple[str, ...]  # one for each rule
    plan: Plan

    def __str__(self) -> str:
        return self.as_python()

    @property
    def replicated(self) -> tuple[Row, ...]:
        """The arrays, scalars left out, that the rules leave whole on every device."""
        return self.plan.replicated

    def as_python(self) -> str:
        """Spells the rules as Python code that makes `rules`, with what is left replicated in a comment."""
        pairs = [f'({_raw(pattern)}, {_spec_text(spec)})' for pattern, spec in self.rules.rules]
        head = ['from jax.sharding import PartitionSpec as P', 'from t5x_pjit_recipes import layout', '']
        return '\n'.join([*head, 'rules = layout.RegexRules([', *self._lines(pairs), '])', self._left()])

    def as_gin(self) -> str:
        """Spells the rules as gin bindings that give them to the partitioner."""
        pairs = [f'({pattern!r}, "{_spec_text(spec)}")' for pattern, spec in self.rules.rules]
        head = ['from __gin__ import dynamic_registration', 'from t5x_pjit_recipes import partitioning', '']
        binding = 'partitioning.PjitPartitioner.param_rules = ['
        return '\n'.join([*head, binding, *self._lines(pairs), ']', self._left()])

    def _lines(self, pairs: Sequence[str]) -> Iterator[str]:
        told = ''
        for pair, reason in zip(pairs, self.reasons, strict=True):
            if reason != told:
                yield f'    # {reason}'
            yield f'    {pair},'
            told = reason

    def _left(self) -> str:
        copies, whole = sum(row.num_bytes for row in self.replicated), self.plan.num_bytes
        share = 100 * copies / max(whole, 1)
        left = f'{len(self.replicated)} of {len(self.plan.rows)} arrays, {format_bytes(copies)} ({share:.2f} %)'
        mesh = describe_sizes(dict(self.plan.mesh.shape))
        return f'# on {mesh}: left whole on every device: {left}'


def suggest(
    shapes: Any, mesh: Mesh | AbstractMesh, *, data: str | None = 'data', model: str | None = 'model'
) -> Suggestion:
    """Proposes rules for parameters that have none.

    Projections are split over `model` in the dim inside attention or an MLP (the output of those into it, the input of
    those out of it), and over `data` in the other dim, fully sharded; embeddings and heads over `model` by words. A dim
    that does not divide stays whole, and another takes its axis. Norms and small arrays stay whole.

    How many heads share a dim cannot be told from most shapes: `model` should divide their number.

    Args:
      shapes: a tree of arrays, or of anything with `shape` and `dtype`.
      mesh: the mesh, which may be abstract.
      data: mesh axis that fully shards the parameters; None to do without.
      model: mesh axis that splits the model's inner dims; None to do without.

    Returns:
      Rules that match each array, and no fault on this mesh; what they leave replicated is in `replicated`.

    Raises:
      RuleError: if the mesh has no such axes, or the tree no arrays.

    >>> from t5x_pjit_recipes.layout.meshes import abstract_mesh
    >>> shapes = {f'layer_{i}': {'wi': {'kernel': np.ones((32, 128))}, 'wo': {'kernel': np.ones((128, 32))},
    ...                          'norm': {'scale': np.ones(32)}} for i in range(2)}
    >>> print(suggest(shapes, abstract_mesh(data=2, model=4)))
    from jax.sharding import PartitionSpec as P
    from t5x_pjit_recipes import layout
    <BLANKLINE>
    rules = layout.RegexRules([
        # projections into attention and MLP
        (r'.*/wi/kernel', P('data', 'model')),
        # projections out of attention and MLP
        (r'.*/wo/kernel', P('model', 'data')),
        # norms
        (r'.*/norm/scale', P()),
    ])
    # on data=2, model=4: left whole on every device: 2 of 6 arrays, 256 B (0.39 %)
    """
    axes = _axis_sizes(dict(mesh.shape), data, model)
    leaves = {name: tuple(np.shape(leaf)) for name, leaf in named_leaves(shapes).items()}
    if not leaves:
        raise RuleError('Cannot suggest rules for a tree of no arrays. Give the parameters, or their shapes.')
    tree = _Tree({name: shape for name, shape in leaves.items() if not is_scalar(shape)})
    choices = {name: _choose(name, shape, tree, axes) for name, shape in tree.shapes.items()}
    proposed = sorted(few_patterns(choices), key=lambda rule: (_KINDS.index(rule[1].kind), rule[1].reason))
    rules = RegexRules([(pattern, choice.spec) for pattern, choice in proposed])
    plan = Plan(shapes, rules.specs(shapes), mesh, rules=rules)
    return Suggestion(rules, tuple(choice.reason for _, choice in proposed), plan)


def _axis_sizes(sizes: Mapping[str, int], data: str | None, model: str | None) -> '_Axes':
    for name in (data, model):
        if name is not None and name not in sizes:
            raise RuleError(
                f'Cannot suggest rules for data={data!r} and model={model!r} on mesh {describe_sizes(sizes)}: it has '
                f'no axis {name!r}{did_you_mean(name, sizes)}. Name its axes, or give None to do without one.'
            )
    return _Axes(data, model, sizes.get(data or '', 1), sizes.get(model or '', 1))


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The two mesh axes, which may be None, and their sizes."""

    data: str | None
    model: str | None
    data_ways: int
    model_ways: int


@dataclasses.dataclass(frozen=True)
class _Choice:
    """What one array gets, and why."""

    kind: str
    spec: PartitionSpec
    note: str = ''

    @property
    def reason(self) -> str:
        return f'{self.kind}: {self.note}' if self.note else self.kind


class _Tree:
    """What the whole tree says of its arrays: which are stacked, and in which order their dims stand."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        self.shapes = dict(shapes)
        self._stacks = dict(self._find_stacks())
        self._votes: dict[tuple[str, bool], int] = {}
        for name in shapes:
            *_, module, last = ['', *name.split(SEPARATOR)]
            shape = self.layer_shape(name)
            if module in _WIDE_IN.split() and len(shape) == 2:
                vote = (shape[1] > shape[0]) - (shape[1] < shape[0])
                self._votes[_family(module, last)] = self._votes.get(_family(module, last), 0) + vote

    def _find_stacks(self) -> Iterator[tuple[str, int]]:
        """Yields the modules that hold stacked layers, with the dim that counts the layers."""
        for name, shape in self.shapes.items():
            *above, module, _ = ['', '', *name.split(SEPARATOR)]
            if len(shape) != 2 or not _NORM.search(module):
                continue
            prefix = SEPARATOR.join([*above[2:], ''])
            inside = [s for n, s in self.shapes.items() if n.startswith(prefix)]
            common = [dim for dim in (0, 1) if len({s[dim : dim + 1] for s in inside}) == 1]
            if common:
                yield prefix, min(common, key=lambda dim: shape[dim])

    def stacked_dim(self, name: str) -> int | None:
        """Returns the dim of an array that counts stacked layers, or None."""
        return next((dim for prefix, dim in self._stacks.items() if name.startswith(prefix)), None)

    def layer_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one layer's part of an array."""
        dim, shape = self.stacked_dim(name), self.shapes[name]
        return shape if dim is None else shape[:dim] + shape[dim + 1 :]

    def is_output_first(self, module: str, last: str) -> bool:
        """Tells whether matrices of this name are (out, in): as the wide ones show, else as PyTorch's weights are."""
        vote = self._votes.get(_family(module, last), 0)
        return vote < 0 if vote else last == 'weight'


def _family(module: str, last: str) -> tuple[str, bool]:
    """Sets GPT-2's `c_attn`, `c_proj`, `c_fc` apart: the order of their dims is the reverse of all others'."""
    return last, module.startswith('c_')


def _kind(parts: Sequence[str], shape: Sequence[int]) -> str:
    """Says what an array is, by its name; by its neighbours' where it means little, and its shape."""
    around, module, last = ['', '', *parts][-3:]
    kind = _MODULES.get(module)
    if _DENSE.fullmatch(module):
        kind = _AROUND.get(around.lower())
        if re.search('mlp|feed_forward', around, re.IGNORECASE) and module[-1] in '01':
            kind = INWARD if module[-1] == '0' else OUTWARD
    if any('expert' in part for part in parts) and len(shape) > 2:
        return OTHER
    if _NORM.search(module) and len(shape) == 1:
        return NORM
    if last in ('bias', 'b'):
        return SPLIT_BIAS if kind in (INWARD, HEAD) else BIAS
    if kind and len(shape) > 1:
        return kind
    if math.prod(shape) < _SMALL:
        return SMALL
    return EMBEDDING if len(shape) == 2 and any(map(_EMBEDDING.search, (module, last))) else OTHER


def _choose(name: str, shape: tuple[int, ...], tree: _Tree, axes: _Axes) -> _Choice:
    parts, inner, stacked = name.split(SEPARATOR), tree.layer_shape(name), tree.stacked_dim(name)
    kind = _kind(parts, inner)
    if kind in (NORM, BIAS, SMALL):
        return _Choice(kind, PartitionSpec())
    model_dims, data_dims = _wishes(kind, parts, inner, tree)
    entries, note = _assign(inner, model_dims, data_dims, axes, _LEAST_SHARE if kind == OTHER else 1)
    if not any(entries):
        whole = 'too small to divide' if math.prod(inner) < _SMALL else f'no dim of {inner} divides'
        return _Choice(kind, PartitionSpec(), whole)
    if stacked is not None:
        entries.insert(stacked, None)
        note = ', '.join(filter(None, [f'dim {stacked} counts layers', note]))
    return _Choice(kind, PartitionSpec(*entries), note)


def _wishes(kind: str, parts: Sequence[str], shape: Sequence[int], tree: _Tree) -> tuple[list[int], list[int]]:
    """Returns the dims that `model` should split, best first, and those that `data` should."""
    dims = list(range(len(shape)))
    if kind == EMBEDDING:
        return dims, dims[::-1]
    if kind == SPLIT_BIAS:
        return dims, []
    if kind == OTHER:
        by_size = sorted(dims, key=lambda dim: (-shape[dim], -dim))
        return by_size, by_size
    # Kernels whose heads have a dim of their own are (in, heads, head size) and (heads, head size, out).
    inputs = [dims[0]] if kind != OUTWARD else dims[:-1]
    if len(shape) == 2 and tree.is_output_first(*parts[-2:]):
        inputs = [1]
    outputs = [dim for dim in dims if dim not in inputs]
    inner, outer = (inputs, outputs) if kind == OUTWARD else (outputs, inputs)
    return inner + outer, outer + inner


def _assign(
    shape: Sequence[int], model_dims: Sequence[int], data_dims: Sequence[int], axes: _Axes, least: int
) -> tuple[list[Any], str]:
    """Gives each axis the first of its dims that divides, or both axes to one dim; says what did not divide."""

    def first(dims: Iterable[int], ways: int) -> int | None:
        return next((d for d in dims if shape[d] % ways == 0 and shape[d] >= least * ways), None)

    entries: list[Any] = [None] * len(shape)
    by_model = first(model_dims, axes.model_ways) if axes.model else None
    by_data = first([d for d in data_dims if d != by_model], axes.data_ways) if axes.data else None
    if by_model is not None:
        entries[by_model] = axes.model
    if by_data is not None:
        entries[by_data] = axes.data
    elif by_model is not None and axes.data and data_dims:
        both = first(model_dims, axes.model_ways * axes.data_ways)
        if both is not None:
            entries[by_model], entries[both] = None, (axes.model, axes.data)
    wished = model_dims[0]
    if axes.model and shape[wished] % axes.model_ways:
        return entries, f'{shape[wished]} does not divide {axes.model_ways} ways'
    return entries, ''


def _spec_text(spec: PartitionSpec) -> str:
    return f'P({", ".join(map(repr, spec))})'


def _raw(pattern: str) -> str:
    return f"r'{pattern}'" if "'" not in pattern else repr(pattern)
