"""State dicts: nested dicts of arrays with string keys, as states are saved and restored.

A leaf's path in a state dict is its keys joined by '/'. A dict that describes a TensorStore array counts as a leaf.
"""

import collections
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flax import serialization, traverse_util

from t5x_pjit_recipes.errors import StateError, did_you_mean, offenders
from t5x_pjit_recipes.layout.paths import SEPARATOR

__all__ = [
    'apply_assignment_map',
    'flatten_state_dict',
    'get_name_tree',
    'intersect_state',
    'merge_state',
    'restore_like',
    'tensorstore_leaf',
]

AssignmentMap = Sequence[tuple[str | re.Pattern[str], str | None]]


def _ordered_like(reference: collections.OrderedDict[str, Any], state_dict: Mapping[str, Any]) -> Any:
    pairs = ((key, serialization.from_state_dict(value, state_dict[key])) for key, value in reference.items())
    return collections.OrderedDict(pairs)


# Flax knows dicts, but takes an OrderedDict, such as the state of optax.named_chain, for a leaf.
serialization.register_serialization_state(
    collections.OrderedDict,
    lambda ordered: {key: serialization.to_state_dict(value) for key, value in ordered.items()},
    _ordered_like,
    override=True,
)

_TENSORSTORE_KEYS = {'driver', 'kvstore', 'metadata'}


def tensorstore_leaf(_: Any, value: Mapping[str, Any]) -> bool:
    """Tells whether a dict describes a TensorStore array, and so is a leaf, whatever its path (the first argument)."""
    return set(value) >= _TENSORSTORE_KEYS


def flatten_state_dict(state_dict: Mapping[str, Any], keep_empty_nodes: bool = False) -> dict[str, Any]:
    """Maps the path of each leaf to the leaf.

    Args:
      state_dict: nested dicts.
      keep_empty_nodes: whether an empty dict stays, as Flax's `empty_node`.

    >>> flatten_state_dict({'target': {'mlp': {'kernel': 1}}, 'state': {'step': 2}})
    {'target/mlp/kernel': 1, 'state/step': 2}
    """
    return traverse_util.flatten_dict(
        state_dict, is_leaf=tensorstore_leaf, keep_empty_nodes=keep_empty_nodes, sep=SEPARATOR
    )


def _unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    return traverse_util.unflatten_dict(dict(flat), sep=SEPARATOR)


def get_name_tree(state_dict: Mapping[str, Any], keep_empty_nodes: bool = False) -> dict[str, Any]:
    """Replaces each leaf by its path; an empty dict too with `keep_empty_nodes`, else it goes.

    >>> get_name_tree({'mlp': {'kernel': 1, 'bias': 2}})
    {'mlp': {'kernel': 'mlp/kernel', 'bias': 'mlp/bias'}}
    """
    return _unflatten({path: path for path in flatten_state_dict(state_dict, keep_empty_nodes)})


