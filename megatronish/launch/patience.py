"""Calls that need not end, as a disk or a reader may not answer: a thread makes them, and is waited for a while."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T], *, otherwise: T) -> T:
    """What `call` returns or raises; `otherwise` if it has not ended by then, and its thread stays behind."""
    found: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="patience", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return found[0] if found else otherwise
