"""What is a rule over several fields of a config?"""

from collections.abc import Callable
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS, one_of

LARGEST_NAMED = 4096  # a remedy names fitting sizes up to this


class ConfigRule(NamedTuple):
    """A rule over several fields: None, or what is wrong."""

    fields: tuple[str, ...]
    complaint: Callable[[Config], str | None]


def divide(name: str, number: int, by_name: str, by: int) -> str | None:
    """The complaint of a size that is not cut evenly."""
    if number % by == 0:
        return None
    sizes = [size for size in range(1, min(number, LARGEST_NAMED) + 1) if number % size == 0]
    fitting = (
        one_of(sizes) if len(sizes) <= 12 and number <= LARGEST_NAMED else f"{', '.join(map(str, sizes[:12]))}, ..."
    )
    return f"{name}={number} must be divisible by {by_name}={by}; use {FIELDS[by_name].flag} {fitting}"
