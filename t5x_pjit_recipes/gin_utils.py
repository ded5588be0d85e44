"""Training from gin files: T5X's flags and functions, and a refusal of every setting that cannot mean what it says.

gin itself is imported here alone. It keeps its configuration for the whole process, so this module does as well. What
gin-config 0.5 does not export (its registry, the names that a file imports) is used where it alone has the answer.
"""

import collections
import copy
import os
import pathlib
import tokenize
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import gin
import jax
from absl import app, flags, logging
from gin import config, config_parser

from t5x_pjit_recipes import gin_faults, gin_settings
from t5x_pjit_recipes.errors import ConfigError, did_you_mean
from t5x_pjit_recipes.gin_settings import Setting, Settings

_PACKAGE = pathlib.Path(__file__).parent
Fn = TypeVar('Fn', bound=Callable[..., Any])

# Every value ever bound, in order: gin itself keeps the last one, and not where it stood.
_SETTINGS: Settings = collections.defaultdict(list)


def gin_root() -> pathlib.Path:
    """Finds the folder of this package's own gin files: inside an installed package, or beside it in a checkout."""
    installed = _PACKAGE / 'gin_files'
    return installed if installed.is_dir() else _PACKAGE.parent / 'gin'


def clear_config() -> None:
    """Forgets all settings, so that another configuration can be parsed in this process."""
    gin.clear_config()
    _SETTINGS.clear()


def parse_gin_flags(
    gin_search_paths: Sequence[str],
    gin_files: Sequence[str],
    gin_bindings: Sequence[str],
    skip_unknown: bool | Sequence[str] = False,
    finalize_config: bool = True,
) -> None:
    """Parses gin files, then bindings, in order: what comes later wins.

    Args:
      gin_search_paths: folders to look for gin files in, before this package's own.
      gin_files: the files; `gin/runs/x.gin` and `runs/x.gin` name this package's own from anywhere.
      gin_bindings: settings such as `TRAIN_STEPS = 200`.
      skip_unknown: whether, or for which names, settings of things that nobody knows are passed over.
      finalize_config: whether all required settings must be there now; if so, none can be added later.

    Raises:
      ConfigError: if a file is missing or cannot be read, if a name is unknown, if a value cannot be meant, or if
        a required setting is missing; each time with all of them, where they stand and what to write instead.
    """
    if gin.config_is_locked():
        raise ConfigError(
            f'Cannot parse {list(gin_files or ())}: the configuration of this process is final already. '
            'Call gin_utils.clear_config() first.'
        )
    reader = _Reader(tuple(gin_search_paths or ()), skip_unknown)
    for name in gin_files or ():
        reader.read_file(name, f'--gin_file={name}')
    reader.read_bindings([gin_bindings] if isinstance(gin_bindings, str) else gin_bindings or ())
    gin_faults.refuse('Cannot parse gin settings whose names mean nothing ({}). Correct them:', reader.faults)
    gin_faults.refuse('Cannot use gin settings whose values cannot be meant ({}). Correct them:', _value_faults())
    if finalize_config:
        unset = gin_settings.unset(_SETTINGS)
        gin_faults.refuse('Cannot finish without the gin settings that are required ({}). Set them:', unset)
        gin.finalize()
    logging.info('Gin configuration:\n%s', gin.config_str())


class _Delegate(config.ParserDelegate):
    """Turns a reference that nothing answers to into a placeholder, since only the reader knows the line."""

    def configurable_reference(self, scoped_selector: str, evaluate: bool) -> Any:
        try:
            return config.ConfigurableReference(scoped_selector, evaluate)
        except (NameError, AttributeError, KeyError, ValueError):
            return config._UnknownConfigurableReference(scoped_selector, evaluate)


