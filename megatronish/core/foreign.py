"""Reader of JSON, YAML and TOML of others: bounded in size, depth and aliases, and plain types with texts as keys.

What comes back is made of dict, list, str, int, float, bool and None alone. A YAML alias is a copy of what it stands
for, and copies count: a file of ten lines cannot become a billion values, and an anchor that holds itself has no end
and is refused. Dates stay the text that they are in the file, and so do keys, whatever YAML would read them as.
"""

import codecs
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from megatronish.core.files import ordinary

LARGEST = 2**24
"""Bytes of a JSON file; those of models have some thousands."""
LARGEST_YAML = 2**16
"""Bytes of a YAML file: PyYAML reads some 20 kB a second. Configs have a few thousand."""
LARGEST_TOML = 2**22
"""Characters of a TOML file: Python reads some millions a second."""
DEEPEST = 50
"""Lists and objects inside of each other."""
MOST_VALUES = 100_000
"""Values of a YAML file, each alias counted as often as it is used."""
LONGEST_NUMBER = 100
"""Characters of a number of YAML."""
DIGITS = "it has a number of thousands of digits"
"""What Python says of such a number is for programmers."""

_LONG_KEY = re.compile(rf"""(?<![\w"'-])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{DEEPEST}}}""")
_LONG_NUMBER = re.compile(r"(?<![\w\"'])[+-]?0[xob][0-9a-fA-F_]{1000}")
_PLAIN = {f"tag:yaml.org,2002:{name}": name for name in ("null", "bool", "int", "float", "str", "timestamp")}
_MERGE = "tag:yaml.org,2002:merge"


def read_json(path: Path, *, largest: int = LARGEST) -> Any:
    """Value of a JSON file; OSError, or ValueError with a sentence for what is not JSON or too much of it."""
    return parse_json(read_text(path, largest))


def parse_json(text: str) -> Any:
    """Value of a JSON text, None of an empty one; ValueError with a sentence for what is not JSON or too deep.

    A key may be there twice if it has the same value: readers differ in which of two values counts.
    """
    if not text.strip():
        return None
    value = json_value(text, pairs=_without_contradiction)
    refuse_deep(value)
    return value


def json_value(text: str, *, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None) -> Any:
    """Value of a JSON text, as deep as Python can read; ValueError with a sentence for any other text.

    `pairs` makes an object of its keys and values.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("its lists and objects are too deep inside of each other") from None
    except (json.JSONDecodeError, _TwoValuesError):
        raise
    except ValueError:
        raise ValueError(DIGITS) from None


class _TwoValuesError(ValueError):
    """Key of a JSON object that is there twice, with two values."""


def _without_contradiction(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Object of its keys and values; ValueError for a key that has two values."""
    values = dict(pairs)
    if len(values) < len(pairs):
        for key, value in pairs:
            if values[key] is not value and values[key] != value:
                raise _TwoValuesError(f"the key {shown(key, most=100)} is there twice, with two values")
    return values


def parse_toml(text: str) -> dict[str, Any]:
    """Tables of a TOML text; ValueError with a sentence for what is not TOML, too much or too deep."""
    if len(text) > LARGEST_TOML:
        raise ValueError(f"it has more than {LARGEST_TOML:,} characters, which is the limit")
    if (match := _LONG_KEY.search(text)) is not None:  # the library takes the square of a key's parts
        raise ValueError(f"line {text.count(chr(10), 0, match.start()) + 1} has a key of more than {DEEPEST} parts")
    if (match := _LONG_NUMBER.search(text)) is not None:  # it could be read, and not written into a sentence
        raise ValueError(f"line {text.count(chr(10), 0, match.start()) + 1} has a number of thousands of digits")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its lists and tables are too deep inside of each other") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:
        raise ValueError(DIGITS) from None


def read_yaml(path: Path) -> Any:
    """Value of a YAML file; OSError, ImportError without PyYAML, or ValueError with a sentence."""
    return parse_yaml(read_text(path, LARGEST_YAML))


