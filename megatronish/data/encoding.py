"""Encoding of batches of JSON lines into tokens, in this process or by many workers, in the order of the batches.

A worker is sent the function that builds the tokenizer, not the tokenizer: what a process is sent when it starts must
fit into a pipe that no process reads yet. A larger message would block the parent for ever if the worker dies before.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatronish.config.plugins import naming_plugins
from megatronish.core.errors import RunError
from megatronish.core.foreign import json_value
from megatronish.data.cleaning import EXCERPT, KEEP_ALL, Cleaning, RemovedDocument
from megatronish.data.readers import Batch, value_under
from megatronish.data.split_sentences import split_sentences

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false"}  # for Hugging Face's library, which else takes every core


class Encoder(Protocol):
    """Interface of a tokenizer that preprocessing calls."""

    vocab_size: int
    eod: int

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; ValueError if one of them has none."""


@dataclass(frozen=True)
class EncodingJob:
    """Settings by which every worker encodes every line. `tokenizer` builds the tokenizer, in each worker."""

    tokenizer: Callable[[], Encoder]
    json_keys: tuple[str, ...]
    append_eod: bool
    split_sentences: bool = False
    """A sequence for each sentence of a document."""
    cleaning: Cleaning = KEEP_ALL

    @property
    def columns(self) -> tuple[str, ...]:
        """Fields of a document that are read."""
        return tuple(dict.fromkeys((*self.json_keys, *self.cleaning.keys)))


class BadLine(NamedTuple):
    """A line that cannot be used, and why; it is counted from byte `origin` of the file on."""

    path: str
    line: int
    why: str
    origin: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.why}"


class Encoded(NamedTuple):
    """Encoded batch: for each key the documents' tokens end to end and their lengths; and the lines that are bad.

    `sequences` are the lengths of the sequences of each document, one of all its tokens, or its sentences.
    """

    tokens: list[NDArray[Any]]
    lengths: list[list[int]]
    sequences: list[list[list[int]]]
    bad_lines: list[BadLine]
    num_bytes: int
    removed: list[RemovedDocument]


class WorkerDiedError(RunError):
    """A worker process ended in the middle of its work."""


def encode_batch(batch: Batch, job: EncodingJob, tokenizer: Encoder) -> Encoded:
    """Tokens of all good lines of a batch."""
    texts: dict[int, list[str]] = {}  # of the good lines, by their numbers
    bad_lines: dict[int, Exception] = {}
    reasons: dict[int, tuple[str, str]] = {}  # why a document is left out, and its text
    for number, line in enumerate(batch.lines, batch.first_line):
        if line.strip():
            try:
                record = read_record(line)
                of_line = texts_of(record, job.json_keys)
                if (why := job.cleaning.reason(record, of_line)) is None:
                    texts[number] = of_line
                else:
                    reasons[number] = why, of_line[0]
            except (ValueError, RecursionError) as error:
                bad_lines[number] = error
    try:
        ids = _encode_lines(list(texts.values()), job, tokenizer)
    except ValueError:  # a text that has no tokens: line by line, to find which
        ids = []
        for number, of_line in list(texts.items()):
            try:
                ids += _encode_lines([of_line], job, tokenizer)
            except ValueError as error:
                bad_lines[number] = error
                del texts[number]
    kept = list[list[list[list[int]]]]()
    for (number, of_line), of_keys in zip(texts.items(), ids, strict=True):
        why = job.cleaning.reason_of_length(sum(len(part) for of_key in of_keys for part in of_key))
        if why is None:
            kept.append(of_keys)
        else:
            reasons[number] = why, of_line[0]
    ids = kept
    documents = [[_document(parts, job, tokenizer) for parts in of_key] for of_key in zip(*ids, strict=True)]
    documents = documents or [[] for _ in job.json_keys]
    empty = np.empty(0, np.int32)
    return Encoded(
        tokens=[np.concatenate([empty, *(part for parts in of_key for part in parts)]) for of_key in documents],
        lengths=[[sum(map(len, parts)) for parts in of_key] for of_key in documents],
        sequences=[[[len(part) for part in parts] for parts in of_key] for of_key in documents],
        bad_lines=[
            BadLine(batch.path, number, str(error), batch.origin) for number, error in sorted(bad_lines.items())
        ],
        num_bytes=batch.num_bytes,
        removed=[
            RemovedDocument(why, batch.path, number, text[:EXCERPT], batch.origin)
            for number, (why, text) in sorted(reasons.items())
        ],
    )


def read_line(line: bytes, json_keys: Sequence[str]) -> list[str]:
    """The texts under `json_keys` of a JSON line; ValueError if it has none."""
    return texts_of(read_record(line), json_keys)