class _Reader:
    """Hands gin one statement after the other, remembers where each stands, and collects the faults."""

    def __init__(self, search_paths: tuple[str, ...], skip_unknown: bool | Sequence[str]) -> None:
        self.faults: list[str] = []
        self._search_paths = search_paths
        self._skip_unknown = skip_unknown

    def read_file(self, name: str, asked_by: str) -> None:
        path = gin_faults.find_gin_file(name, self._search_paths, gin_root(), asked_by)
        shown = _shown(path)
        with path.open(encoding='utf-8') as lines, config._parse_scope() as context:
            for statement in _statements(lines, shown, context):
                self._take(statement, context, f'{shown}:{statement.location.line_num}')

    def read_bindings(self, bindings: Sequence[str]) -> None:
        with config._parse_scope() as context:
            for binding in bindings:
                flag = '--gin.' + '='.join(part.strip() for part in binding.split('=', maxsplit=1))
                for statement in _statements(binding, flag, context):
                    self._take(statement, context, flag)

    def _take(self, statement: Any, context: config.ParseContext, where: str) -> None:
        match statement:
            case config_parser.ImportStatement():
                self._import(statement, context, where)
            case config_parser.IncludeStatement():
                self.read_file(statement.filename, where)
            case config_parser.BindingStatement():
                self._bind(statement, context, where)

    def _import(self, statement: config_parser.ImportStatement, context: config.ParseContext, where: str) -> None:
        try:
            context.process_import(statement)
        except ImportError as error:
            if self._skip_unknown:
                return
            raise ConfigError(
                f'Cannot import what {where} asks for, {statement.format()!r}: {error}'
                f'{gin_faults.offer_module(statement.module, _PACKAGE)}. Correct the import, or install what it needs.'
            ) from error

    def _bind(self, statement: config_parser.BindingStatement, context: config.ParseContext, where: str) -> None:
        scope, selector, arg_name, value, _ = statement
        name = '.'.join(filter(None, ('/'.join(filter(None, (scope, selector))), arg_name)))
        if not arg_name:  # A macro: gin files its name as the scope.
            scope, selector, arg_name = name, gin_settings.MACRO, 'value'
        faults = [] if selector == gin_settings.MACRO else list(self._target_faults(selector, arg_name, context))
        faults += self._reference_faults(value, context)
        try:
            if not faults:
                gin.bind_parameter((scope, selector, arg_name), value)
        except ValueError as error:  # A method without its class, or a parameter that its author keeps out of gin.
            faults = [str(error)]
        self.faults.extend(f'{where}: {fault}' for fault in faults if fault)
        if not faults:
            complete = selector if selector == gin_settings.MACRO else context.get_configurable(selector).selector
            setting = Setting(name, value, where, tuple(config.iterate_references([value])))
            _SETTINGS[scope, complete, arg_name].append(setting)

    def _target_faults(self, selector: str, arg_name: str, context: config.ParseContext) -> Iterator[str]:
        """Yields what is wrong with the left side of a binding; '' for what is to be skipped."""
        if fault := _name_fault(selector, context):
            yield '' if self._skips(selector) else fault
        elif fault := gin_faults.unknown_parameter(selector, context.get_configurable(selector).wrapped, arg_name):
            yield fault

    def _reference_faults(self, value: Any, context: config.ParseContext) -> Iterator[str]:
        for part in config._iterate_flattened_values(value):
            if isinstance(part, config._UnknownConfigurableReference) and not self._skips(part.selector):
                yield _name_fault(part.selector, context)

    def _skips(self, selector: str) -> bool:
        return self._skip_unknown if isinstance(self._skip_unknown, bool) else selector in self._skip_unknown


def _statements(source: Any, shown: str, context: config.ParseContext) -> Iterator[Any]:
    """Yields the statements of an open file or of one binding."""
    try:
        yield from config_parser.ConfigParser(source, _Delegate())
    except (SyntaxError, tokenize.TokenError) as error:
        line = getattr(error, 'lineno', None) or error.args[1][0]
        where = shown if isinstance(source, str) else f'{shown}:{line}'
        text = source if isinstance(source, str) else getattr(error, 'text', None) or ''
        fault = gin_faults.unreadable(text, error, flag=isinstance(source, str))
        raise ConfigError(f'Cannot read {where}: {fault}.') from error
    config._IMPORTS.update(context.imports)  # Where gin looks when it writes the configuration out.


