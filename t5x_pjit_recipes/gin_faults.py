"""Finds gin files and says what is wrong with a setting in one; decides only, and knows nothing of the library gin."""

import ast
import collections.abc
import dataclasses
import inspect
import pathlib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from t5x_pjit_recipes.errors import ConfigError, did_you_mean, near_misses, offenders

# Parameters of T5X's that take a thing, not its maker, whatever their annotations say.
TAKES_A_THING = {
    *('checkpoint_cfg', 'config', 'input_vocabulary', 'logical_axis_rules', 'logical_factor_rules', 'model', 'module'),
    *('optimizer_def', 'output_vocabulary', 'partitioner', 'restore', 'restore_checkpoint_cfg', 'save', 'vocabulary'),
    *('dataset_cfg', 'infer_eval_dataset_cfg', 'train_dataset_cfg', 'train_eval_dataset_cfg'),
}

_ABSTRACT = (collections.abc.Sequence, collections.abc.Mapping, collections.abc.Iterable, collections.abc.Collection)
_PLAIN = frozenset({str, bytes, bool, int, float, types.NoneType, tuple, list, dict, set, frozenset, *_ABSTRACT})
_PACKAGE = __name__.partition('.')[0]


def find_gin_file(name: str, search_paths: Sequence[str], root: pathlib.Path, asked_by: str) -> pathlib.Path:
    """Finds a gin file as spelled, then under the user's search paths, then under this package's own `root`.

    Args:
      name: the file's path, as given to a flag or an include.
      search_paths: folders to look into, in order.
      root: where this package's gin files are; a leading `gin/` in `name` stands for it.
      asked_by: what names the file: a flag, or the file and line of an include.

    Raises:
      ConfigError: if there is no such file; the message lists the places searched and near misses.
    """
    first, *rest = pathlib.PurePath(name).parts or ('',)
    own = [root / name, *([root.joinpath(*rest)] if first == 'gin' and rest else [])]
    places = dict.fromkeys([pathlib.Path(name), *(pathlib.Path(path) / name for path in search_paths), *own])
    for place in places:
        if place.is_file():
            return place
    raise ConfigError(
        f'Cannot find gin file {name!r}, which {asked_by} names: none of {len(places)} places has it. '
        f'{_offer_files(name, root)}Looked at:\n{offenders(map(str, places))}'
    )


def _offer_files(name: str, root: pathlib.Path) -> str:
    stocked = [f'gin/{path.relative_to(root).as_posix()}' for path in root.rglob('*.gin')]
    neighbours = [str(path) for path in pathlib.Path(name).parent.glob('*.gin')]
    near = near_misses(name, [*stocked, *neighbours], most=1)
    return f'Did you mean {near[0]!r}? ' if near else 'Correct the path, or give --gin_search_paths. '


def unknown_name(selector: str, symbols: Mapping[str, Any]) -> str:
    """Tells where a dotted name stops meaning anything, with a near miss; '' if it means something.

    Args:
      selector: the name, as `trainer.Trainer`.
      symbols: what the file's imports bind, by name.

    >>> unknown_name('ast.pars', {'ast': ast})
    "ast has no 'pars' (did you mean 'parse'?)"
    """
    first, *rest = selector.split('.')
    if first not in symbols:
        return f'{first!r} is not imported in this file{did_you_mean(first, symbols)}'
    value, path = symbols[first], first
    for attribute in rest:
        if not hasattr(value, attribute):
            public = [known for known in dir(value) if not known.startswith('_')]
            return f'{path} has no {attribute!r}{did_you_mean(attribute, public)}'
        value, path = getattr(value, attribute), f'{path}.{attribute}'
    return '' if callable(value) else f'{selector} is neither a function nor a class, and takes no settings'


def offer_module(module: str, package: pathlib.Path) -> str:
    """Offers, in brackets, the module of this package that has the same or a near name; T5X's names are ours.

    Args:
      module: the module that could not be imported, as `t5x.utils`.
      package: the folder of this package.
    """
    files = (path.relative_to(package.parent).with_suffix('') for path in package.rglob('*.py'))
    known = {'.'.join(path.parts) for path in files}
    namesake = f'{package.name}.{module.partition(".")[2]}'
    return f' (did you mean {namesake!r}?)' if namesake in known else did_you_mean(module, known)


