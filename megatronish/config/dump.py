"""How is a config written down, so that --config reads the same config back?"""

import dataclasses
import json
from typing import Any

from megatronish.config.config import Config


def resolved(config: Config) -> dict[str, dict[str, Any]]:
    """{section: {field: value}} of TOML's and JSON's types; fields that are None are left out, which means the same."""
    return {
        section: {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
            if value is not None
        }
        for section, fields in dataclasses.asdict(config).items()
    }


def to_toml(config: Config) -> str:
    """The text of a TOML file with every field that has a value."""
    sections = (
        "\n".join([f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in fields.items()), ""])
        for section, fields in resolved(config).items()
    )
    return "\n".join(sections)


def _toml(value: bool | int | float | str | list[Any]) -> str:
    """JSON's spelling of these is TOML's too, but for the control character 127 in strings, and 1e-05 is both's."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
