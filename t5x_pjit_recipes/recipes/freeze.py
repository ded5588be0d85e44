"""Training a part: patterns on parameter names say what is trained or frozen, and the plan says what that saves.

A frozen parameter keeps its bits: no gradient, weight decay or rounding touches it, and it has no slots. Norms that an
optimizer clips by are those of the trained gradients alone. The compiled step holds no gradient of a frozen parameter
and does not go back through layers below which nothing is trained, although `jax.grad` asks for everything: XLA drops
what nobody uses. (A `WeightMetricsComputer` uses all gradients.)
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from t5x_pjit_recipes import reports
from t5x_pjit_recipes.errors import ConfigError, offenders
from t5x_pjit_recipes.layout.axes import is_axes_leaf
from t5x_pjit_recipes.layout.paths import SEPARATOR, map_named, named_leaves
from t5x_pjit_recipes.layout.patterns import likeness
from t5x_pjit_recipes.layout.plan import Plan, format_bytes
from t5x_pjit_recipes.layout.regex_rules import RegexRules
from t5x_pjit_recipes.optimizers import MultiOptimizer, OptimizerDef
from t5x_pjit_recipes.recipes.any_optimizer import read_optimizer
from t5x_pjit_recipes.state_utils import flatten_state_dict
from t5x_pjit_recipes.train_state import FlaxOptimTrainState


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which parameters are trained; a traversal, as `MultiOptimizer` takes them.

    Attributes:
      patterns: regular expressions, each of which must match the whole of a parameter's name.
      verb: 'freeze' if they name what is frozen, 'train' if they name what is trained.

    Raises:
      ConfigError: if the patterns are one text.
      RuleError: listing what is no regular expression.
    """

    patterns: tuple[str, ...]
    verb: str

    def __post_init__(self) -> None:
        object.__setattr__(self, 'patterns', read_patterns(self.patterns, f'{self.verb} parameters'))

    def trained_names(self, params: Any) -> set[str]:
        """Names the parameters that are trained.

        Args:
          params: the parameters, or a tree like them of anything else.

        Raises:
          ConfigError: listing each pattern that matches nothing; or if all parameters or none would be trained.
        """
        names = list(named_leaves(params, is_leaf=is_axes_leaf))
        matched = match_names(self.patterns, names, f'{self.verb} parameters')
        trained = matched if self.verb == 'train' else set(names) - matched
        if not trained or len(trained) == len(names):
            raise ConfigError(
                f'Cannot {self.verb} by patterns {list(self.patterns)}: {"all" if trained else "none"} of '
                f'{len(names)} parameters would be trained. '
                f'{"Use the optimizer as it is, or change" if trained else "Change"} the patterns.'
            )
        return trained

    def update(self, fn: Any, inputs: Any) -> dict[str, Any]:
        """Returns a tree like `inputs` in which `fn` has changed the leaves that are trained."""
        trained = self.trained_names(inputs)
        flat = traverse_util.flatten_dict(inputs, keep_empty_nodes=True) if isinstance(inputs, Mapping) else {}
        names = {path: SEPARATOR.join(map(str, path)) for path in flat}
        self._check_reached(trained, names.values())
        changed = {path: fn(leaf) if names[path] in trained else leaf for path, leaf in flat.items()}
        return traverse_util.unflatten_dict(changed)

    def _check_reached(self, trained: Collection[str], names: Collection[str]) -> None:
        beyond = sorted(set(trained) - set(names))
        if beyond:
            raise ConfigError(
                f'Cannot {self.verb} by patterns {list(self.patterns)}: {len(beyond)} of {len(trained)} parameters to '
                'be trained are in lists, tuples or other containers that are no dicts. Use nested dicts, or an optax '
                f'transformation with freeze.optax_{"freeze" if self.verb == "freeze" else "train_only"}:\n'
                f'{offenders(beyond)}'
            )


def read_patterns(patterns: Sequence[str], doing: str) -> tuple[str, ...]:
    """Returns the patterns as a tuple, once they are known to be regular expressions."""
    if isinstance(patterns, str):
        raise ConfigError(f'Cannot {doing} by patterns={patterns!r}: that is a text, no list. Write [{patterns!r}].')
    _as_rules(tuple(patterns))
    return tuple(patterns)


