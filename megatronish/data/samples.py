"""GPT samples: documents shuffled and laid end to end, cut every S tokens, the cuts shuffled again.

Epoch e is a function of names alone: the .idx (document lengths, not its path), the range of documents, S, the seed,
and e. So training longer, moving the data or changing the layout never reorders what came before. An epoch of T
tokens has n = (T - 1) // S samples; sample i of the run is sample i % n of epoch i // n. A sample is the S + 1 tokens
from a cut on, one more than it predicts from, so neighbours share a token. So every token of an epoch is a label
exactly once, except its first and those left over at its end: together fewer than S + 1.

An epoch is three int64 arrays: where each document starts in .bin, where it ends in the epoch, and the order of the
cuts. They are kept in a cache file. Of the processes that find no such file, one builds it and the others wait, because
eight ranks of a machine that build it at once take eight times its memory. That they wait is no condition: each
would build the same bytes and rename them to the same name; the first file stays. A checksum at its end detects a
damaged file, which is built again.
"""

import hashlib
import logging
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronish.core.errors import RunError, UserError
from megatronish.core.files import AtomicFile, one_builder
from megatronish.data.indexed import IndexedTokens, MappedArray
from megatronish.data.sample import DatasetSettings, DatasetSource, Sample
from megatronish.parallel.streams import numpy_stream

logger = logging.getLogger(__name__)

FORMAT = "megatronish samples 1"
EPOCHS_IN_MEMORY = 2
READ_WHOLE = 1 << 18
"""Bytes up to which a file of the cache is read, not mapped: a thousand prefixes keep no files open for it."""


class TooSmallError(UserError):
    """UserError: the data has fewer tokens than one sample."""


class Epoch(NamedTuple):
    """One pass over the documents: their order and that of the cuts."""

    starts: NDArray[np.int64]  # [documents], token of .bin at which a document starts, in the epoch's order
    ends: NDArray[np.int64]  # [documents], tokens of the epoch up to a document's end
    cuts: NDArray[np.int64]  # [samples], the order in which the cuts are taken


