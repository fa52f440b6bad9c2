"""Config of another framework as settings of this one, with a reason for each key that is not carried over."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatronish.config.dump import toml_value
from megatronish.config.fields import FIELDS, SECTIONS
from megatronish.errors import UserError
from megatronish.files import ordinary


class Imported:
    """Settings by field, and keys that are not carried over, with their reasons."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}

    def set(self, field: str, value: Any) -> None:
        """Set a field. A whole number that the other format writes as 5e8 becomes one."""
        wants_int = FIELDS[field].type is int
        self.settings[field] = int(value) if wants_int and isinstance(value, float) and value.is_integer() else value

    def leave_out(self, key: str, reason: str) -> None:
        """List a key as not carried over."""
        self.left_out[key] = reason

    def to_toml(self, source: Path) -> str:
        """Text of a TOML file for --config, with the keys that are not carried over as comments at its end."""
        lines = [f"# From {source.name}. Check it with: pretrain_gpt.py --config THIS_FILE --dry-run"]
        for section in SECTIONS:
            own = {name: value for name, value in self.settings.items() if FIELDS[name].section == section}
            if own:
                lines += ["", f"[{section}]", *(f"{name} = {toml_value(value)}" for name, value in own.items())]
        if self.left_out:
            lines += ["", f"# Not carried over from {source.name}:"]
            lines += [f"#   {key}: {reason}" for key, reason in self.left_out.items()]
        return "\n".join(lines) + "\n"


class Rule(NamedTuple):
    """Fate of a key: its value is the value of `field`, or it is left out for a reason."""

    field: str | None
    reason: str = ""


def field(name: str) -> Rule:
    """Key whose value is a field's value."""
    return Rule(name)


def dropped(reason: str) -> Rule:
    """Key that is not carried over."""
    return Rule(None, reason)


AUTO = "auto is filled in by the program that starts the run; give the value here"
UNKNOWN = "it is not known here"


def apply(found: Imported, values: Mapping[str, Any], rules: Mapping[str, Rule], *, within: str = "") -> None:
    """Apply one rule a key; keys without a rule are listed, too. Empty values say nothing."""
    for key, value in values.items():
        rule, name = rules.get(key, Rule(None, UNKNOWN)), f"{within}{key}"
        if value is None or value in ("", [], {}):
            continue
        if rule.field is None:
            is_off = value is False or (isinstance(value, dict) and value.get("enabled") is False)
            if not is_off or rule.reason == UNKNOWN:
                found.leave_out(name, rule.reason)
        elif value == "auto":
            found.leave_out(name, f"{AUTO}, as {FIELDS[rule.field].flag}")
        elif not _fits(value, FIELDS[rule.field].type):
            raise UserError(f"{name}={json.dumps(value)} must be {FIELDS[rule.field].wants}; correct the file")
        else:
            found.set(rule.field, value)


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value is of a field's type; a number may be written as 5e8 where a whole one is wanted."""
    if wanted in (bool, str):
        return isinstance(value, wanted)
    if wanted in (int, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return not isinstance(value, dict | list | bool)


def section(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Object under a key; empty if there is none. UserError if it is no object."""
    inner = values.get(key) or {}
    if not isinstance(inner, dict):
        raise UserError(f"{key}={json.dumps(inner)} must be an object of settings; correct the file")
    return inner


def number(values: Mapping[str, Any], key: str) -> float | None:
    """Number under a key; None if there is none, or it is "auto". UserError for anything else."""
    value: Any = values.get(key)
    if value in (None, "auto"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"{key}={json.dumps(value)} must be a number; correct the file") from None


def read_json(path: Path) -> dict[str, Any]:
    """Object of a JSON file; UserError, a sentence, for anything else."""
    return _read(path, "JSON", json.loads)


def read_yaml(path: Path) -> dict[str, Any]:
    """Object of a YAML file; UserError, a sentence, for anything else, or where the library is missing."""
    try:
        import yaml
    except ImportError:
        raise UserError(
            f"{path} is YAML, which is read by PyYAML, and it is not installed; pip install pyyaml, or write the file "
            "as JSON"
        ) from None

    def parse(text: str) -> Any:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from error

    return _read(path, "YAML", parse)


def _read(path: Path, kind: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        text = ordinary(path).read_text(encoding="utf-8")
        values = parse(text) if text.strip() else None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; correct the path") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not {kind}: {error}; correct the file") from error
    if values is None:
        raise UserError(f"{path} is empty: it has no settings; name another file")
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no settings, but {json.dumps(values, default=str)[:40]}; name another file")
    return values