def read_record(line: bytes) -> dict[str, Any]:
    """The object of a JSON line; ValueError if it has none."""
    record = json_value(line.decode("utf-8-sig"))
    if not isinstance(record, dict):
        raise ValueError(f"a line must be a JSON object, not {type(record).__name__}")
    return record


def texts_of(record: dict[str, Any], json_keys: Sequence[str]) -> list[str]:
    """The texts under `json_keys` of an object; ValueError if it has none. `meta.body` is a key inside of `meta`."""
    texts = []
    for key in json_keys:
        value = value_under(record, key)
        if not isinstance(value, str):
            raise ValueError(f"key {key!r} must hold text, not {type(value).__name__}")
        texts.append(value)
    return texts


def _encode_lines(lines: Sequence[list[str]], job: EncodingJob, tokenizer: Encoder) -> list[list[list[list[int]]]]:
    """Ids of the parts of the texts of each line, [lines][keys][parts]: of the whole text, or of its sentences."""
    parts = [[split_sentences(text) if job.split_sentences else [text] for text in line] for line in lines]
    ids = iter(tokenizer.encode_all([part for line in parts for of_key in line for part in of_key]))
    return [[[next(ids) for _ in of_key] for of_key in line] for line in parts]


def _document(parts: list[list[int]], job: EncodingJob, tokenizer: Encoder) -> list[NDArray[Any]]:
    """Tokens of the parts of a text that have any, the last with the token that ends a document.

    As in Megatron, an empty text is an empty document without an end-of-document token.
    """
    nonempty_parts = [ids for ids in parts if ids]
    if nonempty_parts and job.append_eod:
        nonempty_parts[-1] = [*nonempty_parts[-1], tokenizer.eod]
    return [np.array(ids, np.int32) for ids in nonempty_parts]


def encode_all(batches: Iterator[Batch], job: EncodingJob, tokenizer: Encoder, *, workers: int) -> Generator[Encoded]:
    """Encoded batches, in the order of `batches`; `tokenizer` is that of this process."""
    if workers == 1:
        with _environment(ONE_THREAD):
            yield from (encode_batch(batch, job, tokenizer) for batch in batches)
        return
    # spawn: safe whatever threads the parent has, and the same on Linux and macOS
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(job,)) as pool:
        under_way: deque[Future[Encoded]] = deque()
        is_done = False
        try:
            for batch in batches:
                # It may start a worker: one of the two prints a traceback if that is interrupted.
                with signals_held(), _ctrl_c_blocked():
                    under_way.append(pool.submit(_encode_in_worker, batch))
                if len(under_way) >= 2 * workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
            is_done = True
        except BrokenProcessPool as error:
            raise WorkerDiedError(
                "a tokenizing worker died (killed, or out of memory); nothing was written; "
                "start again, with fewer --workers if memory is short"
            ) from error
        finally:
            # Idle workers are waited for: where this process ends at once, their last message could be lost on the way.
            pool.shutdown(wait=is_done, cancel_futures=True)


@contextmanager
def _environment(defaults: dict[str, str]) -> Iterator[None]:
    """Environment variables for a time, where the user has not set them."""
    own = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)


@contextmanager
def signals_held() -> Iterator[None]:
    """Signals that end the program wait. Masking them is not enough: another thread of this process may take them."""
    received: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    held = [signum for signum in ENDING if in_main and callable(signal.getsignal(signum))]
    before = {signum: signal.signal(signum, lambda number, _frame: received.append(number)) for signum in held}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        if received:
            signal.raise_signal(received[0])


@contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Ctrl-C does not reach processes that are started now: they are in the group of the terminal, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Worker(NamedTuple):
    """State of a worker process, or why it has none."""

    job: EncodingJob
    tokenizer: Encoder | None
    failure: str


_worker: Worker | None = None
"""State of this worker process: made once at its start instead of with every batch."""


def _start_worker(job: EncodingJob) -> None:
    global _worker
    # Ctrl-C is the parent's to answer: it has been blocked since this process was started.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ |= {name: value for name, value in ONE_THREAD.items() if name not in os.environ}
    try:
        _worker = Worker(job, job.tokenizer(), "")
    except Exception as error:  # the parent has built the same tokenizer, and reports why a worker cannot
        _worker = Worker(job, None, f"{type(error).__name__}: {error}")


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(batch: Batch) -> Encoded:
    assert _worker is not None
    if _worker.tokenizer is None:
        raise RunError(f"a worker cannot build the tokenizer ({_worker.failure}); nothing was written; start again")
    with naming_plugins():
        return encode_batch(batch, _worker.job, _worker.tokenizer)
