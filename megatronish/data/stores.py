"""Inputs on object storage: which objects a URL names, and an object as a binary file that is read in ranges.

A range whose connection is lost is asked for again, some times. What a store raises in the end is one sentence: a
UserError for what the user has to correct, a RunError for a store that does not answer. Questions of a run have a time
limit each (`TimedQuestions`): a store that is silent ends a run as one that refuses does.
"""

import errno
import io
import re
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from typing import Any, BinaryIO, TypeVar

from megatronish.core.errors import UserError
from megatronish.core.remote import RemotePath, error_of_start, is_outage

TRIES, FIRST_WAIT = 5, 1.0
"""Questions to a store that does not answer, and seconds after the first, which double."""
SMALLEST_READ, LARGEST_READ = 1 << 16, 1 << 23
"""Bytes of one request: the first after a seek is small, and each that follows it is twice as large."""
MAGIC = "*?["

Answer = TypeVar("Answer")


def ask(path: RemotePath, question: Callable[[], Answer], *, what: str = "--input") -> Answer:
    """What the store answers; UserError or RunError with a sentence if it does not, after some tries.

    `what` is what the path is to the user.
    """
    for number in range(TRIES):
        try:
            return question()
        except OSError as error:
            if is_outage(error) and number < TRIES - 1:
                time.sleep(FIRST_WAIT * 2**number)
                continue
            tries = f", after {TRIES} tries" if is_outage(error) else ""
            remedy = "check its name, the credentials and the address of the store"
            raise error_of_start(f"{what} {path} cannot be read{tries}", error, remedy=remedy) from error
    raise AssertionError("the last try returns or raises")


def open_binary(path: Path | RemotePath) -> BinaryIO:
    """Open a file or an object for reading, with `peek` and `seek`."""
    if isinstance(path, Path):
        return path.open("rb")
    return io.BufferedReader(_Ranges(path), SMALLEST_READ)


def size_of(path: Path | RemotePath) -> int:
    """Bytes of a file or an object."""
    return path.stat().st_size if isinstance(path, Path) else ask(path, path.stat).st_size


def whole_range(path: RemotePath, start: int, end: int, *, what: str = "--input") -> bytes:
    """Bytes `start` to `end` of an object, once. OSError if fewer come, UserError if the server knows no ranges."""
    content = path.read_range(start, end)
    if len(content) < end - start:
        raise OSError(errno.EIO, f"{len(content):,} of {end - start:,} bytes came", str(path))
    if len(content) > end - start:
        raise UserError(
            f"{what} {path}: bytes {start:,} to {end:,} were asked for, and the server sent {len(content):,}: it knows "
            "no ranges; copy the file to a disk first"
        )
    return content


class TimedQuestions:
    """Threads in which a store is asked, so that each question has a time limit.

    A thread whose question took too long is left to itself, and does not keep the process from ending. The others are
    used again: fsspec has a connection for each thread.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._idle: list[SimpleQueue[tuple[Callable[[], Any], Future[Any]]]] = []

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """The answer, or what the question raises; OSError if it takes too long."""
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = SimpleQueue()
            threading.Thread(target=_answer_all, args=(thread,), name="store", daemon=True).start()
        answer = Future[Answer]()
        thread.put((question, answer))
        try:
            error = answer.exception(self._seconds)
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, f"no answer within {self._seconds:g} s") from None
        self._idle.append(thread)
        if error is not None:
            raise error
        return answer.result()


def _answer_all(questions: "SimpleQueue[tuple[Callable[[], Any], Future[Any]]]") -> None:
    while True:
        question, answer = questions.get()
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)
        del question, answer  # an answer may be large, and the next question long in coming


class _Ranges(io.RawIOBase):
    """An object as a file: ranges of it, of which the last is kept."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._size = size_of(path)
        self._at = self._start = 0
        self._bytes = b""  # from byte `_start` on

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence], 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = self._start + len(self._bytes)
        if not self._start <= self._at < end:
            if self._at >= self._size:
                return 0
            length = 2 * len(self._bytes) if self._bytes and self._at == end else 0
            length = max(min(max(length, SMALLEST_READ), LARGEST_READ), len(buffer))
            self._bytes, self._start = self._fetch(self._at, min(self._at + length, self._size)), self._at
        place = self._at - self._start
        part = self._bytes[place : place + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _fetch(self, start: int, end: int) -> bytes:
        return ask(self._path, lambda: whole_range(self._path, start, end))


def objects_of(name: str, endings: Collection[str]) -> list[RemotePath]:
    """The objects that a URL names, sorted: an object, all of a folder with a known ending, those of a pattern.

    UserError for a URL that names none, or holds a password, which a plan would have to keep.
    """
    path = RemotePath(name.rstrip("/"))
    if str(path) != path.url:
        raise UserError(
            f"--input {path} holds a password or a key, which would be written into the plan; give it to the store's "
            "library by its variables or files, such as AWS_SECRET_ACCESS_KEY"
        )
    if name.startswith(("http://", "https://")):  # whose servers have no folders, and whose ? begins a query
        size_of(path)
        return [path]
    if any(mark in name for mark in MAGIC):
        return _matches(path, endings)
    if ask(path, path.is_file):
        return [path]
    names = [name for name in ask(path, path.sizes) if name.endswith(tuple(endings)) and not _is_hidden(name)]
    if not names:
        raise UserError(
            f"--input {path} is no object, and no folder with one that ends in {', '.join(endings)}; check it"
        )
    return [path / name for name in sorted(names, key=PurePosixPath)]


def _matches(path: RemotePath, endings: Collection[str]) -> list[RemotePath]:
    """Objects whose name, or a folder of it, fits a pattern. A star is any name, two stars are folders of any depth."""
    from fsspec.utils import glob_translate

    parts = path.url.split("/")
    first = next(number for number, part in enumerate(parts) if any(mark in part for mark in MAGIC))
    root, pattern = RemotePath("/".join(parts[:first])), re.compile(glob_translate("/".join(parts[first:])))
    if first < 3:
        raise UserError(f"--input {path} is a pattern of buckets; name the bucket, as in s3://bucket/*.jsonl")

    def fits(name: str) -> bool:
        folders = [str(folder) for folder in PurePosixPath(name).parents][:-1]
        inside = any(pattern.match(folder) for folder in folders) and name.endswith(tuple(endings))
        return not _is_hidden(name) and (inside or pattern.match(name) is not None)

    names = [name for name in ask(root, root.sizes) if fits(name)]
    if not names:
        raise UserError(f"--input {path} is a pattern that no object fits; check it")
    return [root / name for name in sorted(names, key=PurePosixPath)]


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
