"""Preprocessing: JSON lines to .bin/.idx files, read in order, tokenized by many workers, written in the order read.

The parent reads batches of lines, keeps at most two a worker under way, and writes what comes back in the order it went
out: the files do not depend on the number of workers, and memory does not grow with the input. A line that is no
JSON, lacks a key or holds no text there is reported with its place and counted; its other keys are dropped too, so
that the files of several keys stay aligned. Blank lines are skipped.
"""

import gzip
import json
import multiprocessing
import os
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatronish.data.indexed import IndexedWriter, token_dtype
from megatronish.errors import RunError, UserError

BATCH_BYTES = 1 << 18
MAX_WORKERS = 1024


class Encoder(Protocol):
    """Interface of a tokenizer that preprocessing calls. It is pickled for the workers."""

    vocab_size: int
    eod: int

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; ValueError for text that has none."""


@dataclass(frozen=True)
class EncodingJob:
    """Settings by which every worker encodes every line."""

    tokenizer: Encoder
    json_keys: tuple[str, ...]
    append_eod: bool


class Batch(NamedTuple):
    """Lines that are sent to a worker together; `num_bytes` of the file were read for them."""

    path: str
    first_line: int
    lines: list[bytes]
    num_bytes: int


class Encoded(NamedTuple):
    """Encoded batch: for each key the documents' tokens end to end and their lengths; a sentence for each bad line."""

    tokens: list[NDArray[Any]]
    lengths: list[list[int]]
    bad_lines: list[str]
    num_bytes: int


@dataclass
class Summary:
    """Counts of documents, tokens and bad lines so far."""

    documents: int = 0
    tokens: int = 0
    bad_lines: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        done = f"{self.documents:,} documents | {self.tokens:,} tokens | "
        return f"{done}{self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s | {self.bad_lines:,} bad lines"


class WorkerDiedError(RunError):
    """A worker process ended in the middle of its work."""


def preprocess(
    inputs: Sequence[str | Path],
    output_prefix: str,
    *,
    tokenizer: Encoder,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    strict: bool = False,
    on_bad_line: Callable[[str], None] = print,
    on_progress: Callable[[Summary, int], None] = lambda _summary, _num_bytes: None,
) -> Summary:
    """Write `<output_prefix>_<key>_document.bin/.idx` for each key from JSON lines, plain or .gz.

    `on_progress` hears after each batch how much is done and how many bytes of the files it took. Nothing is left under
    the final names unless all went well. UserError for bad input (with `strict`, any bad line) and a prefix that cannot
    be written, WorkerDiedError for a worker that was killed, RunError for a disk that is full or fails.
    """
    _check(inputs, json_keys=json_keys, workers=workers)
    job = EncodingJob(tokenizer, tuple(json_keys), append_eod)
    summary, start = Summary(), time.monotonic()
    batches = (batch for path in inputs for batch in read_batches(Path(path)))
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        writers = [stack.enter_context(_open_writer(output_prefix, key, dtype=dtype)) for key in json_keys]
        for encoded in stack.enter_context(closing(_encode_all(batches, job, workers=workers))):
            for message in encoded.bad_lines:
                if strict:
                    raise UserError(f"{message}; mend the line, or leave --strict out to skip such lines")
                on_bad_line(message)
            for writer, tokens, lengths in zip(writers, encoded.tokens, encoded.lengths, strict=True):
                writer.add_documents(tokens, lengths)
                summary.tokens += len(tokens)
            summary.documents += len(encoded.lengths[0])
            summary.bad_lines += len(encoded.bad_lines)
            summary.seconds = time.monotonic() - start
            on_progress(summary, encoded.num_bytes)
        if summary.documents == 0:
            raise UserError(
                f"{', '.join(map(str, inputs))} holds no document ({summary.bad_lines} bad lines); "
                f"each line must be a JSON object with a text under {', '.join(json_keys)}"
            )
    return summary


