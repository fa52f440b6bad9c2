"""Shards: .bin/.idx pairs that are one data set, joined into one pair, or listed by a manifest and left where they are.

The index of the joined pair follows from the indices of the shards: it is written in blocks, in memory that does not
grow with the data. A manifest (`NAME.shards.json`) has that same index in a file next to it, `NAME.shards.idx`, and
names the .bin of each shard, relative to its own folder. What is opened by the manifest has the identity of the joined
pair: a run may begin with one and continue with the other.
"""

import hashlib
import json
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatronish.config.sections.data import MANIFEST
from megatronish.core.errors import RunError, UserError
from megatronish.core.files import AtomicFile, unwritten, write_durably
from megatronish.core.remote import Location, RemotePath
from megatronish.data.indexed import (
    BLOCK,
    CODES,
    HEADER,
    MAGIC,
    IndexedTokens,
    JoinedTokens,
    MappedArray,
    TokenArray,
    bin_path,
    idx_path,
    writing,
)

FORMAT = "megatronish shards 1"
COPY_BYTES = 1 << 22
REMEDY = "make it again with megatronish preprocess merge --manifest"


class DataShard(NamedTuple):
    """A whole pair that is joined with others; `sums` are the sha256 of its .bin and .idx, where they are known."""

    prefix: str
    dtype: np.dtype[Any]
    sequences: int
    documents: int
    tokens: int
    sums: tuple[str, str] | None = None


class _Sections(NamedTuple):
    """Byte at which each of the arrays of an index begins."""

    lengths: int
    pointers: int
    documents: int

    @classmethod
    def of(cls, sequences: int) -> "_Sections":
        return cls(HEADER.size, HEADER.size + 4 * sequences, HEADER.size + 12 * sequences)


def join_shards(shards: Sequence[DataShard], prefix: str, *, on_bytes: Callable[[int], object]) -> None:
    """Write the pair of all documents of the shards, in their order, which one writer of all would have written.

    UserError for a shard whose bytes do not have its sums, RunError if the disk is full; nothing is written then.
    """
    with writing(bin_path(prefix)), ExitStack() as stack:
        try:
            joined = AtomicFile(bin_path(prefix))
        except OSError as error:
            raise unwritten(f"--output-prefix {prefix}", Path(prefix), error) from error
        stack.callback(joined.discard)
        index = stack.enter_context(AtomicFile(idx_path(prefix)))
        for shard in shards:
            copy_summed(bin_path(shard.prefix), joined.file, shard.sums and shard.sums[0], on_bytes=on_bytes)
        _write_index(shards, index.file)
        idx_path(prefix).unlink(missing_ok=True)
        joined.commit()


def join_with_bar(shards: Sequence[DataShard], prefix: str) -> None:
    """`join_shards` for a command, with a bar on a terminal."""
    num_bytes = sum(shard.tokens * shard.dtype.itemsize for shard in shards)
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="merging", disable=None) as bar:
        join_shards(shards, prefix, on_bytes=bar.update)


def copy_summed(
    path: Location, into: BinaryIO | None, digest: str | None, *, on_bytes: Callable[[int], object] = int
) -> str:
    """Copy a file into an open one, or only read it; its sha256. UserError if `digest` is not that."""
    hasher = hashlib.sha256()
    with reading(path), path.open("rb") as file:
        while block := file.read(COPY_BYTES):
            hasher.update(block)
            if into is not None:
                with writing(Path(into.name)):
                    into.write(block)
            on_bytes(len(block))
    if digest not in (None, hasher.hexdigest()):
        raise UserError(f"{path} is damaged: its bytes do not have the sum that was written with it; make it again")
    return hasher.hexdigest()


@contextmanager
def reading(path: Location) -> Iterator[None]:
    """RunError for a file that cannot be read, in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; bring it back, or make it again") from error


def _write_index(shards: Sequence[DataShard], file: BinaryIO) -> None:
    dtype = shards[0].dtype
    sequences, documents = sum(shard.sequences for shard in shards), sum(shard.documents for shard in shards)
    file.write(HEADER.pack(MAGIC, 1, CODES[dtype], sequences, documents + 1))
    for shard in shards:
        if shard.sums is not None:
            copy_summed(idx_path(shard.prefix), None, shard.sums[1])
        for lengths in _blocks(shard, "<i4", "lengths", shard.sequences):
            file.write(lengths.data)
    start = 0
    for shard in shards:
        for lengths in _blocks(shard, "<i4", "lengths", shard.sequences):
            ends = np.cumsum(lengths, dtype="<i8")
            file.write(((start + ends - lengths) * dtype.itemsize).data)
            start += int(ends[-1])
    before = 0
    file.write(np.zeros(1, "<i8").data)
    for shard in shards:
        for number, indices in enumerate(_blocks(shard, "<i8", "documents", shard.documents + 1)):
            file.write((indices[number == 0 :] + before).data)
        before += shard.sequences


def _blocks(shard: DataShard, dtype: str, section: str, count: int) -> Iterator[NDArray[Any]]:
    """The values of an array of a shard's index, so many in all, in blocks."""
    path = idx_path(shard.prefix)
    with reading(path), path.open("rb") as file:
        file.seek(getattr(_Sections.of(shard.sequences), section))
        while count:
            values = np.fromfile(file, dtype, min(count, BLOCK))
            if not len(values):
                raise RunError(f"{path} was cut short while it was read; make it again")
            yield values
            count -= len(values)


