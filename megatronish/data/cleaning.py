"""Cleaning: which documents preprocessing leaves out, by a field, by length or by chance, each with its reason.

Whether a document stays follows from itself and the settings: it does not depend on tasks, workers or their order.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unicodedata import unidata_version

from megatronish.core.errors import UserError
from megatronish.data.conditions import Condition
from megatronish.data.decontamination import Decontamination, References
from megatronish.data.language import LanguageFilter, LanguageJudge
from megatronish.data.signatures import SEPARATOR, Deduplication
from megatronish.data.weights import SampleWeights

MAX_EXAMPLES = 10
"""Documents of each reason that are shown."""
EXCERPT = 80
"""Characters of a document that are shown."""
NO_DEDUPLICATION, NO_DECONTAMINATION, ANY_LANGUAGE = Deduplication(), Decontamination(), LanguageFilter()
NO_WEIGHTS = SampleWeights()


class RemovedDocument(NamedTuple):
    """A document that was left out, and why; its line is counted from byte `origin` of the file on."""

    why: str
    path: str
    line: int
    excerpt: str
    origin: int = 0
    kept: int | None = None
    """Position of the document that stays in its place, of a duplicate."""


class Reason(NamedTuple):
    """Name of the rule that leaves a document out, and what is shown of the document."""

    why: str
    shown: str


@dataclass(frozen=True)
class Cleaning:
    """Rules of which documents stay. Lengths are those of all keys together."""

    conditions: tuple[Condition, ...] = ()
    characters: tuple[int, int | None] = (0, None)
    tokens: tuple[int, int | None] = (0, None)
    keep_fraction: float = 1.0
    seed: int = 0
    deduplication: Deduplication = NO_DEDUPLICATION
    """What is alike, which is found over all documents that the other rules keep before they are tokenized."""
    decontamination: Decontamination = NO_DECONTAMINATION
    language: LanguageFilter = ANY_LANGUAGE
    references: References | None = None
    """What was read from the files of decontamination."""
    judge: LanguageJudge | None = None
    """What judges languages, with its model."""
    weights: SampleWeights = NO_WEIGHTS
    """How often documents are written that the rules keep."""

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
        seed, deduplication = settings.get("sampling_seed", 0), Deduplication.of(settings)
        return cls(
            conditions,
            ranges[0],
            ranges[1],
            fraction,
            seed,
            deduplication,
            Decontamination.of(settings),
            LanguageFilter.of(settings),
            weights=SampleWeights.of(settings),
        )

    def opened(self) -> "Cleaning":
        """The rules with what they read from files, in the process that applies them."""
        return replace(
            self,
            references=self.decontamination.references() if self.decontamination.paths else None,
            judge=self.language.judge() if self.language.languages else None,
        )

    @property
    def files(self) -> list[tuple[str, str]]:
        """Files that the rules read, each with its flag."""
        models = [] if self.language.model is None else [("language-model", self.language.model)]
        return [*(("decontaminate", path) for path in self.decontamination.paths), *models]

    @property
    def libraries(self) -> dict[str, str]:
        """Versions on which the rules depend, of libraries and of Python's Unicode. UserError if one is missing."""
        reads_words = self.deduplication.is_wanted or bool(self.decontamination.paths)
        return {**self.language.libraries, **({"Unicode": unidata_version} if reads_words else {})}

    @property
    def keys(self) -> tuple[str, ...]:
        """Fields that the rules read."""
        return (*(condition.key for condition in self.conditions), *self.weights.keys)

    def reason(self, record: Mapping[str, Any], texts: Sequence[str]) -> Reason | None:
        """Why a document is left out before it is tokenized; None if it is not."""
        for condition in self.conditions:
            if not condition.holds(record):
                return Reason(f"--filter {condition.text}", texts[0])
        if (why := _outside(sum(map(len, texts)), self.characters, "characters")) is not None:
            return Reason(why, texts[0])
        if self.keep_fraction < 1:
            content = f"{self.seed}{SEPARATOR}{SEPARATOR.join(texts)}".encode("utf-8", "surrogatepass")
            drawn = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
            if drawn >= self.keep_fraction * 2**64:
                return Reason(f"--keep-fraction {self.keep_fraction:g}", texts[0])
        if self.language.languages:
            assert self.judge is not None, "the rules are opened first"
            if (judged := self.judge.refused(texts)) is not None:
                return Reason(self.language.rule, f"[{judged.language} {judged.score:.2f}] {texts[0]}")
        if self.decontamination.paths:
            assert self.references is not None, "the rules are opened first"
            if (shared := self.references.shared(texts)) is not None:
                return Reason(f"--decontaminate {shared.path}", f"... {shared.words} ...")
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

    def lines(self, *, examples: bool, what: str = "documents were left out") -> list[str]:
        """A line of each reason, and of each example of it."""
        told = []
        for why, count in sorted(self.counts.items()):
            told.append(f"{count:,} {what} by {why}")
            if examples:
                told += [f"    {path}:{line}: {_on_a_line(excerpt)}" for path, line, excerpt in self.examples[why]]
        return told


def _on_a_line(text: str) -> str:
    """A text in one line, without characters that would change a terminal."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
