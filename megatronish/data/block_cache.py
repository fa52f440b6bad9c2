"""Block cache: what a run reads of objects on object storage, in a folder of the machine, up to a stated size.

`blocks/` has blocks of BLOCK_BYTES, each a file: the bytes of the object and a CRC-32 of each SUM_BYTES of them. The
least recently used ones are removed first. `whole/` has what is needed from the first to the last step, an index or a
digest, each with a CRC-32 in a file NAME.sum, and is never cleared. `samples/` is for the sample indices of
data/samples.py.

A file gets its name once it is whole, so a kill leaves no part of one; its sums tell what a power cut has left, which
is fetched again. Processes of a machine share the folder: of those that want the same block one fetches it. A name has
a hash of the object's address, its size and what the store says of its content. So an object that was replaced is
another one, whose blocks are not mixed with those of the first.

Blocks are small because samples are documents in random order: where the cache is smaller than the data, each document
costs a block. A block of 1 MiB takes about as long as the answer to the smallest request.
"""

import errno
import hashlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

from megatronish.core.errors import RunError, UserError
from megatronish.core.files import AtomicFile, one_builder, refuse_url, unwritten
from megatronish.core.private import cache_folder, locked
from megatronish.core.remote import RemotePath
from megatronish.data.stores import TimedQuestions, ask, whole_range

logger = logging.getLogger(__name__)

BLOCK_BYTES, SUM_BYTES = 1 << 20, 1 << 16
TRANSFER_BYTES = 1 << 23
"""Bytes of one request for an object that is fetched whole."""
REQUEST_SECONDS = 30.0
"""Time limit of one request."""
NUM_REQUESTS = 16
"""Requests of one process at the same time."""
LOOK_SECONDS = 60.0
"""Seconds after which a store is asked again whether an object is still the one that was opened."""
KEPT_PART = 0.9
"""Part of the size that blocks have after the oldest ones were removed: they are all listed for that, so not often."""

WHAT = "the data"
Argument = TypeVar("Argument")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class StoredObject:
    """An object as it was when it was opened; `identity` is what the store says of its content."""

    path: RemotePath
    size: int
    identity: str

    @property
    def key(self) -> str:
        """Name in the cache: another one for other content."""
        return hashlib.sha256(repr((self.path.url, self.size, self.identity)).encode()).hexdigest()[:32]


class Block(NamedTuple):
    """A block of an object."""

    stored: StoredObject
    number: int

    @property
    def start(self) -> int:
        """Its first byte in the object."""
        return self.number * BLOCK_BYTES

    @property
    def length(self) -> int:
        """Its bytes; the last one of an object has fewer."""
        return min(BLOCK_BYTES, self.stored.size - self.start)


