"""Compares two plans: `python -m t5x_pjit_recipes.diff --gin_file=RUN.gin --with_gin_file=OTHER.gin`.

The first plan is that of the gin files and settings; the second has those, and then what `--with_gin_file`,
`--with_gin.NAME=VALUE` and `--with_mesh` add to them or change.
"""

from collections.abc import Iterator, Mapping, Sequence

from absl import flags

from t5x_pjit_recipes import planning
from t5x_pjit_recipes.errors import ConfigError
from t5x_pjit_recipes.layout import Plan, diff
from t5x_pjit_recipes.layout.plan import format_bytes


def main(argv: Sequence[str]) -> None:
    """Lists the parameters that lie otherwise, and what a device holds of each part of the state."""
    del argv
    given = flags.FLAGS
    if not (given.with_gin_file or given.with_gin_bindings or given.with_mesh):
        raise ConfigError(
            'Cannot compare a plan with itself: nothing says what the other one has. Give --with_gin_file=FILE, '
            '--with_gin.NAME=VALUE or --with_mesh=data=32,model=4.'
        )
    before = planning.run_of_flags().parts()
    after = planning.load_run(
        [*(given.gin_file or ()), *(given.with_gin_file or ())],
        [*given.gin_bindings, *given.with_gin_bindings],
        given.gin_search_paths,
        given.with_mesh or given.mesh,
    ).parts()
    difference = diff(before['params'], after['params'])
    held = {title: [part.bytes_per_device for part in both] for title, *both in pairs(before, after)}
    if given.json:
        planning.print_json({'params': difference, 'bytes_per_device': held})
    else:
        print(difference.text(planning.width()), '', *map(line, held, held.values()), sep='\n')


def pairs(before: Mapping[str, Plan], after: Mapping[str, Plan]) -> Iterator[tuple[str, Plan, Plan]]:
    """Pairs the plans of the parts that either state has; a state without the part has an empty one."""
    for title in dict.fromkeys([*before, *after]):
        yield title, *(parts.get(title, Plan({}, {}, parts['params'].mesh)) for parts in (before, after))


def line(title: str, held: Sequence[int]) -> str:
    """Says how what a device holds of one part changes."""
    before, after = held
    return f'{title:<16}{format_bytes(before):>10} -> {format_bytes(after):>10} per device'


if __name__ == '__main__':
    flags.DEFINE_multi_string('with_gin_file', None, 'A gin file that the second plan has as well.')
    flags.DEFINE_multi_string('with_gin_bindings', [], 'A setting, "NAME = VALUE", that the second plan has as well.')
    flags.DEFINE_string('with_mesh', None, 'The mesh of the second plan, as --mesh.')
    planning.run_command(main)