def _name_fault(selector: str, context: config.ParseContext) -> str:
    """Tells what is wrong with the name of a configurable where it stands; '' if gin knows it."""
    if context._dynamic_registration and (fault := gin_faults.unknown_name(selector, context._symbol_table)):
        return fault
    try:
        if context.get_configurable(selector):
            return ''
    except (KeyError, ValueError) as error:  # Ambiguous, or taken by another function of that name.
        return error.args[0]
    tails = ['.'.join(known.split('.')[-1 - selector.count('.') :]) for known, _ in config._REGISTRY.items()]
    return f'nothing is called {selector!r} here{did_you_mean(selector, tails)}'


def _shown(path: pathlib.Path) -> str:
    """Spells a file's path shortly: from the working directory, or as `gin/…` where it is one of our own."""
    absolute = path.resolve()
    if absolute.is_relative_to(gin_root()):
        return f'gin/{absolute.relative_to(gin_root()).as_posix()}'
    return os.path.relpath(absolute) if absolute.is_relative_to(pathlib.Path.cwd()) else str(absolute)


def _value_faults() -> Iterator[str]:
    """Yields the values that cannot be meant, each where it is written out, which may be in a macro."""
    for (_, selector, arg_name), settings in _SETTINGS.items():
        fn = config._REGISTRY[selector].wrapped
        parameter = gin_faults.describe_parameter(fn, arg_name)
        setting = gin_settings.through_macros(settings[-1], _SETTINGS)
        check = gin_faults.uncalled if gin_settings.is_reference(setting.value) else gin_faults.misquoted
        if fault := check(parameter, setting.value):
            yield f'{setting.label}: {fault}'


def configured(fn: Fn) -> Fn:
    """Returns `fn` with its gin settings as arguments; what a caller gives wins over them.

    Raises:
      ConfigError: if no gin file names `fn`, or if a setting has no effect on it (see `check_all_used`).
    """
    check_all_used(fn)
    return gin.get_configurable(fn)


def build_arguments(fn: Callable[..., Any], names: Sequence[str]) -> dict[str, Any]:
    """Builds some of the arguments that gin has for `fn`, without calling it; only what these need must be set.

    Args:
      fn: what gin files name.
      names: the arguments; those that no setting is for are left out.

    Raises:
      ConfigError: if no gin file names `fn`; or listing the settings that are required and missing.
    """
    selector = _selector_of(fn)
    needed = {key: given for key, given in _SETTINGS.items() if key[1] != selector or key[2] in names}
    reached = gin_settings.reach({selector}, needed)
    needed = {key: given for key, given in needed.items() if gin_settings.is_reached(key, reached)}
    unset = gin_settings.unset(needed)
    gin_faults.refuse('Cannot build what gin describes without the settings that are required ({}). Set them:', unset)
    given = gin.get_bindings(fn, resolve_references=False)
    return {name: copy.deepcopy(given[name]) for name in names if name in given}  # Copying calls gin's references.


def check_all_used(fn: Callable[..., Any]) -> None:
    """Checks that every setting that was parsed can have an effect on a call of `fn`.

    A setting counts as used if references lead from `fn` to it, in the scope it is for. References in settings that
    a later line replaced lead on as well, so a ready-made file may be included and one line of it changed. gin's own
    record of what was used (its operative config) is not asked: it knows of nothing before it has been called, and
    the trainer and the evaluators are called late.

    Raises:
      ConfigError: if gin knows nothing of `fn`; or listing the settings without effect, with near misses.
    """
    selector = _selector_of(fn)
    # What was decorated for gin in its source takes its settings whoever calls it.
    decorated = {key[1] for key in _SETTINGS if config._REGISTRY[key[1]].import_source is None}
    reached = gin_settings.reach({selector, *decorated - {gin_settings.MACRO}}, _SETTINGS)
    gin_faults.refuse(
        f'Cannot run {fn.__name__} with settings that have no effect on it ({{}}). Correct or remove them:',
        gin_settings.without_effect(reached, _SETTINGS),
    )


