"""Settings of the command line and of the TOML file: field names are resolved, values are still text."""

import difflib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatronish.config.fields import ALIASES, FIELDS, SECTIONS
from megatronish.config.flags import KNOWN, VALUES, Known


class Setting(NamedTuple):
    """Field that the user set. `spelled` is the setting as written: "--tp 2" or "[parallel] tp = 2"."""

    field: str
    values: tuple[str, ...]
    spelled: str
    typed: bool


class Settings(NamedTuple):
    """Settings of one source, with notes and problems."""

    settings: list[Setting]
    notes: list[str]
    problems: list[str]
    invalid: set[str]  # fields with a problem, which need no further complaint


class CommandLine(NamedTuple):
    """Command line, split into the config file's name and flags."""

    config_file: str | None
    wants_help: bool
    flags: Settings


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Flags with the values that follow them. A value that starts with a dash is written --flag=value."""
    config_files: list[str] = []
    flags = Settings([], [], [], set())
    flags.problems.extend(
        f"{word!r} is not UTF-8 text, as a config must be; type it anew, or rename what it names"
        for word in argv
        if not _is_text(word)
    )
    wants_help = False
    for flag, values in _chunks(argv):
        name = flag.lstrip("-").replace("_", "-")
        if flag in ("-h", "--help"):
            wants_help = True
        elif not flag:
            remedy = f"write --config {values[0]}" if values[0].endswith(".toml") else "flags start with --; see --help"
            flags.problems.append(f"{' '.join(values)!r} belongs to no flag; {remedy}")
        elif name == "config":
            config_files.extend(values)
            if len(values) != 1 or len(config_files) > 1:
                flags.problems.append(f"--config {' '.join(config_files)} must name one file; name it once")
        elif not flag.startswith("--"):
            flags.problems.append(_unknown(name, spelled=flag, typed=True))
        else:
            _understand(flags, name=name, values=values, spelled=" ".join([flag, *values]), typed=True)
    return CommandLine(config_files[0] if config_files else None, wants_help, flags)


def read_file(path: Path) -> Settings:
    """Settings of a TOML file; OSError or TOMLDecodeError if it cannot be read at all."""
    found = Settings([], [], [], set())
    for section, entries in tomllib.loads(path.read_text(encoding="utf-8")).items():
        if section == "plugin" and not isinstance(entries, dict):  # it comes before all sections, and may stand there
            _read_entry(found, section="plugins", key=section, value=entries)
        elif not isinstance(entries, dict):
            _stray(found, section)
        elif section not in SECTIONS:
            nearest = difflib.get_close_matches(section, SECTIONS, n=1)
            remedy = f"did you mean [{nearest[0]}]?" if nearest else f"there are {', '.join(SECTIONS)}"
            found.problems.append(f"[{section}] is not a section; {remedy}")
        else:
            for key, value in entries.items():
                _read_entry(found, section=section, key=key, value=value)
    return found


def _read_entry(found: Settings, *, section: str, key: str, value: Any) -> None:
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
        _understand(found, name=name if value else f"no-{name}", values=(), spelled=spelled, typed=False)
    else:
        _understand(found, name=name, values=tuple(map(str, values)), spelled=spelled, typed=False)


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


def _chunks(argv: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """[(flag, its values), ...]; a dash before a digit is a number's sign."""
    chunks: list[tuple[str, tuple[str, ...]]] = []
    for word in argv:
        if re.match(r"--?[A-Za-z]", word):
            flag, equals, value = word.partition("=")
            chunks.append((flag, (value,) if equals else ()))
        else:
            flag, values = chunks.pop() if chunks else ("", ())
            chunks.append((flag, (*values, word)))
    return chunks


def _understand(found: Settings, *, name: str, values: tuple[str, ...], spelled: str, typed: bool) -> None:
    """Add the settings, the note or the problem that a flag (or a key, read like a flag) leads to."""
    field = ALIASES.get(name, name.replace("-", "_"))
    negated = field.removeprefix("no_")
    if field in FIELDS:
        if FIELDS[field].type is bool:
            values = tuple(value.lower() for value in values) or ("true",)
        values = tuple(VALUES.get(field, {}).get(value, value) for value in values)
        found.settings.append(Setting(field, values, spelled, typed))
    elif field != negated and negated in FIELDS and FIELDS[negated].type is bool and not values:
        found.settings.append(Setting(negated, ("false",), spelled, typed))
    elif name in KNOWN:
        _look_up(found, KNOWN[name], values=values, spelled=spelled, typed=typed)
    else:
        found.problems.append(_unknown(name, spelled=spelled, typed=typed))


def _look_up(found: Settings, known: Known, *, values: tuple[str, ...], spelled: str, typed: bool) -> None:
    if known.status != "refused" and len(values) != known.num_values:
        found.problems.append(f"{spelled} must have {known.num_values or 'no'} value; it has {len(values)}")
    elif known.status == "means":
        found.settings.extend(Setting(field, (value,), spelled, typed) for field, value in known.settings)
    elif known.status == "idle":
        found.notes.append(f"{spelled} is idle: {known.text}")
    elif values and set(values) <= set(known.harmless):
        found.notes.append(f"{spelled} is idle: it asks for what is done anyway")
    else:
        found.problems.append(f"{spelled} is refused: {known.text}")


def _unknown(name: str, *, spelled: str, typed: bool) -> str:
    names = [*ALIASES, *(field.replace("_", "-") for field in FIELDS), *KNOWN, "config", "help"]
    nearest = difflib.get_close_matches(name, names, n=1)
    if typed:
        remedy = f"did you mean --{nearest[0]}?" if nearest else "see --help"
        return f"{spelled.split()[0]} is not a flag; {remedy}"
    remedy = f"did you mean {nearest[0].replace('-', '_')}?" if nearest else "docs/FLAGS.md lists all"
    return f"{spelled.split(' = ')[0]} is not a key; {remedy}"
