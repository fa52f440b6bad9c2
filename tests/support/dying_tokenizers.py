"""Tokenizers that end the worker they are sent to. Each worker imports this file, which therefore imports no torch."""

import multiprocessing
import os
import signal
from typing import Any

from megatronish.tokenizer.plain import BytesTokenizer


class DyingTokenizer(BytesTokenizer):
    """Its process is killed, as by the kernel when memory is short, at a text that says so."""

    def encode(self, text: str) -> list[int]:
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(text)


def dying_at_its_start() -> BytesTokenizer:
    """A tokenizer whose building ends a worker; the parent builds it."""
    if multiprocessing.parent_process() is not None:
        os._exit(9)
    return BytesTokenizer()


class DyingOnArrival:
    """A function that ends the worker that it is sent to, before the worker can do anything."""

    def __call__(self) -> BytesTokenizer:
        return BytesTokenizer()

    def __reduce__(self) -> tuple[Any, ...]:
        return (os._exit, (9,))


def missing_in_workers() -> BytesTokenizer:
    """A tokenizer whose file is gone by the time a worker reads it."""
    if multiprocessing.parent_process() is not None:
        raise FileNotFoundError("tokenizer.json is not there")
    return BytesTokenizer()
