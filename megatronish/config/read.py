"""Reading of a run's config in three passes: parse, fill in, check; all complaints are printed together.

1. `_parse`  texts of a TOML file, and of flags over it, to values of the fields that they set (settings.py,
             flag_meaning.py, conflicts.py)
2. `_fill`   what is not given: from the model that the run starts from (model_source.py), or derived (defaults.py)
3. `_check`  of the whole: ranges, rules, files (check.py, rules/)
"""

import contextlib
import dataclasses
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import tyro

from megatronish.config.check import missing_files
from megatronish.config.check import problems as broken_rules
from megatronish.config.config import Config
from megatronish.config.conflicts import merge, settle, with_passwords
from megatronish.config.defaults import derive
from megatronish.config.fields import FIELDS
from megatronish.config.flag_meaning import Setting, Settings
from megatronish.config.help import print_help
from megatronish.config.hub import from_hub, hub_name
from megatronish.config.model_source import ReadStart, Start, contradictions, implied_tokenizer, stretched
from megatronish.config.plugins import import_plugins
from megatronish.config.sections.experts import ExpertOptions
from megatronish.config.settings import HELP_ALL, CommandLine, asks_for_mock_data, read_command_line, read_file
from megatronish.config.shipped import config_path, of_other_framework, shipped_configs
from megatronish.core.errors import UserError, without_passwords

PROGRAM = "pretrain_gpt.py"
LARGEST = 2**24  # bytes of a file; ours have a few thousand


