"""Writer of configs: TOML that --config reads as the same config."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from megatronish.config.config import Config
from megatronish.config.fields import VERBATIM, fields_of
from megatronish.errors import without_passwords


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
    sections = (
        "\n".join([f"[{section}]", *(f"{name} = {toml_value(value)}" for name, value in fields.items()), ""])
        for section, fields in resolved(config).items()
    )
    return "\n".join(sections)


def toml_value(value: Any) -> str:
    """Value in TOML's spelling: JSON's, except for the control character 127 in texts."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
