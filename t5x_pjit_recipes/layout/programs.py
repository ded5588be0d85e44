"""Programs: functions compiled with a layout for what goes in and what comes out.

Specs become shardings at this boundary. While the function is traced, the mesh is in scope as an abstract mesh together
with the logical axis rules, so that sharding constraints inside it are real, also under grad, vmap and an outer jit.
"""

import collections
import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from t5x_pjit_recipes.errors import MeshError, PlanError
from t5x_pjit_recipes.layout.axes import constraint_rules, is_spec_leaf
from t5x_pjit_recipes.layout.constraints import check_constraints
from t5x_pjit_recipes.layout.meshes import check_auto, describe_sizes
from t5x_pjit_recipes.layout.placement import (
    any_dead,
    any_elsewhere,
    any_tracer,
    check_alive,
    check_given_once,
    check_here,
    flat_devices,
    place_leaves,
)
from t5x_pjit_recipes.layout.plan import Plan


class Program:
    """A function with layouts for its inputs and outputs, compiled when it is first called.

    Inputs may be anything, anywhere: what lies otherwise is moved, what lies right costs nothing. Dicts and FrozenDicts
    may be mixed in inputs and specs.

    Args:
      fn: the function; also a bound method or a partial.
      mesh: the mesh of all specs.
      in_specs: specs of the positional arguments (static ones left out), as a tree or a prefix of one; None means
        replicated. An argument given by keyword has the spec of its position, if there is one.
      out_specs: specs of the result, likewise.
      rules: logical axis rules for constraints inside the function.
      static_argnums: arguments that are compiled in.
      donate_argnums: arguments whose memory the result may take; they must not be used again.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        in_specs: Any,
        out_specs: Any,
        *,
        rules: Iterable[tuple[str, Any]] = (),
        static_argnums: int | Sequence[int] = (),
        donate_argnums: int | Sequence[int] = (),
    ):
        check_auto(mesh)
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.mesh, self.rules = fn, mesh, tuple(rules)
        self._in_specs, self._out_specs = in_specs, out_specs
        self._static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
        self._donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
        self._parameters = _parameter_names(fn)
        self._current: dict[Any, _Variant] = {}
        self._variants: dict[Any, _Variant] = {}
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._preparing = threading.local()

    def __repr__(self) -> str:
        return f'Program({_name_of(self.fn)} on {describe_sizes(dict(self.mesh.shape))})'

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function.

        Raises:
          PlanError: if an input or output cannot lie as its spec says, or a constraint inside cannot be kept.
          PlacementError: if an input was donated to an earlier call, or is to be donated and is given twice.
        """
        call = self._bind(args, kwargs)
        if any_dead(call.leaves):
            check_alive(self._display(call), 'run on')
        if self._donated and len(set(map(id, call.leaves))) < len(call.leaves):
            check_given_once(self._display(call), self._donated_leaves(call))
        variant = self._current.get(call.key)
        if variant is not None:
            # A ValueError here means inputs that lie otherwise, or new shapes: only what was prepared is ever traced.
            if not (variant.wary and any_elsewhere(call.leaves, flat_devices(self.mesh))):
                with contextlib.suppress(ValueError):
                    return variant.run(call.leaves)
            with contextlib.suppress(ValueError):
                return variant.run(place_leaves(call.leaves, variant.in_shardings))
        return self._prepare_and_run(call)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the function for these arguments, which may be ShapeDtypeStructs, without running it.

        What is compiled from it takes the arguments in this order, by position.
        """
        args, kwargs = self._by_position(args, kwargs)
        call = self._bind(args, kwargs)
        call = call._replace(leaves=[_abstract(leaf) for leaf in call.leaves])
        with self._tracing():
            variant = self._variant(call, call.leaves)
            positional, named = jax.tree_util.tree_unflatten(call.structure, variant.in_shardings)
            shapes, named_shapes = jax.tree_util.tree_unflatten(call.structure, call.leaves)
            return jax.jit(
                self._in_order(len(args), tuple(named)),
                in_shardings=(*positional, *named.values()),
                out_shardings=variant.out_shardings,
                static_argnums=self._static,
                donate_argnums=self._donated,
            ).lower(*_with_statics(shapes, call.statics), *named_shapes.values())

    def compile(self, *args: Any, **kwargs: Any) -> 'CompiledProgram':
        """Compiles the function for these arguments, which may be ShapeDtypeStructs, ahead of its first call."""
        call = self._bind(args, kwargs)
        leaves = [_abstract(leaf) for leaf in call.leaves]
        with self._tracing():
            compiled = self._variant(call, leaves).jitted.lower(*leaves).compile()
        return CompiledProgram(compiled, call.structure, self._donated_leaves(call), self.mesh)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the shapes of the result, without compiling or running anything."""
        call = self._bind(args, kwargs)
        with self._tracing():
            return jax.jit(self._function(call)).trace(*call.leaves).out_info[0]

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> '_Call':
        if kwargs:
            args, kwargs = self._by_position(args, kwargs)
        if not self._static:
            leaves, structure = jax.tree_util.tree_flatten((args, kwargs))
            return _Call(leaves, structure, ())
        at = _from_the_front(self._static, len(args))
        leaves, structure = jax.tree_util.tree_flatten((tuple(a for i, a in enumerate(args) if i not in at), kwargs))
        return _Call(leaves, structure, tuple((i, a) for i, a in enumerate(args) if i in at))

    def _by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Makes positional what was given by keyword and is static, or has a spec, by position."""
        named = dict(kwargs)
        for name in self._parameters[len(args) :]:
            if name not in named or not (len(args) in self._static or self._has_spec(len(args))):
                break
            args = (*args, named.pop(name))
        return args, named

    def _has_spec(self, position: int) -> bool:
        dynamic = position - sum(0 <= i < position for i in self._static)
        return type(self._in_specs) not in (tuple, list) or dynamic < len(self._in_specs)

    def _prepare_and_run(self, call: '_Call') -> Any:
        if isinstance(self.mesh, AbstractMesh):
            raise MeshError(
                f'Cannot run {_name_of(self.fn)} on the abstract mesh {describe_sizes(dict(self.mesh.shape))}: it has '
                'no devices. Build the mesh from devices, as layout.make_mesh does.'
            )
        with self._tracing():
            leaves = place_leaves(call.leaves, self._in_shardings(call))
            self._current[call.key] = variant = self._variant(call, leaves)
            return variant.run(leaves)

    def _variant(self, call: '_Call', leaves: list[Any]) -> '_Variant':
        """Compiles the function for a call of this structure, once every layout has been checked."""
        function, in_shardings = self._function(call), self._in_shardings(call)
        trace = jax.jit(function).trace(*leaves)
        check_constraints(trace.jaxpr, self.mesh)
        (result,) = trace.out_info
        _check_lengths(self._out_specs, result)
        plan = Plan(result, self._out_specs, self.mesh)
        key = (call.key, jax.tree_util.tree_structure(result))
        if key not in self._variants:
            layouts = {'in_shardings': tuple(in_shardings), 'donate_argnums': self._donated_leaves(call)}
            jitted = jax.jit(function, out_shardings=(plan.shardings,), **({} if call.traced else layouts))
            self._variants[key] = _Variant(jitted, in_shardings, plan.shardings, self.mesh)
        return self._variants[key]

    def _function(self, call: '_Call') -> Callable[..., Any]:
        """Returns the function as one of the leaves of its arguments; the same one for each structure."""
        if call.key in self._functions:
            return self._functions[call.key]
        structure, statics = call.structure, call.statics
        # Under grad, vmap or an outer jit the leaves' own layouts are out of sight: they are constrained, not declared.
        constraints = self._in_shardings(call) if call.traced else [None] * len(call.leaves)

        def flat(*leaves: Any) -> Any:
            if not getattr(self._preparing, 'now', False):
                raise _NotPrepared
            leaves = map(_constrained, leaves, constraints)
            args, kwargs = jax.tree_util.tree_unflatten(structure, leaves)
            with self._scope():
                return (self.fn(*_with_statics(args, statics), **kwargs),)

        flat.__name__ = _name_of(self.fn)
        self._functions[call.key] = flat
        return flat

    def _in_order(self, count: int, names: tuple[str, ...]) -> Callable[..., Any]:
        """Returns the function with all its arguments by position, `count` of them and then those named."""

        def in_order(*values: Any) -> Any:
            with self._scope():
                return self.fn(*values[:count], **dict(zip(names, values[count:], strict=True)))

        in_order.__name__ = _name_of(self.fn)
        if not names:
            with contextlib.suppress(TypeError, ValueError):
                in_order.__signature__ = inspect.signature(self.fn)
        return in_order

    def _in_shardings(self, call: '_Call') -> list[Any]:
        """Returns a sharding for each leaf; None for those of keyword arguments, which may lie as they do."""
        positional, named = jax.tree_util.tree_unflatten(call.structure, call.leaves)
        names = self._names(call, len(positional))
        arguments = collections.OrderedDict(zip(names, positional, strict=True))
        plan = Plan(arguments, _for_arguments(self._in_specs, arguments), self.mesh)
        return [*jax.tree_util.tree_leaves(plan.shardings), *[None] * len(jax.tree_util.tree_leaves(named))]

    def _names(self, call: '_Call', count: int) -> list[str]:
        """Names the arguments that are not static, as the function does."""
        statics = dict(call.statics)
        places = [i for i in range(count + len(statics)) if i not in statics]
        return [self._parameters[i] if i < len(self._parameters) else str(i) for i in places]

    def _display(self, call: '_Call') -> Any:
        """Puts the leaves under the names of their arguments, in their own order, for an error."""
        positional, named = jax.tree_util.tree_unflatten(call.structure, call.leaves)
        names = self._names(call, len(positional))
        return collections.OrderedDict([*zip(names, positional, strict=True), *named.items()])

    def _donated_leaves(self, call: '_Call') -> tuple[int, ...]:
        children = call.structure.children()[0].children()
        total = len(children) + len(call.statics)
        donated = _from_the_front(self._donated, total)
        leaf, indices = 0, []
        for position, child in zip((i for i in range(total) if i not in dict(call.statics)), children, strict=True):
            if position in donated:
                indices += range(leaf, leaf + child.num_leaves)
            leaf += child.num_leaves
        return tuple(indices)

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        with jax.sharding.use_abstract_mesh(_abstract_mesh(self.mesh)), constraint_rules(self.rules):
            yield

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Lets the function be traced: whatever is traced outside has not been checked."""
        outer, self._preparing.now = getattr(self._preparing, 'now', False), True
        try:
            yield
        finally:
            self._preparing.now = outer


