"""Reading of a run's config: a TOML file, flags over it, derived fields, and all complaints together."""

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import tyro

from megatronish.config.check import problems as broken_rules
from megatronish.config.config import Config
from megatronish.config.conflicts import merge, settle, with_passwords
from megatronish.config.defaults import Derived, derive
from megatronish.config.fields import FIELDS, SECTIONS, with_fields
from megatronish.config.flag_meaning import Setting, Settings
from megatronish.config.hub import from_hub, hub_name
from megatronish.config.model_source import ReadStart, Start, contradictions, implied_tokenizer, stretched
from megatronish.config.plugins import import_plugins
from megatronish.config.sections.data import DataConfig, parse_blend, split_part
from megatronish.config.sections.experts import ExpertOptions
from megatronish.config.settings import asks_for_mock_data, read_command_line, read_file
from megatronish.config.shipped import HOW_TO_MAKE, config_path, of_other_framework, shipped_configs
from megatronish.core.errors import UserError

# Check that the files which a config names exist. Their content is checked by their readers.


LONGEST, LONGEST_NAME = 4000, 240
"""Characters of a path and of a name in it: Linux takes 4096 and 255, and an ending comes after them."""


def missing_files(data: DataConfig) -> list[str]:
    """Complaints about data prefixes and tokenizer files that do not exist; none with --mock-data."""
    if data.mock_data:
        return []
    return [*_missing_data(data), *_missing_tokenizer(data)]


def _missing_data(data: DataConfig) -> Iterator[str]:
    if data.dataset_type != "pretrain":  # what a path of another kind means, that kind knows alone
        return
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        try:
            prefixes = [split_part(path)[0] for _, path in parse_blend(getattr(data, name))]
        except ValueError:  # the rules say so
            continue
        for prefix in prefixes:
            # Asked first: the system calls below raise ValueError or OSError for what can be no path.
            if complaint := _no_path(prefix):
                yield f"{name}={prefix[:60]!r}: {complaint}"
                continue
            missing = [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").is_file()]
            # What exists and is no ordinary file has another remedy than what is missing: a pipe would block its
            # reader.
            odd = [path for path in missing if Path(path).exists()]
            if odd:
                yield f"{name}={prefix}: {odd[0]} is no file but a folder, a pipe or a device; name the prefix of files"
            elif missing:
                are = "does not exist" if len(missing) == 1 else "do not exist"
                yield f"{name}={prefix}: {' and '.join(missing)} {are}; {_data_remedy(prefix)}"


def _no_path(text: str) -> str | None:
    """What is wrong with a text that can be no path of files; None if nothing is."""
    if not Path(text).name:
        return "it names no file; name the prefix of files, what stands before .bin and .idx"
    if "\0" in text:
        return "a path has no NUL; correct it"
    if len(text) > LONGEST or max(map(len, Path(text).parts)) > LONGEST_NAME:
        return f"a path of {len(text)} characters is too long; name files elsewhere"
    return None


def _data_remedy(prefix: str) -> str:
    # From the most likely mistake to the least: an ending too much, Megatron-LM's ending left out, files of a shipped
    # config that are not made yet, texts that are no tokens.
    for end in (".bin", ".idx"):
        if prefix.endswith(end) and Path(prefix).is_file():
            return f"leave {end} off: use {prefix.removesuffix(end)}"
    if Path(f"{prefix}_text_document.idx").is_file():
        return f"use {prefix}_text_document"
    if prefix in HOW_TO_MAKE:
        return f"make them in this folder with: {HOW_TO_MAKE[prefix]}; or use --mock-data"
    if Path(prefix).is_file():
        return "chats are read as they are with dataset_type=chat; of other texts make them with megatronish preprocess"
    return "make them with megatronish preprocess, or use --mock-data"


def _missing_tokenizer(data: DataConfig) -> Iterator[str]:
    if data.tokenizer_type not in ("sentencepiece", "huggingface", "tiktoken"):
        return
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        path = getattr(data, name)
        if path is not None and Path(path).is_dir() and data.tokenizer_type == "sentencepiece":
            yield f"{name}={path} is a folder; name the SentencePiece file in it, or use --tokenizer-type huggingface"
        if path is not None and not Path(path).exists():
            remedy = "correct the path, or use --tokenizer-type bytes, which needs no file"
            if path in HOW_TO_MAKE:
                remedy = f"make it in this folder with: {HOW_TO_MAKE[path]}"
            yield f"{name}={path} does not exist; {remedy}"


PROGRAM = "pretrain_gpt.py"
LARGEST = 2**24  # bytes of a file; ours have a few thousand
_NAMES = [f"[{section}]" for section in SECTIONS]
DESCRIPTION = (
    f"Pretrains a GPT. --config FILE.toml, or --config NAME of a config that comes with megatronish (demo, quick ...), "
    f"reads sections {', '.join(_NAMES[:-1])} and {_NAMES[-1]}; the flags below override it. Names and meanings are "
    "Megatron-LM's where it has the flag."
)


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
    needs_files: bool = True,
    settle_layout: Callable[[Config], Config] | None = None,
) -> ReadConfig:
    """Config of a command line; `world_size` is the launcher's (torchrun, SLURM), None on a plain start.

    `read_start` reads the model that --load-hf or --use-checkpoint-args names; `program` is the name in --help. Without
    `needs_files`, data and tokenizer may be elsewhere; `settle_layout` replaces the layout before the check. Prints and
    exits 0 on --help. ConfigError with all problems.
    """
    # Every source gives settings as text, and not yet as values: a complaint quotes them as the user wrote them.
    line = read_command_line(argv)
    if line.wants_help:
        tyro.cli(tyro.conf.OmitArgPrefixes[Config], args=["--help"], prog=program, description=DESCRIPTION)
    path = config_path(line.config_file) if line.config_file is not None else None
    # A file that cannot be read ends it here: every field that it sets would be missing, and complain.
    file = _read_file(path, is_mock=asks_for_mock_data(argv))
    if isinstance(file, str):
        raise ConfigError([file, *line.flags.problems])

    # Settings as values: flags override the file, and of settings that exclude each other one is left.
    merged = merge(file=file.settings, typed=line.flags.settings, yielding=[*line.flags.yielding, *file.yielding])
    # Plug-ins come before any value is read: what they register are valid names.
    found_plugins = _imported(merged.settings, [*file.problems, *line.flags.problems, *merged.problems])
    settings, hidden = with_passwords(merged.settings)
    values, type_errors = _values(settings)
    # Conflicts are decided by values, as a setting that equals its default is in none.
    settled = settle({name: settings[name] for name in values}, values)
    wrong = [*file.problems, *line.flags.problems, *merged.problems, *type_errors.values(), *settled.problems, *hidden]
    given, from_where = _downloaded({name: values[name] for name in settled.settings}, wrong)
    given |= implied_tokenizer(given)

    # The model that the run starts from fills in what is not given.
    start = _start(given, read_start)
    if isinstance(start, str):
        raise ConfigError([start, *wrong])
    # Defaults, over them what the model to start from says, over that what was given.
    config = with_fields(Config(), **({} if start is None else start.fields(given)) | given)
    # Fields with a complaint hold their defaults here, which no rule may complain about: the user wrote another value.
    invalid = {*type_errors, *file.invalid}
    derived = _settled(derive(config, path=path, world_size=world_size, invalid=invalid), settle_layout)
    problems = [
        *wrong,
        *([] if start is None else contradictions(start, _of_start(settled.settings, given), given)),
        *derived.problems,
        *broken_rules(derived.config, invalid=invalid),
        *(missing_files(derived.config.data) if needs_files else []),
    ]
    if problems:
        raise ConfigError(problems)
    notes = [*found_plugins, *from_where, *_idle(settled.idle, path)]
    notes += [*merged.notes, *file.notes, *line.flags.notes, *derived.notes]
    if start is not None:
        notes += stretched(start, derived.config.training.seq_length)
    return ReadConfig(derived.config, notes)


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