class ConfigError(UserError):
    """All errors of a config, a sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{count} in the configuration:", *(f"  {problem}" for problem in self.problems)]))


class ReadConfig(NamedTuple):
    """Config of a run, with notes for the user."""

    config: Config
    notes: list[str]


def read_config(
    argv: Sequence[str],
    *,
    world_size: int | None = None,
    read_start: ReadStart | None = None,
    program: str = PROGRAM,
    unasked: Collection[str] = (),
    settle_layout: Callable[[Config], Config] | None = None,
) -> ReadConfig:
    """Config of a command line; `world_size` is the launcher's (torchrun, SLURM), None on a plain start.

    `read_start` reads the model that --load-hf or --use-checkpoint-args names; `program` is the name in --help. A
    program that does not train leaves fields `unasked`: they need not be given, nor files of data or tokenizer exist.
    `settle_layout` replaces the layout before the check. Prints and exits 0 on --help (help.py). ConfigError with all
    problems.
    """
    # Every source gives settings as text, and not yet as values: a complaint quotes them as the user wrote them.
    line = read_command_line(argv)
    if line.wants_help:
        print_help(program, shows_all=line.wants_help == HELP_ALL)
    parsed = _parse(line, is_mock=asks_for_mock_data(argv))
    filled = _fill(parsed, read_start, world_size=world_size)
    if settle_layout is not None:
        filled = filled._replace(config=settle_layout(filled.config))
    if problems := _check(parsed, filled, unasked=unasked):
        raise ConfigError(problems)
    return ReadConfig(filled.config, [*map(without_passwords, (*parsed.notes, *filled.notes))])


class Parsed(NamedTuple):
    """First pass: the values that are given, by field, and the settings that they come from.

    Fields of `invalid` have a complaint in `problems`: no other is made about them.
    """

    values: dict[str, Any]
    settings: dict[str, Setting]
    invalid: set[str]
    problems: list[str]
    notes: list[str]
    path: Path | None


class Filled(NamedTuple):
    """Second pass: the whole config; what is not given comes from the model to start from, or is derived."""

    config: Config
    start: Start | None
    problems: list[str]
    notes: list[str]


def _parse(line: CommandLine, *, is_mock: bool) -> Parsed:
    """Values from texts. ConfigError where no value can be read: no file, no plug-in, no model of the hub."""
    path = config_path(line.config_file) if line.config_file is not None else None
    file, flags = _read_file(path, is_mock=is_mock), line.flags
    # A file that cannot be read ends it here: every field that it sets would be missing, and complain.
    if isinstance(file, str):
        raise ConfigError([file, *flags.problems])
    # Flags override the file, and of settings that exclude each other one is left.
    merged = merge(file=file.settings, typed=flags.settings, yielding=[*flags.yielding, *file.yielding])
    problems = [*file.problems, *flags.problems, *merged.problems]
    # Plug-ins come before any value is read: what they register are valid names.
    plugins = _imported(merged.settings, problems)
    settings, hidden = with_passwords(merged.settings)
    values, type_errors = _values(settings)
    # Conflicts are decided by values, as a setting that equals its default is in none.
    settled = settle({name: settings[name] for name in values}, values)
    problems += [*type_errors.values(), *settled.problems, *hidden]
    given, from_where = _downloaded({name: values[name] for name in settled.settings}, problems)
    given |= implied_tokenizer(given)
    notes = [*plugins, *from_where, *_idle(settled.idle, path), *merged.notes, *file.notes, *flags.notes]
    return Parsed(given, settled.settings, {*type_errors, *file.invalid}, problems, notes, path)


def _fill(parsed: Parsed, read_start: ReadStart | None, *, world_size: int | None) -> Filled:
    """The whole config. ConfigError if the model that the run starts from cannot be read: it decides the most."""
    start = _start(parsed.values, read_start)
    if isinstance(start, str):
        raise ConfigError([start, *parsed.problems])
    defaults = {} if start is None else start.fields(parsed.values)
    # Over the defaults what that model says, over that what was given. Fields with a complaint hold their defaults,
    # which no rule may complain about: the user wrote another value.
    config = Config().with_fields(**defaults | parsed.values)
    derived = derive(config, path=parsed.path, world_size=world_size, invalid=parsed.invalid)
    notes = list(derived.notes)
    if start is not None:
        notes += stretched(start, derived.config.training.seq_length)
    return Filled(derived.config, start, derived.problems, notes)


def _check(parsed: Parsed, filled: Filled, *, unasked: Collection[str]) -> list[str]:
    """Third pass: all complaints, in the order in which they are printed."""
    config, start, own = filled.config, filled.start, parsed.values
    return [
        *parsed.problems,
        *([] if start is None else contradictions(start, _of_start(parsed.settings, own), own)),
        *filled.problems,
        *broken_rules(config, invalid={*parsed.invalid, *(set(unasked) - own.keys())}),
        *([] if unasked else missing_files(config.data)),
    ]


def _imported(settings: Mapping[str, Setting], wrong: Sequence[str]) -> list[str]:
    """Notes about the plug-ins of these settings, which are imported; ConfigError, with what else is wrong, if not."""
    try:
        return import_plugins(settings["plugin"].values if "plugin" in settings else ())
    except UserError as error:
        raise ConfigError([str(error), *wrong]) from error


def _downloaded(given: dict[str, Any], wrong: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Fields with folders in the place of names of the hub, and notes; with errors nothing is fetched."""
    if wrong:
        # Without the model its fields are at their defaults, and every further complaint about them would be wrong.
        if hub_name(given.get("load_hf") or ""):  # what else is wrong, the model decides
            raise ConfigError(wrong)
        return given, []
    try:
        downloaded, notes = from_hub(given)
    except UserError as error:
        raise ConfigError([str(error)]) from error
    return given | downloaded, notes


def _idle(idle: Mapping[str, str], path: Path | None) -> list[str]:
    """The note about settings of the file that others exclude."""
    names = ", ".join(f"{name} (by {winner})" for name, winner in idle.items())
    return [f"idle in {path}: {names}" if path is not None else f"idle: {names}"] if names else []


def _of_start(settings: Mapping[str, Setting], given: Mapping[str, Any]) -> dict[str, Setting]:
    """Settings that the model to start from decides: with upcycling, a dense model decides nothing about experts."""
    own = vars(ExpertOptions()) if given.get("moe_use_upcycling") else {}
    return {name: setting for name, setting in settings.items() if name not in own}


def _start(given: Mapping[str, Any], read_start: ReadStart | None) -> Start | str | None:
    """Model that the run starts from, if its files describe it, or why they cannot be read."""
    checkpoint = Config().with_fields(**given).checkpoint
    if read_start is None:
        assert not (checkpoint.load_hf or (checkpoint.load and checkpoint.use_checkpoint_args)), (
            "the caller passes a reader of models"
        )
        return None
    try:
        return read_start(checkpoint)
    except UserError as error:
        return str(error)


