"""Prints what each device will hold: `python -m t5x_pjit_recipes.plan --gin_file=... --mesh=data=64,model=64`.

Nothing is trained or placed. `--json` prints data, `--figure=plan.png` draws a picture as well.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from t5x_pjit_recipes import figures, planning, reports
from t5x_pjit_recipes.layout import Plan, describe_mesh


def main(argv: Sequence[str]) -> None:
    """Plans the run that the flags describe."""
    del argv
    run = planning.run_of_flags()
    parts = run.parts(with_rules=flags.FLAGS.json)
    for plan in parts.values():
        plan.check()
    if flags.FLAGS.json:
        planning.print_json(describe(parts))
    else:
        print(reports.describe_parts(parts, width=planning.width()))
        if savings := reports.describe_savings(run.state, run.partitioner):
            print(savings)
    if flags.FLAGS.figure:
        figures.save_parts(parts, flags.FLAGS.figure)


def describe(parts: Mapping[str, Plan]) -> dict[str, Any]:
    """Returns the plans of a state's parts as data; its arrays are the parameters."""
    params = parts['params']
    return {
        'mesh': dict(params.mesh.shape),
        'description': describe_mesh(params.mesh),
        'bytes_per_device': {title: plan.bytes_per_device for title, plan in parts.items()},
        'replicated_bytes': {title: sum(row.num_bytes for row in plan.replicated) for title, plan in parts.items()},
        'arrays': params.rows,
    }


if __name__ == '__main__':
    flags.DEFINE_string('figure', None, 'A file, such as plan.png, to draw what each device holds into.')
    planning.run_command(main)