def _settled(derived: Derived, settle_layout: Callable[[Config], Config] | None) -> Derived:
    """The same in another layout, where the caller has one."""
    return derived if settle_layout is None else derived._replace(config=settle_layout(derived.config))


def _of_start(settings: Mapping[str, Setting], given: Mapping[str, Any]) -> dict[str, Setting]:
    """Settings that the model to start from decides: with upcycling, a dense model decides nothing about experts."""
    own = vars(ExpertOptions()) if given.get("moe_use_upcycling") else {}
    return {name: setting for name, setting in settings.items() if name not in own}


def _start(given: Mapping[str, Any], read_start: ReadStart | None) -> Start | str | None:
    """Model that the run starts from, if its files describe it, or why they cannot be read."""
    checkpoint = with_fields(Config(), **given).checkpoint
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
    # One call for all, which is enough where nothing is wrong. Else log2(n) rounds of halves find each wrong field, and
    # the values of the others are kept for the rules.
    together = _parse(settings)
    if together is not None:
        return together, set()
    if len(settings) == 1:
        return {}, {settings[0].field}
    middle = len(settings) // 2
    (first, wrong), (second, also_wrong) = _sift(settings[:middle]), _sift(settings[middle:])
    return first | second, wrong | also_wrong


def _parse(settings: Sequence[Setting]) -> dict[str, Any] | None:
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
            found: Any = tyro.cli(
                dataclasses.make_dataclass("Given", fields), args=arguments, prog=PROGRAM, console_outputs=False
            )
    except SystemExit:
        return None
    read = {name: getattr(found, name) for name in given}
    # Elements of lists, and names that plug-ins register, are compared with the choices once they are read.
    if not all(FIELDS[setting.field].allows(read[setting.field]) for setting in settings):
        return None
    return read | values