def _read_file(path: Path | None, *, is_mock: bool) -> Settings | str:
    """Settings of the file, or why it cannot be read."""
    if path is None:
        return Settings.empty()
    # Before it is opened: opening a pipe would block, and a device may never end.
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no file but a device or a pipe"
        return f"--config {path} is {what}; name a TOML file"
    try:
        if path.stat().st_size > LARGEST:
            return f"--config {path} has {path.stat().st_size} bytes, and {LARGEST} is the limit; name a TOML file"
        if (other := of_other_framework(path)) is not None:
            return other
        return read_file(path, is_mock=is_mock)
    except FileNotFoundError:
        others = [*sorted(map(str, path.parent.glob("*.toml"))), *shipped_configs()]
        return f"--config {path} does not exist; there are {', '.join(others)}"
    except (ValueError, RecursionError) as error:  # of TOML, of its encoding, or of a number of thousands of digits
        return f"--config {path} is not TOML: {error}; correct that line"
    except OSError as error:
        return f"--config {path} cannot be read: {error.strerror}; name a readable TOML file"


def _values(settings: Mapping[str, Setting]) -> tuple[dict[str, Any], dict[str, str]]:
    """({field: value}, {field: complaint})."""
    misnamed = {name for name, setting in settings.items() if not _is_a_choice(setting)}
    values, wrong = _sift([setting for name, setting in settings.items() if name not in misnamed])
    wrong |= misnamed
    complaints = {
        name: f"{setting.spelled}: {name} must be {FIELDS[name].wants}{_others(name)}"
        for name, setting in settings.items()
        if name in wrong
    }
    return values, complaints


def _others(name: str) -> str:
    """What completes the choices of a field that plug-ins extend."""
    return "; others are those of plug-ins (--plugin)" if FIELDS[name].is_extensible and FIELDS[name].choices else ""


def _is_a_choice(setting: Setting) -> bool:
    """Whether a field that has few values is set to one of them."""
    field = FIELDS[setting.field]
    if get_origin(field.type) is tuple or not field.choices:
        return True  # read, and then asked by `allows`
    return " ".join(setting.values) in {"None", *map(str, field.choices)}


def _sift(settings: Sequence[Setting]) -> tuple[dict[str, Any], set[str]]:
    """({field: value}, fields of wrong values). tyro stops at its first bad value: halves are read by themselves."""
    together = _typed(settings)
    if together is not None:
        return together, set()
    if len(settings) == 1:
        return {}, {settings[0].field}
    middle = len(settings) // 2
    (first, wrong), (second, also_wrong) = _sift(settings[:middle]), _sift(settings[middle:])
    return first | second, wrong | also_wrong


def _typed(settings: Sequence[Setting]) -> dict[str, Any] | None:
    """{field: value}, or None if a value is not of its field's type."""
    values: dict[str, Any] = {}
    arguments = []
    # Switches are read here: only `true` and `false` are values, in files as in flags. tyro reads everything else.
    for setting in settings:
        field = FIELDS[setting.field]
        if field.type is bool:
            if setting.values not in (("true",), ("false",)):
                return None
            values[setting.field] = setting.values == ("true",)
        else:
            first, *others = setting.values or ("",)
            arguments += [f"{field.flag}={first}", *others] if setting.values else [field.flag]
    # A class of these fields alone: tyro takes a tenth of a second to read all of them.
    given = {setting.field: FIELDS[setting.field] for setting in settings}
    fields = [(field.name, field.annotation, field.default) for field in given.values()]
    try:
        # A value of the wrong type is printed in spite of console_outputs.
        with contextlib.redirect_stderr(io.StringIO()):
            parsed: Any = tyro.cli(
                dataclasses.make_dataclass("Given", fields), args=arguments, prog=PROGRAM, console_outputs=False
            )
    except SystemExit:
        return None
    read = {name: getattr(parsed, name) for name in given}
    # Elements of lists, and names that plug-ins register, are compared with the choices once they are read.
    if not all(FIELDS[setting.field].allows(read[setting.field]) for setting in settings):
        return None
    return read | values