def unknown_parameter(selector: str, fn: Any, name: str) -> str:
    """Tells that `fn` takes no argument of that name, with a near miss; '' if it takes it.

    >>> unknown_parameter('ast.parse', ast.parse, 'file_name')
    "ast.parse has no parameter 'file_name' (did you mean 'filename'?)"
    """
    parameters = inspect.signature(fn).parameters
    if name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return ''
    return f'{selector} has no parameter {name!r}{did_you_mean(name, parameters)}'


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What a signature says of one parameter."""

    name: str
    default: Any = None
    admits: frozenset[Any] = frozenset()  # The types that its annotation names; empty where there is none to read.

    @property
    def is_plain(self) -> bool:
        """Whether it is known to take nothing but plain values and things of this package."""
        return bool(self.admits) and all(map(_is_plain, self.admits))


def describe_parameter(fn: Any, name: str) -> Parameter:
    """Reads what the signature of a function or class says of one parameter.

    >>> def fn(steps: int | None = 3): ...
    >>> describe_parameter(fn, 'steps') == Parameter('steps', 3, frozenset({int, type(None)}))
    True
    """
    found = inspect.signature(fn).parameters.get(name)
    default = None if found is None or found.default is inspect.Parameter.empty else found.default
    return Parameter(name, default, _admitted(_type_hints(fn).get(name, Any)))


def _type_hints(fn: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fn.__init__ if inspect.isclass(fn) else fn)
    except (NameError, TypeError, AttributeError):  # Annotations that only a type checker can read.
        return {}


def _admitted(annotation: Any) -> frozenset[Any]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or isinstance(annotation, typing.TypeVar | str):
        return frozenset()
    if origin in (typing.Union, types.UnionType):
        parts = [_admitted(arg) for arg in args]
        return frozenset().union(*parts) if all(parts) else frozenset()
    if origin is typing.Literal:
        return frozenset(map(type, args))
    return frozenset({origin or annotation})


def _is_plain(admitted: Any) -> bool:
    if admitted in _PLAIN:
        return True
    ours = isinstance(admitted, type) and admitted.__module__.partition('.')[0] == _PACKAGE
    return ours and not any('__call__' in vars(base) for base in admitted.__mro__)


def misquoted(parameter: Parameter, value: Any) -> str:
    """Tells that a number, True, False or None stands in quotes where text cannot be meant; '' if all is well.

    >>> misquoted(Parameter('steps', 3), '2')
    "'2' in quotes is text: write 2"
    >>> misquoted(Parameter('name', 'a'), '2')
    ''
    """
    if not isinstance(value, str):
        return ''
    try:
        literal = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return ''
    wants_no_text = parameter.is_plain and str not in parameter.admits
    wants_no_text |= not parameter.admits and isinstance(parameter.default, bool | int | float | tuple)
    if literal is None or (wants_no_text and not isinstance(literal, str)):
        return f'{value!r} in quotes is text: write {value}'
    return ''


def uncalled(parameter: Parameter, reference: Any) -> str:
    """Tells that a maker is given where the thing that it makes is wanted; '' if all is well.

    Args:
      parameter: what receives the value.
      reference: one of gin's references, `@name` or `@name()`.
    """
    if reference.evaluate or not _wants_a_call(parameter, reference.configurable.wrapped):
        return ''
    name = reference.scoped_selector
    return f'@{name} is the maker itself, and {parameter.name} takes what it makes: write @{name}()'


def _wants_a_call(parameter: Parameter, maker: Any) -> bool:
    if parameter.name.endswith('_fn'):  # Both are callable, the maker and what it makes: its return type decides.
        return collections.abc.Callable in _admitted(_type_hints(maker).get('return', Any))
    if parameter.admits & {collections.abc.Callable, type}:
        return False
    return parameter.is_plain or parameter.name in TAKES_A_THING


def unreadable(text: str, error: Exception, flag: bool) -> str:
    """Words a syntax error; where text lacks quotes, says how to quote it.

    Args:
      text: the line or setting that cannot be read.
      error: what reading it raised.
      flag: whether it was given as a flag, whose quotes the shell takes away.
    """
    name, _, value = (part.strip() for part in text.partition('='))
    if re.match(r'[\w/.~$-]', value):
        spelling = f'--gin.{name}="\'{value}\'"' if flag else f"{name} = '{value}'"
        return f'{value} is no number, no quoted text and no reference. If it is text, quote it: {spelling}'
    if 'EOF' in str(error):
        return 'a bracket or a quote is never closed. Close it'
    reason = str(getattr(error, 'msg', None) or error.args[0]).splitlines()[0]
    return f'{reason.rstrip(".")}. Correct {text.strip() or "the line"}'


def refuse(action: str, faults: Iterable[str]) -> None:
    """Raises one ConfigError that lists all faults, or returns where there are none.

    Args:
      action: what cannot be done, why, and the remedy; the count of faults replaces `{}`.
      faults: what is wrong, a line each.
    """
    faults = list(dict.fromkeys(faults))
    if faults:
        raise ConfigError(f'{action.format(len(faults))}\n{offenders(faults)}')