# Shards as one data set, without a copy.


def write_manifest(shards: Sequence[DataShard], prefix: str, *, notes: Mapping[str, Any] | None = None) -> Path:
    """Write the index of all shards and the manifest that names them, `<prefix>.shards.json`; its path.

    `notes` are further facts for its reader, which change nothing.
    """
    path, index = Path(prefix + MANIFEST), Path(f"{prefix}.shards.idx")
    for shard in shards:
        copy_summed(bin_path(shard.prefix), None, shard.sums and shard.sums[0])
    with writing(path):
        path.unlink(missing_ok=True)  # one of before would name the new index
    with writing(index), AtomicFile(index) as file:
        _write_index(shards, file.file)
    bins = [
        {
            "path": os.path.relpath(bin_path(shard.prefix), path.parent),
            "bytes": shard.tokens * shard.dtype.itemsize,
            "sha256": shard.sums and shard.sums[0],
        }
        for shard in shards
        if shard.tokens
    ]
    with index.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    manifest = {"format": FORMAT, "index": {"path": index.name, "sha256": digest}, "bins": bins, **(notes or {})}
    with writing(path):
        write_durably(path, json.dumps(manifest, indent=1) + "\n")
    return path


class Manifest(NamedTuple):
    """What a manifest names, relative to its own folder: the index, and each .bin with its bytes."""

    index_name: str
    bins: list[tuple[str, int]]

    @classmethod
    def of(cls, text: str) -> "Manifest":
        """Manifest of its text; ValueError for what is none."""
        try:
            manifest = json.loads(text)
            if manifest["format"] != FORMAT:
                raise ValueError(f"its format is {manifest['format']!r}")
            bins = [(str(each["path"]), int(each["bytes"])) for each in manifest["bins"]]
            return cls(str(manifest["index"]["path"]), bins)
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error


Place = TypeVar("Place", Path, RemotePath, Location)


def named_by(manifest: Place, name: str) -> Place:
    """What a manifest names, relative to its own folder; stores know no `..`."""
    if isinstance(manifest, Path):
        return manifest.parent / name
    protocol, _, folder = manifest.parent.url.partition("://")
    return RemotePath(f"{protocol}://{posixpath.normpath(f'{folder}/{name}')}")


class _Bin(NamedTuple):
    """Tokens of a shard as a manifest names them."""

    path: Path
    num_bytes: int


class ShardedTokens(IndexedTokens):
    """Shards of a manifest, mapped, as the pair that joining them would make."""

    def __init__(self, manifest: str | Path) -> None:
        self._index_path, self._bins = _read_manifest(Path(manifest))
        super().__init__(manifest)

    def _files(self) -> list[Path]:
        """The index of all shards, and the .bin of each."""
        return [self._index_path, *(each.path for each in self._bins)]

    @property
    def where(self) -> str:
        """What holds the tokens, for messages."""
        return f"a shard of {self.prefix}"

    @property
    def index_name(self) -> str:
        """The index, for messages."""
        return str(self._index_path)

    def _missing_remedy(self) -> str:
        return f"{self.prefix} names it: bring it back, or preprocess that task again and {REMEDY}"

    def _map_tokens(self, bins: Sequence[Path]) -> TokenArray:
        expected = 0
        for each in self._bins:
            if (size := each.path.stat().st_size) != each.num_bytes:
                raise UserError(f"{each.path} has {size} bytes but {self.prefix} says {each.num_bytes}; {REMEDY}")
            expected += each.num_bytes
        if expected != self._num_bytes():
            raise UserError(f"{self.prefix} names {expected} bytes but its index says {self._num_bytes()}; {REMEDY}")
        mapped = [MappedArray(path, self.dtype) for path in bins]
        return JoinedTokens(mapped, self.dtype)


def _read_manifest(path: Path) -> tuple[Path, list[_Bin]]:
    if not path.is_file():
        raise UserError(f"data file {path} does not exist; {REMEDY}, or name a prefix")
    try:
        manifest = Manifest.of(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not a manifest of shards ({error}); {REMEDY}, or name a prefix") from error
    return named_by(path, manifest.index_name), [_Bin(named_by(path, name), size) for name, size in manifest.bins]