class BlockCache:
    """Reader of objects through a folder, whose blocks have at most `num_bytes` together.

    UserError or RunError with a sentence for what a store does not give. Threads may share it.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder = folder
        self._room = _Room(folder / "blocks", num_bytes)
        self._questions = TimedQuestions(REQUEST_SECONDS)
        self._looked: dict[StoredObject, float] = {}
        self._warned = False

    @classmethod
    def open(cls, folder: str | None, gigabytes: float) -> "BlockCache":
        """Cache in a folder, or in the user's; UserError if nothing can be written there."""
        path = cache_place(folder)
        cache = cls(path, int(gigabytes * 1e9))
        try:
            (path / "blocks").mkdir(parents=True, exist_ok=True)
            with cache._room.made(0):  # of a size that was larger before
                pass
        except OSError as error:
            raise unwritten(f"--data-store-cache-path {path}", path, error) from error
        return cache

    # Objects, and what is kept of them whole.

    def objects(self, paths: Sequence[RemotePath]) -> list[StoredObject]:
        """The objects of these paths, as they are now."""
        return self.in_threads(self._opened, paths)

    def text(self, path: RemotePath) -> str:
        """Text of an object, which is not kept."""
        return ask(path, lambda: self._questions.ask(path.read_text), what=WHAT)

    def whole(self, stored: StoredObject) -> Path:
        """The file of an object, which is fetched as a whole."""

        def fetch(file: SummedWriter) -> None:
            starts = range(0, stored.size, TRANSFER_BYTES)
            for first in range(0, len(starts), NUM_REQUESTS):  # some at a time: an index may be larger than memory
                for content in self.in_threads(
                    lambda start: self.fetch(stored, start, min(start + TRANSFER_BYTES, stored.size)),
                    starts[first : first + NUM_REQUESTS],
                ):
                    file.write(content)

        return self.kept(stored.key, fetch, size=stored.size)

    def kept(self, name: str, write: Callable[["SummedWriter"], object], *, size: int) -> Path:
        """A file of `size` bytes that is never cleared; `write` writes it if it is not there, or is damaged."""
        path = self.folder / "whole" / name
        if not _is_whole(path, size):
            with one_builder(path):
                if not _is_whole(path, size):
                    try:
                        with AtomicFile(path) as output, AtomicFile(_sum_path(path)) as sum_file:
                            summed = SummedWriter(output.file)
                            write(summed)
                            sum_file.file.write(f"{summed.crc}\n".encode())
                    except OSError as error:
                        raise unwritten(f"--data-store-cache-path {self.folder}", path, error) from error
        return path

    # Ranges.

    def read(self, stored: StoredObject, start: int, end: int) -> bytes:
        """Bytes `start` to `end` of an object, from blocks that are kept, or are fetched and kept."""
        return b"".join(
            self._read_block(block, max(start - block.start, 0), min(end - block.start, block.length))
            for block in blocks_of(stored, start, end)
        )

    def fetch(self, stored: StoredObject, start: int, end: int) -> bytes:
        """Bytes `start` to `end` of an object, from the store; RunError if the object is no longer the same."""
        path = stored.path

        def question() -> bytes:
            return self._questions.ask(lambda: whole_range(path, start, end, what=WHAT))

        content = ask(path, question, what=WHAT)
        now = time.monotonic()
        if now - self._looked.get(stored, 0.0) > LOOK_SECONDS:
            if self._opened(path) != stored:
                raise RunError(
                    f"{WHAT} {path} were replaced while this run reads them; put the old object back, or start again: "
                    "a run continues on equal data alone"
                )
            self._looked[stored] = now
        return content

    def read_ahead(self, blocks: Iterable[Block]) -> None:
        """Fetch the blocks that are not kept, several at a time."""

        def fetch(block: Block) -> None:  # which keeps no bytes in memory
            self._read_block(block, 0, block.length)

        self.in_threads(fetch, [block for block in blocks if not self._path(block).exists()])

    def in_threads(self, question: Callable[[Argument], Answer], arguments: Sequence[Argument]) -> list[Answer]:
        """Answers to a question about each of the arguments, several asked at a time."""
        if len(arguments) < 2:
            return list(map(question, arguments))
        with ThreadPoolExecutor(min(NUM_REQUESTS, len(arguments)), thread_name_prefix="blocks") as pool:
            return list(pool.map(question, arguments))

    def _opened(self, path: RemotePath) -> StoredObject:
        def question() -> StoredObject:
            status = path.stat()
            return StoredObject(path, status.st_size, path.identity() or f"{status.st_mtime}")

        stored = ask(path, lambda: self._questions.ask(question), what=WHAT)
        self._looked.setdefault(stored, time.monotonic())
        return stored

    def _path(self, block: Block) -> Path:
        # A folder has 256 blocks at most: whoever writes one lists the folder.
        return self.folder / "blocks" / block.stored.key / f"{block.number >> 8:06x}" / f"{block.number & 255:02x}"

    def _read_block(self, block: Block, first: int, end: int) -> bytes:
        """Bytes of a block, counted from its start."""
        path = self._path(block)
        if (content := _kept_bytes(path, block.length, first, end)) is not None:
            return content
        with one_builder(path):
            if (content := _kept_bytes(path, block.length, first, end)) is not None:
                return content
            content = self.fetch(block.stored, block.start, block.start + block.length)
            self._keep(path, content)
        return content[first:end]

    def _keep(self, path: Path, content: bytes) -> None:
        try:
            sums = _sums_of(content)
            with self._room.made(len(content) + len(sums)):
                output = AtomicFile(path)
                try:
                    output.file.write(content)
                    output.file.write(sums)
                    output.commit(durably=False)
                except BaseException:
                    output.discard()
                    raise
        except OSError as error:  # a full disk: only time is lost
            if not self._warned:
                logger.warning(
                    "blocks of the data are not kept in %s: %s; each is fetched whenever it is read. "
                    "--data-store-cache-path names another folder, --data-store-cache-size another size",
                    *(self.folder, error.strerror or error),
                )
            self._warned = True


