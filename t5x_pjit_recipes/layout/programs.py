"""Programs: functions compiled with a layout for what goes in and what comes out.

Specs become shardings at this boundary. While the function is traced, the mesh is in scope as an abstract mesh together
with the logical axis rules, so that sharding constraints inside it are real, also under grad, vmap and an outer jit.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from t5x_pjit_recipes.errors import PlanError, offenders
from t5x_pjit_recipes.layout.axes import constraint_rules, spec_axes
from t5x_pjit_recipes.layout.meshes import check_auto, describe_sizes
from t5x_pjit_recipes.layout.placement import check_alive, check_given_once, is_dead, place_leaves
from t5x_pjit_recipes.layout.plan import Plan


class Program:
    """A function with layouts for its inputs and outputs, compiled when it is first called.

    Inputs may be anything, anywhere: what lies otherwise is moved, what lies right costs nothing. Dicts and FrozenDicts
    may be mixed in inputs and specs.

    Args:
      fn: the function; also a bound method or a partial.
      mesh: the mesh of all specs.
      in_specs: specs of the positional arguments (static ones left out), as a tree or a prefix of one; None means
        replicated.
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
        self._wrapped: dict[tuple[str, ...], Callable[..., Any]] = {}
        self._variants: dict[Any, _Variant] = {}
        self._latest: dict[tuple[str, ...], _Variant] = {}
        self._just_traced = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function.

        Raises:
          PlanError: if an input or output cannot lie as its spec says, or a constraint inside cannot be kept.
          PlacementError: if an input was donated to an earlier call.
        """
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        if any(map(is_dead, leaves)):
            check_alive((args, kwargs), 'run on')
        if self._donated and len(set(map(id, leaves))) < len(leaves):
            check_given_once((args, kwargs))
        flat, keywords = self._flatten(args, kwargs)
        variant = self._latest.get(keywords)
        if variant is not None:
            try:
                result = variant.jitted(*flat)
                if self._just_traced:
                    self._examine(variant, jax.tree.map(_abstract, flat))
                return result
            except ValueError:
                pass  # Inputs that lie otherwise or have other containers; preparing anew tells these from real faults.
        flat = self._placed(flat, keywords)
        self._latest[keywords] = variant = self._variant(flat, keywords)
        return variant.jitted(*flat)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the function for these arguments, which may be ShapeDtypeStructs, without running it."""
        flat, keywords = self._flatten(args, kwargs)
        return self._variant(flat, keywords).jitted.lower(*flat)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the shapes of the result, without compiling or running anything."""
        flat, keywords = self._flatten(args, kwargs)
        return jax.jit(self._traced(keywords), static_argnums=self._static).eval_shape(*flat)

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """Makes positional what has a spec by position; returns all values, and the names of the other keywords."""
        if not kwargs:
            return args, ()
        named = dict(kwargs)
        for name in self._parameters[len(args) :]:
            if name not in named or not self._has_spec(len(args)):
                break
            args = (*args, named.pop(name))
        return (*args, *named.values()), tuple(named)

    def _has_spec(self, position: int) -> bool:
        dynamic = position - sum(i < position for i in self._static)
        return not isinstance(self._in_specs, tuple | list) or dynamic < len(self._in_specs)

    def _variant(self, flat: tuple[Any, ...], keywords: tuple[str, ...]) -> '_Variant':
        """Compiles the function for arguments of this structure, once every layout has been checked."""
        inputs = self._in_plan(flat, keywords).shardings
        traced = self._traced(keywords)
        probe = jax.jit(traced, static_argnums=self._static)
        trace = probe.trace(*flat)
        check_constraints(trace.jaxpr, self.mesh)
        outputs = Plan(trace.out_info, self._out_specs, self.mesh).shardings
        key = (keywords, *map(jax.tree_util.tree_structure, (inputs, outputs)))
        if key not in self._variants:
            jitted = jax.jit(
                traced,
                in_shardings=(*inputs, *[None] * len(keywords)),
                out_shardings=outputs,
                static_argnums=self._static,
                donate_argnums=self._donated,
            )
            self._variants[key] = _Variant(jitted, probe)
        self._just_traced = False
        return self._variants[key]

    def _examine(self, variant: '_Variant', shapes: tuple[Any, ...]) -> None:
        """Checks the constraints of a variant that was traced anew, for inputs of other shapes."""
        check_constraints(variant.probe.trace(*shapes).jaxpr, self.mesh)
        self._just_traced = False

    def _traced(self, keywords: tuple[str, ...]) -> Callable[..., Any]:
        def traced(*flat: Any) -> Any:
            self._just_traced = True
            count = len(flat) - len(keywords)
            named = dict(zip(keywords, flat[count:], strict=True))
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh), constraint_rules(self.rules):
                return self.fn(*flat[:count], **named)

        traced.__name__ = getattr(self.fn, '__name__', type(self.fn).__name__)
        return self._wrapped.setdefault(keywords, traced)

    def _split(self, flat: tuple[Any, ...], keywords: tuple[str, ...]) -> list[int]:
        """Lists the positions of the arguments that have a layout: neither static nor given by keyword."""
        static = {i % len(flat) for i in self._static if flat}
        return [i for i in range(len(flat) - len(keywords)) if i not in static]

    def _in_plan(self, flat: tuple[Any, ...], keywords: tuple[str, ...]) -> Plan:
        arguments = tuple(flat[i] for i in self._split(flat, keywords))
        return Plan(arguments, _for_arguments(self._in_specs, arguments), self.mesh)

    def _placed(self, flat: tuple[Any, ...], keywords: tuple[str, ...]) -> tuple[Any, ...]:
        plan = self._in_plan(flat, keywords)
        leaves, treedef = jax.tree_util.tree_flatten(plan.shapes)
        shardings = jax.tree_util.tree_leaves(plan.shardings)
        placed = jax.tree_util.tree_unflatten(treedef, place_leaves(leaves, shardings))
        at = dict(zip(self._split(flat, keywords), placed, strict=True))
        return tuple(at.get(i, arg) for i, arg in enumerate(flat))


class _Variant(NamedTuple):
    """A program compiled for arguments of one structure, and the same without layouts, to look into its trace."""

    jitted: Any
    probe: Any


def _parameter_names(fn: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # Some builtins have no signature.
        return []
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def _abstract(leaf: Any) -> Any:
    """Stands in for an array that may have been donated since; anything else is itself."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, 'shape') else leaf


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
