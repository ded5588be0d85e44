"""Programs: functions compiled with a layout for what goes in and what comes out.

Specs become shardings at this boundary. While the function is traced, the mesh is in scope as an abstract mesh together
with the logical axis rules, so that sharding constraints inside it are real, also under grad, vmap and an outer jit.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from t5x_pjit_recipes.errors import PlanError, offenders
from t5x_pjit_recipes.layout.axes import constraint_rules, spec_axes
from t5x_pjit_recipes.layout.meshes import check_auto, describe_sizes
from t5x_pjit_recipes.layout.placement import check_alive, is_dead, lies_as, place_leaves, to_shardings
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
        self._variants: dict[Any, Any] = {}
        self._latest: dict[tuple[str, ...], Any] = {}
        self._just_traced = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function.

        Raises:
          PlanError: if an input or output cannot lie as its spec says, or a constraint inside cannot be kept.
          PlacementError: if an input was donated to an earlier call.
        """
        if any(map(is_dead, jax.tree_util.tree_leaves((args, kwargs)))):
            check_alive((args, kwargs), 'run on')
        flat = (*args, *kwargs.values())
        jitted = self._latest.get(tuple(kwargs))
        if jitted is not None:
            try:
                return self._checked(jitted, flat, jitted(*flat))
            except ValueError:
                pass  # Inputs that lie otherwise or have other containers; the prepared call tells these from real faults.
        return self._call_prepared(flat, tuple(kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the function for these arguments, which may be ShapeDtypeStructs, without running it."""
        flat = (*args, *kwargs.values())
        jitted = self._with_outputs_matched(self._variant(flat, tuple(kwargs)), flat, lambda f: f.lower(*flat))
        check_constraints(jitted.trace(*flat).jaxpr, self.mesh)
        return jitted.lower(*flat)

    def _call_prepared(self, flat: tuple[Any, ...], keywords: tuple[str, ...]) -> Any:
        variant = self._variant(flat, keywords)
        flat = self._placed(flat, keywords)
        results = []
        jitted = self._with_outputs_matched(variant, flat, lambda f: results.append(f(*flat)))
        self._latest[keywords] = jitted
        return self._checked(jitted, flat, results[-1])

    def _checked(self, jitted: Any, flat: tuple[Any, ...], result: Any) -> Any:
        if self._just_traced:
            self._just_traced = False
            check_constraints(jitted.trace(*_shapes(flat, self._static)).jaxpr, self.mesh)
        return result

    def _with_outputs_matched(self, variant: Any, flat: tuple[Any, ...], use: Callable[[Any], Any]) -> Any:
        """Uses a compiled variant; where its out specs are made of other containers than the result, mends them."""
        key, jitted = variant
        try:
            use(jitted)
            return jitted
        except ValueError as error:
            results = jax.eval_shape(self._traced(key[1]), *flat) if not self._static else None
            if results is None:
                raise
            plan = Plan(results, self._out_specs, self.mesh)
            plan.check()
            matched = self._jit(key[1], self._in_shardings(flat, key[1]), plan.shardings)
            if jax.tree_util.tree_structure(plan.shardings) == jax.tree_util.tree_structure(
                to_shardings(self._out_specs, self.mesh)
            ):
                raise error
            use(matched)
            self._variants[key] = matched
            return matched

    def _variant(self, flat: tuple[Any, ...], keywords: tuple[str, ...]) -> tuple[Any, Any]:
        """Returns the compiled function for arguments of this structure, with its key."""
        key = (jax.tree_util.tree_structure(self._dynamic(flat)), keywords)
        if key not in self._variants:
            shardings = self._in_shardings(flat, keywords)
            self._variants[key] = self._jit(keywords, shardings, to_shardings(self._out_specs, self.mesh))
        return key, self._variants[key]

    def _jit(self, keywords: tuple[str, ...], in_shardings: Any, out_shardings: Any) -> Any:
        return jax.jit(
            self._traced(keywords),
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            static_argnums=self._static,
            donate_argnums=self._donated,
        )

    def _traced(self, keywords: tuple[str, ...]) -> Callable[..., Any]:
        def traced(*flat: Any) -> Any:
            self._just_traced = True
            count = len(flat) - len(keywords)
            named = dict(zip(keywords, flat[count:], strict=True))
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh), constraint_rules(self.rules):
                return self.fn(*flat[:count], **named)

        traced.__name__ = getattr(self.fn, '__name__', type(self.fn).__name__)
        return traced

    def _dynamic(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        static = {i % len(flat) for i in self._static if flat}
        return tuple(arg for i, arg in enumerate(flat) if i not in static)

    def _in_shardings(self, flat: tuple[Any, ...], keywords: tuple[str, ...]) -> tuple[Any, ...]:
        """Returns shardings like the arguments; those of keyword arguments are left to the compiler."""
        positional = self._dynamic(flat[: len(flat) - len(keywords)])
        plan = Plan(positional, _for_arguments(self._in_specs, positional), self.mesh)
        return (*plan.shardings, *[None] * len(keywords))

    def _placed(self, flat: tuple[Any, ...], keywords: tuple[str, ...]) -> tuple[Any, ...]:
        positional = self._dynamic(flat[: len(flat) - len(keywords)])
        leaves, treedef = jax.tree_util.tree_flatten(positional)
        shardings = jax.tree_util.tree_leaves(self._in_shardings(flat, keywords)[: len(positional)])
        if all(map(lies_as, leaves, shardings)):
            return flat
        moved = iter(jax.tree_util.tree_unflatten(treedef, place_leaves(leaves, shardings)))
        static = {i % len(flat) for i in self._static}
        count = len(flat) - len(keywords)
        return tuple(arg if i in static or i >= count else next(moved) for i, arg in enumerate(flat))


def _for_arguments(specs: Any, arguments: tuple[Any, ...]) -> Any:
    """Drops specs of arguments that hold no arrays, which may be given all the same."""
    if not isinstance(specs, tuple | list) or len(specs) != len(arguments):
        return specs
    return tuple(s if jax.tree_util.tree_leaves(a) else None for s, a in zip(specs, arguments, strict=True))


def _shapes(flat: tuple[Any, ...], static: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns the arguments with shapes in place of arrays, which may have been donated since."""
    statics = {i % len(flat) for i in static if flat}
    return tuple(
        arg
        if i in statics
        else jax.tree.map(lambda x: jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.dtypes.result_type(x)), arg)
        for i, arg in enumerate(flat)
    )


def check_constraints(jaxpr: Any, mesh: Mesh) -> None:
    """Raises PlanError for sharding constraints whose mesh axes do not divide the dims; JAX may drop these in silence.

    Args:
      jaxpr: a traced function's jaxpr, closed or not; functions called within it are looked into.
      mesh: the mesh that the constraints speak of.
    """
    faults = list(dict.fromkeys(_constraint_faults(jaxpr, dict(mesh.shape))))
    if faults:
        raise PlanError(
            f'Cannot keep {len(faults)} sharding constraints on mesh {describe_sizes(dict(mesh.shape))}: their mesh axes '
            f'do not divide the dims. Change the rules or the sizes:\n{offenders(faults)}'
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
    entries = [e for e in (spec or ())]
    for dim, (size, entry) in enumerate(zip(aval.shape, entries, strict=False)):
        axes = () if entry is PartitionSpec.UNCONSTRAINED else spec_axes(entry)
        ways = math.prod(sizes.get(axis, 1) for axis in axes)
        if size % ways:
            fit = -(-size // ways) * ways
            yield f'an array of shape {aval.shape}: dim {dim} is {size}, which {axes} splits {ways} ways; {fit} would fit'
