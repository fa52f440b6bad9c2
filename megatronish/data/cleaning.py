"""Cleaning: which documents preprocessing leaves out, each with its reason.

By a field, by length or by chance, by language, for words shared with given texts, or as duplicates (signatures.py).
Whether a document stays follows from itself and the settings: it does not depend on tasks, workers or their order.
"""

import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, NamedTuple
from unicodedata import unidata_version

import numpy as np
from numpy.typing import NDArray

from megatronish.core.errors import UserError
from megatronish.core.remote import location
from megatronish.data.conditions import Condition
from megatronish.data.pieces import InputFile
from megatronish.data.readers import read_batches, read_record
from megatronish.data.signatures import (
    SEPARATOR,
    Deduplication,
    factors_of,
    hashes_of_words,
    normalised,
    runs_in_order,
    words_of,
)
from megatronish.data.weights import SampleWeights

# Language of documents: by a fastText model that is given (lid.176.bin), else by py3langid, which has its own.
#
# Both give one language and a score from 0 to 1 for a text, the same each time. What is judged is the beginning of
# a document, with white space made equal.

MIN_SCORE = 0.65
JUDGED = 20_000
"""Characters of a document that are judged."""
LABEL = "__label__"


class Judged(NamedTuple):
    """Language of a text, by its code, and how sure it is, from 0 to 1."""

    language: str
    score: float


@dataclass(frozen=True)
class LanguageFilter:
    """Languages whose documents stay, if any are named."""

    languages: tuple[str, ...] = ()
    model: str | None = None
    """A file of fastText; None is py3langid."""
    min_score: float = MIN_SCORE

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "LanguageFilter":
        """From settings under the names of their flags; UserError for those that make no sense."""
        made = cls(
            tuple(settings.get("filter_language", ())),
            settings.get("language_model"),
            settings.get("min_language_score", MIN_SCORE),
        )
        if made.model is not None and not made.languages:
            raise UserError(f"--language-model {made.model} is of no use without --filter-language; add it, such as en")
        if not 0 <= made.min_score <= 1:
            raise UserError(
                f"--min-language-score {made.min_score:g} must be at least 0 and at most 1; for example {MIN_SCORE}"
            )
        return made

    @property
    def rule(self) -> str:
        """Name under which documents are counted that are left out."""
        return f"--filter-language {' '.join(self.languages)}"

    @property
    def libraries(self) -> dict[str, str]:
        """Versions of libraries that have a model of their own. UserError if one is missing."""
        if not self.languages or self.model is not None:
            return {}
        _library("py3langid.langid", "py3langid")
        return {"py3langid": version("py3langid")}

    def judge(self) -> "LanguageJudge":
        """What judges texts in this process. UserError if the library or the model cannot be read."""
        return _with_py3langid(self) if self.model is None else _with_fasttext(self, self.model)


@dataclass(frozen=True)
class LanguageJudge:
    """A filter of languages with its model."""

    rule: LanguageFilter
    judged: Callable[[str], Judged]

    def refused(self, texts: Sequence[str]) -> Judged | None:
        """The language of a document that is none of those that stay, or not surely; None for one that stays."""
        beginning = " ".join(texts)[:JUDGED]
        # A lone surrogate is no text for a library of C++.
        judged = self.judged(" ".join(beginning.encode(errors="replace").decode().split()))
        stays = judged.language in self.rule.languages and judged.score >= self.rule.min_score
        return None if stays else judged


def _with_py3langid(rule: LanguageFilter) -> LanguageJudge:
    library = _library("py3langid.langid", "py3langid")
    identifier = library.LanguageIdentifier.from_model_file(library.MODEL_FILE, norm_probs=True)
    if unknown := sorted(set(rule.languages) - set(identifier.labels)):
        known = " ".join(sorted(identifier.labels))
        raise UserError(f"--filter-language {unknown[0]} is no language of py3langid; it knows {known}")
    return LanguageJudge(rule, lambda text: Judged(*identifier.classify(text)))


def _with_fasttext(rule: LanguageFilter, path: str) -> LanguageJudge:
    library = _library("fasttext", "fasttext-predict")
    try:
        model = library.load_model(path)
        model.predict("a")  # an old fasttext fails with a new numpy only here
    except (ValueError, OSError) as error:
        raise UserError(
            f"--language-model {path} cannot be used ({error}); name a model of fastText, such as lid.176.bin, and if "
            "it is one, pip install fasttext-predict"
        ) from error

    def judged(text: str) -> Judged:
        (label, *_), (score, *_) = model.predict(text)
        return Judged(label.removeprefix(LABEL), float(score))

    return LanguageJudge(rule, judged)


