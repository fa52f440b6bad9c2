"""Child processes in which what strangers wrote is used: memory and time are bounded, and a crash ends the child alone.

A chat template is a program, and a tokenizer's file drives a library that may abort. `Contained` starts a small
process, asks it, and waits for a bounded time. The child is asked with pickles and answers with text alone, so that
whatever it became cannot act on the process that asks.

Time is that of the processor, and a budget over all questions: each adds to it by its size, so a warm child answers any
number of short questions, and neither one long nor many slow ones. The system ends a child at the end of its
budget, also inside of a library. Memory is bounded where the system can (Linux); elsewhere time and the size of answers
alone are.
"""

import contextlib
import importlib
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from megatronish.core.errors import RunError, shown, signal_name

HEADER = struct.Struct("<cQ")
PATIENCE = 300.0
"""Seconds of the clock, on a machine that is busy with other work."""

Kind = Literal[b"=", b"!", b"m", b"x"]
"""An answer, a refusal (a ValueError of the child), no memory, another error."""


class ContainedError(Exception):
    """The child had to be ended, or ended itself: the message follows a subject, "takes more than ..."."""


class PanicError(ValueError):
    """ValueError: a compiled library met what it holds for impossible."""


@dataclass(frozen=True)
class ChildBounds:
    """What a child may use: bytes beyond its own start, and seconds of the processor."""

    memory: int = 1 << 30
    seconds: float = 10.0
    seconds_each: float = 0.02
    """What each question adds to the budget."""
    seconds_each_byte: float = 2e-6
    answer: int = 4 << 20
    """Bytes of an answer, and 16 times those of its question."""


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Context in which a compiled library works for one text: whatever it raises becomes a ValueError, a sentence."""
    try:
        yield
    except (ValueError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        raise ValueError(_sentence(what, error)) from error
    except BaseException as error:  # as a library in Rust does
        raise PanicError(_sentence(what, error)) from error


def _sentence(what: str, error: BaseException) -> str:
    return f"{what} ({type(error).__name__}: {shown(str(error), longest=300)})"


class Contained:
    """Child that calls `function`, "module:name", with arguments, and answers questions with what that returned.

    It starts with the first question, and again in a process that was forked since. It ends with its owner.
    """

    def __init__(self, function: str, *arguments: Any, bounds: ChildBounds = ChildBounds()) -> None:  # frozen
        self._call = function, arguments
        self._bounds = bounds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def __getstate__(self) -> tuple[Any, ...]:
        return (*self._call, self._bounds)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        function, arguments, bounds = state
        self.__init__(function, *arguments, bounds=bounds)  # type: ignore[misc]  # a child is never shared

    def start(self) -> None:
        """Start the child now. Errors as those of `ask`."""
        with self._lock:
            self._running()

    def ask(self, question: Any) -> str:
        """The answer. ValueError as the function raised it; ContainedError if it did not end, or not well."""
        with self._lock:
            process = self._running()
            try:
                return self._asked(process, question)
            except ValueError:
                raise
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the child, if there is one."""
        if self._process is not None:
            self._stop()
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():
            process = _started()
            self._process, self._owner = process, os.getpid()
            self._stop = weakref.finalize(self, _end, process, self._owner)
            try:
                self._asked(process, (*self._call, self._bounds))
            except BaseException:
                self.close()
                raise
        return self._process

    def _asked(self, process: subprocess.Popen[bytes], question: Any) -> str:
        assert process.stdin is not None and process.stdout is not None
        try:
            packed = pickle.dumps(question)
            process.stdin.write(HEADER.pack(b"?", len(packed)) + packed)
            process.stdin.flush()
            kind, size = HEADER.unpack(_read(process.stdout, HEADER.size))
            if size > (most := self._bounds.answer + 16 * len(packed)):
                raise ContainedError(f"writes more than {most >> 20} MiB")
            text = _read(process.stdout, size).decode("utf-8", "surrogatepass")
        except (EOFError, OSError):
            raise ContainedError(self._why(process)) from None
        if kind == b"!":
            raise ValueError(text)
        if kind == b"m":
            raise ContainedError(f"needs more than {self._bounds.memory >> 20} MiB of memory")
        if kind == b"x":
            raise ContainedError(f"fails in its library: {text}")
        return text

    def _why(self, process: subprocess.Popen[bytes]) -> str:
        """What ended the child."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
        status = process.poll()
        if status is None or status == -signal.SIGPROF:
            return f"takes more than {self._bounds.seconds:g} s"
        if status < 0:
            return f"ends the process that uses it with {signal_name(-status)}"
        return f"ends the process that uses it with status {status}"


def _started() -> subprocess.Popen[bytes]:
    """A new child, in the process group of this one, so that whatever ends that ends it too."""
    path = [os.path.abspath(each) for each in sys.path]
    program = f"import sys; sys.path[:] = {path!r}; from megatronish.core.contained import be_child; be_child()"
    environ = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ | {"RUST_BACKTRACE": "0"},
        )
    except OSError as error:
        raise RunError(
            f"no process can be started in which a foreign file is tried: {error.strerror}; raise the limits of "
            "processes (ulimit -u) and of open files (ulimit -n)"
        ) from error


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner != os.getpid():  # a fork of the owner, whose child it is not
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            assert pipe is not None
            pipe.close()


def _read(file: BinaryIO | Any, size: int) -> bytes:
    """So many bytes of a child. EOFError if it has ended, or does not write them in `PATIENCE` seconds."""
    descriptor, parts, until = file.fileno(), [], time.monotonic() + PATIENCE
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    while size:
        if not waiting.poll(1000 * max(until - time.monotonic(), 0)):
            raise EOFError
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# The child.


def be_child() -> None:
    """Answer questions until the parent is gone."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    (function, arguments, bounds), size = _next_question(questions)
    module, _, name = function.partition(":")
    make = getattr(importlib.import_module(module), name)
    _bound_memory(bounds.memory)
    clock = _Clock(bounds)
    with clock.running(size):
        kind, made = _outcome(lambda _: make(*arguments), None)
    _answer(answers, kind, "" if kind == b"=" else made)
    while True:
        question, size = _next_question(questions)
        with clock.running(size):
            kind, answer = _outcome(made, question)
        _answer(answers, kind, answer)


