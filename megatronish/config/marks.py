"""Marks on the fields of a config: what is next to the type in `Annotated`.

A field's range, whether a run must give it, and the table that its names come from stand on the field itself, so that a
new flag is one edit. `fields.py` collects the marks.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum


class Mark(Enum):
    """Marks without a value."""

    REQUIRED = "the default means that the field is not given, which is an error"
    ADDS_UP = "of a list: flags that are repeated add to it, and to the list of the file"
    TRAINING_ONLY = "of a model: only training reads the field; what trained weights compute does not depend on it"


REQUIRED, TRAINING_ONLY, ADDS_UP = Mark.REQUIRED, Mark.TRAINING_ONLY, Mark.ADDS_UP


@dataclass(frozen=True)
class Range:
    """Bound on a number. `rule` completes the sentence "hidden_size=0 ..."."""

    rule: str
    holds: Callable[[float], bool]
    is_maximum: bool = False


@dataclass(frozen=True, eq=False)  # hashed by identity: tyro hashes marks, and tables have no hash
class NamedIn:
    """Names that are the keys of a table, read from it whenever a config is read."""

    table: Collection[str]


def at_least(least: int) -> Range:
    """Range from `least` on."""
    rule = f"must be at least {least}" if least else "must not be negative"
    return Range(rule, lambda value: value >= least)


def greater_than(bound: int) -> Range:
    """Range above `bound`, which is not part of it."""
    return Range(f"must be greater than {bound}", lambda value: value > bound)


def fraction(*, excluding: int) -> Range:
    """Range from 0 to 1 without one of its ends."""
    if excluding == 1:
        return Range("must be at least 0 and less than 1", lambda value: 0 <= value < 1)
    return Range("must be greater than 0 and at most 1", lambda value: 0 < value <= 1)


def at_most(most: float, text: str | None = None) -> Range:
    """Range up to `most`, written `text`: a larger value is a typing error that would overflow, or run for hours."""
    return Range(f"must be at most {text or most}", lambda value: value <= most, is_maximum=True)
