"""Packed samples: rows of S + 1 tokens that hold whole documents where they fit, by best fit over all documents.

Ding et al. 2024 (arXiv:2404.10830). Concatenation cuts documents where a sample ends, so a text may begin without its
beginning. Here a document of T tokens is cut only if T > S + 1, into pieces that share a token with the next one, and
pieces are packed into rows: the longest first, each into the fullest row that has place for it. Every token except the
first of its document is a label once an epoch. Documents of a row do not see each other, and places that stay empty are
filler, which no loss reads. A document of fewer than two tokens has no label and is left out.

Rows are a function of the file, the range of documents, S and the seed (which decides between pieces of one length);
their order is another one in each epoch. The rows are three int64 arrays in a file of the cache.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronish.data.blend import Blend
from megatronish.data.fill_in_middle import FilledMiddle
from megatronish.data.indexed import IndexedTokens
from megatronish.data.sample import Dataset, DatasetSettings, DatasetSource, Sample
from megatronish.data.samples import (
    GPTSamples,
    KeptIndex,
    TooSmallError,
    check_tokens,
    kept_index,
    open_gpt_samples,
    refuse_unkept,
    shuffled_places,
)

FORMAT = "megatronish packed samples 1"


class PackedRows(NamedTuple):
    """Pieces of documents in the order of their rows."""

    starts: NDArray[np.int64]  # [pieces], token of .bin at which a piece starts
    lengths: NDArray[np.int64]  # [pieces], its tokens, 2 to S + 1
    rows: NDArray[np.int64]  # [pieces], number of its row, which rises from 0


class PackedSamples:
    """Rows of S + 1 tokens from a range of a file's documents; `sample(i)` for any i >= 0, epoch after epoch."""

    def __init__(self, file: IndexedTokens, source: DatasetSource, settings: DatasetSettings) -> None:
        self.name, self._file, self._settings = source.name, file, settings
        self._range = tuple(round(fraction * file.num_documents) for fraction in source.part)
        facts = (FORMAT, file.identity, self._range, settings.seq_length, settings.seed)
        self._order_identity = hashlib.sha256(repr(facts).encode()).hexdigest()
        self.identity = hashlib.sha256(repr((self._order_identity, file.content)).encode()).hexdigest()
        self._kept = self._index(source)
        self._rows = PackedRows(*self._kept.values.reshape(3, -1))
        if not len(self._rows.rows):
            raise TooSmallError(
                f"the {source.name} data of {file.prefix} has no document of two tokens in {self._range[1]:,} of its "
                f"{file.num_documents:,} documents; give it more data, or a larger part of --split"
            )
        self.num_samples = int(self._rows.rows[-1]) + 1
        self._epoch: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))
        self.sample(0)  # so that data of another tokenizer shows at the start

    @property
    def efficiency(self) -> float:
        """Part of the places of all rows that tokens are at."""
        return int(self._rows.lengths.sum()) / (self.num_samples * (self._settings.seq_length + 1))

    @property
    def num_cut(self) -> tuple[int, int]:
        """Documents that are cut here, and about how many concatenation would cut: with the chance (T - 1) / S each."""
        first, end = self._range
        lengths, seq_length = np.diff(self._file.document_starts()[first : end + 1]), self._settings.seq_length
        chances = np.clip((lengths - 1) / seq_length, 0, 1)
        return int((lengths > seq_length + 1).sum()), round(float(chances.sum()))

    def __str__(self) -> str:
        pieces = f"{len(self._rows.rows):,} documents and pieces"
        rows = f"{self.num_samples:,} rows, {self.efficiency:.2%} full"
        cut, otherwise = self.num_cut
        cuts = f"{cut:,} documents are cut (about {otherwise:,} with --packing concatenate)"
        return f"packing of {self._file.prefix} ({self.name}): {pieces} in {rows}; {cuts}"

    def sample(self, index: int) -> Sample:
        """The pieces of one row, each a document of its own, and filler."""
        spans = self._spans(index)
        self._file.check_size()
        parts = [self._file.tokens[start:end] for start, end in spans]
        lengths = [end - start for start, end in spans]
        text = np.concatenate(parts)
        filler = self._settings.seq_length + 1 - len(text)
        check_tokens(text, self._file.where, vocab_size=self._settings.vocab_size)
        tokens = np.append(text.astype(np.int64), np.full(filler, self._settings.eod))
        documents = np.repeat(np.arange(len(parts) + 1), [*lengths, filler])
        loss_mask = np.arange(len(tokens)) < len(tokens) - filler
        return Sample(tokens, loss_mask, documents, num_filler=filler)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Fetch what these samples are read from; of data on a disk nothing."""
        self._file.read_ahead(span for index in indices for span in self._spans(index))

    def build_indices(self, _num_samples: int) -> None:
        """The rows are built, and serve all epochs. RunError if they could not be kept."""
        refuse_unkept(self._path)

    def _spans(self, index: int) -> list[tuple[int, int]]:
        """Places of .bin, [start, end), of the pieces of a row."""
        epoch, place = divmod(index, self.num_samples)
        if self._epoch[0] != epoch:
            names = (self._settings.seed, "data", self._order_identity, "rows", epoch)
            self._epoch = epoch, shuffled_places(*names, size=self.num_samples)
        row = int(self._epoch[1][place])
        self._kept.check()
        first, end = np.searchsorted(self._rows.rows, [row, row + 1])
        starts, lengths = self._rows.starts[first:end], self._rows.lengths[first:end]
        return list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True))

    def _index(self, source: DatasetSource) -> KeptIndex:
        self._path = self._settings.index_folder(source.path) / f"{self._order_identity[:32]}.rows"
        return kept_index(self._path, self._pack)

    def _pack(self) -> NDArray[np.int64]:
        bounds = self._file.document_starts()[self._range[0] : self._range[1] + 1]
        order = shuffled_places(self._settings.seed, "data", self._order_identity, "ties", size=len(bounds) - 1)
        starts, lengths = pieces_of(bounds[:-1][order], np.diff(bounds)[order], self._settings.seq_length)
        rows = best_fit(lengths, self._settings.seq_length + 1)
        by_row = np.argsort(rows, kind="stable")
        return np.concatenate([starts[by_row], lengths[by_row], rows[by_row]])


def packing_notes(dataset: Dataset) -> Iterator[str]:
    """A line for each packed data set, alone or in a blend: how full its rows are."""
    dataset = dataset.plain if isinstance(dataset, FilledMiddle) else dataset
    members = dataset.members if isinstance(dataset, Blend) else [dataset]
    yield from (str(member) for member in members if isinstance(member, PackedSamples))


def open_pretraining(source: DatasetSource, settings: DatasetSettings) -> GPTSamples | PackedSamples:
    """Samples of the .bin/.idx pair with this prefix, or of the shards of this manifest, as `packing` asks for."""
    if settings.packing == "best-fit":
        return PackedSamples(settings.files.open(source.path), source, settings)
    return open_gpt_samples(source, settings)


def pieces_of(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], seq_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and lengths of pieces of at most S + 1 tokens, of which each begins with the last token of the one before.

    A document without a label has no piece.
    """
    counts = -(-np.maximum(lengths - 1, 0) // seq_length)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of each piece in its document
    begins = number * seq_length
    sizes = np.minimum(np.repeat(lengths, counts) - begins, seq_length + 1)
    return np.repeat(starts, counts) + begins, sizes


def best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Row of each piece (of 1 to `capacity` tokens): best fit, the longest first, the first of equals first.

    Pieces of one length are placed together. The fullest row that has place for one takes as many of them as fit,
    because after the first it is still the fullest that has place. So the work is about that of the different lengths
    and spaces, and not that of the pieces; free spaces are the bits of one number.
    """
    row_of_piece = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    sizes, firsts = np.unique(-lengths[order], return_index=True)
    with_space: dict[int, list[NDArray[np.int64]]] = defaultdict(list)
    spaces = num_rows = 0  # bit s of `spaces` is set where rows have s places left
    for size, first, end in zip((-sizes).tolist(), firsts.tolist(), [*firsts.tolist(), len(order)][1:], strict=True):
        while first < end:
            fitting = spaces >> size
            if fitting:
                space = size + (fitting & -fitting).bit_length() - 1
                rows = with_space[space].pop()
                if not with_space[space]:
                    spaces ^= 1 << space
            else:
                space, count = capacity, -(-(end - first) // (capacity // size))
                rows = np.arange(num_rows, num_rows + count)
                num_rows += count
            each = space // size
            taken = min(len(rows), -(-(end - first) // each))
            members = order[first : min(first + taken * each, end)]
            row_of_piece[members] = np.repeat(rows[:taken], each)[: len(members)]
            first += len(members)
            # All rows that were taken are full but the last, which may have got fewer pieces.
            in_last = len(members) - (taken - 1) * each
            for left, of in (
                (space, rows[taken:]),
                (space - each * size, rows[: taken - 1]),
                (space - in_last * size, rows[taken - 1 : taken]),
            ):
                if left and len(of):
                    with_space[left].append(of)
                    spaces |= 1 << left
    return row_of_piece
