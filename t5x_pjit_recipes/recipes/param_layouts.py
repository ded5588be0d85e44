"""What may say how parameters lie: rules on their names, specs, or logical axes; all are read here, into one plan."""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from t5x_pjit_recipes.errors import PlanError, RuleError, offenders
from t5x_pjit_recipes.layout.axes import AxisMetadata, AxisNames, is_axes_leaf, is_spec_leaf, specs_by_name
from t5x_pjit_recipes.layout.explain import Derivation
from t5x_pjit_recipes.layout.logical_rules import LogicalRules
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.layout.plan import Plan
from t5x_pjit_recipes.layout.regex_rules import RegexRules
from t5x_pjit_recipes.param_axes import names_like

# RegexRules; a list of (pattern, target) pairs; a tree of PartitionSpecs or a prefix of one; a tree of logical axes.
RulesOrSpecs = RegexRules | Sequence[tuple[Any, Any]] | Mapping[str, Any] | Any


def plan_params(partitioner: Any, params: Any, rules_or_specs: RulesOrSpecs = None) -> Plan:
    """Plans how parameters lie on a partitioner's mesh, by whatever says it; nothing is moved.

    Args:
      partitioner: has the mesh, and the rules from logical axes to mesh axes.
      params: a tree of arrays, or of anything with shapes.
      rules_or_specs: `layout.RegexRules`; or a list of (pattern, target) pairs, as they take; or a tree of
        PartitionSpecs like `params`, a prefix of one, or one for all (None means replicated); or a tree of logical axes
        like `params` (AxisMetadata, AxisNames or tuples of names). None means the partitioner's own `param_rules`.

    Raises:
      RuleError: if nothing says how they lie, or two say it; as `RegexRules.specs` raises; or for axes without a rule.
      StateError: naming each array that has not one logical axis for each dim.
      PlanError: if a tree of specs has arrays without a spec, or specs without an array. Specs that do not fit shapes
        are the plan's faults, which its `check` raises.
    """
    given = read_layout(partitioner, params, rules_or_specs)
    logical_rules = LogicalRules(partitioner.logical_axis_rules)
    if isinstance(given, RegexRules):
        specs, derivation = given.specs(params, logical_rules), Derivation(logical_rules, regex_rules=given)
    else:
        if unknown := logical_rules.describe_unknown(given):
            raise RuleError(unknown)
        specs, derivation = logical_rules.specs(given), Derivation(logical_rules, given)
    return Plan(params, specs, partitioner.mesh, rules=derivation)


def read_layout(partitioner: Any, params: Any, rules_or_specs: RulesOrSpecs) -> Any:
    """Reads what says how parameters lie, as `plan_params` takes it: RegexRules, or AxisMetadata for each array."""
    if rules_or_specs is None:
        if partitioner.param_rules is None:
            raise RuleError(
                f'Cannot lay out {len(named_leaves(params))} arrays: no rules or specs were given, and the partitioner '
                'has no param_rules. Give layout.RegexRules, a list of (pattern, PartitionSpec) pairs, a tree of '
                'PartitionSpecs or one of AxisMetadata; layout.suggest proposes rules.'
            )
        return partitioner.param_rules
    if partitioner.param_rules not in (None, rules_or_specs):
        raise RuleError(
            f'Cannot lay out {len(named_leaves(params))} arrays by two sets of rules: the partitioner has '
            f'{len(partitioner.param_rules)} param_rules, and {_kind(rules_or_specs)} was given besides. Give one.'
        )
    if isinstance(rules_or_specs, RegexRules):
        return rules_or_specs
    if _are_pairs(rules_or_specs):
        return RegexRules(rules_or_specs)
    if _are_axes(rules_or_specs):
        return _metadata(names_like(params, rules_or_specs))
    specs = specs_by_name(rules_or_specs, params)
    return RegexRules([(re.escape(name), spec) for name, spec in specs.items()])


def ruled_by(partitioner: Any, rules: RegexRules) -> Any:
    """Returns a partitioner on the same mesh that lays out parameters by `rules`; the one given stays as it is."""
    if partitioner.param_rules is rules:
        return partitioner
    rules.check_mesh(partitioner.mesh.axis_names)  # Asking for the mesh builds it, so that the copy shares it.
    ruled = copy.copy(partitioner)
    ruled._param_rules = rules
    return ruled


def _kind(rules_or_specs: Any) -> str:
    if isinstance(rules_or_specs, RegexRules) or _are_pairs(rules_or_specs):
        return f'a list of {len(rules_or_specs)} rules'
    return 'a tree of logical axes' if _are_axes(rules_or_specs) else 'a tree of specs'


def _are_pairs(given: Any) -> bool:
    """Tells a list of rules from a list of specs: a rule begins with a pattern."""
    return type(given) in (list, tuple) and any(
        type(rule) in (list, tuple) and len(rule) > 0 and type(rule[0]) in (str, tuple) for rule in given
    )


def _are_axes(given: Any) -> bool:
    """Tells whether the leaves of a tree name logical axes, and not mesh axes.

    Raises:
      PlanError: if some do and others do not.
    """
    named = named_leaves(given, is_leaf=lambda x: is_axes_leaf(x) or is_spec_leaf(x))
    axes = [name for name, leaf in named.items() if isinstance(leaf, AxisMetadata | AxisNames) or _is_names(leaf)]
    specs = [name for name, leaf in named.items() if leaf is not None and is_spec_leaf(leaf)]
    if axes and specs:
        lines = [f'{name}: {"logical" if name in axes else "mesh"} axes, {named[name]!r}' for name in (*axes, *specs)]
        raise PlanError(
            f'Cannot read a tree of which {len(axes)} leaves name logical axes and {len(specs)} are specs of mesh '
            f'axes. Spell all of them in one way:\n{offenders(sorted(lines))}'
        )
    return bool(axes)


def _is_names(leaf: Any) -> bool:
    return type(leaf) is tuple and len(leaf) > 0


def _metadata(names: Any) -> Any:
    return jax.tree.map(lambda spec: AxisMetadata(names=tuple(spec or ())), names, is_leaf=is_spec_leaf)


def is_shape(leaf: Any) -> bool:
    """Tells whether a leaf has a shape and no values."""
    return isinstance(leaf, jax.ShapeDtypeStruct)
