"""Signatures of documents, by which equal and nearly equal ones are found: two documents that share a key are alike.

`exact`: one key, a hash of the text, in which each run of white space is one space and characters are composed (NFC).

`minhash` (Broder 1997; Lee et al. 2022): a text is the set of its runs of N words, without case and punctuation. Two
texts that share the part J of these have equal minima of a hash with the probability J. The minima of a document are
cut into bands, each of which is a key: two documents share one with the probability 1 - (1 - J^rows)^bands. What is
equal by `exact` shares all keys here.

A document of several keys is one text: that of each key, in the order of --json-keys, with a SEPARATOR between them.
"""

import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronish.core.errors import UserError

SEPARATOR = "\x1f"
"""Character between the texts of several keys of a document: it is white space, so no normalised text has it."""
MOST_MINIMA = 4096
RUNS_AT_ONCE = 1 << 12
SEED = 0x6D696E68

# Writing of Chinese and Japanese has no spaces: each character is a word.
_SINGLE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
MARKS = range(0x300, 0x20000)
"""Characters among which are all marks of letters."""


@dataclass(frozen=True)
class Deduplication:
    """Which documents are alike: `kind` is none, exact or minhash, and the numbers are those of minhash."""

    kind: str = "none"
    ngram: int = 5
    bands: int = 14
    rows: int = 8

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Deduplication":
        """From settings under the names of their flags; UserError for numbers that make no sense."""
        made = cls(
            settings.get("deduplicate", "none"),
            *(
                settings.get(f"minhash_{name}", default)
                for name, default in (("ngram", cls.ngram), ("bands", cls.bands), ("rows", cls.rows))
            ),
        )
        if made.kind not in ("none", "exact", "minhash"):
            raise UserError(f"--deduplicate {made.kind} must be none, exact or minhash")
        if min(made.ngram, made.bands, made.rows) < 1 or made.bands * made.rows > MOST_MINIMA or made.ngram > 100:
            raise UserError(
                f"--minhash-ngram {made.ngram}, --minhash-bands {made.bands} and --minhash-rows {made.rows} must be at "
                f"least 1, the first at most 100, and bands times rows at most {MOST_MINIMA:,}; for example 5, 14 and 8"
            )
        for name in ("ngram", "bands", "rows"):
            if made.kind != "minhash" and getattr(made, name) != getattr(cls, name):
                raise UserError(
                    f"--minhash-{name} {getattr(made, name)} says nothing without --deduplicate minhash; add that, or "
                    "leave this out"
                )
        return made

    @property
    def is_wanted(self) -> bool:
        """Whether documents are compared at all."""
        return self.kind != "none"

    @property
    def reason(self) -> str:
        """Name under which documents are counted that are left out."""
        return f"--deduplicate {self.kind}"

    @property
    def likeness(self) -> float:
        """Part of the runs of words that two documents share, of which two in three are found."""
        return (1 / self.bands) ** (1 / self.rows)

    def keys(self, texts: Sequence[str]) -> NDArray[np.uint64]:
        """Keys of a document as rows of two halves, 128 bits each: one, or one for each band."""
        text = normalised(texts)
        if self.kind == "exact":
            return _keys([text.encode("utf-8", "surrogatepass")])
        bands = np.split(self._draws.minima(self._runs(text)), self.bands)
        return _keys([bytes([number % 256, number // 256]) + band.tobytes() for number, band in enumerate(bands)])

    def _runs(self, text: str) -> NDArray[np.uint64]:
        """A hash of each run of words; a shorter text is one run, and so is one that has none.

        A separator is a word, too: texts of two keys that end and begin otherwise are not the same.
        """
        texts = [words_of(part) for part in text.split(SEPARATOR)]
        words = [word for of_key in texts for word in (SEPARATOR, *of_key)][1:] if any(texts) else [text]
        return np.unique(runs_in_order(hashes_of_words(words), self._draws.factors[: len(words)]))

    @property
    def _draws(self) -> "_Draws":
        return _draws_of(self.ngram, self.bands * self.rows)


class _Draws(NamedTuple):
    """Numbers of the hashes: of words in a run, and of each of the minima."""

    factors: NDArray[np.uint64]
    multipliers: NDArray[np.uint64]
    offsets: NDArray[np.uint64]

    def minima(self, runs: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The least of each hash over all runs."""
        least = np.full(len(self.multipliers), np.iinfo(np.uint64).max, np.uint64)
        for start in range(0, len(runs), RUNS_AT_ONCE):
            hashed = self.multipliers[:, None] * runs[start : start + RUNS_AT_ONCE] + self.offsets[:, None]
            np.minimum(least, hashed.min(1), out=least)
        return least


def factors_of(ngram: int) -> NDArray[np.uint64]:
    """Numbers by which words in a run are multiplied."""
    return _draws_of(ngram, 0).factors


@lru_cache(maxsize=4)
def _draws_of(ngram: int, minima: int) -> _Draws:
    drawn = np.random.Philox(SEED).random_raw(ngram + 2 * minima)
    odd = drawn | np.uint64(1)
    return _Draws(odd[:ngram], odd[ngram : ngram + minima], drawn[ngram + minima :])


def normalised(texts: Sequence[str]) -> str:
    """The texts of a document in which each run of white space is one space, and characters are composed (NFC)."""
    return SEPARATOR.join(" ".join(unicodedata.normalize("NFC", text).split()) for text in texts)


def words_of(text: str) -> list[str]:
    """Words without case and punctuation; a Chinese or Japanese character is a word."""
    return _word().findall(text.lower())


@lru_cache(maxsize=1)
def _word() -> re.Pattern[str]:
    """Expression of a word, whose letters have their marks.

    Python's letters are without the marks that write vowels, as of Hindi, Arabic and Thai: words would end at each of
    them, and be the same with other vowels.
    """
    marks = [chr(code) for code in MARKS if unicodedata.category(chr(code)) in ("Mn", "Mc")]
    low, high = ("".join(mark for mark in marks if (mark > "\uffff") == is_high) for is_high in (False, True))
    # What is looked for ahead says the same faster: a class with characters above U+FFFF is slow.
    mark = rf"(?=[^\x00-\x7f])(?:[{low}]|(?=[^\x00-\uffff])[{high}])"
    return re.compile(rf"[{_SINGLE}]|[^\W{_SINGLE}]++(?:(?:{mark})++[^\W{_SINGLE}]*+)*+")


def hashes_of_words(words: Sequence[str]) -> NDArray[np.uint64]:
    """A hash of each word, the same on every machine."""
    places = {word: place for place, word in enumerate(dict.fromkeys(words))}
    digests = b"".join(_digest(word.encode("utf-8", "surrogatepass"), 8) for word in places)
    hashes: NDArray[np.uint64] = np.frombuffer(digests, "<u8")
    return hashes[np.fromiter(map(places.__getitem__, words), np.int64, len(words))]


def runs_in_order(values: NDArray[np.uint64], factors: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of each run of neighbouring values, as many as there are factors."""
    count = len(values) - len(factors) + 1
    runs = np.zeros(count, np.uint64)
    for place, factor in enumerate(factors):
        runs += values[place : place + count] * factor
    runs ^= runs >> np.uint64(31)
    runs *= np.uint64(0x9E3779B97F4A7C15)
    return runs ^ (runs >> np.uint64(29))


def _digest(content: bytes, size: int) -> bytes:
    return hashlib.blake2b(content, digest_size=size).digest()


def _keys(contents: Sequence[bytes]) -> NDArray[np.uint64]:
    keys: NDArray[np.uint64] = np.frombuffer(b"".join(_digest(content, 16) for content in contents), "<u8")
    return keys.reshape(-1, 2)
