"""Do the files of a checkpoint hold what was written? Their lengths and SHA-256 sums, written last and read first.

`checksums.json` says of which spans each file consists, one after the other:

    {"files": {"__0_0.distcp": [[1608, "9f2c..."], [2048, "77ab..."]], "state.json": [[2210, "03d1..."]]}, "sha256": ""}

A span is what is read at once: one stored rectangle of a tensor, or a whole file of another kind. So a rank verifies
exactly the bytes it reads, before it uses them, and need not read what others hold. The last field is the sum of the
first, and there is one way to spell both: whatever byte of this file changes, it shows.
"""

import hashlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, NamedTuple

from megatronish.errors import UserError
from megatronish.files import write_durably

CHECKSUMS = "checksums.json"
CHUNK_BYTES = 2**20


class DamagedError(UserError):
    """A checkpoint that cannot be read. `remedy` is what to do about it."""

    def __init__(self, folder: Path, why: str, remedy: str | None = None) -> None:
        remedy = remedy or "load an earlier step with --ckpt-step, or remove that folder"
        super().__init__(f"{folder} is damaged: {why}; {remedy}")
        self.folder, self.why, self.remedy = folder, why, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """How it travels to another rank."""
        return DamagedError, (self.folder, self.why, self.remedy)


class Span(NamedTuple):
    """So many bytes of a file, and their sum."""

    length: int
    sha256: str


class SummingStream(io.RawIOBase):
    """Sums what is written through it to `file`. A span ends wherever the place in the file is asked for."""

    def __init__(self, file: IO[bytes]) -> None:
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

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if not self.closed:
            self.tell()
            super().close()
            self._file.close()


@dataclass(frozen=True)
class Checksums:
    """What the files of a folder should hold, by their names relative to it."""

    folder: Path
    files: dict[str, list[Span]]

    @classmethod
    def read(cls, folder: Path) -> "Checksums":
        """Of a checkpoint; DamagedError if they are missing or changed themselves."""
        try:
            _length_of(folder, CHECKSUMS)
            files = _read_files((folder / CHECKSUMS).read_bytes().decode())
        except DamagedError:
            raise
        except OSError as error:
            raise _unreadable(folder, CHECKSUMS, error) from error
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise DamagedError(folder, f"{CHECKSUMS} does not hold what was written") from error
        return cls(folder, files)

    def write(self) -> None:
        """Leave them in the folder."""
        write_durably(self.folder / CHECKSUMS, _spelled(self.files))

    def with_other_files(self) -> "Checksums":
        """These, and one span for each other file that lies in the folder now."""
        paths = (path for path in self.folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
        others = {path.relative_to(self.folder).as_posix(): path for path in sorted(paths)}
        read = {name: _spans_of(path) for name, path in others.items() if name not in self.files}
        return Checksums(self.folder, self.files | read)

    def check_lengths(self) -> None:
        """DamagedError with the name of a file that is missing or cut short."""
        for name in self.files:
            self._check_length(name)

    def read_file(self, name: str) -> bytes:
        """All of a file. DamagedError if it is not what was written."""
        self._check_length(name)
        try:
            with (self.folder / name).open("rb") as file:
                return b"".join(self._verified(name, _exactly(file, span.length), span) for span in self.files[name])
        except OSError as error:
            raise _unreadable(self.folder, name, error) from error

    @contextmanager
    def opened(self, name: str) -> Iterator[Callable[[int, int], bytes]]:
        """For reading spans of a file: (offset, length) -> bytes. DamagedError if they are not what was written."""
        self._check_length(name)
        starts = self._starts(name)

        def read(offset: int, length: int) -> bytes:
            span = starts.get(offset)
            if span is None or span.length != length:
                raise DamagedError(self.folder, f"{CHECKSUMS} does not know the {length} bytes at {offset} of {name}")
            file.seek(offset)
            return self._verified(name, _exactly(file, length), span)

        try:
            with (self.folder / name).open("rb", buffering=0) as file:
                yield read
        except OSError as error:
            raise _unreadable(self.folder, name, error) from error

    def verify(self, *, part: int = 0, parts: int = 1) -> None:
        """Read all files, or one part of them, and check every byte. DamagedError with the name of one that differs."""
        for name in sorted(self.files)[part::parts]:
            self._check_length(name)
            try:
                with (self.folder / name).open("rb") as file:
                    sums = [_span_in(file, span.length) for span in self.files[name]]
            except OSError as error:
                raise _unreadable(self.folder, name, error) from error
            if sums != self.files[name]:
                raise self._changed(name)

    def _starts(self, name: str) -> dict[int, Span]:
        """Where each span begins."""
        found, start = {}, 0
        for span in self.files[name]:
            found[start] = span
            start += span.length
        return found

    def _check_length(self, name: str) -> None:
        if name not in self.files:
            raise DamagedError(self.folder, f"{CHECKSUMS} does not know of {name}")
        length, wanted = _length_of(self.folder, name), sum(span.length for span in self.files[name])
        if length != wanted:
            raise DamagedError(self.folder, f"{name} has {length} bytes instead of {wanted}")

    def _verified(self, name: str, data: bytes, span: Span) -> bytes:
        if hashlib.sha256(data).hexdigest() != span.sha256:
            raise self._changed(name)
        return data

    def _changed(self, name: str) -> DamagedError:
        return DamagedError(self.folder, f"{name} does not hold what was written")


def _spelled(files: dict[str, list[Span]]) -> str:
    body = json.dumps(files)
    return f'{{"files": {body}, "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n'


def _read_files(text: str) -> dict[str, list[Span]]:
    """ValueError and others unless all of the text is as `_spelled` would have it."""
    files = {name: [Span(*span) for span in spans] for name, spans in json.loads(text)["files"].items()}
    for name, spans in files.items():
        os.fsencode(name)  # ValueError of what the system cannot spell
        inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
        if not inside or "\0" in name or not all(type(span.length) is int and span.length > 0 for span in spans):
            raise ValueError(name)
    if _spelled(files) != text:
        raise ValueError("the sum")
    return files


def _length_of(folder: Path, name: str) -> int:
    """A pipe or a folder has none."""
    try:
        found = (folder / name).stat()
    except OSError as error:
        raise _unreadable(folder, name, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError(folder, f"{name} is no file")
    return found.st_size


def _unreadable(folder: Path, name: str, error: OSError) -> DamagedError:
    missing = isinstance(error, FileNotFoundError)
    return DamagedError(folder, f"{name} is missing" if missing else f"{name} cannot be read ({error.strerror})")


def _spans_of(path: Path) -> list[Span]:
    with path.open("rb") as file:
        span = _span_in(file, path.stat().st_size)
    return [span] if span.length else []


def _span_in(file: BinaryIO, length: int) -> Span:
    """What the next `length` bytes of a file are; fewer where it ends before."""
    found, left = hashlib.sha256(), length
    while left and (data := file.read(min(left, CHUNK_BYTES))):
        found.update(data)
        left -= len(data)
    return Span(length - left, found.hexdigest())


def _exactly(file: BinaryIO | io.FileIO, length: int) -> bytes:
    """The next `length` bytes of a file, fewer where it ends before; the system hands out 2 GB at a time at most."""
    parts = []
    while length and (data := file.read(length)):
        parts.append(data)
        length -= len(data)
    return b"".join(parts)