class CompiledProgram:
    """A program compiled for one set of shapes: as jax.stages.Compiled, but it refuses inputs that were donated.

    Static arguments are compiled in, and are not given again.
    """

    def __init__(self, compiled: jax.stages.Compiled, structure: Any, donated_leaves: Sequence[int], mesh: Mesh):
        self._compiled, self._structure = compiled, structure
        self._donated_leaves, self._mesh = donated_leaves, mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program on inputs of the structure, shapes and layouts that it was compiled for."""
        leaves, structure = jax.tree_util.tree_flatten((args, kwargs))
        if structure != self._structure:
            raise PlanError(
                f'Cannot run a program compiled for arguments of the structure {self._structure} on {structure}. '
                'Give it the same containers, or call the program that is not compiled ahead.'
            )
        if any_dead(leaves):
            check_alive(args, 'run on')
        if self._donated_leaves and len(set(map(id, leaves))) < len(leaves):
            check_given_once(args, self._donated_leaves)
        if any_elsewhere(leaves, flat_devices(self._mesh)):
            check_here(args, self._mesh)
        return self._compiled(*leaves)[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


class _NotPrepared(ValueError):
    """Raised where a function would be traced for shapes whose layouts have not been checked."""


class _Call(NamedTuple):
    """Arguments taken apart: leaves and structure of (positional, keyword) ones, and (position, static value) pairs."""

    leaves: list[Any]
    structure: Any
    statics: tuple[tuple[int, Any], ...]

    @property
    def traced(self) -> bool:
        return any_tracer(self.leaves)

    @property
    def key(self) -> Any:
        # 1, 1.0 and True are equal, and make different programs.
        return (self.structure, self.traced, tuple((i, type(value), value) for i, value in self.statics))


@dataclasses.dataclass
class _Variant:
    """A program compiled for calls of one structure.

    Attributes:
      wary: whether it has met arrays on another mesh of the same sizes; then every call looks where its arrays are.
    """

    jitted: Any
    in_shardings: list[Any]
    out_shardings: Any
    mesh: Mesh
    wary: bool = False

    def run(self, leaves: list[Any]) -> Any:
        known = self.jitted._cache_size()
        result = self.jitted(*leaves)[0]
        # Only what JAX keeps for its quick path, layouts of arguments that are new to it, can be wrong the next time.
        if self.jitted._cache_size() > known and not any_tracer(leaves):
            self.wary = self.wary or any_elsewhere(leaves, flat_devices(self.mesh))
        return result


def _with_statics(args: Sequence[Any], statics: Sequence[tuple[int, Any]]) -> list[Any]:
    args = list(args)
    for position, value in statics:
        args.insert(position, value)
    return args


def _constrained(leaf: Any, sharding: Any) -> Any:
    return leaf if sharding is None else jax.lax.with_sharding_constraint(leaf, sharding)


def _abstract(leaf: Any) -> Any:
    """Stands for an array that may lie anywhere, where only its shape is asked for."""
    if not hasattr(leaf, 'shape') or isinstance(leaf, jax.core.Tracer):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, 'weak_type', False))


def _abstract_mesh(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def _parameter_names(fn: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # Some builtins have no signature.
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _from_the_front(positions: Iterable[int], count: int) -> set[int]:
    """Counts negative positions from the front; leaves out those of arguments that are not given."""
    return {i + count if i < 0 else i for i in positions if -count <= i < count}


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, '__name__', type(fn).__name__)


def _for_arguments(specs: Any, arguments: collections.OrderedDict[str, Any]) -> Any:
    """Names specs like their arguments; those of arguments that hold no arrays, or are not given, are dropped."""
    if is_spec_leaf(specs):
        return specs
    if type(specs) not in (tuple, list):
        specs = (specs,)
    if len(specs) < len(arguments):
        raise PlanError(
            f'Cannot lay out {len(arguments)} arguments ({", ".join(arguments)}) by {len(specs)} specs. '
            'Give one spec, or None, for each argument.'
        )
    return collections.OrderedDict(
        (name, spec if jax.tree_util.tree_leaves(argument) else None)
        for (name, argument), spec in zip(arguments.items(), specs, strict=False)
    )


def _check_lengths(specs: Any, result: Any) -> None:
    if type(specs) is tuple and type(result) is tuple and len(specs) != len(result):
        raise PlanError(
            f'Cannot lay out a result of {len(result)} parts by {len(specs)} specs. '
            'Give one spec, or None, for each part.'
        )