def _check(inputs: Sequence[str | Path], *, json_keys: Sequence[str], workers: int) -> None:
    for path in inputs:
        if not Path(path).is_file():
            raise UserError(f"--input {path} is not a file; check the path")
    if len(set(json_keys)) != len(json_keys) or not json_keys:
        raise UserError(f"--json-keys {' '.join(json_keys)} must be different keys, at least one; for example text")
    if not 1 <= workers <= MAX_WORKERS:
        raise UserError(f"--workers {workers} must be at least 1 and at most {MAX_WORKERS}; use as many as CPU cores")


def _open_writer(output_prefix: str, key: str, *, dtype: np.dtype[Any]) -> IndexedWriter:
    try:
        return IndexedWriter(f"{output_prefix}_{key}_document", dtype=dtype)
    except OSError as error:
        raise UserError(
            f"--output-prefix {output_prefix} cannot be written: {error.filename}: {error.strerror}; choose another"
        ) from error


def read_batches(path: Path) -> Iterator[Batch]:
    """Batches of the lines of a file, plain or .gz, about 256 KiB each."""
    with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
        line, position = 1, 0
        try:
            while lines := file.readlines(BATCH_BYTES):
                yield Batch(str(path), line, lines, raw.tell() - position)
                line, position = line + len(lines), raw.tell()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(
                f"--input {path} cannot be unpacked after line {line - 1}: {error}; copy it again"
            ) from error


def encode_batch(batch: Batch, job: EncodingJob) -> Encoded:
    """Tokens of all good lines of a batch."""
    documents: list[list[NDArray[Any]]] = [[] for _ in job.json_keys]
    bad_lines = []
    for number, line in enumerate(batch.lines, batch.first_line):
        if not line.strip():
            continue
        try:
            ids = [_encode(text, job) for text in read_line(line, job.json_keys)]
        except (ValueError, RecursionError) as error:
            bad_lines.append(f"{batch.path}:{number}: {error}")
        else:
            for of_key, tokens in zip(documents, ids, strict=True):
                of_key.append(tokens)
    empty = np.empty(0, np.int32)
    return Encoded(
        tokens=[np.concatenate([empty, *of_key]) for of_key in documents],
        lengths=[[len(tokens) for tokens in of_key] for of_key in documents],
        bad_lines=bad_lines,
        num_bytes=batch.num_bytes,
    )


def read_line(line: bytes, json_keys: Sequence[str]) -> list[str]:
    """The texts under `json_keys` of a JSON line; ValueError if it has none."""
    record = json.loads(line.decode("utf-8-sig"))
    if not isinstance(record, dict):
        raise ValueError(f"a line must be a JSON object, not {type(record).__name__}")
    for key in json_keys:
        if key not in record:
            raise ValueError(f"key {key!r} is missing")
        if not isinstance(record[key], str):
            raise ValueError(f"key {key!r} must hold text, not {type(record[key]).__name__}")
    return [record[key] for key in json_keys]


def _encode(text: str, job: EncodingJob) -> NDArray[Any]:
    """Tokens of a text. As in Megatron, an empty text is an empty document without an end-of-document token."""
    ids = job.tokenizer.encode(text)
    if ids and job.append_eod:
        ids.append(job.tokenizer.eod)
    return np.array(ids, np.int32)


def _encode_all(batches: Iterator[Batch], job: EncodingJob, *, workers: int) -> Generator[Encoded]:
    """Encoded batches, in the order of `batches`."""
    if workers == 1:
        yield from (encode_batch(batch, job) for batch in batches)
        return
    # spawn: safe whatever threads the parent has, and the same on Linux and macOS
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(job,)) as pool:
        under_way: deque[Future[Encoded]] = deque()
        try:
            for batch in batches:
                under_way.append(pool.submit(_encode_in_worker, batch))
                if len(under_way) >= 2 * workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool as error:
            raise WorkerDiedError(
                "a tokenizing worker died (killed, or out of memory); nothing was written; "
                "start again, with fewer --workers if memory is short"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_job: EncodingJob | None = None
"""Job of a worker process: sent once at its start instead of with every batch."""


def _start_worker(job: EncodingJob) -> None:
    global _job
    _job = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(batch: Batch) -> Encoded:
    assert _job is not None
    return encode_batch(batch, _job)
