"""Reader of config.json: its keys by type, and the errors about them."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from megatronish.core import foreign
from megatronish.core.errors import UserError

CONFIG = "config.json"
CORRECT = "correct that line"
LARGEST_WHOLE = 2**31 - 1


class ConfigJson:
    """Keys of a config.json, read by type. `defaults` replace absent keys, but not a null."""

    def __init__(self, path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.path, self.values = path, {**defaults, **values}

    def whole(self, key: str, *, null: int | None = None, least: int = 1) -> int:
        """Whole number of at least `least`; `null` if the key is absent or null."""
        value = self.values.get(key)
        value = null if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(key, f"must be a whole number of at least {least}", remedy=CORRECT)
        if value > LARGEST_WHOLE:
            self.refuse(key, f"must be at most {LARGEST_WHOLE}", remedy=CORRECT)
        return value

    def number(self, key: str, *, null: float | None = None) -> float:
        """Number that is not negative; `null` if the key is absent or null."""
        value = self.values.get(key)
        value = null if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            self.refuse(key, "must be a number that is not negative", remedy=CORRECT)
        if value > sys.float_info.max:
            self.refuse(key, "must be finite", remedy=CORRECT)
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; null counts as false."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "must be true or false", remedy=CORRECT)
        return bool(value)

    def must_be(self, key: str, *allowed: Any, why: str) -> None:
        """Check that the value is one of these; UserError if not."""
        if self.values.get(key) not in allowed:
            self.refuse(key, why)

    def refuse(self, key: str, why: str, *, remedy: str = "take another model") -> NoReturn:
        """UserError about a key: file, value, rule and remedy."""
        setting = f"{key}={json.dumps(self.values[key])}" if key in self.values else f"{key}, which is absent,"
        raise UserError(f"{self.path}: {setting} {why}; {remedy}")


def read_json(folder: Path) -> dict[str, Any]:
    """Content of a folder's config.json; UserError if there is none, or it is no JSON object."""
    path = folder / CONFIG
    try:
        values = foreign.read_json(path)
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror})"
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            problem = f"{folder} holds no {CONFIG}" if folder.is_dir() else f"{folder} does not exist as a folder"
        raise UserError(f"{problem}; name the folder of a Hugging Face model") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}; download it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object; download it again")
    return values
