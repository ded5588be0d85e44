"""What gin files set, line by line, and which of it a run can reach; decides only, and does not import gin."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

from t5x_pjit_recipes.errors import ConfigError, did_you_mean, near_misses

MACRO = 'gin.macro'
CONSTANT = 'gin.constant'

Scope: TypeAlias = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One binding: the name as written, the value, the file and line or the flag, and gin's references in the value."""

    name: str
    value: Any
    where: str
    references: tuple[Any, ...] = ()

    @property
    def label(self) -> str:
        """Where it stands and what it is called, which a flag says by itself."""
        return self.where if self.where.startswith('--') else f'{self.where}: {self.name}'


# All values given for a scope, complete selector and parameter, in order. A macro's name is its scope.
Settings: TypeAlias = Mapping[tuple[str, str, str], list[Setting]]
Reached: TypeAlias = Collection[tuple[Scope, str]]


def is_reference(value: Any) -> bool:
    """Tells whether a value is one of gin's references: `@name`, `@name()` or `%NAME`."""
    return hasattr(value, 'scoped_configurable_fn')


def macro_name(value: Any) -> str | None:
    """Returns NAME where the value is `%NAME`."""
    is_macro = is_reference(value) and value.configurable.selector == MACRO
    return '/'.join(value.scopes) if is_macro else None


def through_macros(setting: Setting, settings: Settings) -> Setting:
    """Follows a value through macros to the setting that writes it out.

    Raises:
      ConfigError: if the macros run in a circle.
    """
    followed = set()
    while (name := macro_name(setting.value)) and (name, MACRO, 'value') in settings:
        if name in followed:
            raise ConfigError(f'Cannot follow %{name}, set by {setting.where}: it refers to itself. Give it a value.')
        followed.add(name)
        setting = settings[name, MACRO, 'value'][-1]
    return setting


def unset(settings: Settings) -> Iterator[str]:
    """Yields each required setting without a value and each macro used but never set, with the flag that sets it."""
    latest = [given[-1] for given in settings.values()]
    macros = {scope for scope, selector, _ in settings if selector == MACRO}
    users = {macro_name(ref): setting for setting in latest for ref in setting.references if macro_name(ref)}
    wanted = {setting.name: f'required by {setting.where}' for setting in latest if _is_required(setting.value)}
    wanted |= {name: f'used by {user.where}' for name, user in users.items() if name not in macros}
    for name, why in wanted.items():
        near = near_misses(name, macros - set(users) - set(wanted), most=1)
        note = f' ({near[0]} is set, and nothing uses it)' if near else ''
        yield f'{name}, {why}: --gin.{name}=...{note}'


def _is_required(value: Any) -> bool:
    return is_reference(value) and value.configurable.selector == CONSTANT and value.scopes == ['gin.REQUIRED']


def reach(entries: Collection[str], settings: Settings) -> Reached:
    """Collects every configurable that references lead to, with the scope in which it would be called.

    Args:
      entries: complete selectors of what is called from outside all scopes.
      settings: everything that was set, replaced values included.
    """
    todo = [((), selector) for selector in entries]
    reached = set()
    while todo:
        scope, selector = todo.pop()
        if (scope, selector) not in reached:
            reached.add((scope, selector))
            todo.extend(_next(scope, selector, settings))
    return reached


def _next(scope: Scope, selector: str, settings: Settings) -> Iterator[tuple[Scope, str]]:
    for (setting_scope, setting_selector, _), given in settings.items():
        if setting_selector.startswith(f'{selector}.'):  # A method of the class that was reached.
            yield scope, setting_selector
        if setting_selector != selector or not _covers(setting_scope, scope):
            continue
        for reference in (reference for setting in given for reference in setting.references):
            yield tuple(reference.scopes) or scope, reference.configurable.selector
            if not reference.evaluate:  # Called by whoever receives it, and so perhaps outside all scopes.
                yield tuple(reference.scopes), reference.configurable.selector


def _covers(setting_scope: str, scope: Scope) -> bool:
    """Tells whether a call within `scope` takes settings made for `setting_scope`."""
    parts = tuple(setting_scope.split('/')) if setting_scope else ()
    return scope[: len(parts)] == parts


def is_reached(key: tuple[str, str, str], reached: Reached) -> bool:
    """Tells whether something reached takes the settings for a scope, selector and parameter."""
    scope, selector, _ = key
    return any(known == selector and _covers(scope, other) for other, known in reached)


def without_effect(reached: Reached, settings: Settings) -> Iterator[str]:
    """Yields the settings that nothing reached takes, each where it stands, with a near miss."""
    for (scope, selector, _), given in settings.items():
        scopes = {'/'.join(other) for other, known in reached if known == selector}
        if is_reached((scope, selector, ''), reached):
            continue
        if selector == MACRO:
            why = f'nothing refers to %{scope}{did_you_mean(scope, scopes)}'
        elif scopes:
            why = f'nothing is built in scope {scope!r}{did_you_mean(scope, scopes)}'
        else:
            why = 'nothing that runs refers to it'
        yield f'{given[-1].label}: {why}'
