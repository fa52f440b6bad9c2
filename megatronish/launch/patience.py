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
    return_values: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            return_values.append(call())
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
    return return_values[0] if return_values else otherwise


def apart(seconds: float, call: Callable[[], T], *, otherwise: T) -> T:
    """What `call` returns or raises, in a child process: a thread that waits for a disk keeps its process from ending.

    `otherwise` if it has not ended by then. The child holds no descriptor of this process, so that who reads one does
    not wait for it. Where no process can be started, or it is killed, a thread makes the call.
    """
    if sys.platform == "darwin":  # its system libraries do not survive a fork
        return within(seconds, call, otherwise=otherwise)
    reader, writer = os.pipe()
    try:
        child = os.fork()
    except OSError:  # no more processes, or no memory
        os.close(reader)
        os.close(writer)
        return within(seconds, call, otherwise=otherwise)
    if child == 0:
        _be_child(call, writer)
    os.close(writer)
    data, has_ended = b"", False
    try:
        with os.fdopen(reader, "rb") as answer:
            waiting = select.poll()  # `select` takes no descriptor above 1,023
            waiting.register(reader, select.POLLIN)
            if waiting.poll(1000 * seconds):
                data, has_ended = answer.read(), True
    finally:
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0 if has_ended else os.WNOHANG)
    if not data:  # a child that was killed says nothing of the disk
        return within(seconds, call, otherwise=otherwise) if has_ended else otherwise
    return_value, error = pickle.loads(data)
    if error is not None:
        raise error
    return return_value


def _be_child(call: Callable[[], object], writer: int) -> None:
    try:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # handlers of this process are not for a copy
            signal.signal(signum, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        os.closerange(3, writer)
        os.closerange(writer + 1, 1 << 16)
        try:
            told = pickle.dumps((call(), None))
        except Exception as error:
            told = pickle.dumps((None, error))
        with os.fdopen(writer, "wb") as answer:
            answer.write(told)
    finally:
        os._exit(0)