def parse_yaml(text: str) -> Any:
    """Value of a YAML text; ValueError with a sentence for what is not YAML, not plain, or too much."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Loader that looks at no more brackets than it may be deep: its time grows with the square of the depth."""

        def fetch_flow_collection_start(self, token: Any) -> None:
            if self.flow_level > DEEPEST:
                raise RecursionError
            super().fetch_flow_collection_start(token)

    loader = None
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        return None if node is None else _Values(loader).value(node, 0)
    except yaml.YAMLError as error:
        told = " ".join(str(error).split()).replace(' in "<unicode string>"', "")
        raise ValueError("it has several documents; keep one" if "single document" in told else shown(told)) from None
    except RecursionError:
        raise ValueError(f"its lists and objects are more than {DEEPEST} deep") from None
    finally:
        if loader is not None:
            loader.dispose()


def shown(value: object, *, most: int = 200) -> str:
    """Text of a foreign value on one line, for a message or a comment: what is not printable is escaped, and cut."""
    text = value if isinstance(value, str) else _json(value)
    text = "".join(_printable(text[:most]))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _json(value: object) -> str:
    try:
        return json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        return type(value).__name__


def _printable(text: str) -> Iterator[str]:
    for character in text:
        yield character if character.isprintable() else ascii(character)[1:-1]


def read_text(path: Path, largest: int = LARGEST) -> str:
    """UTF-8 text of a file; OSError, or ValueError for other bytes, and for more of them than `largest`."""
    with ordinary(path).open("rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise ValueError(f"it has more than {largest:,} bytes, which is the limit")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError("it is UTF-16, and must be UTF-8; save it as UTF-8") from None
        raise ValueError(f"it is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None


def size_of(value: Any) -> int:
    """Characters of all texts in a JSON value, keys too, and one for each value: what it costs to write it once."""
    size, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        size += 1 + (len(each) if isinstance(each, str) else 0)
        if isinstance(each, dict):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
    return size


def refuse_deep(value: Any) -> None:
    """ValueError for more than DEEPEST lists and objects inside of each other."""
    level = [value]
    for _ in range(DEEPEST + 1):
        inside = [each for each in level if isinstance(each, dict | list)]
        level = [part for each in inside for part in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return
    raise ValueError(f"its lists and objects are more than {DEEPEST} deep")


class _Values:
    """Plain values of the nodes of a YAML text, counted."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._count = loader, 0

    def value(self, node: Any, depth: int) -> Any:
        """Value of a node, `depth` lists and objects deep."""
        self._count += 1
        if self._count > MOST_VALUES:
            self._refuse(node, f"makes more than {MOST_VALUES:,} values of it, by aliases of aliases or by itself")
        if depth > DEEPEST:
            self._refuse(node, f"is more than {DEEPEST} lists and objects deep; an anchor may hold itself")
        if node.id == "scalar":
            return self._scalar(node)
        if node.id == "sequence" and node.tag == "tag:yaml.org,2002:seq":
            return [self.value(each, depth + 1) for each in node.value]
        if node.id == "mapping" and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, depth)
        return self._refuse(node, f"has the tag {shown(node.tag)}, which is no plain value")

    def _mapping(self, node: Any, depth: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key, each in node.value:
            if key.id != "scalar":
                self._refuse(key, "is a list or an object as a key; keys are texts")
            if key.tag == _MERGE:
                others = each.value if each.id == "sequence" else [each]
                for other in others:
                    if other.id != "mapping":
                        self._refuse(other, "is merged by <<, and is no object")
                    merged = self.value(other, depth + 1) | merged
            else:
                value = self.value(each, depth + 1)
                if key.value in entries and entries[key.value] != value:
                    self._refuse(key, f"has {shown(key.value, most=100)} again, with another value")
                entries[key.value] = value
        return merged | entries

    def _scalar(self, node: Any) -> Any:
        kind, text = _PLAIN.get(node.tag), node.value
        if kind is None:
            self._refuse(node, f"has the tag {shown(node.tag)}, which is no plain value")
        if kind in ("str", "timestamp"):
            return text
        if kind in ("int", "float") and len(text) > LONGEST_NUMBER:
            self._refuse(node, f"is a number of {len(text)} characters")
        try:
            return getattr(self._loader, f"construct_yaml_{kind}")(node)
        except (ValueError, KeyError, IndexError, OverflowError):
            return self._refuse(node, f"is {shown(text)}, which is no {kind}")

    @staticmethod
    def _refuse(node: Any, what: str) -> NoReturn:
        mark = node.start_mark
        raise ValueError(f"line {mark.line + 1}, column {mark.column + 1} {what}")


def is_finite(value: object) -> bool:
    """Whether a value is a finite number that a float holds; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
