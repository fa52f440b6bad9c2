"""Values of another framework's file: objects, numbers, texts and switches, each with a sentence for what is none.

A sentence names the key with its whole path: `within` is what stands before it, such as "optimizer.params.".
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatronish.compat.importers.imported import Rule
from megatronish.config.fields import FIELDS, one_of
from megatronish.core.errors import UserError
from megatronish.core.foreign import is_finite, read_json, read_yaml, shown

Switches = Mapping[str, tuple[Any, ...]]
"""Keys that are switches, with the sections that they are in, a dot after each, and what they may be except on or off.

A type, such as int, stands for all values of it.
"""
AUTO_TOO = ("auto",)
"""What a switch may be that the program which starts the run fills in."""
ON, OFF = ("true", "yes", "on", "y", "t", "1"), ("false", "no", "off", "n", "f", "0")
NAMES_OF_TYPES: dict[type, str] = {int: "a whole number"}


def settled(
    values: Mapping[str, Any], switches: Switches, *, within: str = "", prefixes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The values with each switch as true, false, None, or one of its other values; UserError for anything else.

    Files have switches in quotation marks, too, and as 1 and 0. Keys of a section may begin with its prefix.
    """
    own = {key: others for key, others in switches.items() if "." not in key}
    inner: dict[str, dict[str, tuple[Any, ...]]] = {}
    for key, others in switches.items():
        name, dot, rest = key.partition(".")
        if dot:
            inner.setdefault(name, {})[rest] = others
    settled_values = dict(values)
    for key, value in values.items():
        plain = key.removeprefix((prefixes or {}).get("", ""))
        if plain in own:
            settled_values[key] = _switch(value, own[plain], f"{within}{key}")
        elif key in inner and isinstance(value, dict):  # section() refuses what is no object
            prefix = {"": (prefixes or {}).get(key, "")}
            settled_values[key] = settled(value, inner[key], within=f"{within}{key}.", prefixes=prefix)
    return settled_values


def _switch(value: Any, others: tuple[Any, ...], key: str) -> Any:
    """Value of one switch: true, false, None, or one of `others`."""
    if value is None or value == "" or isinstance(value, bool):
        return None if value == "" else value
    if value in (0, 1):  # so takes them pydantic, which reads the files of these frameworks
        return bool(value)
    word = value.lower() if isinstance(value, str) else None
    if word in (*ON, *OFF):
        return word in ON
    for other in others:
        if isinstance(other, type):
            if isinstance(value, other):
                return value
        elif value == other or (word is not None and word == str(other).lower()):
            return other
    names = [NAMES_OF_TYPES[other] if isinstance(other, type) else str(other) for other in others]
    more = f", or {one_of(names)}" if others else ""
    raise UserError(f"{shown(key)}={shown(value)} must be true or false{more}; correct the file")


def switches_of(rules: Mapping[str, Rule], *, within: str = "", others: tuple[Any, ...] = ()) -> Switches:
    """Keys of a table of rules that are switches here, too."""
    return {
        f"{within}{key}": others
        for key, rule in rules.items()
        if rule.field is not None and FIELDS[rule.field].type is bool
    }


def section(values: Mapping[str, Any], key: str, *, within: str = "") -> dict[str, Any]:
    """Object under a key; empty if there is none. UserError if it is no object."""
    inner = values.get(key)
    if inner is None or inner is False or inner in ("", []):
        return {}
    if not isinstance(inner, dict):
        raise UserError(f"{within}{key}={shown(inner)} must be an object of settings; correct the file")
    return inner


def number(
    values: Mapping[str, Any], key: str, *, within: str = "", least: float | None = None, most: float | None = None
) -> float | None:
    """Number under a key, at least `least` and at most `most`; None if there is none. UserError for anything else."""
    value: Any = values.get(key)
    if value is None:
        return None
    try:
        converted = float(value)
    except (TypeError, ValueError, OverflowError):
        converted = float("nan")
    if isinstance(value, bool) or not is_finite(converted):
        raise UserError(f"{within}{key}={shown(value)} must be a number; correct the file")
    for is_broken, bound in (
        (least is not None and converted < least, f"at least {least}"),
        (most is not None and converted > most, f"at most {most}"),
    ):
        if is_broken:
            raise UserError(f"{within}{key}={shown(value)} must be {bound}; correct the file")
    return converted


def number_or_auto(
    values: Mapping[str, Any], key: str, *, within: str = "", least: float | None = None, most: float | None = None
) -> float | None:
    """Number under a key; None, too, if it is "auto", which the caller lists."""
    return None if values.get(key) == "auto" else number(values, key, within=within, least=least, most=most)


def whole(value: float, key: str) -> int:
    """The value as a whole number; UserError if it is none."""
    if not float(value).is_integer():
        raise UserError(f"{key}={value:g} must be a whole number; correct the file")
    return int(value)


def text(values: Mapping[str, Any], key: str, default: str = "", *, within: str = "") -> str:
    """Text under a key; `default` if there is none. UserError for a list or an object.

    False is none: YAML reads an unquoted NO as false.
    """
    value = values.get(key)
    if isinstance(value, list | dict):
        raise UserError(f"{within}{key}={shown(value)} must be a text; correct the file")
    if value is None or value is False or value == "":
        return default
    return "true" if value is True else str(value)


def read_object(path: Path, *, is_yaml: bool) -> dict[str, Any]:
    """Object of a JSON or a YAML file; UserError, a sentence, for anything else, or where PyYAML is missing."""
    kind, read = ("YAML", read_yaml) if is_yaml else ("JSON", read_json)
    name = shown(str(path))
    try:
        values = read(path)
    except ImportError:
        raise UserError(
            f"{name} is YAML, which is read by PyYAML, and it is not installed; pip install pyyaml, or write the file "
            "as JSON"
        ) from None
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}; correct the path") from error
    except ValueError as error:
        raise UserError(f"{name} cannot be read as {kind}: {error}; correct the file") from error
    if values is None:
        raise UserError(f"{name} is empty: it has no settings; name another file")
    if not isinstance(values, dict):
        raise UserError(f"{name} holds no settings, but {shown(values, most=40)}; name another file")
    return values
