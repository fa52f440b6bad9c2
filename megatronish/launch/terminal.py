"""The terminal of a run: what reads it may stop reading (Ctrl-S, a pager, a pipe that stalls), and the run continues.

A thread writes, and the run waits for it a moment, so that lines come at once and in their order. Where the reader has
stopped, lines are kept for it up to MOST_BYTES; what comes then is left out and counted. A log has all of it.
"""

import contextlib
import io
import os
import select
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, TextIO, cast

from megatronish.core.errors import without_passwords
from megatronish.launch.patience import within

MOST_BYTES = 2**20  # kept for a reader that has stopped
PROMPT_SECONDS = 0.2  # for a line, after which the reader has stopped
LAST_SECONDS = 3.0  # without any progress at the end, after which what is left is given up


OUTPUT = "standard output"
"""Name of the file in errors of standard output."""
NARROWEST = 40  # columns that help is laid out for: fewer keep its library busy for minutes


def open_streams() -> None:
    """Give a process whose standard streams are closed, as under some daemons, /dev/null in their place.

    A file that is opened next would have their descriptors else, and what is printed would go into it.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


class _Output(io.FileIO):
    """Standard output whose errors say that they are its own."""

    def write(self, data: Any) -> int:
        """Write the bytes, or a part of them."""
        try:
            return super().write(data)
        except BrokenPipeError:  # no failure: its reader has left
            raise
        except OSError as error:
            error.filename = OUTPUT
            raise


def name_output() -> None:
    """Have errors of standard output name it, as a full disk that it goes to is not the disk of any other file."""
    if (out := sys.stdout) is not sys.__stdout__ or not isinstance(out, io.TextIOWrapper):
        return
    with contextlib.suppress(OSError):  # a reader that is gone is met again
        out.flush()
    buffer = io.BufferedWriter(_Output(1, "w", closefd=False))
    how: dict[str, Any] = {"line_buffering": out.line_buffering, "write_through": out.write_through}
    sys.stdout = io.TextIOWrapper(buffer, encoding=out.encoding, errors=out.errors, **how)


def widen() -> None:
    """Have a terminal of very few columns be taken for one of more."""
    if shutil.get_terminal_size().columns < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)


class Writer:
    """Thread that writes to a descriptor. A reader that is gone is like one that will never read again."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pieces: deque[bytes] = deque()
        self._size, self._lost, self._written = 0, 0, 0
        self._has_stopped, self._is_gone = False, False
        self._changed = threading.Condition()
        threading.Thread(target=self._serve, name="terminal", daemon=True).start()

    def write(self, data: bytes) -> None:
        """Write, or leave it to the thread if that does not happen at once."""
        with self._changed:
            if self._is_gone:
                return
            if self._size + len(data) > MOST_BYTES:
                self._lost += data.count(b"\n")
                return
            self._pieces.append(data)
            self._size += len(data)
            self._changed.notify_all()
            if not self._has_stopped:
                self._has_stopped = not self._changed.wait_for(self._is_done, PROMPT_SECONDS)

    def finish(self) -> None:
        """Wait for what is left, as long as something is read."""
        with self._changed:
            before = -1
            while not self._is_done() and self._written != before:
                before = self._written
                self._changed.wait_for(self._is_done, LAST_SECONDS)

    def _is_done(self) -> bool:
        return self._size == 0 or self._is_gone

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._pieces))
                data = self._pieces.popleft()
                self._size -= len(data)
                if self._lost and not self._pieces:
                    data += (
                        f"[{self._lost:,} lines are left out here, for want of a reader; the log has them]\n".encode()
                    )
                    self._lost = 0
                self._size += len(data)
            is_gone = not self._write(data)
            with self._changed:
                self._size -= len(data)
                self._has_stopped = self._has_stopped and self._size > 0
                self._is_gone = is_gone
                self._changed.notify_all()
            if is_gone:
                return

    def _write(self, data: bytes) -> bool:
        """Write all of it, as slowly as it is read; whether there is a reader."""
        while data:
            try:
                count = os.write(self._descriptor, data[:4096])
            except BlockingIOError:
                select.select([], [self._descriptor], [])
                continue
            except OSError:
                return False
            data = data[count:]
            self._written += count
        return True


class Terminal:
    """A text stream in every respect but that `write` waits for no reader."""

    def __init__(self, stream: TextIO, writer: Writer) -> None:
        self._stream, self._writer = stream, writer

    def write(self, text: str) -> int:
        """Write to the terminal, now or later."""
        self._writer.write(text.encode(self._stream.encoding or "utf-8", "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Nothing is left to be written, if there is a reader."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def patient(*streams: TextIO) -> Iterator[list[TextIO]]:
    """Streams that write to the same files and wait for no reader; those that are no files are left as they are."""
    writers: dict[tuple[int, int], Writer] = {}
    patient_streams: list[TextIO] = []
    for stream in streams:
        try:
            stream.flush()
            descriptor = stream.fileno()
            status = os.fstat(descriptor)
        except (OSError, ValueError, AttributeError):
            patient_streams.append(stream)
            continue
        identity = status.st_dev, status.st_ino  # of one terminal, lines of both streams keep their order
        if identity not in writers:
            own = os.dup(descriptor)
            try:
                writers[identity] = Writer(own)
            except RuntimeError:  # the machine lets this user start no more threads
                os.close(own)
                patient_streams.append(stream)
                continue
        patient_streams.append(cast(TextIO, Terminal(stream, writers[identity])))
    try:
        yield patient_streams
    finally:
        for writer in writers.values():
            writer.finish()


def say(line: str) -> None:
    """Print a line on stderr, without passwords, for a launcher that ends soon: there may be no reader."""
    line = without_passwords(line)
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        print(line, file=sys.stderr, flush=True)
        return
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        within(LAST_SECONDS, partial(_write_all, descriptor, f"{line}\n".encode()), otherwise=None)


def say_at_once(line: str) -> None:
    """The same from a handler of a signal: nothing is said where the reader has stopped."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{line}\n".encode())


def _write_all(descriptor: int, data: bytes) -> None:
    deadline = time.monotonic() + LAST_SECONDS
    while data and time.monotonic() < deadline:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [], 0.1)
