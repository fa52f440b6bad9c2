"""Indexed tokens: reader and writer of Megatron's .bin/.idx pair, byte for byte.

`<prefix>.bin` is all tokens, one after another. `<prefix>.idx` is, little endian and without padding:

    9 bytes   magic "MMIDIDX\\0\\0"
    uint64    version, 1
    uint8     code of the tokens' dtype
    uint64    number of sequences n
    uint64    number of document indices d, one more than there are documents
    int32[n]  tokens of each sequence
    int64[n]  where each sequence starts in .bin, in bytes
    int64[d]  sequence at which each document starts; the last is n
    int8[n]   modality of each sequence; only multimodal data has it, and it is not read here

An empty document is a repeated document index and has no sequence. The writer commits .bin before .idx, and takes an
older .idx away first: an .idx under its name always belongs to the .bin next to it.

Files are read as memory. A read beyond the end of a mapped file ends the process with SIGBUS, which no handler can turn
into an error. So readers of long runs check the size before they read: half a microsecond a file.
"""

import hashlib
import mmap
import re
import shutil
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatronish.core.errors import RunError, UserError
from megatronish.core.files import TEMPORARY, AtomicFile, remedy_of_writing

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {code: np.dtype(name) for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1)}
CODES = {dtype: code for code, dtype in DTYPES.items()}
LARGEST_LENGTH = 2**31 - 1
REMEDY = "copy both files again or run megatronish preprocess again"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Type of the tokens of a vocabulary: uint16 below 65500 ids, as in Megatron, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str | Path) -> Path:
    """Path of the tokens of a pair."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Path of the index of a pair."""
    return Path(f"{prefix}.idx")


# How much of a .bin tells one text from another of the same lengths: a hash of terabytes would take hours.
NUM_PIECES, PIECE_BYTES = 256, 4096
BLOCK = 1 << 18
"""Entries of an index that are checked, or copied, at a time."""


