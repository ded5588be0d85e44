"""Says why parameters lie as planned: `python -m t5x_pjit_recipes.explain --gin_file=... NAME ...`.

Names are those that `plan` prints, `*` included. Without a name it prints the plan with what decided each line.
"""

import fnmatch
from collections.abc import Sequence

from absl import flags

from t5x_pjit_recipes import planning
from t5x_pjit_recipes.layout import Plan, explain


def main(argv: Sequence[str]) -> None:
    """Explains the parameters that the arguments name."""
    plan = planning.run_of_flags().parts(with_rules=True)['params']
    explanations = [explain(find(name, plan), plan) for name in argv[1:]]
    if flags.FLAGS.json:
        planning.print_json(explanations or plan.rows)
    else:
        print('\n\n'.join(map(str, explanations)) or plan.table(planning.width()))


def find(name: str, plan: Plan) -> str:
    """Returns the first parameter that a name with `*` stands for, or the name as it is.

    >>> import numpy as np
    >>> from t5x_pjit_recipes.layout import abstract_mesh
    >>> find('layers_*/w', Plan({'layers_0': {'w': np.zeros(2)}}, None, abstract_mesh(data=1)))
    'layers_0/w'
    """
    return next((row.name for row in plan.rows if fnmatch.fnmatchcase(row.name, name)), name)


if __name__ == '__main__':
    planning.run_command(main)
