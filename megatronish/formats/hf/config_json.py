"""What stands under a key of a Hugging Face model's config.json, and what is said if it is not what it should be?"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from megatronish.errors import UserError

CONFIG = "config.json"
MEND = "mend that line"
LARGEST_WHOLE = 2**31 - 1


class ConfigJson:
    """The keys of a config.json, asked for by type. `defaults` stand in for those that are absent, not for a null."""

    def __init__(self, path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.path, self.values = path, {**defaults, **values}

    def whole(self, key: str, *, null: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`; `null` where it is absent or null."""
        value = self.values.get(key)
        value = null if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(key, f"must be a whole number of at least {least}", remedy=MEND)
        if value > LARGEST_WHOLE:
            self.refuse(key, f"must be at most {LARGEST_WHOLE}", remedy=MEND)
        return value

    def number(self, key: str, *, null: float | None = None) -> float:
        """A number that is not negative; `null` where it is absent or null."""
        value = self.values.get(key)
        value = null if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            self.refuse(key, "must be a number that is not negative", remedy=MEND)
        if value > sys.float_info.max:
            self.refuse(key, "must be finite", remedy=MEND)
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; a null is false."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "must be true or false", remedy=MEND)
        return bool(value)

    def must_be(self, key: str, *allowed: Any, why: str) -> None:
        """UserError unless it is one of these."""
        if self.values.get(key) not in allowed:
            self.refuse(key, why)

    def refuse(self, key: str, why: str, *, remedy: str = "take another model") -> NoReturn:
        """Say what is wrong with a key."""
        setting = f"{key}={json.dumps(self.values[key])}" if key in self.values else f"{key}, which is absent,"
        raise UserError(f"{self.path}: {setting} {why}; {remedy}")


def read_json(folder: Path) -> dict[str, Any]:
    """The config.json of a folder; UserError if there is none, or it is no JSON object."""
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror})"
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            problem = f"{folder} holds no {CONFIG}" if folder.is_dir() else f"{folder} does not exist as a folder"
        raise UserError(f"{problem}; name the folder of a Hugging Face model") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}; fetch it anew") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object; fetch it anew")
    return values
