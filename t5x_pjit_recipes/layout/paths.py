"""One spelling of a leaf's name: `decoder/layers_0/mlp/wi/kernel`.

Every table, rule and error of this package names leaves as this module spells them.
"""

from collections.abc import Callable
from typing import Any

import jax

from t5x_pjit_recipes.errors import RecipeError, offenders

SEPARATOR = '/'


def leaf_name(path: tuple[Any, ...]) -> str:
    """Joins one of JAX's key paths into a name.

    >>> leaf_name((jax.tree_util.DictKey('mlp'), jax.tree_util.SequenceKey(0), jax.tree_util.GetAttrKey('mu')))
    'mlp/0/mu'
    """
    return SEPARATOR.join(_key_name(key) for key in path)


def _key_name(key: Any) -> str:
    for attribute in ('key', 'name', 'idx'):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def is_none(x: Any) -> bool:
    """Tells whether `x` is None; as `is_leaf` it makes None a leaf."""
    return x is None


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Maps each leaf's name to the leaf, in the tree's own order.

    Raises:
      RecipeError: if two leaves have one name, because a key has '/' in it.

    >>> named_leaves({'b': {'c': 1}, 'a': (2, 3)})
    {'a/0': 2, 'a/1': 3, 'b/c': 1}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    named = {leaf_name(path): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        names = [leaf_name(path) for path, _ in leaves]
        twice = list(dict.fromkeys(name for name in names if names.count(name) > 1))
        raise RecipeError(
            f'Cannot tell {len(leaves)} leaves apart by their names: these stand for several, since a key has '
            f'{SEPARATOR!r} in it. Rename the keys:\n{offenders(twice)}'
        )
    return named


def map_named(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Maps `fn(name, leaf, *other_leaves)` over `tree`; `rest` are trees that have `tree` as a prefix.

    >>> map_named(lambda name, x: f'{name}={x}', {'a': {'b': 1}})
    {'a': {'b': 'a/b=1'}}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, *others: fn(leaf_name(path), leaf, *others), tree, *rest, is_leaf=is_leaf
    )