def intersect_state(state_dict: Mapping[str, Any], intersect_state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Drops what only `state_dict` has, and names it in one UserWarning."""
    flat, other = flatten_state_dict(state_dict), flatten_state_dict(intersect_state_dict)
    _warn('dropped, as the other state has no such leaf', [path for path in flat if path not in other])
    return _unflatten({path: leaf for path, leaf in flat.items() if path in other})


def merge_state(
    state_dict: Mapping[str, Any], from_scratch_state: Mapping[str, Any], overwrite: bool = False
) -> dict[str, Any]:
    """Adds what only `from_scratch_state` has, and names it in one UserWarning.

    Args:
      state_dict: the state that is completed.
      from_scratch_state: where the missing leaves come from.
      overwrite: whether leaves that `state_dict` has already are replaced, too.
    """
    flat, scratch = flatten_state_dict(state_dict), flatten_state_dict(from_scratch_state)
    added = {path: leaf for path, leaf in scratch.items() if overwrite or path not in flat}
    _warn('taken from scratch', added)
    return _unflatten({**flat, **added})


def apply_assignment_map(
    ckpt_optimizer_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any],
    assignment_map: AssignmentMap,
    require_all_rules_match: bool = True,
    *,
    is_resuming: bool = False,
) -> Mapping[str, Any]:
    r"""Renames a checkpoint's leaves to those of another model.

    Each leaf of the new model takes the first rule whose pattern matches its whole path. The rule's replacement,
    expanded as by `re.Match.expand`, is the leaf's path in the checkpoint; None leaves the leaf out. Leaves without
    a rule keep their path, and so do leaves of the checkpoint that no rule took.

    Args:
      ckpt_optimizer_state: the checkpoint's state dict.
      optimizer_state: the new model's state dict; only its paths count.
      assignment_map: pairs of a pattern on new paths and a replacement.
      require_all_rules_match: whether a rule that no leaf took is an error.
      is_resuming: whether the checkpoint is the new model's own, so that nothing is renamed.

    Raises:
      StateError: if a replacement leads to a path that the checkpoint lacks, or a rule is of no use.

    >>> apply_assignment_map({'dec': {'w': 1}}, {'decoder': {'w': 0}}, [('decoder/(.*)', r'dec/\1')])
    {'decoder': {'w': 1}}
    """
    if is_resuming:
        return ckpt_optimizer_state
    old, new = flatten_state_dict(ckpt_optimizer_state), flatten_state_dict(optimizer_state)
    sources, used = _sources(new, assignment_map)
    _check_sources(sources, old)
    if require_all_rules_match:
        _check_all_used(assignment_map, used)
    skipped = {path for path, source in sources.items() if source is None}
    taken = skipped | set(sources.values())
    assigned = {path: old[source] for path, source in sources.items() if source is not None}
    carried = {path: leaf for path, leaf in old.items() if path not in taken}
    shared = {path: old[path] for path in new if path in old and path not in skipped}
    result = {**shared, **carried, **assigned}
    _warn('absent from the checkpoint and no rule names a source for them', new.keys() - skipped - result.keys())
    return _unflatten(result)


def _sources(paths: Iterable[str], rules: AssignmentMap) -> tuple[dict[str, str | None], set[int]]:
    """Gives the old path of each new one that a rule matches (None where it is skipped), and which rules did match."""
    patterns = [re.compile(pattern) for pattern, _ in rules]
    sources, used = {}, set()
    for path in paths:
        matches = ((number, pattern.fullmatch(path)) for number, pattern in enumerate(patterns))
        number, match = next(((number, match) for number, match in matches if match), (None, None))
        if match:
            replacement = rules[number][1]
            sources[path] = None if replacement is None else match.expand(replacement)
            used.add(number)
    return sources, used


def _check_sources(sources: Mapping[str, str | None], old: Mapping[str, Any]) -> None:
    absent = {path: source for path, source in sources.items() if source is not None and source not in old}
    if absent:
        lines = [f'{path} from {source}{did_you_mean(source, old)}' for path, source in absent.items()]
        raise StateError(
            f'Cannot assign {len(absent)} leaves: the checkpoint has no such sources.\n{offenders(lines)}\n'
            f'It has:\n{offenders(sorted(old), most=len(old))}'
        )


def _check_all_used(rules: AssignmentMap, used: set[int]) -> None:
    unused = [f'rule {number}: {rule!r}' for number, rule in enumerate(rules) if number not in used]
    if unused:
        raise StateError(
            f'Cannot use {len(unused)} of {len(rules)} assignment rules: no leaf is left for them. '
            f'Drop or mend them, or pass require_all_rules_match=False:\n{offenders(unused)}'
        )


def _warn(what: str, paths: Iterable[str]) -> None:
    paths = sorted(paths)
    if paths:
        warnings.warn(f'{len(paths)} leaves are {what}:\n{offenders(paths)}', UserWarning, stacklevel=3)


def restore_like(reference: Mapping[str, Any], state_dict: Mapping[str, Any]) -> Any:
    """Puts the leaves of a state dict into a copy of `reference`, whose containers are kept.

    Leaves may be anything: arrays, shape structs, specs, None. Where both sides have a shape, the shapes must agree.
    What `reference` holds as None or as an empty container may be absent.

    Args:
      reference: a dict of what is to be restored.
      state_dict: nested dicts with the paths of `reference`'s own state dict.

    Raises:
      StateError: naming every leaf that is absent or has another shape.

    >>> restore_like({'target': (1, 2)}, {'target': {'0': 3, '1': 4}})
    {'target': (3, 4)}
    """
    wanted = traverse_util.flatten_dict(serialization.to_state_dict(reference), keep_empty_nodes=True)
    given = traverse_util.flatten_dict(state_dict)
    _check_leaves(wanted, given)
    _warn('left over, as the state has no place for them', (_name(path) for path in _leftovers(wanted, given)))
    merged = {path: given.get(path, leaf) for path, leaf in wanted.items()}
    return serialization.from_state_dict(dict(reference), traverse_util.unflatten_dict(merged))


def _name(path: tuple[str, ...]) -> str:
    return SEPARATOR.join(path)


def _leftovers(wanted: Mapping[Any, Any], given: Mapping[Any, Any]) -> list[Any]:
    return [path for path, leaf in given.items() if path not in wanted and leaf is not None]


def _check_leaves(wanted: Mapping[Any, Any], given: Mapping[Any, Any]) -> None:
    faults = [fault for path, leaf in wanted.items() if (fault := _leaf_fault(path, leaf, given))]
    if faults:
        raise StateError(
            f'Cannot restore {len(wanted)} leaves from a state dict of {len(given)}: {len(faults)} of them are absent '
            f'or have another shape. Restore what the same model and optimizer saved:\n{offenders(faults)}'
        )


def _leaf_fault(path: tuple[str, ...], leaf: Any, given: Mapping[Any, Any]) -> str:
    if leaf is None or leaf is traverse_util.empty_node:
        return ''
    if path not in given:
        return f'{_name(path)} is absent'
    want, have = (getattr(x, 'shape', None) for x in (leaf, given[path]))
    if want is None or have is None or tuple(want) == tuple(have):
        return ''
    return f'{_name(path)} has shape {tuple(want)} and the state dict has {tuple(have)}'
