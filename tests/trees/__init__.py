"""Parameter trees of published models, by names and shapes alone, each as one library spells it.

Each JSON file maps names to shapes. Braces keep them short: `h/{0..11}/ln_{1,2}/scale` stands for 24 leaves. `flax_*`
are spelled as Hugging Face's Flax models are, `torch_*` as Hugging Face's checkpoints for PyTorch with `/` for `.`
(whose Linear layers are (out, in)), the others as the libraries do that their names name.
"""

import json
import math
import pathlib
import re

import jax
import numpy as np

FOLDER = pathlib.Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob('*.json'))
_BRACES = re.compile(r'\{([^{}]*)\}')


def load(name):
    """Returns a nested dict of ShapeDtypeStructs."""
    tree = {}
    for pattern, shape in json.loads((FOLDER / f'{name}.json').read_text(encoding='utf-8')).items():
        for leaf_name in expand(pattern):
            *above, last = leaf_name.split('/')
            at = tree
            for part in above:
                at = at.setdefault(part, {})
            at[last] = jax.ShapeDtypeStruct(tuple(shape), np.float32)
    return tree


def expand(pattern):
    """Lists the names that a pattern with braces stands for.

    >>> expand('h/{0..1}/{q,k}')
    ['h/0/q', 'h/0/k', 'h/1/q', 'h/1/k']
    """
    if (found := _BRACES.search(pattern)) is None:
        return [pattern]
    before, after = pattern[: found.start()], pattern[found.end() :]
    if '..' in found[1]:
        first, last = map(int, found[1].split('..'))
        choices = map(str, range(first, last + 1))
    else:
        choices = found[1].split(',')
    return [name for choice in choices for name in expand(f'{before}{choice}{after}')]


def num_parameters(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
