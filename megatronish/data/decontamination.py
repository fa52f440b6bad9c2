"""Decontamination: documents that share a run of words with given texts, such as the questions of a benchmark.

The rule of GPT-3 (Brown et al. 2020, appendix C): 13 words in a row, without case and punctuation. A document that has
one is left out whole. Every text of every field of a record is looked for, questions and answers alike; a text of fewer
words is not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronish.core.errors import UserError
from megatronish.core.remote import location
from megatronish.data.pieces import InputFile
from megatronish.data.readers import read_batches, read_record
from megatronish.data.signatures import factors_of, hashes_of_words, normalised, runs_in_order, words_of

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