class ReadTokens(Protocol):
    """Tokens that are read, not mapped: each slice is an array of its own."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> NDArray[Any]: ...


class JoinedTokens:
    """Tokens of several arrays end to end; a slice is a view where it lies in one array.

    A slice of mapped files checks the sizes of those that it lies in alone, not a thousand for each sample.
    """

    def __init__(self, arrays: Sequence["NDArray[Any] | MappedArray | ReadTokens"], dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        files = [(array, array.values) if isinstance(array, MappedArray) else (None, array) for array in arrays]
        self._files = [file for file, values in files if len(values)]
        self._arrays = [values for _, values in files if len(values)]
        self._ends = np.cumsum([len(array) for array in self._arrays], dtype=np.int64).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, part: slice) -> NDArray[Any]:
        start, end, step = part.indices(len(self))
        assert step == 1, "tokens are read in their order"
        slices = []
        for number, part_of in self.parts(start, end):
            if (file := self._files[number]) is not None:
                file.check()
            slices.append(self._arrays[number][part_of])
        if len(slices) == 1:
            return slices[0]
        return np.concatenate(slices) if slices else np.empty(0, self.dtype)

    def parts(self, start: int, end: int) -> Iterator[tuple[int, slice]]:
        """Where tokens `start` to `end` lie: numbers of arrays that are not empty, and a part of each."""
        while start < end:
            number = bisect_right(self._ends, start)
            before = self._ends[number] - len(self._arrays[number])
            yield number, slice(start - before, min(end, self._ends[number]) - before)
            start = self._ends[number]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


TokenArray = NDArray[Any] | JoinedTokens
"""Tokens of a data set end to end, in a file or in several."""


class IndexedTokens:
    """Memory-mapped .bin/.idx pair. UserError if either file is missing, of another format, truncated or damaged."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        index, *bins = self._files()
        for path in (index, *bins):
            if not path.is_file():
                raise UserError(f"data file {path} does not exist; {self._missing_remedy()}")
        num_sequences, num_indices = self._read_header(index)
        self._mapped = [MappedArray(index, np.uint8)]
        self._index = self._mapped[0].values
        arrays = HEADER.size
        self.sequence_lengths = self._index[arrays : arrays + 4 * num_sequences].view("<i4")
        arrays += 4 * num_sequences
        self.pointers = self._index[arrays : arrays + 8 * num_sequences].view("<i8")
        arrays += 8 * num_sequences
        self.document_indices = self._index[arrays : arrays + 8 * num_indices].view("<i8")
        self._check_index()
        self.tokens = self._map_tokens(bins)

    def _files(self) -> list[Path]:
        """The files that are read: the index first, then those of the tokens, in their order."""
        return [idx_path(self.prefix), bin_path(self.prefix)]

    @property
    def where(self) -> str:
        """What holds the tokens, for messages."""
        return str(bin_path(self.prefix))

    @property
    def index_name(self) -> str:
        """The index, for messages."""
        return str(idx_path(self.prefix))

    def read_ahead(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch tokens [start, end) before they are read; those of a disk need none of that."""

    def _missing_remedy(self) -> str:
        return _missing_remedy(self.prefix)

    def _read_header(self, path: Path) -> tuple[int, int]:
        name, size = self.index_name, path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size:
            raise UserError(f"{name} has {size} bytes and is truncated: its header alone has {HEADER.size}; {REMEDY}")
        magic, version, code, num_sequences, num_indices = HEADER.unpack(head)
        if magic != MAGIC or version != 1:
            raise UserError(
                f"{name} is not an index in Megatron's MMIDIDX format, version 1; make it with megatronish preprocess"
            )
        if code not in DTYPES or DTYPES[code].kind == "f":
            raise UserError(f"{name} has dtype code {code}, which is no integer type of tokens; {REMEDY}")
        self.dtype = DTYPES[code]
        expected = HEADER.size + 12 * num_sequences + 8 * num_indices
        if size not in (expected, expected + num_sequences) or num_indices < 1:
            raise UserError(
                f"{name} has {size} bytes but its header says {expected}: it is truncated or damaged; {REMEDY}"
            )
        return num_sequences, num_indices

    def _check_index(self) -> None:
        name = self.index_name
        documents, num_sequences, start = self.document_indices, len(self.sequence_lengths), 0
        for first in range(0, num_sequences, BLOCK):  # in blocks, so that memory does not grow with the index
            lengths = self.sequence_lengths[first : first + BLOCK]
            if lengths.min() < 0:
                raise UserError(f"{name} has a sequence of {lengths.min()} tokens and is damaged; {REMEDY}")
            ends = np.cumsum(lengths, dtype=np.int64)
            pointers = (start + ends - lengths) * self.dtype.itemsize
            if not np.array_equal(self.pointers[first : first + BLOCK], pointers):
                raise UserError(f"{name} has pointers that do not follow from its lengths and is damaged; {REMEDY}")
            start += int(ends[-1])
        rises = documents[0] == 0 and documents[-1] == num_sequences
        for first in range(0, len(documents) - 1, BLOCK):
            block = documents[first : first + BLOCK + 1]
            rises = rises and bool((block[1:] >= block[:-1]).all())
        if not rises:
            raise UserError(
                f"{name} has document indices that do not rise from 0 to its {num_sequences} sequences and is damaged; "
                f"{REMEDY}"
            )

    def _num_bytes(self) -> int:
        """Bytes of all tokens, by the index."""
        if not len(self.pointers):
            return 0
        return int(self.pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize

    def _map_tokens(self, bins: Sequence[Path]) -> TokenArray:
        (path,) = bins
        size, expected = path.stat().st_size, self._num_bytes()
        if size != expected:
            fault = "is truncated" if size < expected else "is not the one its .idx was written for"
            raise UserError(f"{path} has {size} bytes but its .idx says {expected}: it {fault}; {REMEDY}")
        self._mapped.append(MappedArray(path, self.dtype))
        return self._mapped[-1].values

    def check_size(self) -> None:
        """RunError if a file has become shorter since it was opened: reading on would end the process with SIGBUS."""
        for mapped in self._mapped:
            mapped.check()

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the file."""
        return len(self.tokens)

    @property
    def identity(self) -> str:
        """A hash of the .idx: equal in every folder, different as soon as a document's length is."""
        return self._index_digest

    @cached_property
    def _index_digest(self) -> str:
        return hashlib.sha256(self._index.data).hexdigest()

    @property
    def content(self) -> str:
        """A hash of pieces of the .bin, spread evenly: other text of the same lengths has another."""
        return self._content_digest

    @cached_property
    def _content_digest(self) -> str:
        return self._digest_of_content()

    def _digest_of_content(self) -> str:
        size, num_bytes = self.dtype.itemsize, self.num_tokens * self.dtype.itemsize
        starts = np.linspace(0, max(num_bytes - PIECE_BYTES, 0), NUM_PIECES, dtype=np.int64)
        starts = np.unique(starts).tolist()
        spans = [(start // size, min(-(-(start + PIECE_BYTES) // size), self.num_tokens)) for start in starts]
        digest = hashlib.sha256(str(num_bytes).encode())
        if num_bytes <= NUM_PIECES * PIECE_BYTES:  # the pieces overlap: each byte is read once
            (whole,) = self._pieces([(0, self.num_tokens)])
            content = memoryview(whole.tobytes())
            for start in starts:
                digest.update(content[start : start + PIECE_BYTES])
            return digest.hexdigest()
        for start, (first, _), piece in zip(starts, spans, self._pieces(spans), strict=True):
            skipped = start - first * size
            digest.update(piece.tobytes()[skipped : skipped + PIECE_BYTES])
        return digest.hexdigest()

    def _pieces(self, spans: Sequence[tuple[int, int]]) -> Iterable[NDArray[Any]]:
        """Tokens [start, end) of a few places."""
        return (self.tokens[start:end] for start, end in spans)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, sequence: int) -> NDArray[Any]:
        """Tokens of one sequence, a view of the file."""
        start = int(self.pointers[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sequence_lengths[sequence])]

    def document_start(self, document: int) -> int:
        """Number of tokens before a document; for `num_documents`, of all tokens."""
        return self.sequence_start(int(self.document_indices[document]))

    def sequence_start(self, sequence: int) -> int:
        """Number of tokens before a sequence; for the number of sequences, of all tokens."""
        return int(self.pointers[sequence]) // self.dtype.itemsize if sequence < len(self) else self.num_tokens

    def document(self, document: int) -> NDArray[Any]:
        """Tokens of one document, a view of the file."""
        return self.tokens[self.document_start(document) : self.document_start(document + 1)]

    def document_starts(self) -> NDArray[np.int64]:
        """int64 [documents + 1]: `document_start` of every document, and the number of all tokens."""
        starts = np.append(self.pointers // self.dtype.itemsize, self.num_tokens)
        return starts[self.document_indices]


def _missing_remedy(prefix: str) -> str:
    if prefix.endswith((".bin", ".idx")):
        return f"give the prefix without its ending: {prefix[:-4]}"
    near = sorted(Path(prefix).parent.glob(f"{Path(prefix).name}*.idx"))
    if near and str(near[0])[:-4] != prefix:
        return f"did you mean {str(near[0])[:-4]}?"
    return "check the path (it is a prefix: P for P.bin and P.idx) or make the files with megatronish preprocess"


class IndexedWriter:
    """Writer of a .bin/.idx pair, a document after another; the files get their names in `finalize`.

    Memory: 12 bytes a document. As a context it is finalized at the end, or leaves nothing behind after an exception.
    RunError if the disk is full or fails; OSError if the .bin cannot be created.
    """

    def __init__(self, prefix: str | Path, *, dtype: np.dtype[Any]) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODES:
            raise UserError(f"dtype {dtype} cannot be written to a .bin file; use one of {', '.join(map(str, CODES))}")
        self._bin = AtomicFile(bin_path(prefix))
        self._lengths = array("i")
        self._documents = array("q", [0])

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Add one document, of one sequence or of sequences of these `lengths`; it may be empty."""
        tokens = np.asarray(tokens)
        sequences = np.asarray([len(tokens)] * bool(len(tokens)) if lengths is None else lengths, np.int64)
        self._add(tokens, sequences, np.asarray([len(sequences)]))

    def add_documents(self, tokens: ArrayLike, lengths: ArrayLike) -> None:
        """Add documents of one sequence each, end to end in `tokens`; a length of 0 is an empty document."""
        sequences = np.asarray(lengths, np.int64)
        self._add(np.asarray(tokens), sequences[sequences > 0], (sequences > 0).astype(np.int64))

    def add_split_documents(self, tokens: ArrayLike, sequences: Sequence[Sequence[int]]) -> None:
        """Add documents, end to end in `tokens`, of sequences of these lengths; one without any is empty."""
        lengths = np.fromiter((length for of_document in sequences for length in of_document), np.int64)
        self._add(np.asarray(tokens), lengths, np.fromiter(map(len, sequences), np.int64))

    def add_prefix(self, prefix: str | Path) -> None:
        """Add all documents of another pair, which must have the same dtype."""
        other = IndexedTokens(prefix)
        if other.dtype != self.dtype:
            raise UserError(
                f"{prefix} holds {other.dtype} tokens and cannot be merged into {self.prefix} of {self.dtype}; "
                "preprocess both with the same tokenizer"
            )
        with bin_path(prefix).open("rb") as file, writing(bin_path(self.prefix)):
            shutil.copyfileobj(file, self._bin.file, 1 << 22)
        self._index(np.asarray(other.sequence_lengths), np.diff(other.document_indices))

    def _add(self, tokens: NDArray[Any], lengths: NDArray[np.int64], sequences: NDArray[np.int64]) -> None:
        assert int(lengths.sum()) == len(tokens), "sequence lengths must add up to the tokens"
        limits = np.iinfo(self.dtype)
        if len(tokens) and not (limits.min <= tokens.min() and tokens.max() <= limits.max):
            raise UserError(
                f"token ids {tokens.min()} to {tokens.max()} do not fit the {self.dtype} of {bin_path(self.prefix)}; "
                "is --vocab-size smaller than the tokenizer's?"
            )
        if len(lengths) and lengths.max() > LARGEST_LENGTH:
            raise UserError(f"a document of {lengths.max()} tokens is longer than {LARGEST_LENGTH}; cut it in pieces")
        with writing(bin_path(self.prefix)):
            self._bin.file.write(tokens.astype(self.dtype).tobytes())
        self._index(lengths, sequences)

    def _index(self, lengths: NDArray[Any], sequences: NDArray[Any]) -> None:
        self._lengths.frombytes(lengths.astype("i4").tobytes())
        self._documents.frombytes((self._documents[-1] + np.cumsum(sequences, dtype=np.int64)).tobytes())

    def finalize(self) -> None:
        """Rename both files to their final names, .idx last."""
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.empty(0, np.int32)
        pointers = np.zeros(len(lengths), "<i8")
        np.cumsum(lengths[:-1], out=pointers[1:])
        pointers *= self.dtype.itemsize
        with writing(bin_path(self.prefix)), AtomicFile(idx_path(self.prefix)) as index:
            documents = np.frombuffer(self._documents, np.int64)
            index.file.write(HEADER.pack(MAGIC, 1, CODES[self.dtype], len(lengths), len(documents)))
            for values in (lengths.astype("<i4", copy=False), pointers, documents.astype("<i8", copy=False)):
                index.file.write(values.data)
            idx_path(self.prefix).unlink(missing_ok=True)
            self._bin.commit()

    def discard(self) -> None:
        """Delete what was written; nothing after `finalize`."""
        self._bin.discard()

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finalize()
        finally:
            self.discard()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """RunError for a pair, or an index, that cannot be written, in place of an OSError, which names no file."""
    try:
        yield
    except OSError as error:
        remedy = remedy_of_writing(error, Path(path).parent)
        name = re.sub(f"{TEMPORARY.pattern}$", "", str(path))
        both = f"{name} and its .idx" if name.endswith(".bin") else name
        raise RunError(f"{both} cannot be written: {error.strerror}; {remedy} first") from error


class MappedArray:
    """The values of a file from byte `offset` on, as a read-only array [n]; an empty file has none.

    OSError if the file cannot be opened, ValueError if its size is no whole number of values.
    """

    def __init__(self, path: Path, dtype: DTypeLike, *, offset: int = 0) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self._size = path.stat().st_size
        self.values: NDArray[Any] = np.empty(0, dtype)
        if self._size > offset:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), self._size, access=mmap.ACCESS_READ)
            self.values = np.frombuffer(self._map, dtype, offset=offset)

    def check(self) -> None:
        """RunError if the file has become shorter since it was mapped."""
        if self._map is not None and (size := self._map.size()) < self._size:
            raise RunError(
                f"{self.path} has {size} bytes and had {self._size} when this run opened it: another process has cut "
                "it short; copy or make it again, and start again: the run continues from its newest checkpoint"
            )
