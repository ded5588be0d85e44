"""Programs: functions compiled with a layout for what goes in and what comes out.

Specs become shardings at this boundary. While the function is traced, the mesh is in scope as an abstract mesh together
with the logical axis rules, so that sharding constraints inside it are real, also under grad, vmap and an outer jit.
"""

import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from t5x_pjit_recipes.errors import PlanError, offenders
from t5x_pjit_recipes.layout.axes import constraint_rules, spec_axes
from t5x_pjit_recipes.layout.meshes import check_auto, describe_sizes
from t5x_pjit_recipes.layout.placement import any_dead, check_alive, check_given_once, place_leaves
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
        self.fn, self.mesh, self.rules = fn, mesh, tuple(rules)
        self._in_specs, self._out_specs = in_specs, out_specs
        self._static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
        self._donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
        self._parameters = _parameter_names(fn)
        self._current: dict[Any, _Variant] = {}
        self._variants: dict[Any, _Variant] = {}
        self._traced: dict[Any, Callable[..., Any]] = {}
        self._preparing = threading.local()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function.

        Raises:
          PlanError: if an input or output cannot lie as its spec says, or a constraint inside cannot be kept.
          PlacementError: if an input was donated to an earlier call, or is to be donated and is given twice.
        """
        call = self._bind(args, kwargs)
        if any_dead(call.leaves):
            check_alive((args, kwargs), 'run on')
        if self._donated and len(set(map(id, call.leaves))) < len(call.leaves):
            check_given_once((args, kwargs))
        variant = self._current.get(call.key)
        if variant is not None:
            try:
                return variant.run(call.leaves)
            except ValueError:
                pass  # Inputs that lie otherwise, or have new shapes; preparing anew tells these from real faults.
        with self._tracing():
            leaves = place_leaves(call.leaves, self._in_shardings(call))
            self._current[call.key] = variant = self._variant(call, leaves)
            return variant.run(leaves)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the function for these arguments, which may be ShapeDtypeStructs, without running it.

        What is compiled from it takes the arguments in this order, by position.
        """
        args, kwargs = self._by_position(args, kwargs)
        call = self._bind(args, kwargs)
        with self._tracing():
            variant = self._variant(call, call.leaves)
            positional, named = jax.tree_util.tree_unflatten(call.structure, self._in_shardings(call))

            def in_order(*values: Any) -> Any:
                with self._scope():
                    return self.fn(*values[: len(args)], **dict(zip(named, values[len(args) :], strict=True)))

            in_order.__name__ = _name_of(self.fn)
            return jax.jit(
                in_order,
                in_shardings=(*positional, *named.values()),
                out_shardings=variant.out_shardings,
                static_argnums=self._static,
                donate_argnums=self._donated,
            ).lower(*args, *kwargs.values())

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the shapes of the result, without compiling or running anything."""
        call = self._bind(args, kwargs)
        with self._tracing():
            trace = jax.jit(self._flat_function(call)).trace(*call.leaves)
        return trace.out_info[0]

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
        """Makes positional what was given by keyword and has a spec by position."""
        named = dict(kwargs)
        for name in self._parameters[len(args) :]:
            if name not in named or not self._has_spec(len(args)):
                break
            args = (*args, named.pop(name))
        return args, named

    def _has_spec(self, position: int) -> bool:
        dynamic = position - sum(i < position for i in self._static)
        return not isinstance(self._in_specs, tuple | list) or dynamic < len(self._in_specs)

    def _in_shardings(self, call: '_Call') -> list[Any]:
        """Returns a sharding for each leaf; None for those of keyword arguments, which may lie as they do."""
        positional, named = jax.tree_util.tree_unflatten(call.structure, call.leaves)
        plan = Plan(positional, _for_arguments(self._in_specs, positional), self.mesh)
        plan.check()
        return [*jax.tree_util.tree_leaves(plan.shardings), *[None] * len(jax.tree_util.tree_leaves(named))]

    def _variant(self, call: '_Call', leaves: list[Any]) -> '_Variant':
        """Compiles the function for a call of this structure, once every layout has been checked."""
        function = self._flat_function(call)
        trace = jax.jit(function).trace(*leaves)
        check_constraints(trace.jaxpr, self.mesh)
        plan = Plan(trace.out_info[0], self._out_specs, self.mesh)
        plan.check()
        out_tree = jax.tree_util.tree_structure(trace.out_info[0])
        if (call.key, out_tree) not in self._variants:
            jitted = jax.jit(
                function,
                in_shardings=tuple(self._in_shardings(call)),
                out_shardings=(plan.shardings,),
                donate_argnums=self._donated_leaves(call),
            )
            self._variants[call.key, out_tree] = _Variant(jitted, plan.shardings)
        return self._variants[call.key, out_tree]

    def _flat_function(self, call: '_Call') -> Callable[..., Any]:
        """Returns the function as one of the leaves of its arguments; the same one for each structure."""

        def flat(*leaves: Any) -> Any:
            if not getattr(self._preparing, 'now', False):
                raise _NotPrepared
            args, kwargs = jax.tree_util.tree_unflatten(call.structure, leaves)
            args = list(args)
            for position, value in call.statics:
                args.insert(position, value)
            with self._scope():
                return (self.fn(*args, **kwargs),)

        flat.__name__ = _name_of(self.fn)
        return self._traced.setdefault(call.key, flat)

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
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh), constraint_rules(self.rules):
            yield

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Lets the function be traced: whatever is traced outside has not been checked."""
        outer, self._preparing.now = getattr(self._preparing, 'now', False), True
        try:
            yield
        finally:
            self._preparing.now = outer


