"""The frame of a rank's work, whoever started it: where it writes, and its ending, an exit status and a message."""

import contextlib
import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TextIO, cast

from megatronish.config.plugins import naming_plugins
from megatronish.core.errors import RunError, UserError, WholeRunError, without_passwords
from megatronish.launch.elastic import report_to_torchrun
from megatronish.launch.guard import own_guard
from megatronish.launch.os_errors import mishap, status_of
from megatronish.launch.patience import within
from megatronish.launch.place import Place
from megatronish.launch.terminal import patient, say, say_at_once

INTERRUPTED = "interrupted: saving before leaving; press Ctrl-C again to leave at once"
DISK_SECONDS = 60.0  # for the disk of the logs, before a run begins


class Ending(NamedTuple):
    """The ending of a rank. `seconds` is on the machine's monotonic clock, so that its ranks can be put in order.

    With `is_of_run` the message is about the whole run and names the rank itself, which is hardly this one. `origin` is
    the rank that met the error, where all ranks raise what one of them has met.
    """

    seconds: float
    status: int
    message: str | None
    is_of_run: bool = False
    origin: int | None = None


def run_rank(
    function: Callable[[Place], int], place: Place, log_dir: Path | None, *, patience: float = DISK_SECONDS
) -> Ending:
    """Call `function` and turn whatever happens into an ending; nothing is raised.

    With a `log_dir`, what the rank writes goes to `rank_<r>.log` in it; rank 0's goes to the terminal as well. Its disk
    has `patience` seconds to answer.
    """
    if log_dir is None:
        return _ending(function, place)
    path = log_dir / f"rank_{place.rank}.log"
    try:
        log = within(patience, partial(_opened, path), otherwise=None)
    except OSError as error:
        return Ending(time.monotonic(), 2, f"cannot write the log {path}: {error.strerror}; choose another run folder")
    if log is None:
        silent = f"the disk of {path} has not answered for {patience:g} s; look at its server, and start again"
        return Ending(time.monotonic(), 1, silent)
    with _written_to(log, and_terminal=place.rank == 0):
        ending = _ending(function, place)
    within(1.0, partial(_close, log, ending.message), otherwise=None)  # the launcher waits for the ending
    return ending


