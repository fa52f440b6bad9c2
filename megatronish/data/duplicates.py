"""Duplicates over all of the input: signed in tasks, matched by ranges of keys, joined; the first in input order stays.

A document has a position: the number of its piece of input, over all tasks, and its line in it. Positions rise with the
order of the input, however it is cut. Signing writes (key, position) in sorted runs, of a size that fits into memory.
Matching reads one range of keys from the runs of all tasks, and links every document of a key with the first of it.
What minhash has linked is joined to groups, over all keys, of which the first document stays. Each of these follows
from the input and the settings alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronish.core.remote import location
from megatronish.data.batch_work import in_order
from megatronish.data.cleaning import Cleaning
from megatronish.data.encoding import texts_to_keep
from megatronish.data.inputs import is_parquet
from megatronish.data.pieces import InputPiece, lines_before
from megatronish.data.readers import LINE_BITS, Batch, batches_of

ROWS_AT_ONCE = 1 << 21
"""Rows of keys and positions, 24 bytes each, that are sorted in memory."""
LINKS_AT_ONCE = 1 << 22
KEY_RANGE = 1 << 64

Links = NDArray[np.int64]
"""Pairs of positions, [2, number]: documents that are left out, in their order, and the one that stays for each."""


class Signed(NamedTuple):
    """Keys and positions of the documents of a batch."""

    keys: NDArray[np.uint64]
    positions: NDArray[np.int64]
    documents: int
    num_bytes: int


class SignedPieces(NamedTuple):
    """Number of documents that were signed, and rows of each run of the file."""

    documents: int
    runs: list[int]


@dataclass(frozen=True)
class SigningJob:
    """Settings by which every worker signs the documents that cleaning keeps."""

    json_keys: tuple[str, ...]
    cleaning: Cleaning

    @property
    def columns(self) -> tuple[str, ...]:
        """Fields of a document that are read."""
        return tuple(dict.fromkeys((*self.json_keys, *self.cleaning.keys)))

    def prepared(self) -> Callable[[Batch], Signed]:
        """Signing of a batch in this process."""
        return partial(sign_batch, job=replace(self, cleaning=self.cleaning.opened()))


def sign_batch(batch: Batch, job: SigningJob) -> Signed:
    """Keys of all documents of a batch that can be read and are kept."""
    texts = texts_to_keep(batch, job.json_keys, job.cleaning).texts
    keys = [job.cleaning.deduplication.keys(of_line) for of_line in texts.values()]
    positions = np.array([batch.position(line) for line in texts], np.int64)
    return Signed(
        np.concatenate([np.empty((0, 2), np.uint64), *keys]),
        positions.repeat([len(of_document) for of_document in keys]),
        len(texts),
        batch.num_bytes,
    )


class SignatureWriter:
    """Writer of keys and positions into an open file, in sorted runs of which each fits into memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._keys, self._positions = list[NDArray[np.uint64]](), list[NDArray[np.int64]]()
        self.runs = list[int]()
        """Rows of each run in the file."""

    def add(self, signed: Signed) -> None:
        """Add the rows of a batch; the file has them only after `finish`."""
        self._keys.append(signed.keys)
        self._positions.append(signed.positions)
        if sum(map(len, self._positions)) >= ROWS_AT_ONCE:
            self.finish()

    def finish(self) -> None:
        """Write what was added since the last run as a run."""
        if not sum(map(len, self._positions)):
            return
        keys, positions = np.concatenate(self._keys), np.concatenate(self._positions)
        self._keys, self._positions = [], []
        order = np.lexsort((positions, keys[:, 1], keys[:, 0]))
        for column in (keys[order, 0], keys[order, 1], positions[order]):
            self._file.write(np.ascontiguousarray(column, "<u8").data)
        self.runs.append(len(positions))


def sign_pieces(
    pieces: Sequence[InputPiece],
    job: SigningJob,
    file: BinaryIO,
    *,
    workers: int,
    on_signed: Callable[[int, int], object],
    first_piece: int = 0,
) -> SignedPieces:
    """Write keys and positions of the documents of pieces into a file; `on_signed` hears of documents and bytes."""
    writer, documents = SignatureWriter(file), 0
    batches = batches_of(pieces, job.columns, first_piece=first_piece)
    with closing(in_order(batches, job, job.prepared(), workers=workers)) as all_signed:
        for signed in all_signed:
            writer.add(signed)
            documents += signed.documents
            on_signed(documents, signed.num_bytes)
    writer.finish()
    return SignedPieces(documents, writer.runs)


def find_duplicates(
    pieces: Sequence[InputPiece], job: SigningJob, path: Path, *, workers: int, on_bytes: Callable[[int], object]
) -> "Duplicates":
    """Duplicates of pieces, found by this process and its workers with a file at a path that is of no use later."""
    with path.open("wb") as file:
        signed = sign_pieces(pieces, job, file, workers=workers, on_signed=lambda _, num_bytes: on_bytes(num_bytes))
    links = matched([SignatureFile(path, signed.runs)], 0, KEY_RANGE)
    return Duplicates(joined_groups([links]), pieces)


