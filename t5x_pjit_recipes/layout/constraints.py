"""Sharding constraints inside a traced function: whether they can be kept, which JAX may not tell."""

import math
from collections.abc import Iterable
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from t5x_pjit_recipes.errors import PlanError, offenders
from t5x_pjit_recipes.layout.axes import spec_axes
from t5x_pjit_recipes.layout.meshes import describe_sizes


def check_constraints(jaxpr: Any, mesh: Mesh | AbstractMesh) -> None:
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
            sharding = equation.params['sharding']
            spec, mesh = getattr(sharding, 'spec', None), getattr(sharding, 'mesh', None)
            yield from _uneven(equation.invars[0].aval, spec, dict(mesh.shape) if mesh is not None else sizes)
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
