"""Rules over several fields of a config: the record of a rule, and what rules of several sections share."""

from collections.abc import Callable
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS, one_of

LARGEST_NAMED = 4096  # a remedy names fitting sizes up to this
MESH = (
    "data_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
"""Fields of the mesh's sizes."""


class ConfigRule(NamedTuple):
    """Rule over several fields: `complaint` is None, or a sentence with the value, the rule and the remedy.

    `fields` are all fields that the rule reads. The rule is asked only if each of them is valid by itself (given, of
    its type, in its range), so that no rule repeats a complaint and no rule divides by zero.
    """

    fields: tuple[str, ...]
    complaint: Callable[[Config], str | None]


def divide(name: str, number: int, by_name: str, by: int) -> str | None:
    """Complaint about a size that is not divisible, with the divisors that are."""
    if number % by == 0:
        return None
    sizes = [size for size in range(1, min(number, LARGEST_NAMED) + 1) if number % size == 0]
    fitting = (
        one_of(sizes) if len(sizes) <= 12 and number <= LARGEST_NAMED else f"{', '.join(map(str, sizes[:12]))}, ..."
    )
    return f"{name}={number} must be divisible by {by_name}={by}; use {FIELDS[by_name].flag} {fitting}"