def _next_question(questions: BinaryIO) -> tuple[Any, int]:
    """The next question and its size; the process ends when the parent has."""
    head = questions.read(HEADER.size)
    size = HEADER.unpack(head)[1] if len(head) == HEADER.size else 0
    packed = questions.read(size)
    if len(packed) < max(size, 1):
        os._exit(0)
    return pickle.loads(packed), size


def _outcome(work: Callable[[Any], Any], question: Any) -> tuple[Kind, Any]:
    try:
        return b"=", work(question)
    except MemoryError:
        return b"m", ""
    except ValueError as error:
        return b"!", str(error)
    except BaseException as error:  # a panic of a library in Rust is no Exception
        return b"x", shown(f"{type(error).__name__}: {error}", longest=300)


def _answer(answers: BinaryIO, kind: Kind, text: str) -> None:
    packed = text.encode("utf-8", "surrogatepass")
    answers.write(HEADER.pack(kind, len(packed)) + packed)
    answers.flush()


class _Clock:
    """The budget of time. Where it ends, SIGPROF ends the process, whatever it does."""

    def __init__(self, bounds: ChildBounds) -> None:
        self._bounds, self._left = bounds, bounds.seconds

    @contextlib.contextmanager
    def running(self, size: int) -> Iterator[None]:
        """Context in which a question of so many bytes is answered."""
        more = self._bounds.seconds_each + size * self._bounds.seconds_each_byte
        self._left = min(self._left, self._bounds.seconds) + more
        before = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, max(self._left, 1e-3))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self._left -= time.process_time() - before


def _bound_memory(num_bytes: int) -> None:
    """Bound the address space to what it is now and so much more. macOS has no such bound."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
