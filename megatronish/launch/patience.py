"""Calls that need not end, as a disk or a reader may not answer, made by a thread or a process that is waited for."""

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T], *, otherwise: T) -> T:
    """What `call` returns or raises; `otherwise` if it has not ended by then, and its thread stays behind.

    Where the machine lets this user start no more threads, the call is made here.
    """
    found: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="patience", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return call()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return found[0] if found else otherwise


def apart(seconds: float, call: Callable[[], T], *, otherwise: T) -> T:
    """What `call` returns, in a child process: a thread that waits for a disk keeps its process from ending.

    `otherwise` if it raises, or has not ended by then. The child holds no stream of this process.
    """
    if sys.platform == "darwin":  # its system libraries do not survive a fork
        return within(seconds, call, otherwise=otherwise)
    reader, writer = os.pipe()
    try:
        child = os.fork()
    except OSError:  # no more processes, or no memory
        os.close(reader)
        os.close(writer)
        return otherwise
    if child == 0:
        _be_child(call, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        has_ended = bool(select.select([reader], [], [], seconds)[0])
        data = answer.read() if has_ended else b""
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0 if has_ended else os.WNOHANG)
    return pickle.loads(data) if data else otherwise


def _be_child(call: Callable[[], object], writer: int) -> None:
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        with os.fdopen(writer, "wb") as answer:
            answer.write(pickle.dumps(call()))
    finally:
        os._exit(0)