def _opened(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_fifo():  # without a reader, opening it would block
        raise FileExistsError(errno.EEXIST, "it is a pipe")
    log = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    os.utime(path)  # a disk that does not answer may still open what it has in its cache
    return log


def _close(log: TextIO, message: str | None) -> None:
    with contextlib.suppress(OSError), log:
        log.write(f"{message}\n" if message else "")


def run_here(
    function: Callable[[Place], int], place: Place, log_dir: Path | None, *, patience: float = DISK_SECONDS
) -> int:
    """Be the rank at `place` in this very process, under torchrun, srun or alone; the exit status.

    Where there are peers, a failed rank speaks after a second and then leaves at once. What makes its peers fail is
    that it is gone; by the time it was their turn to speak, torchrun has ended those of its machine. Rank 0 goes first,
    so that a mistake which every rank has noticed is reported once.
    """
    terminal = os.dup(2)  # of a rank with a log of its own, 2 is that log meanwhile
    place = replace(place, leave=partial(_leave, terminal), guarded=partial(own_guard, terminal))
    with _interrupt_as_sigterm():
        ending = run_rank(function, place, log_dir, patience=patience)
    os.close(terminal)
    if place.world_size > 1 and ending.status != 0:
        _wait_to_speak(place)
    if ending.message:
        line = ending.message
        if not ending.is_of_run:
            line = failure(place, line, origin=ending.origin)
        say(line)
        report_to_torchrun(line)
    if place.world_size > 1 and ending.status != 0:
        sys.stdout.flush()
        os._exit(ending.status)  # leaving in good order could wait for the peers
    return ending.status


def _wait_to_speak(place: Place) -> None:
    """Wait a second. SIGTERM of an agent ends a rank then, as another rank of this machine has spoken.

    Where there are several machines, what failed may have been on another one, and its agent with it: then no one
    speaks here, and the first rank of the machine does so before it goes.
    """
    asked = list[int]()  # no threading.Event: a handler that sets one waits for the lock of whom it interrupts
    if threading.current_thread() is threading.main_thread():
        is_speaker = place.local_rank == 0 and not place.is_on_one_machine
        signal.signal(signal.SIGTERM, (lambda number, _: asked.append(number)) if is_speaker else signal.SIG_DFL)
    deadline = time.monotonic() + (1.0 if place.rank == 0 else 1.5)
    while not asked and time.monotonic() < deadline:
        time.sleep(0.02)


def _leave(terminal: int, report: str, is_reporter: bool) -> None:
    """End this rank with a report about the run, whatever its main thread does."""
    if is_reporter:
        within(1.0, lambda: os.write(terminal, f"{without_passwords(report)}\n".encode()), otherwise=0)
    within(1.0, lambda: report_to_torchrun(report), otherwise=None)
    os._exit(1)


def failure(place: Place, message: str, *, origin: int | None = None) -> str:
    """The line that tells the user whose message this is."""
    rank = place.rank if origin is None else origin
    return message if place.world_size == 1 else f"rank {rank} failed: {message}"


def _ending(function: Callable[[Place], int], place: Place) -> Ending:
    origin, is_of_run = None, False
    try:
        with naming_plugins():
            status, message = function(place), None
    except SystemExit as error:
        status, message = _describe(error)
        if status == 0 and place.world_size > 1:  # the other ranks still count on this one
            status, message = 1, "sys.exit(0) was called before the run had finished"
    except BaseException as error:  # torch raises some that are no Exception (CheckpointException)
        status, message = _describe(error)
        origin, is_of_run = getattr(error, "origin", None), isinstance(error, WholeRunError)
        if is_of_run:
            message = f"the run failed: {message}"
    seconds = time.monotonic()
    return Ending(seconds, status if 0 <= status < 256 else 1, message, is_of_run, origin)


def _describe(error: BaseException) -> tuple[int, str | None]:
    """Exit status and message: the sentence of a mistake or a mishap, the traceback of a bug."""
    if isinstance(error, UserError):
        return 2, str(error)
    if isinstance(error, RunError):
        return 1, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, "interrupted"
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0, f"sys.exit({error.code}) was called" if error.code else None
        return 1, without_passwords(str(error.code))
    told = mishap(error) or "".join(traceback.format_exception(error)).rstrip()
    return status_of(error), without_passwords(told)


@contextlib.contextmanager
def _interrupt_as_sigterm() -> Iterator[None]:
    """The first Ctrl-C does what SIGTERM does (save and leave) once the rank handles that; the second ends it."""

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            raise KeyboardInterrupt
        say_at_once(INTERRUPTED)
        signal.raise_signal(signal.SIGTERM)

    # A job in the background of a shell ignores Ctrl-C and continues to.
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _written_to(log: TextIO, *, and_terminal: bool) -> Iterator[None]:
    """Send stdout and stderr to `log`, the terminal seeing them too or not.

    Without the terminal the descriptors move as well, which catches what C++ writes.
    """
    with contextlib.ExitStack() as stack:
        if not and_terminal:
            stack.enter_context(_descriptors_at(log))
        shown = stack.enter_context(patient(sys.stdout, sys.stderr)) if and_terminal else (None, None)
        out, err = (_Copied(stream, log) for stream in shown)
        stack.enter_context(contextlib.redirect_stdout(cast(TextIO, out)))
        stack.enter_context(contextlib.redirect_stderr(cast(TextIO, err)))
        yield


@contextlib.contextmanager
def _descriptors_at(log: TextIO) -> Iterator[None]:
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    try:
        yield
    finally:
        for descriptor, old in zip((1, 2), saved, strict=True):
            os.dup2(old, descriptor)
            os.close(old)


class Shown(str):
    """A line as the terminal shows it; a log of the rank keeps it as `logged`."""

    logged: str

    def __new__(cls, text: str, *, logged: str) -> "Shown":
        """Make the text of the terminal."""
        line = super().__new__(cls, text)
        line.logged = logged
        return line


class _Copied:
    """A stream that is the terminal in every respect, if there is one, but leaves a copy of what is written in a log.

    What the log has no room for is lost: no run should end for that.
    """

    def __init__(self, terminal: TextIO | None, log: TextIO) -> None:
        self._terminal = terminal
        self._log = log

    def write(self, text: str) -> int:
        if (shown := without_passwords(text)) != text:  # else it may be a `Shown`
            text = shown
        if self._terminal is not None:
            self._terminal.write(text)  # first: the disk of the log may be what does not answer
        if self._terminal is None or not text.startswith("\r"):  # a progress bar that draws itself again
            with contextlib.suppress(OSError):
                self._log.write(text.logged if isinstance(text, Shown) else text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            (self._terminal or self._log).flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal or self._log, name)
