"""Inspection of a .bin/.idx pair: its numbers, whether it is whole, near-duplicates, and a sample as the model sees it.

Near-duplicates are estimated by MinHash (Broder 1997): two documents that share the part J of their runs of five tokens
have equal minima of a hash with the probability J. Each document has 64 minima, in 16 bands of four. Documents that are
equal in a band are compared; two of J = 0.8 are with a probability of 0.9998.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronish.config.sections.data import MANIFEST
from megatronish.core.errors import RunError, UserError
from megatronish.core.remote import location
from megatronish.data.indexed import IndexedTokens
from megatronish.data.loader import Collator
from megatronish.data.sample import Sample
from megatronish.data.samples import shuffled_places
from megatronish.data.shards import copy_summed, named_by, reading
from megatronish.data.signatures import runs_in_order
from megatronish.data.token_files import TokenFiles
from megatronish.tokenizer.tokenizer import Tokenizer

BLOCK = 1 << 22  # tokens that are read at a time
SHINGLE, MINIMA, BANDS = 5, 64, 16
ALIKE = 0.8
"""Part of the runs of tokens that near-duplicates share."""
LONGEST_COMPARED = 1 << 13  # tokens of a document of which runs are compared


class TokenCounts(NamedTuple):
    """What one pass over all tokens finds."""

    smallest: int
    largest: int
    special: dict[str, int]
    """Occurrences of special tokens, by their names."""
    without_end: int | None
    """Documents that do not end with the token that ends documents; None where that is unknown."""


def lengths_of(file: IndexedTokens) -> NDArray[np.int64]:
    """Tokens of each document, [documents]."""
    return np.diff(file.document_starts())


def count_tokens(file: IndexedTokens, special: Mapping[str, int], *, eod: int | None) -> TokenCounts:
    """Read every token once, in memory that does not grow with the data."""
    limit = max(special.values(), default=-1) + 1
    counts = np.zeros(limit, np.int64)
    starts = file.document_starts()
    lasts = starts[1:][np.diff(starts) > 0] - 1  # rises
    smallest, largest, ended = np.iinfo(np.int64).max if file.num_tokens else 0, -1, 0
    for first in range(0, file.num_tokens, BLOCK):
        block = np.asarray(file.tokens[first : first + BLOCK])
        low, high = int(block.min()), int(block.max())
        smallest, largest = min(smallest, low), max(largest, high)
        if limit:
            counts += np.bincount(block[(block >= 0) & (block < limit)], minlength=limit)
        if eod is not None:
            inside = lasts[slice(*np.searchsorted(lasts, [first, first + len(block)]))]
            ended += int((block[inside - first] == eod).sum())
    named = {name: int(counts[token]) for name, token in special.items()}
    return TokenCounts(smallest, largest, named, None if eod is None else len(lasts) - ended)


# Whether a pair is whole.


class PairCheck(NamedTuple):
    """A thing that was checked, whether it is right, and a sentence about it."""

    name: str
    is_right: bool
    sentence: str


def check_pair(path: str, *, vocab_size: int | None, eod: int | None, files: TokenFiles) -> Iterator[PairCheck]:
    """All checks of a pair or of a manifest, until one fails without which others say nothing."""
    try:
        file = files.open(path)
    except (UserError, RunError) as error:
        yield PairCheck("files", False, str(error))
        return
    what = f"{file.num_documents:,} documents of {file.num_tokens:,} tokens ({file.dtype})"
    yield PairCheck("files", True, f"sizes fit together, and the index rises: {what}")
    counts = count_tokens(file, {}, eod=eod)
    yield _range_of(file, counts, vocab_size)
    if counts.without_end is not None:
        number = counts.without_end
        yield PairCheck(
            "ends",
            True,
            f"{number:,} documents do not end with token {eod}, which ends one"
            if number
            else f"all documents end with token {eod}",
        )
    yield _sums(path)


def _range_of(file: IndexedTokens, counts: TokenCounts, vocab_size: int | None) -> PairCheck:
    if not file.num_tokens:
        return PairCheck("ids", False, f"{file.where} holds no token; preprocess its text again")
    ids = f"ids are {counts.smallest} to {counts.largest}"
    if vocab_size is None and counts.smallest >= 0:
        return PairCheck("ids", True, f"{ids}; name a tokenizer to compare them with its vocabulary")
    if counts.smallest < 0 or (vocab_size is not None and counts.largest >= vocab_size):
        known = "" if vocab_size is None else f", and the vocabulary has {vocab_size}"
        return PairCheck(
            "ids",
            False,
            f"{file.where}: {ids}{known}; name the tokenizer that the data was made with, or preprocess the text again",
        )
    return PairCheck("ids", True, f"{ids}, below the vocabulary of {vocab_size}")


def _sums(path: str) -> PairCheck:
    """Compare checksums, which a manifest alone has."""
    if not path.endswith(MANIFEST):
        return PairCheck("sums", True, "no checksums are kept of a pair")
    manifest = location(path)
    with reading(manifest):
        content = json.loads(manifest.read_bytes())
    named = [(each["path"], each.get("sha256")) for each in (content["index"], *content["bins"])]
    known = [(named_by(manifest, name), digest) for name, digest in named if digest is not None]
    try:
        for file, digest in known:
            copy_summed(file, None, digest)
    except (UserError, RunError) as error:
        return PairCheck("sums", False, str(error))
    return PairCheck("sums", True, f"{len(known):,} of {len(named):,} files have the checksums of the manifest")


# Near-duplicates.


class AlikeDocuments(NamedTuple):
    """Two documents that share most of their text, and the part of their runs of tokens that they share, about."""

    first: int
    second: int
    similarity: float


@dataclass(frozen=True)
class NearDuplicates:
    """Near-duplicates among `compared` documents: each with an earlier one that it is like."""

    compared: int
    pairs: tuple[AlikeDocuments, ...]


def near_duplicates(file: IndexedTokens, *, most: int, seed: int = 0) -> NearDuplicates:
    """Compare at most so many documents, drawn by the seed, of those with five tokens or more."""
    long = np.flatnonzero(lengths_of(file) >= SHINGLE)
    if len(long) > most:
        long = np.sort(long[shuffled_places(seed, "inspected documents", size=len(long))[:most]])
    draws = np.random.Generator(np.random.Philox(seed)).bit_generator.random_raw(2 * MINIMA + SHINGLE)
    odd = draws | np.uint64(1)
    minima = np.empty((len(long), MINIMA), np.uint32)
    for row, document in enumerate(long.tolist()):
        ids = np.asarray(file.document(document)[:LONGEST_COMPARED]).astype(np.uint64)
        runs = np.unique(runs_in_order(ids + np.uint64(1), odd[:SHINGLE]))
        mixed = runs * odd[SHINGLE : SHINGLE + MINIMA, None] + draws[SHINGLE + MINIMA :, None]
        minima[row] = (mixed >> np.uint64(32)).min(1)
    pairs = {}
    for band in np.split(minima, BANDS, axis=1):
        firsts: dict[bytes, int] = {}
        for row, key in enumerate(map(bytes, np.ascontiguousarray(band))):
            first = firsts.setdefault(key, row)
            if first != row and row not in pairs and (like := float((minima[first] == minima[row]).mean())) >= ALIKE:
                pairs[row] = AlikeDocuments(int(long[first]), int(long[row]), like)
    return NearDuplicates(len(long), tuple(pairs[row] for row in sorted(pairs)))


# Texts and samples.


def text_of(tokens: Sequence[int], tokenizer: Tokenizer | None, special: Mapping[str, int]) -> str:
    """Text of tokens, special ones by their names; without a tokenizer their numbers."""
    if tokenizer is None:
        return " ".join(map(str, tokens))
    names = {token: name for name, token in special.items()}
    parts = []
    for name, members in groupby(tokens, key=names.get):
        run = list(members)
        parts.append(tokenizer.decode(run) if name is None else name * len(run))
    return "".join(parts)


class ShownRun(NamedTuple):
    """Neighbouring tokens of a document that all count in the loss as labels, or all do not."""

    document: int
    is_trained: bool
    tokens: list[int]
    position: int
    """Position id of the first one."""


def runs_of_sample(sample: Sample, collate: Collator) -> Iterator[ShownRun]:
    """A sample as the model sees it, without its filler; its first token is no label.

    Documents are those of the sample, or what end-of-document tokens end, also where they see each other.
    """
    batch = collate([sample], [0])
    count = len(sample.tokens) - sample.num_filler
    trained = [False, *batch.loss_mask[0].tolist()][:count]
    if sample.document_ids is not None:
        documents = sample.document_ids.tolist()
    else:
        is_end = sample.tokens == (-1 if collate.eod is None else collate.eod)
        documents = (np.cumsum(is_end) - is_end).tolist()
    positions = batch.position_ids[0].tolist()
    positions.append(positions[-1] + 1 if documents[-1] == documents[-2] else 0)
    for (document, is_trained), members in groupby(range(count), key=lambda place: (documents[place], trained[place])):
        places = list(members)
        yield ShownRun(document, is_trained, sample.tokens[places].tolist(), positions[places[0]])


def digest_of(file: IndexedTokens) -> str:
    """A hash that is equal for equal data sets."""
    return hashlib.sha256((file.identity + file.content).encode()).hexdigest()[:16]
