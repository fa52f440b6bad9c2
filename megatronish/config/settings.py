"""Settings of the command line and of the TOML file: field names are resolved, values are still text."""

import re
import shlex
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from megatronish.config.fields import ALIASES, FIELDS, SECTIONS
from megatronish.config.flag_meaning import Settings, report, understand
from megatronish.config.portable import from_here
from megatronish.config.suggest import is_meant_as_config, nearest_section, one_of_sections, unknown
from megatronish.core.foreign import parse_toml, read_text


class CommandLine(NamedTuple):
    """Command line, split into the config file's name and flags; and the flag that asks for help, if one does."""

    config_file: str | None
    wants_help: str | None
    flags: Settings


MOST_PROBLEMS = 200
HELP, HELP_ALL = ("-h", "--help"), "--help-all"


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Flags with the values that follow them. A value that starts with a dash is written --flag=value."""
    config_files: list[str] = []
    flags = Settings.empty()
    flags.problems.extend(
        f"{word!r} is not UTF-8 text, as a config must be; type it again, or rename the file that it names"
        for word in argv
        if not _is_text(word)
    )
    wants_help, words = None, flags_of(argv)
    is_mock = asks_for_mock_data(argv)
    for flag, values in words:
        if len(flags.problems) > MOST_PROBLEMS:
            flags.problems.append("flags after that were not read; correct these first")
            break
        name = flag.lstrip("-").replace("_", "-")
        if flag in (*HELP, HELP_ALL):
            wants_help = flag
        elif not flag:
            remedy = f"write --config {values[0]}" if values[0].endswith(".toml") else "flags start with --; see --help"
            flags.problems.append(f"{' '.join(values)!r} belongs to no flag; {remedy}")
        elif name == "config":
            config_files.extend(values)
            if len(values) != 1 or len(config_files) > 1:
                flags.problems.append(f"--config {' '.join(config_files)} must name one file; name it once")
        elif flag.startswith("--") and len(values) == 1 and is_meant_as_config(name):
            config_files.extend(values)
            flags.problems.append(unknown(name, spelled=flag, typed=True))
        elif not flag.startswith("--"):
            flags.problems.append(unknown(name, spelled=flag, typed=True))
        else:
            spelled = " ".join([flag, *(value or "''" for value in values)])
            understand(flags, name=name, values=values, spelled=spelled, typed=True, is_mock=is_mock)
    return CommandLine(config_files[0] if config_files else None, wants_help, report(flags))


def asks_for_mock_data(argv: Sequence[str]) -> bool:
    """Whether the last flag about made-up data asks for them: files that list data are not read then."""
    names = {"--mock-data": True, "--no-mock-data": False}
    asked = [
        names[name] != (values == ("false",))
        for flag, values in flags_of(argv)
        if (name := flag.replace("_", "-")) in names
    ]
    return bool(asked) and asked[-1]


def read_file(path: Path, *, is_mock: bool = False) -> Settings:
    """Settings of a TOML file; OSError or TOMLDecodeError if it cannot be read at all. `is_mock`: by --mock-data."""
    settings = Settings.empty()
    tables = from_here(parse_toml(read_text(path)), path.parent)
    data = tables.get("data")
    is_mock = is_mock or (isinstance(data, dict) and data.get("mock_data") is True)
    for section, entries in tables.items():
        if len(settings.problems) > MOST_PROBLEMS:
            break
        if section == "plugin" and not isinstance(entries, dict):  # it comes before all sections, and may stand there
            _read_entry(settings, section="plugins", key=section, value=entries)
        elif not isinstance(entries, dict):
            _stray(settings, section)
        else:
            if section not in SECTIONS:
                settings.problems.append(one_of_sections(section, SECTIONS))
                section = nearest_section(section, SECTIONS)  # so that nothing is missing for that
            for key, value in entries.items() if section else ():
                if len(settings.problems) > MOST_PROBLEMS:  # each takes a millisecond to find what was meant
                    break
                _read_entry(settings, section=section, key=key, value=value, is_mock=is_mock)
    if len(settings.problems) > MOST_PROBLEMS:
        settings.problems.append("what stands after that was not read; correct these first")
    return report(settings)


def _read_entry(found: Settings, *, section: str, key: str, value: Any, is_mock: bool = False) -> None:
    """Add the setting of one key, read like a flag: true is `--key`, false is `--no-key`."""
    field = FIELDS.get(ALIASES.get(key, key))
    spelled = f"[{section}] {key} = {str(value).lower() if isinstance(value, bool) else value}"
    if field is not None and field.section != section:
        found.problems.append(f"[{section}] {key} belongs in [{field.section}]; move it there")
        found.invalid.add(field.name)
        return
    name = key.replace("_", "-")
    values = tuple(value) if isinstance(value, list) else (value,)
    if field is not None and isinstance(value, bool) != (field.type is bool):
        found.problems.append(f"{spelled}: {field.name} must be {field.wants}")
        found.invalid.add(field.name)
    elif not all(isinstance(part, str | int | float) for part in values):
        found.problems.append(f"{spelled}: {key} must be {field.wants if field else 'a plain value'}")
        found.invalid.update({field.name} if field else ())
    elif isinstance(value, bool):
        understand(found, name=name if value else f"no-{name}", values=(), spelled=spelled, typed=False)
    else:
        words = tuple(map(str, values))
        understand(found, name=name, values=words, spelled=spelled, typed=False, is_mock=is_mock)


def _stray(found: Settings, key: str) -> None:
    field = FIELDS.get(ALIASES.get(key, key))
    where = f"[{field.section}]" if field else f"one of the sections {', '.join(SECTIONS)}"
    found.problems.append(f"{key} stands outside of any section; move it into {where}")


def _is_text(word: str) -> bool:
    """Whether a word is UTF-8 text: other bytes come from the shell as lone surrogates."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parts(word: str) -> list[str]:
    """Words of "--split '99,1,0'"; any other word is left as it is."""
    if not re.match(r"--[A-Za-z][\w-]*\s", word):
        return [word]
    try:
        return shlex.split(word)
    except ValueError:  # a quotation mark that nothing closes
        return word.split()


def flags_of(argv: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """[(flag, its values), ...]; a dash before a digit is a number's sign.

    A flag and its values in one word, as a script that quotes too much passes them, are several words.
    """
    chunks: list[tuple[str, tuple[str, ...]]] = []
    for word in chain.from_iterable(map(_parts, argv)):
        if re.match(r"--?[A-Za-z]", word):
            flag, equals, value = word.partition("=")
            chunks.append((flag, (value,) if equals else ()))
        else:
            flag, values = chunks.pop() if chunks else ("", ())
            chunks.append((flag, (*values, word)))
    return chunks