def _library(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"--filter-language needs {package}, which is not installed; pip install {package} (or "
            "megatronish[language])"
        ) from error


# Decontamination: documents that share a run of words with given texts, such as the questions of a benchmark.
#
# The rule of GPT-3 (Brown et al. 2020, appendix C): 13 words in a row, without case and punctuation. A document
# that has one is left out whole. Every text of every field of a record is looked for, questions and answers alike;
# a text of fewer words is not.

NGRAM = 13
LONGEST_NGRAM = 100


class SharedRun(NamedTuple):
    """The file of a text that a document shares words with, and these words."""

    path: str
    words: str


@dataclass(frozen=True)
class Decontamination:
    """Files of texts that documents must not share so many words in a row with."""

    paths: tuple[str, ...] = ()
    ngram: int = NGRAM

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Decontamination":
        """From settings under the names of their flags; UserError for a number that makes no sense."""
        made = cls(tuple(settings.get("decontaminate", ())), settings.get("decontaminate_ngram", NGRAM))
        if not 1 <= made.ngram <= LONGEST_NGRAM:
            raise UserError(
                f"--decontaminate-ngram {made.ngram} must be at least 1 and at most {LONGEST_NGRAM}; for example "
                f"{NGRAM}"
            )
        if made.ngram != NGRAM and not made.paths:
            raise UserError(
                f"--decontaminate-ngram {made.ngram} says nothing without --decontaminate; name its files, or leave "
                "this out"
            )
        return made

    def references(self) -> "References":
        """The runs of words of the files. UserError for a file that cannot be read, or has a line that cannot."""
        runs, files = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        num_texts = num_short = 0
        for number, path in enumerate(self.paths):
            for text in _texts_of(path):
                words = words_of(normalised([text]))
                num_texts += 1
                num_short += len(words) < self.ngram
                runs.append(_runs(words, self.ngram))
                files.append(np.full(len(runs[-1]), number))
        all_runs, all_files = np.concatenate(runs), np.concatenate(files)
        order = np.lexsort((all_files, all_runs))  # of equal runs the first is that of the first file
        return References(self, all_runs[order], all_files[order], num_texts, num_short)


class References(NamedTuple):
    """Runs of words of given texts, sorted, and the number of the file of each."""

    of: Decontamination
    runs: NDArray[np.uint64]
    files: NDArray[np.int64]
    num_texts: int
    num_short: int

    def shared(self, texts: Sequence[str]) -> SharedRun | None:
        """The first run of words that a document shares with a text; None if there is none."""
        if not len(self.runs):
            return None
        for text in texts:
            words = words_of(normalised([text]))
            runs = _runs(words, self.of.ngram)
            places = np.minimum(self.runs.searchsorted(runs), len(self.runs) - 1)
            if len(hits := np.flatnonzero(self.runs[places] == runs)):
                first = int(hits[0])
                return SharedRun(
                    self.of.paths[int(self.files[places[first]])], " ".join(words[first : first + self.of.ngram])
                )
        return None

    def __str__(self) -> str:
        short = f", of which {self.num_short:,} are shorter and not looked for" if self.num_short else ""
        return f"runs of {self.of.ngram} words of {self.num_texts:,} texts are looked for{short}"


def _runs(words: Sequence[str], ngram: int) -> NDArray[np.uint64]:
    if len(words) < ngram:
        return np.empty(0, np.uint64)
    return runs_in_order(hashes_of_words(words), factors_of(ngram))


def _texts_of(path: str) -> Iterator[str]:
    try:
        InputFile.of(path, what="--decontaminate")
    except OSError as error:
        raise UserError(f"--decontaminate {path} cannot be read: {error.strerror}; check the path") from error
    for batch in read_batches(location(path), ()):
        for number, line in enumerate(batch.lines, batch.first_line):
            if line.strip():
                try:
                    yield from _texts_in(read_record(line))
                except (ValueError, RecursionError) as error:
                    raise UserError(
                        f"--decontaminate {path}:{number}: {error}; write a JSON object a line, with texts to look for"
                    ) from error


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(inner)


# Rules of a preprocessing, and the counts of what they leave out.

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