class _NotPrepared(ValueError):
    """Raised where a function would be traced for shapes whose layouts have not been checked."""


class _Call(NamedTuple):
    """Arguments taken apart: leaves and structure of (positional, keyword) ones, and (position, static value) pairs."""

    leaves: list[Any]
    structure: Any
    statics: tuple[tuple[int, Any], ...]

    @property
    def key(self) -> Any:
        return (self.structure, self.statics) if self.statics else self.structure


class _Variant(NamedTuple):
    """A program compiled for calls of one structure."""

    jitted: Any
    out_shardings: Any

    def run(self, leaves: list[Any]) -> Any:
        return self.jitted(*leaves)[0]


def _parameter_names(fn: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # Some builtins have no signature.
        return []
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def _from_the_front(positions: Iterable[int], count: int) -> set[int]:
    """Counts negative positions from the front; leaves out those of arguments that are not given."""
    return {i + count if i < 0 else i for i in positions if -count <= i < count}


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, '__name__', type(fn).__name__)


def _for_arguments(specs: Any, arguments: tuple[Any, ...]) -> Any:
    """Drops specs of arguments that hold no arrays, which may be given all the same."""
    if not isinstance(specs, tuple | list) or len(specs) != len(arguments):
        return specs
    return tuple(s if jax.tree_util.tree_leaves(a) else None for s, a in zip(specs, arguments, strict=True))


def check_constraints(jaxpr: Any, mesh: Mesh) -> None:
    """Raises PlanError for sharding constraints whose mesh axes do not divide the dims; JAX may drop these in silence.

    Args:
      jaxpr: a traced function's jaxpr, closed or not; functions called within it are looked into.
      mesh: the mesh that the constraints speak of.
    """
    faults = list(dict.fromkeys(_constraint_faults(jaxpr, dict(mesh.shape))))
    if faults:
        raise PlanError(
            f'Cannot keep {len(faults)} sharding constraints on mesh {describe_sizes(dict(mesh.shape))}: their axes do '
            f'not divide the dims. Change the rules or the sizes:\n{offenders(faults)}'
        )


def _constraint_faults(jaxpr: Any, sizes: dict[str, int]) -> Iterable[str]:
    for equation in getattr(jaxpr, 'jaxpr', jaxpr).eqns:
        if equation.primitive.name == 'sharding_constraint':
            spec = getattr(equation.params['sharding'], 'spec', None)
            yield from _uneven(equation.invars[0].aval, spec, sizes)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, 'eqns') or hasattr(inner, 'jaxpr'):
                    yield from _constraint_faults(inner, sizes)


def _uneven(aval: Any, spec: Any, sizes: dict[str, int]) -> Iterable[str]:
    for dim, (size, entry) in enumerate(zip(aval.shape, tuple(spec or ()), strict=False)):
        axes = () if entry is PartitionSpec.UNCONSTRAINED else spec_axes(entry)
        ways = math.prod(sizes.get(axis, 1) for axis in axes)
        if size % ways:
            fit = -(-size // ways) * ways
            yield f'array {aval.shape}: dim {dim} is {size}, which {axes} splits {ways} ways; {fit} would fit'