def cache_place(folder: str | None) -> Path:
    """The folder that --data-store-cache-path names, else one of the user's. UserError if there is none."""
    if folder is not None:
        refuse_url("--data-store-cache-path", Path(folder))
        return Path(folder)
    try:
        return cache_folder() / "data"
    except OSError as error:
        raise UserError(
            f"no folder for data of object storage can be made ({error.strerror}); name one with "
            "--data-store-cache-path"
        ) from error


def blocks_of(stored: StoredObject, start: int, end: int) -> Iterator[Block]:
    """Blocks that hold bytes `start` to `end`."""
    return (Block(stored, number) for number in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)))


class _Room:
    """The size of all blocks in a folder: their sum is a file next to it, which all processes keep up under a lock.

    A block is written under that lock, or a count of all files would miss it. A process that is killed between the sum
    and its block leaves a sum that is too large, which the next count corrects.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._folder, self._num_bytes = folder, num_bytes
        self._sum = folder.with_name("blocks.sum")

    @contextmanager
    def made(self, num_bytes: int) -> Iterator[None]:
        """Context in which a block is written; the oldest ones are removed before if there is no room for it."""
        with locked(self._folder.with_name("blocks.lock")):
            total = self._total()
            if total is None or total + num_bytes > self._num_bytes:
                total = self._without_oldest(num_bytes)
            self._sum.write_text(f"{total + num_bytes:024d}")
            yield

    def _total(self) -> int | None:
        try:
            return int(self._sum.read_text())
        except (OSError, ValueError):
            return None

    def _without_oldest(self, num_bytes: int) -> int:
        """Remove the least recently used files until there is room for a block; bytes of those that stay."""
        files = []
        for folder, _, names in os.walk(self._folder):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    status = os.stat(path)
                except FileNotFoundError:
                    continue
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        if total + num_bytes <= self._num_bytes:
            return total
        for _, size, path in sorted(files):
            if total + num_bytes <= KEPT_PART * self._num_bytes:
                break
            try:
                os.unlink(path)
            except OSError as error:
                if error.errno != errno.ENOENT:  # of another user: it stays, and counts
                    continue
            total -= size
        return total


# A file that is kept whole, and its sum.


class SummedWriter:
    """Writer into a file, which adds up the CRC-32 of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.crc = file, 0

    def write(self, content: bytes) -> int:
        """Append; the number of bytes."""
        self.crc = zlib.crc32(content, self.crc)
        return self._file.write(content)


def _sum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sum")


def _is_whole(path: Path, size: int) -> bool:
    """Whether a file of `size` bytes is there, and has its sum. A file that is not read to its end has another one."""
    try:
        if path.stat().st_size != size:
            return False
        crc = 0
        with path.open("rb", buffering=0) as file:
            while content := file.read(TRANSFER_BYTES):
                crc = zlib.crc32(content, crc)
        return int(_sum_path(path).read_text()) == crc
    except (OSError, ValueError):
        return False


# A block as a file.


def _sums_of(content: bytes) -> bytes:
    parts = (memoryview(content)[start : start + SUM_BYTES] for start in range(0, len(content), SUM_BYTES))
    return b"".join(zlib.crc32(part).to_bytes(4, "little") for part in parts)


def _kept_bytes(path: Path, length: int, first: int, end: int) -> bytes | None:
    """Bytes of a block of `length` bytes that is kept, which counts as a use; None if it is not there, or damaged."""
    begin, numbers = first // SUM_BYTES * SUM_BYTES, range(first // SUM_BYTES, -(-end // SUM_BYTES))
    stop = min(numbers.stop * SUM_BYTES, length)
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != length + 4 * -(-length // SUM_BYTES):
                return None
            content = os.pread(file.fileno(), stop - begin, begin)
            sums = os.pread(file.fileno(), 4 * len(numbers), length + 4 * numbers.start)
            with suppress(PermissionError):  # another user's, in a folder of both
                os.utime(file.fileno())
    except OSError:
        return None
    return content[first - begin : end - begin] if _sums_of(content) == sums else None
