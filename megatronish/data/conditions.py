"""Conditions on a field of a document, as flags have them. No code is run."""

import json
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatronish.core.errors import UserError
from megatronish.data.readers import value_under

_CONDITION = re.compile(r"\s*([^\s=!<>]+)\s*(==|!=|<=|>=|<|>)\s*(.*\S)\s*")
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


class Condition(NamedTuple):
    """A comparison of a field with a value, as --filter has it."""

    key: str
    comparison: str
    value: Any
    text: str

    @classmethod
    def of(cls, text: str) -> "Condition":
        """Read `lang == en` or `meta.score >= 0.5`; UserError for anything else."""
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise UserError(
                f"--filter {text!r} must be a key, one of {' '.join(_COMPARISONS)} and a value; for example "
                "'lang == en'"
            )
        key, comparison, word = match.groups()
        value = value_of(word)
        if isinstance(value, (list, dict)):
            raise UserError(f"--filter {text!r} must compare with a number, a text, true, false or null")
        return cls(key, comparison, value, text)

    def holds(self, record: Mapping[str, Any]) -> bool:
        """Whether the field is there, can be compared and compares so."""
        try:
            value = value_under(record, self.key)
        except ValueError:
            return False
        numbers = _is_number(value) and _is_number(self.value)
        if not numbers and type(value) is not type(self.value):
            return self.comparison == "!="
        try:
            return _COMPARISONS[self.comparison](value, self.value)
        except TypeError:  # null, which is neither less nor more
            return False


def value_of(word: str) -> Any:
    """The number, text, truth value or null that a word of a flag stands for."""
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