def _selector_of(fn: Callable[..., Any]) -> str:
    entry = config._inverse_lookup(fn)
    if entry is None:
        raise ConfigError(
            f'Cannot run {fn.__name__} from gin: none of {len(_SETTINGS)} settings names it. '
            'Give a run file, as --gin_file=gin/runs/pretrain_pydoc.gin.'
        )
    return entry.selector


@gin.configurable
def get_gin_config_str(show_provenance: bool = False) -> str:
    """Writes the parsed configuration as the text of a gin file.

    Args:
      show_provenance: whether to add, as comments, where each setting stood.
    """
    text = gin.config_str()
    if not show_provenance:
        return text
    latest = sorted((settings[-1] for settings in _SETTINGS.values()), key=lambda setting: setting.name)
    return '\n'.join([text, '# Where each setting stood:', *(f'# {each.name}: {each.where}' for each in latest)])


@gin.register
def summarize_gin_config(model_dir: str, summary_writer: Any | None, step: int) -> None:
    """Writes the configuration to `config.gin` in the model's folder, and as a text to the summaries.

    Args:
      model_dir: the folder; made where it is missing.
      summary_writer: anything with `write_texts(step, texts)` and `flush()`, or None.
      step: the training step to file the text under.
    """
    if jax.process_index() != 0:
        return
    text = get_gin_config_str()
    folder = pathlib.Path(model_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.gin').write_text(text, encoding='utf-8')
    if summary_writer is not None:
        summary_writer.write_texts(step, {'config': gin.markdown(text)})
        summary_writer.flush()


def without_traces(message: str) -> str:
    """Drops from an error's message what gin adds to it: the calls through which it came.

    >>> without_traces("Cannot do it.\\n  In call to configurable 'train' (<function train at 0x7f>)")
    'Cannot do it.'
    """
    return message.partition('\n  In call to configurable')[0]


def rewrite_gin_args(args: Sequence[str]) -> list[str]:
    """Rewrites `--gin.NAME=VALUE` to `--gin_bindings=NAME = VALUE`, `--with_gin.` likewise, and leaves all else.

    >>> rewrite_gin_args(['train.py', '--gin.A=1', '--x=2'])
    ['train.py', '--gin_bindings=A = 1', '--x=2']
    """
    return [_rewrite(arg) if arg.startswith(('--gin.', '--with_gin.')) else arg for arg in args]


def _rewrite(arg: str) -> str:
    prefix, _, setting = arg.partition('.')
    name, equals, value = setting.partition('=')
    if not equals:
        raise ConfigError(f'Cannot read flag {arg}: it has no value. Write {arg}=VALUE.')
    return f'{prefix}_bindings={name} = {value}'


def define_flags() -> None:
    """Defines `--gin_file`, `--gin_bindings` and `--gin_search_paths`, once."""
    if 'gin_file' in flags.FLAGS:
        return
    flags.DEFINE_multi_string('gin_file', None, 'A gin file; may be given several times, and later files win.')
    flags.DEFINE_multi_string('gin_bindings', [], 'A setting, "NAME = VALUE"; --gin.NAME=VALUE says the same.')
    flags.DEFINE_list('gin_search_paths', ['.'], 'Folders in which gin files and what they include are looked for.')


def run(main: Callable[[Sequence[str]], Any]) -> None:
    """Runs a script's `main` with absl, where flags may be given as `--gin.NAME=VALUE`."""
    app.run(main, flags_parser=lambda args: app.parse_flags_with_usage(rewrite_gin_args(args)))


@gin.configurable
def sum_fn(var1: Any = gin.REQUIRED, var2: Any = gin.REQUIRED) -> Any:
    """Adds two values in a gin file."""
    return var1 + var2


@gin.configurable
def bool_fn(var1: Any = gin.REQUIRED) -> bool:
    """Turns a value in a gin file into True or False."""
    return bool(var1)


@gin.configurable
def string_split_fn(
    text: str = gin.REQUIRED, separator: str = gin.REQUIRED, maxsplit: int = -1, index: int | None = None
) -> list[str] | str:
    """Splits text in a gin file; with `index`, returns that part alone."""
    parts = text.split(separator, maxsplit)
    return parts if index is None else parts[index]
