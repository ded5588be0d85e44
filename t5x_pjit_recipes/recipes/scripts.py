"""Recipes as commands: T5X's gin flags, emulated devices, and a function that gin gives its arguments."""

from collections.abc import Callable, Sequence
from typing import Any

from absl import flags, logging

from t5x_pjit_recipes import gin_utils, planning
from t5x_pjit_recipes.train import emulate_cpu_devices


def run(fn: Callable[..., Any]) -> None:
    """Runs a recipe's function with its settings from gin; an error of ours ends it with its message alone.

    The flags are `train`'s: --gin_file, --gin.NAME=VALUE, --gin_search_paths and --cpu_devices.

    Args:
      fn: what gin files name, all of whose required arguments they set; it prints what it has to say.
    """

    def main(argv: Sequence[str]) -> None:
        del argv
        logging.set_verbosity(logging.WARNING)
        given = flags.FLAGS
        if given.cpu_devices:
            emulate_cpu_devices(given.cpu_devices)
        with planning.ending_readably():
            gin_utils.parse_gin_flags(given.gin_search_paths, given.gin_file or (), given.gin_bindings)
            gin_utils.configured(fn)()

    gin_utils.define_flags()
    flags.DEFINE_integer('cpu_devices', None, 'How many CPU devices to emulate.', lower_bound=1)
    gin_utils.run(main)
