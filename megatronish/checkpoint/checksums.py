"""Checksums of a checkpoint: lengths and SHA-256 sums of the spans of its files, written last and read first.

`checksums.json` lists the spans that each file consists of, one after the other:

    {"files": {"__0_0.distcp": [[1608, "9f2c..."], [2048, "77ab..."]], "state.json": [[2210, "03d1..."]]}, "sha256": ""}

A span is the unit of reading: one stored rectangle of a tensor, or a whole file of another kind. So a rank verifies
exactly the bytes that it reads, before it uses them, and need not read the bytes of other ranks. The last field is the
sum of the first, and the text of both is canonical: a change of any byte of this file is detected.
"""

import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, BinaryIO, NamedTuple

from megatronish.core.errors import UserError
from megatronish.core.files import write_durably
from megatronish.core.remote import Location, RemoteFile, RemotePath, is_outage

CHECKSUMS = "checksums.json"
CHUNK_BYTES = 2**20


class DamagedError(UserError):
    """UserError: a checkpoint is incomplete or changed. `why` names the file, `remedy` says what to do about it."""

    def __init__(self, folder: Location, why: str, remedy: str | None = None) -> None:
        remedy = remedy or "load an earlier step with --ckpt-step, or remove that folder"
        super().__init__(f"{folder} is damaged: {why}; {remedy}")
        self.folder, self.why, self.remedy = folder, why, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickling by its three parts, for other ranks: the default would pass the whole sentence as `folder`."""
        return DamagedError, (self.folder, self.why, self.remedy)


class Span(NamedTuple):
    """Consecutive bytes of a file: their number, and their SHA-256 sum in hexadecimal."""

    length: int
    sha256: str


class SummingStream(io.RawIOBase):
    """Stream that computes the checksums of what is written through it to `file`. Each call of `tell` ends a span."""

    def __init__(self, file: IO[bytes] | RemoteFile) -> None:
        self.spans: list[Span] = []
        self._file, self._start, self._length, self._sum = file, 0, 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        self._sum.update(data)
        self._length += memoryview(data).nbytes
        return self._file.write(data)

    def tell(self) -> int:
        if self._length:
            self.spans.append(Span(self._length, self._sum.hexdigest()))
            self._start, self._length, self._sum = self._start + self._length, 0, hashlib.sha256()
        return self._start

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if not self.closed:
            self.tell()
            super().close()
            self._file.close()


@dataclass(frozen=True)
class Checksums:
    """Expected spans of the files of a folder, by the names of the files relative to it."""

    folder: Location
    files: dict[str, list[Span]]

    @classmethod
    def read(cls, folder: Location) -> "Checksums":
        """Checksums of a checkpoint; DamagedError if checksums.json is missing or changed, OSError in an outage."""
        try:
            _length_of(folder, CHECKSUMS)
            text = (folder / CHECKSUMS).read_bytes()
        except OSError as error:
            raise _unreadable(folder, CHECKSUMS, error) from error
        return cls.parse(folder, text)

    @classmethod
    def parse(cls, folder: Location, text: bytes) -> "Checksums":
        """Checksums that the text of a checksums.json holds; DamagedError if it was changed."""
        try:
            files = _read_files(text.decode())
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise DamagedError(folder, f"{CHECKSUMS} does not hold what was written") from error
        return cls(folder, files)

    def write(self) -> None:
        """Write checksums.json into the folder, atomically."""
        if isinstance(self.folder, RemotePath):
            (self.folder / CHECKSUMS).write_text(_json_of(self.files))
        else:
            write_durably(self.folder / CHECKSUMS, _json_of(self.files))

    def with_other_files(self) -> "Checksums":
        """These checksums and one span for each other file that is in the folder now."""
        if isinstance(self.folder, RemotePath):
            others = set(self.folder.sizes())
        else:
            others = {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}
        new = sorted(others - self.files.keys() - {CHECKSUMS})
        return Checksums(self.folder, self.files | {name: _spans_of(self.folder / name) for name in new})

    def with_text(self, name: str, text: str) -> "Checksums":
        """These checksums and that of a file which will have this text."""
        span = Span(len(text.encode()), hashlib.sha256(text.encode()).hexdigest())
        return Checksums(self.folder, self.files | {name: [span]})

    def check_lengths(self) -> None:
        """Check that every file is there with its length; DamagedError names the first that is not."""
        sizes = self.folder.sizes() if isinstance(self.folder, RemotePath) else None
        for name in self.files:
            if sizes is None or sizes.get(name) != self._length(name):
                self._check_length(name)

    def read_file(self, name: str) -> bytes:
        """Content of a file, verified; DamagedError if a byte differs from what was written."""
        self._check_length(name)
        try:
            with (self.folder / name).open("rb") as file:
                return b"".join(self._verified(name, _exactly(file, span.length), span) for span in self.files[name])
        except OSError as error:
            raise _unreadable(self.folder, name, error) from error

    @contextmanager
    def opened(self, name: str) -> Iterator["OpenedFile"]:
        """A file whose spans are read and verified; DamagedError for one that differs."""
        self._check_length(name)
        try:
            with (self.folder / name).open("rb", buffering=0) as file:
                yield OpenedFile(self, name, file, self._starts(name))
        except OSError as error:
            raise _unreadable(self.folder, name, error) from error

    def verify(self, *, part: int = 0, parts: int = 1) -> None:
        """Verify every byte of all files, or of every `parts`-th file from `part` on.

        DamagedError with the name of a file that differs. Files are read 1 MiB at a time: spans may be gigabytes.
        """
        for name in sorted(self.files)[part::parts]:
            self._check_length(name)
            try:
                with (self.folder / name).open("rb") as file:
                    sums = [_span_in(file, span.length) for span in self.files[name]]
            except OSError as error:
                raise _unreadable(self.folder, name, error) from error
            if sums != self.files[name]:
                raise self.changed(name)

    def _starts(self, name: str) -> dict[int, Span]:
        """Spans of a file by the offset of their first byte."""
        starts, start = {}, 0
        for span in self.files[name]:
            starts[start] = span
            start += span.length
        return starts

    def _check_length(self, name: str) -> None:
        if name not in self.files:
            raise DamagedError(self.folder, f"{CHECKSUMS} does not know of {name}")
        length, expected = _length_of(self.folder, name), self._length(name)
        if length != expected:
            raise DamagedError(self.folder, f"{name} has {length} bytes instead of {expected}")

    def _length(self, name: str) -> int:
        return sum(span.length for span in self.files[name])

    def _verified(self, name: str, data: bytes, span: Span) -> bytes:
        if hashlib.sha256(data).hexdigest() != span.sha256:
            raise self.changed(name)
        return data

    def changed(self, name: str) -> DamagedError:
        """What to raise for a file with other bytes than were written."""
        return DamagedError(self.folder, f"{name} does not hold what was written")


class OpenedFile:
    """File of a checkpoint, open for reading its spans."""

    def __init__(self, sums: Checksums, name: str, file: io.FileIO | RemoteFile, starts: dict[int, Span]) -> None:
        self._sums, self._name, self._file, self._starts = sums, name, file, starts

    def _span(self, offset: int, length: int) -> Span:
        """Span at a place. Only whole ones can be verified: other bytes are of other files, a DamagedError."""
        span = self._starts.get(offset)
        if span is None or span.length != length:
            what = f"{CHECKSUMS} does not know the {length} bytes at {offset} of {self._name}"
            raise DamagedError(self._sums.folder, what)
        return span

    def read(self, offset: int, length: int) -> bytearray:
        """Bytes of a span, verified."""
        span = self._span(offset, length)
        data = self.part(offset, length)
        if hashlib.sha256(data).hexdigest() != span.sha256:
            raise self._sums.changed(self._name)
        return data

    def verify(self, offset: int, length: int) -> None:
        """Verify a span without keeping it."""
        span = self._span(offset, length)
        self._file.seek(offset)
        if _span_in(self._file, length) != span:
            raise self._sums.changed(self._name)

    def part(self, offset: int, length: int) -> bytearray:
        """Some bytes of a span that is verified, or is to be; fewer where the file ends before."""
        self._file.seek(offset)
        data, filled = bytearray(length), 0  # filled in place: the bytes are in memory once
        with memoryview(data) as whole:
            while filled < length and (number := self._file.readinto(whole[filled:])):  # of Linux 2 GB at most
                filled += number
        del data[filled:]
        return data

    def stream(self, offset: int, length: int) -> "SpanStream":
        """A span as a file of its own, of which only what is asked for is read."""
        return SpanStream(lambda place, number: self.part(offset + place, number), length)


class SpanStream(io.RawIOBase):
    """Bytes of one span, as a file that can be read from any place; `part` gives some at a place."""

    def __init__(self, part: Callable[[int, int], bytearray], length: int) -> None:
        self._part, self._length, self._place = part, length, 0

    @classmethod
    def of(cls, data: bytearray) -> "SpanStream":
        """Bytes in memory, which io.BytesIO would copy."""
        return cls(lambda place, number: data[place : place + number], len(data))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self._length)[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        data = self._part(self._place, max(0, min(len(buffer), self._length - self._place)))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def _json_of(files: dict[str, list[Span]]) -> str:
    body = json.dumps(files)
    return f'{{"files": {body}, "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n'


def _read_files(text: str) -> dict[str, list[Span]]:
    """Spans by file name; raises ValueError, or what json raises, unless the text is what `_json_of` writes."""
    # Types: a name with a list of (length, sum) each. What is of another type raises here or in the comparison below.
    files = {name: [Span(*span) for span in spans] for name, spans in json.loads(text)["files"].items()}
    # Names: only files inside the folder, so that a checkpoint from elsewhere cannot make a rank read another file.
    for name, spans in files.items():
        os.fsencode(name)  # ValueError for a name that the file system cannot encode
        inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
        if not inside or "\0" in name or not all(type(span.length) is int and span.length > 0 for span in spans):
            raise ValueError(name)
    # Sum: the text is canonical, so comparing all of it verifies the sum and refuses every other spelling.
    if _json_of(files) != text:
        raise ValueError("the sum")
    return files


def _length_of(folder: Location, name: str) -> int:
    """Length of a file in bytes; DamagedError for a missing file, a pipe or a folder."""
    try:
        status = (folder / name).stat()
    except OSError as error:
        raise _unreadable(folder, name, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError(folder, f"{name} is no file")
    return status.st_size


def _unreadable(folder: Location, name: str, error: OSError) -> DamagedError | OSError:
    """What to raise for a file that cannot be read. A store that does not answer says nothing of its files."""
    if isinstance(folder, RemotePath) and is_outage(error):
        return OSError(errno.EIO, error.strerror or str(error), str(folder / name))
    missing = isinstance(error, FileNotFoundError)
    return DamagedError(folder, f"{name} is missing" if missing else f"{name} cannot be read ({error.strerror})")


def _spans_of(path: Location) -> list[Span]:
    with path.open("rb") as file:
        span = _span_in(file, path.stat().st_size)
    return [span] if span.length else []


def _span_in(file: BinaryIO | RemoteFile, length: int) -> Span:
    """Span of the next `length` bytes of a file, shorter where the file ends before."""
    sha256, left = hashlib.sha256(), length
    while left and (data := file.read(min(left, CHUNK_BYTES))):
        sha256.update(data)
        left -= len(data)
    return Span(length - left, sha256.hexdigest())


def _exactly(file: BinaryIO | io.FileIO | RemoteFile, length: int) -> bytes:
    """Next `length` bytes of a file, fewer where the file ends before; one read of Linux returns 2 GB at most."""
    parts = []
    while length and (data := file.read(length)):
        parts.append(data)
        length -= len(data)
    return b"".join(parts)
