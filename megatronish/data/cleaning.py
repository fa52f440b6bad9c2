"""Cleaning: which documents preprocessing leaves out, by a field, by length or by chance, each with its reason.

Whether a document stays follows from itself and the settings: it does not depend on tasks, workers or their order.
"""

import hashlib
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatronish.core.errors import UserError
from megatronish.data.readers import value_under

MAX_EXAMPLES = 10
"""Documents of each reason that are shown."""
EXCERPT = 80
"""Characters of a document that are shown."""
SEPARATOR = "\x1f"

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
        try:
            value = json.loads(word)
        except (ValueError, RecursionError):
            value = word
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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class RemovedDocument(NamedTuple):
    """A document that was left out, and why; its line is counted from byte `origin` of the file on."""

    why: str
    path: str
    line: int
    excerpt: str
    origin: int = 0


@dataclass(frozen=True)
class Cleaning:
    """Rules of which documents stay. Lengths are those of all keys together."""

    conditions: tuple[Condition, ...] = ()
    characters: tuple[int, int | None] = (0, None)
    tokens: tuple[int, int | None] = (0, None)
    keep_fraction: float = 1.0
    seed: int = 0

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Cleaning":
        """The rules of settings under the names of their flags; UserError for rules that make no sense."""
        ranges = []
        for unit in ("characters", "tokens"):
            low, high = settings.get(f"min_{unit}", 0), settings.get(f"max_{unit}")
            if low < 0 or (high is not None and high < max(low, 1)):
                raise UserError(
                    f"--min-{unit} {low} and --max-{unit} {high} must be at least 0, and the second at least the first"
                )
            ranges.append((low, high))
        fraction = settings.get("keep_fraction", 1.0)
        if not 0 < fraction <= 1:
            raise UserError(f"--keep-fraction {fraction} must be more than 0 and at most 1; for example 0.1")
        conditions = tuple(Condition.of(text) for text in settings.get("filter", ()))
        return cls(conditions, ranges[0], ranges[1], fraction, settings.get("sampling_seed", 0))

    @property
    def keys(self) -> tuple[str, ...]:
        """Fields that the rules read."""
        return tuple(condition.key for condition in self.conditions)

    def reason(self, record: Mapping[str, Any], texts: Sequence[str]) -> str | None:
        """Why a document is left out before it is tokenized; None if it is not."""
        for condition in self.conditions:
            if not condition.holds(record):
                return f"--filter {condition.text}"
        if (why := _outside(sum(map(len, texts)), self.characters, "characters")) is not None:
            return why
        if self.keep_fraction < 1:
            content = f"{self.seed}{SEPARATOR}{SEPARATOR.join(texts)}".encode("utf-8", "surrogatepass")
            drawn = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
            if drawn >= self.keep_fraction * 2**64:
                return f"--keep-fraction {self.keep_fraction:g}"
        return None

    def reason_of_length(self, num_tokens: int) -> str | None:
        """Why a document of so many tokens is left out; None if it is not."""
        return _outside(num_tokens, self.tokens, "tokens")


KEEP_ALL = Cleaning()


def _outside(length: int, limits: tuple[int, int | None], unit: str) -> str | None:
    low, high = limits
    if length < low:
        return f"--min-{unit} {low}"
    return f"--max-{unit} {high}" if high is not None and length > high else None


@dataclass
class RemovedCounts:
    """Number of documents that were left out, and the first of them, by reason."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[list[Any]]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Documents left out for any reason."""
        return sum(self.counts.values())

    def add(self, other: "RemovedCounts") -> None:
        """Count those of another part of the input, which comes after this one."""
        for why, count in other.counts.items():
            self.counts[why] = self.counts.get(why, 0) + count
            shown = self.examples.setdefault(why, [])
            shown += other.examples[why][: MAX_EXAMPLES - len(shown)]

    def lines(self, *, examples: bool) -> list[str]:
        """A line of each reason, and of each example of it."""
        told = []
        for why, count in sorted(self.counts.items()):
            told.append(f"{count:,} documents were left out by {why}")
            if examples:
                told += [f"    {path}:{line}: {excerpt}" for path, line, excerpt in self.examples[why]]
        return told
