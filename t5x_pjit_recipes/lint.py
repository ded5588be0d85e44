"""Looks for faults in a run's rules: `python -m t5x_pjit_recipes.lint --gin_file=... --mesh=data=64,model=64`.

Rules by patterns are looked at, and logical axis rules by the names that parameters have. It ends with 1 where rules
cannot be used as they are.
"""

from collections.abc import Sequence
from typing import Any

from absl import flags

from t5x_pjit_recipes import planning
from t5x_pjit_recipes.layout import AxisNames, Finding, LogicalRules, RegexRules, lint
from t5x_pjit_recipes.layout.paths import named_leaves
from t5x_pjit_recipes.param_rules import own_axes


def main(argv: Sequence[str]) -> int:
    """Lints the rules of the run that the flags describe."""
    del argv
    findings = find(planning.run_of_flags())
    if flags.FLAGS.json:
        planning.print_json(findings)
    else:
        print('\n'.join(map(str, findings)) or 'nothing found')
    return int(any(finding.level == 'error' for finding in findings))


def find(run: planning.Run) -> tuple[Finding, ...]:
    """Lints both kinds of rules of a run."""
    logical = LogicalRules(run.partitioner.logical_axis_rules)
    rules: RegexRules | None = run.partitioner.param_rules
    axes: dict[str, Any] = {name: names for name, names in own_axes(run.state).items() if names is not None}
    findings: tuple[Finding, ...] = ()
    if rules is not None:
        unnamed = {name: leaf for name, leaf in named_leaves(run.state.params).items() if name not in axes}
        findings = lint(rules, unnamed, run.mesh, logical_rules=logical) if unnamed else ()
        axes |= {f'rule {n} {p!r}': t for n, (p, t) in enumerate(rules.rules, 1) if isinstance(t, AxisNames)}
    return findings + (lint(logical, axes, run.mesh) if axes else ())


if __name__ == '__main__':
    planning.run_command(main)