class GPTSamples:
    """Samples of S + 1 tokens from a range of a file's documents; `sample(i)` for any i >= 0, epoch after epoch."""

    def __init__(
        self,
        file: IndexedTokens,
        *,
        name: str,
        first_document: int,
        end_document: int,
        seq_length: int,
        seed: int,
        vocab_size: int,
        cache_folder: Path | None = None,
    ) -> None:
        self.name = name
        self.seq_length = seq_length
        self._file = file
        self._first, self._end = first_document, end_document
        self._vocab_size = vocab_size
        self._seed = seed
        self._cache_folder = cache_folder
        num_tokens = file.document_start(end_document) - file.document_start(first_document)
        self.num_samples = (num_tokens - 1) // seq_length
        if self.num_samples < 1:
            raise TooSmallError(
                f"the {name} data of {file.prefix} is {num_tokens} tokens in {end_document - first_document} of its "
                f"{file.num_documents} documents, fewer than the {seq_length + 1} of one sample (--seq-length + 1); "
                "give it more data, a larger part of --split or none (for example --split 1,0,0), or a shorter sequence"
            )
        facts = (FORMAT, file.identity, first_document, end_document, seq_length, seed)
        self._order_identity = _hash(facts)
        self.identity = _hash((self._order_identity, file.content))
        self._epochs: dict[int, Epoch] = {}
        self._mapped: dict[int, MappedArray] = {}  # files of the cache that epochs are in
        self.sample(0)  # so that data of another tokenizer shows at the start

    def sample(self, index: int) -> Sample:
        """Tokens from a cut of the shuffled documents on; documents end with the tokens that end them."""
        self._file.check_size()
        tokens = self._file.tokens
        values = np.concatenate([tokens[start:end] for start, end in self._spans(index)])
        check_tokens(values, self._file.where, vocab_size=self._vocab_size)
        return Sample(values.astype(np.int64))

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Fetch what these samples are read from; of data on a disk nothing."""
        self._file.read_ahead(span for index in indices for span in self._spans(index))

    def build_indices(self, num_samples: int) -> None:
        """Build the epochs of the first so many samples that are not kept yet. RunError if one cannot be kept."""
        for number in range(max(1, -(-num_samples // self.num_samples))):
            self._epoch(number)
            if self._cache_folder is not None:
                refuse_unkept(self._path(self._cache_folder, number))

    def _spans(self, index: int) -> list[tuple[int, int]]:
        """Places of .bin, [start, end), that a sample is made of."""
        # The S + 1 places [begin, end) of the epoch: documents end to end, in the epoch's order.
        number, place = divmod(index, self.num_samples)
        epoch = self._epoch(number)
        if number in self._mapped:
            self._mapped[number].check()
        begin = int(epoch.cuts[place]) * self.seq_length
        end = begin + self.seq_length + 1
        # The d documents first..last that overlap it: where each starts in .bin and begins in the epoch. All are [d].
        first, last = np.searchsorted(epoch.ends, [begin, end - 1], side="right")
        starts = np.asarray(epoch.starts[first : last + 1])
        ends = np.asarray(epoch.ends[first : last + 1])
        lengths = np.diff(ends, prepend=epoch.ends[first - 1] if first else 0)
        begins = ends - lengths
        # The part of each document inside [begin, end); empty documents have none.
        from_ = starts + np.maximum(begin - begins, 0)
        to = starts + np.minimum(end - begins, lengths)
        return [(a, b) for a, b in zip(from_.tolist(), to.tolist(), strict=True) if a < b]

    def _epoch(self, number: int) -> Epoch:
        if number not in self._epochs:
            while len(self._epochs) >= EPOCHS_IN_MEMORY:
                oldest = next(iter(self._epochs))
                del self._epochs[oldest]
                self._mapped.pop(oldest, None)
            documents = self._end - self._first
            values = self._cached(number, size=2 * documents + self.num_samples)
            self._epochs[number] = Epoch(*np.split(values, [documents, 2 * documents]))
        return self._epochs[number]

    def _cached(self, number: int, *, size: int) -> NDArray[np.int64]:
        """The three arrays of an epoch end to end, read from the cache, or built and written to it."""
        if self._cache_folder is None:
            return self._build(number)
        path = self._path(self._cache_folder, number)
        kept = kept_index(path, lambda: self._build(number), size=size)
        if kept.mapped is not None:
            self._mapped[number] = kept.mapped
        return kept.values

    def _path(self, folder: Path, number: int) -> Path:
        return folder / f"{self._order_identity[:32]}-{number:05d}.epoch"

    def _build(self, number: int) -> NDArray[np.int64]:
        bounds = self._file.document_starts()[self._first : self._end + 1]
        documents = self._order("documents", number, size=len(bounds) - 1)
        ends = np.cumsum(np.diff(bounds)[documents])
        return np.concatenate([bounds[documents], ends, self._order("cuts", number, size=self.num_samples)])

    def _order(self, of: str, number: int, *, size: int) -> NDArray[np.int64]:
        return shuffled_places(self._seed, "data", self._order_identity, of, number, size=size)


def shuffled_places(*names: str | int, size: int) -> NDArray[np.int64]:
    """Permutation by sorting raw draws: numpy keeps those equal over its versions, but not `permutation`."""
    return stable_order(numpy_stream(*names).bit_generator.random_raw(size))


def stable_order(draws: NDArray[np.uint64]) -> NDArray[np.int64]:
    """`draws.argsort(kind="stable")`, several times as fast for draws that are spread over all of 64 bits.

    Numbers are sorted instead of places: the upper bits of each draw with its place below them. The few draws that have
    their upper bits in common are ordered afterwards.
    """
    bits = np.uint64(max(len(draws) - 1, 0).bit_length())
    packed = draws >> bits << bits
    packed |= np.arange(len(draws), dtype=np.uint64)
    packed.sort()
    places = (packed & np.uint64((1 << int(bits)) - 1)).astype(np.int64)
    packed >>= bits
    end = 0
    for first in np.flatnonzero(packed[1:] == packed[:-1]).tolist():
        if first >= end:
            end = int(np.searchsorted(packed, packed[first], side="right"))
            places[first:end] = places[first:end][draws[places[first:end]].argsort(kind="stable")]
    return places


def check_tokens(tokens: NDArray[Any], where: str, *, vocab_size: int) -> None:
    """UserError if tokens are outside of the vocabulary."""
    largest, smallest = int(tokens.max()), int(tokens.min())
    if largest >= vocab_size or smallest < 0:
        raise UserError(
            f"{where} holds token id {largest if smallest >= 0 else smallest}, but the "
            f"vocabulary has {vocab_size}; train with the tokenizer that the data was made with, "
            "or preprocess it again"
        )


def open_gpt_samples(source: DatasetSource, settings: DatasetSettings) -> GPTSamples:
    """Samples of the .bin/.idx pair with this prefix, or of the shards of this manifest."""
    file = settings.files.open(source.path)
    first, end = (round(fraction * file.num_documents) for fraction in source.part)
    return GPTSamples(
        file,
        name=source.name,
        first_document=first,
        end_document=end,
        seq_length=settings.seq_length,
        seed=settings.seed,
        vocab_size=settings.vocab_size,
        cache_folder=settings.index_folder(source.path),
    )


def _hash(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


# Arrays in a file of the cache.


class KeptIndex(NamedTuple):
    """Values of an index, [n], and the file of the cache that they are mapped from, if they are."""

    values: NDArray[np.int64]
    mapped: MappedArray | None

    def check(self) -> None:
        """RunError if the file has become shorter since it was mapped."""
        if self.mapped is not None:
            self.mapped.check()


def kept_index(path: Path, build: Callable[[], NDArray[np.int64]], *, size: int | None = None) -> KeptIndex:
    """Values of a file of the cache, of `size` values if that is known; built and written to it if it is not there."""
    if (kept := _read(path, size=size)) is not None:
        return kept
    with one_builder(path):
        if (kept := _read(path, size=size)) is not None:
            return kept
        values = build()
        try:
            _write(path, values)
        except OSError as error:  # a read-only folder or a full disk: only time is lost
            logger.warning("sample index not kept in %s: %s; --data-cache-path names another folder", path, error)
            return KeptIndex(values, None)
    return _read(path, size=size) or KeptIndex(values, None)


def refuse_unkept(path: Path) -> None:
    """RunError for an index that is built, and is in no file: its folder cannot be written, or the disk is full."""
    if not path.is_file():
        raise RunError(
            f"the sample index {path} is not kept; free space there, or name another folder with --data-cache-path"
        )


def _read(path: Path, *, size: int | None) -> KeptIndex | None:
    """Values that `_write` wrote, without their checksum; None if the file is missing or not whole."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != 8 * (size + 1) if size is not None else not num_bytes:
            return None
        mapped = MappedArray(path, "<i8") if num_bytes > READ_WHOLE else None
        values = np.frombuffer(path.read_bytes(), "<i8") if mapped is None else mapped.values
    except (OSError, ValueError):
        return None
    return KeptIndex(values[:-1], mapped) if zlib.crc32(values[:-1].data) == values[-1] else None


def _write(path: Path, values: NDArray[np.int64]) -> None:
    path.unlink(missing_ok=True)  # damaged, or it would have been read
    output = AtomicFile(path)
    try:
        values = values.astype("<i8", copy=False)
        output.file.write(values.data)
        output.file.write(np.array([zlib.crc32(values.data)], "<i8").data)
        output.commit(keep_existing=True, durably=False)  # after a power cut its checksum tells, and it is built again
    except BaseException:
        output.discard()
        raise
