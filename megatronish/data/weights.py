"""Weights of documents: how often each is written, by a field of it or by its file.

A document of weight 2.3 is written twice, and a third time by a hash of its text with the chance 0.3. Copies do not
stand next to each other: the second copies come after all documents, in the same order, and then the third ones.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from megatronish.core.errors import UserError
from megatronish.data.conditions import Condition, value_of
from megatronish.data.signatures import SEPARATOR

MOST_COPIES = 100


class TimesWritten(NamedTuple):
    """Number of times that a document is written, and by which rule."""

    number: int
    rule: str


ONCE = TimesWritten(1, "")


class SampleWeight(NamedTuple):
    """Weight of the documents whose field has a value, or without a condition whose file fits a pattern."""

    text: str
    weight: float
    condition: Condition | None = None
    pattern: str = ""

    @classmethod
    def of(cls, text: str) -> "SampleWeight":
        """Read `source=wiki:2` or `books/*:0.5`; UserError for anything else."""
        which, colon, number = text.rpartition(":")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if not which or not colon or not 0 <= weight <= MOST_COPIES:
            raise UserError(
                f"--sample-weights {text!r} must be KEY=VALUE:WEIGHT or PATTERN:WEIGHT, with a weight of at least 0 "
                f"and at most {MOST_COPIES}; for example source=wiki:2 or 'books/*:0.5'"
            )
        key, equals, value = which.partition("=")
        if not equals:
            return cls(text, weight, pattern=which)
        if not key:
            raise UserError(f"--sample-weights {text!r} has no key before the sign; for example source=wiki:2")
        return cls(text, weight, Condition(key, "==", value_of(value), text))

    def fits(self, record: Mapping[str, Any], path: str) -> bool:
        """Whether the weight is that of a document."""
        return fnmatchcase(path, self.pattern) if self.condition is None else self.condition.holds(record)


@dataclass(frozen=True)
class SampleWeights:
    """Weights of which the first that fits a document counts; without one it is written once."""

    weights: tuple[SampleWeight, ...] = ()
    seed: int = 0

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "SampleWeights":
        """From settings under the names of their flags; UserError for weights that make no sense."""
        texts = settings.get("sample_weights", ())
        return cls(tuple(SampleWeight.of(text) for text in texts), settings.get("sampling_seed", 0))

    @property
    def rounds(self) -> int:
        """Most copies that a document may have."""
        return max(1, *(math.ceil(weight.weight) for weight in self.weights)) if self.weights else 1

    @property
    def keys(self) -> tuple[str, ...]:
        """Fields of documents that are read."""
        return tuple(weight.condition.key for weight in self.weights if weight.condition is not None)

    def copies(self, record: Mapping[str, Any], path: str, texts: Sequence[str]) -> TimesWritten:
        """How often a document is written."""
        for weight in self.weights:
            if weight.fits(record, path):
                whole = math.floor(weight.weight)
                drawn = _drawn(self.seed, texts) < (weight.weight - whole) * 2**64
                return TimesWritten(whole + drawn, f"--sample-weights {weight.text}")
        return ONCE

    def refuse_unused(self, paths: Sequence[str]) -> None:
        """UserError for a pattern that no file of the input fits."""
        for weight in self.weights:
            if weight.condition is None and not any(fnmatchcase(path, weight.pattern) for path in paths):
                raise UserError(
                    f"--sample-weights {weight.text!r} fits no file of --input; files are named as {paths[0]}, and a "
                    "field is KEY=VALUE:WEIGHT"
                )


def _drawn(seed: int, texts: Sequence[str]) -> int:
    # The word keeps the draw apart from that of --keep-fraction.
    content = SEPARATOR.join(["weights", str(seed), *texts]).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
