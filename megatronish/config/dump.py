"""Writer of configs: TOML that --config reads as the same config."""

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from megatronish.config.config import Config
from megatronish.config.fields import VERBATIM, fields_of
from megatronish.core.errors import UserError, without_passwords
from megatronish.core.foreign import shown

LONGEST_COMMENT = 400


def resolved(config: Config) -> dict[str, dict[str, Any]]:
    """{section: {field: value}} of TOML's and JSON's types; without fields that are None, and without passwords."""
    return {
        section: {name: _shown(name, value) for name, value in fields.items() if value is not None}
        for section, fields in dataclasses.asdict(config).items()
    }


def _shown(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return [_shown(name, each) for each in value]
    return without_passwords(value) if isinstance(value, str) and name not in VERBATIM else value


Section = TypeVar("Section")


def section_of(kind: type[Section], saved: Mapping[str, Any]) -> Section:
    """Section of a config from its fields as `resolved` gives them; TypeError for a field or a value it cannot have."""
    fields = fields_of(kind)
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    for name, value in values.items():
        if name not in fields:
            raise TypeError(f"there is no {name}")
        if not fields[name].takes(value):
            raise TypeError(f"{name}={str(value)[:60]} must be {fields[name].wants}")
    return kind(**values)


def to_toml(config: Config) -> str:
    """Text of a TOML file with every field that has a value."""
    return write_toml(resolved(config))


def write_toml(
    tables: Mapping[str, Mapping[str, Any]], *, before: Sequence[str] = (), after: Sequence[str] = ()
) -> str:
    """Text of a TOML file with these tables, between comments. The only writer of TOML.

    Names, texts and comments may be of others: whatever is in them, none of them ends its line. So that a comment can
    never become a key, the text is parsed again and compared with `tables`; UserError where the two differ.
    """
    parts = [*(["\n".join(map(toml_comment, before))] if before else [])]
    parts += [
        "\n".join(
            [f"[{toml_key(table)}]", *(f"{toml_key(name)} = {toml_value(each)}" for name, each in values.items())]
        )
        for table, values in tables.items()
    ]
    parts += ["\n".join(map(toml_comment, after))] if after else []
    text = "\n\n".join(parts) + "\n"
    meant = {table: {name: _plain(each) for name, each in values.items()} for table, values in tables.items()}
    try:
        parsed = tomllib.loads(text)
        text.encode()
    except (ValueError, RecursionError) as error:  # half a surrogate pair, or a number of thousands of digits
        raise UserError(f"it holds what no TOML file can hold: {shown(str(error))}; correct it") from error
    if repr(parsed) != repr(meant):
        raise UserError("what would be written as TOML reads as something else; please report this, with the file")
    return text


def toml_comment(text: str) -> str:
    """Comment of one line."""
    return f"# {shown(text, most=LONGEST_COMMENT)}" if text else "#"


def toml_key(name: str) -> str:
    """Key in TOML's spelling: bare where it can be."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def toml_value(value: Any) -> str:
    """Value in TOML's spelling: JSON's, except for infinity and NaN; in texts what is not printable is escaped."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, str | int | float):
        raise UserError(f"{shown(value)} has no place in a TOML file; correct it")
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