class _SignedRows(NamedTuple):
    """Columns of a part of a run: both halves of the keys, and the positions."""

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]
    positions: NDArray[np.uint64]


class SignatureFile(NamedTuple):
    """Keys and positions of a task, which `SignatureWriter` wrote in runs of so many rows."""

    path: Path
    runs: Sequence[int]

    def between(self, start: int, end: int) -> Iterator[_SignedRows]:
        """Rows of each run whose first half of the key is at least `start` and less than `end`.

        The file is mapped only meanwhile: there may be more files than a process may have open.
        """
        columns = np.memmap(self.path, "<u8", "r") if sum(self.runs) else np.empty(0, "<u8")
        begin = 0
        for rows in self.runs:
            run = _SignedRows(*np.split(columns[begin : begin + 3 * rows], 3))
            begin += 3 * rows
            first, last = (
                rows if border >= KEY_RANGE else int(run.high.searchsorted(np.uint64(border)))
                for border in (start, end)
            )
            yield _SignedRows(*(column[first:last] for column in run))


def matched(files: Sequence[SignatureFile], start: int, end: int) -> Links:
    """Links of all documents whose keys lie between, each to the first one of its key."""
    rows = sum(len(part.high) for file in files for part in file.between(start, end))
    steps = -(-rows // ROWS_AT_ONCE) or 1
    borders = [start + (end - start) * step // steps for step in range(steps + 1)]
    pairs = [_linked(files, *borders[step : step + 2]) for step in range(steps)]
    return _in_order(np.concatenate(pairs, axis=1))


def _in_order(links: Links) -> Links:
    """Links in the order of the documents that are left out, each link once."""
    links = links[:, np.lexsort(links[::-1])]
    is_new = np.ones(links.shape[1], np.bool_)
    is_new[1:] = (links[:, 1:] != links[:, :-1]).any(0)
    return links[:, is_new]


def _linked(files: Sequence[SignatureFile], start: int, end: int) -> Links:
    parts = [_SignedRows(*map(np.array, part)) for file in files for part in file.between(start, end)]
    # First no rows: there may be no document at all.
    high, low, positions = map(np.concatenate, zip(np.empty((3, 0), "<u8"), *parts, strict=True))
    order = np.lexsort((positions, low, high))
    high, low, positions = high[order], low[order], positions[order].astype(np.int64)
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    firsts = positions[is_first][np.cumsum(is_first) - 1]
    return np.stack([positions[~is_first], firsts[~is_first]])


def joined_groups(all_links: Iterable[Links]) -> Links:
    """Links of every document to the first one of its group: of all that links lead to, over any number of them.

    Memory grows with the number of documents that have a link, not with that of links or of documents.
    """
    groups = np.empty((2, 0), np.int64)
    waiting, num_waiting = list[Links](), 0
    for links in all_links:
        waiting.append(links)
        num_waiting += links.shape[1]
        if num_waiting > max(LINKS_AT_ONCE, groups.shape[1]):
            groups = _groups(np.concatenate([groups, *waiting], axis=1))
            waiting, num_waiting = [], 0
    return _groups(np.concatenate([groups, *waiting], axis=1))


def _groups(links: Links) -> Links:
    """Union-find of all links at once: roots are linked to lesser ones, and paths shortened, until nothing changes."""
    members, places = np.unique(links, return_inverse=True)
    one, other = places.reshape(links.shape)
    root = np.arange(len(members))
    while (root[one] != root[other]).any():
        lesser, greater = np.minimum(root[one], root[other]), np.maximum(root[one], root[other])
        np.minimum.at(root, greater, lesser)
        while (root != root[root]).any():
            root = root[root]
    is_left_out = root != np.arange(len(members))
    return np.stack([members[is_left_out], members[root[is_left_out]]])


class Duplicates:
    """Documents of some pieces of input that are left out, as another one stays for each of them.

    `pieces` are those of all tasks, for the names of documents that stay.
    """

    def __init__(self, links: Links, pieces: Sequence[InputPiece]) -> None:
        self._links, self._pieces = links, pieces

    def of(self, batch: Batch) -> Mapping[int, int]:
        """Lines of a batch that are left out, and the position of the document that stays for each."""
        borders = batch.position(batch.first_line), batch.position(batch.first_line + len(batch.lines))
        first, last = np.searchsorted(self._links[0], borders)
        lines = self._links[0, first:last] - batch.position(0)
        return dict(zip(lines.tolist(), self._links[1, first:last].tolist(), strict=True))

    def place(self, position: int) -> str:
        """File and line of a document."""
        piece = self._pieces[position >> LINE_BITS]
        # Lines are counted from the beginning of the piece, rows of a table from that of the file.
        before = 0 if is_parquet(location(piece.path)) else lines_before(piece.start, piece.path)
        return f"{piece.path}:{before + position % (1 << LINE_BITS)}"


def between_positions(links: Links, first_piece: int, last_piece: int) -> Links:
    """Links of documents of the pieces from the first to the last, which does not belong to them."""
    borders = np.searchsorted(links[0], [first_piece << LINE_BITS, last_piece << LINE_BITS])
    return links[:, borders[0] : borders[1]]