def _as_rules(patterns: tuple[str, ...]) -> RegexRules:
    return RegexRules([(pattern, None) for pattern in patterns])


def match_names(patterns: tuple[str, ...], names: Collection[str], doing: str) -> set[str]:
    """Returns the names that a pattern matches.

    Raises:
      ConfigError: listing each pattern that matches none, with the nearest name.

    >>> sorted(match_names(('encoder/.*',), ['encoder/wi', 'encoder/wo', 'decoder/wi'], 'freeze'))
    ['encoder/wi', 'encoder/wo']
    """
    rules = _as_rules(patterns)
    dead = rules.dead(dict.fromkeys(names, 0))
    if dead:
        raise ConfigError(
            f'Cannot {doing} by {len(patterns)} patterns: {len(dead)} of them match none of {len(names)} parameters. '
            'A pattern must match a whole name; correct or remove them:\n'
            + offenders(_describe_dead(number, patterns[number - 1], names) for number in dead)
        )
    return {name for name in names if rules.deciding(name) is not None}


def _describe_dead(number: int, pattern: str, names: Collection[str]) -> str:
    part = next((name for name in names if re.search(pattern, name)), None)
    if part is not None:
        return f'pattern {number} {pattern!r} matches no whole name, but a part of {part}'
    return f'pattern {number} {pattern!r}; the nearest: {max(names, key=lambda name: _closeness(name, pattern))}'


def _closeness(name: str, pattern: str) -> float:
    """Compares a pattern that begins with '.*/' with the end of a name alone."""
    rest = pattern.removeprefix('.*/')
    ending = name if rest == pattern else SEPARATOR.join(name.split(SEPARATOR)[-1 - rest.count(SEPARATOR) :])
    return likeness(ending, rest)


class PartialOptimizer(MultiOptimizer):
    """Trains the selected parameters by one optimizer, and leaves all others as they are."""

    def __init__(self, optimizer_def: OptimizerDef, selection: Selection) -> None:
        super().__init__([(selection, read_optimizer(optimizer_def))])

    def describe_savings(self, train_state: Any, partitioner: Any) -> str:
        """See `describe_savings` of this module."""
        return describe_savings(train_state, partitioner)


def freeze(optimizer_def: OptimizerDef, patterns: Sequence[str]) -> PartialOptimizer:
    """Makes an optimizer that trains all parameters but those whose name a pattern matches.

    Args:
      optimizer_def: trains the others, and keeps state for them alone; an `OptimizerDef` or an optax transformation.
      patterns: regular expressions, each to match the whole of a name such as `encoder/layers_0/mlp/wi_0/kernel`.

    Raises:
      ConfigError: if `optimizer_def` is no optimizer. When the parameters are known (at `FlaxOptimTrainState.create`),
        for patterns that match nothing, or that leave nothing to train or to freeze; and for parameters that are to be
        trained and are not in nested dicts, which `optax_freeze` trains.
    """
    return PartialOptimizer(optimizer_def, Selection(patterns, 'freeze'))


def train_only(optimizer_def: OptimizerDef, patterns: Sequence[str]) -> PartialOptimizer:
    """Makes an optimizer that trains the parameters whose name a pattern matches, and no others; see `freeze`."""
    return PartialOptimizer(optimizer_def, Selection(patterns, 'train'))


def optax_freeze(transformation: Any, patterns: Sequence[str]) -> optax.GradientTransformationExtraArgs:
    """Does as `freeze` does, for an optax transformation; the state is that of `optax.partition`.

    Give it the whole chain: what stands behind it in another one, such as weight decay, changes frozen parameters.
    What `optax.apply_updates` adds to a frozen parameter is -0.0, which changes no number; only where it runs on a
    device that takes denormal numbers (below 1e-38) for zero, as CPUs do in XLA, these become zero.
    """
    return _partitioned(transformation, Selection(patterns, 'freeze'))


def optax_train_only(transformation: Any, patterns: Sequence[str]) -> optax.GradientTransformationExtraArgs:
    """Does as `train_only` does, for an optax transformation; see `optax_freeze`."""
    return _partitioned(transformation, Selection(patterns, 'train'))


def _partitioned(transformation: Any, selection: Selection) -> optax.GradientTransformationExtraArgs:
    if not all(hasattr(transformation, method) for method in ('init', 'update')):
        raise ConfigError(
            f'Cannot {selection.verb} by {type(transformation).__name__}: that is no optax transformation. Give one, '
            'such as optax.adamw(1e-3), or use freeze.freeze or freeze.train_only.'
        )

    def labels(params: Any) -> Any:
        trained = selection.trained_names(params)
        return map_named(lambda name, _: 'trained' if name in trained else 'frozen', params)

    return optax.partition({'trained': transformation, 'frozen': optax.stateless(_keep)}, labels)


def _keep(updates: Any, params: Any = None) -> Any:
    """Makes every update -0.0, the one number that changes no other: -0.0 + 0.0 is 0.0."""
    del params
    return jax.tree.map(lambda update: jnp.full_like(update, -0.0), updates)


def describe_savings(train_state: Any, partitioner: Any) -> str:
    """Says how many parameters are frozen, and the bytes per device that this saves.

    Args:
      train_state: of arrays or shapes; its optimizer is one that `freeze` or `train_only` made.
      partitioner: lays out this state, and the one in which everything is trained.
    """
    part, whole = (_plans(state, partitioner) for state in (train_state, _trained_whole(train_state)))
    params = named_leaves(train_state.params)
    frozen = set(params) - train_state._optimizer.optimizer_def.trained_names(train_state.params)
    sizes = {name: leaf.dtype.itemsize * int(np.prod(leaf.shape)) for name, leaf in params.items()}
    lines = [
        f'{"frozen":<16}{len(frozen)} of {len(params)} parameters, {format_bytes(sum(sizes[name] for name in frozen))} '
        f'of {format_bytes(sum(sizes.values()))}; this saves'
    ]
    for title in ('gradients', 'optimizer state'):
        all_bytes, saved = whole[title].bytes_per_device, whole[title].bytes_per_device - part[title].bytes_per_device
        lines.append(f'{" " * 16}{format_bytes(saved)} of {format_bytes(all_bytes)} of {title} per device')
    return '\n'.join(lines)


def _plans(train_state: Any, partitioner: Any) -> dict[str, Plan]:
    return reports.plan_parts(train_state, partitioner.get_mesh_axes(train_state), partitioner.mesh)


def _trained_whole(train_state: Any) -> Any:
    """Shapes the state that the same parameters would have if their optimizer trained them all."""
    (optimizer_def,) = train_state._optimizer.optimizer_def.sub_optimizers
    axes = {} if train_state.params_axes is None else {'params_axes': train_state.params_axes}

    def make(params: Any) -> Any:
        return FlaxOptimTrainState.create(optimizer_def, {'params': params, **axes})

    return jax.eval_shape(make, train_state.params)


def drop_other_slots(
    stored: Mapping[str, Any], target: Mapping[str, Any], *, is_resuming: bool = False
) -> Mapping[str, Any]:
    """Leaves out of a checkpoint the slots that a state which trains a part has no place for.

    One of the `state_transformation_fns` of a `RestoreCheckpointConfig`. The slots of trained parameters are kept if
    the checkpoint has all of them; else, as with another optimizer, none, and `fallback_to_scratch` makes new ones.

    Args:
      stored: the checkpoint's state dict.
      target: the state dict of the state to be restored.
      is_resuming: whether the checkpoint is the run's own; then all is kept.
    """
    if is_resuming or 'param_states' not in stored['state']:
        return stored
    wanted = flatten_state_dict({'param_states': target['state'].get('param_states', {})})
    offered = flatten_state_dict({'param_states': stored['state']['param_states']})
    wanted = {name for name, leaf in wanted.items() if leaf is not None}
    kept = {name: offered[name] for name in wanted} if wanted <= offered.keys() else {}
    slots = traverse_util.unflatten_dict(kept, sep='/')
    others = {name: leaf for name, leaf in stored['state'].items() if name != 'param_states'}
    return {**stored, 'state': {**others, **slots}}
