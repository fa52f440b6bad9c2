"""Preprocessing: JSON lines to .bin/.idx files, read in order, tokenized by many workers, written in the order read.

The parent reads batches of lines, keeps at most two a worker in work, and writes what comes back in the order it went
out: the files do not depend on the number of workers, and memory does not grow with the input. A line that is no
JSON, lacks a key or holds no text there is reported with its place and counted; its other keys are dropped too, so
that the files of several keys stay aligned. Blank lines are skipped.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatronish.core.errors import UserError
from megatronish.core.files import refuse_input_as_output
from megatronish.core.remote import Location, location
from megatronish.data.cleaning import KEEP_ALL, MAX_EXAMPLES, Cleaning, RemovedCounts, RemovedDocument
from megatronish.data.encoding import BadLine, Encoder, EncodingJob, encode_all, signals_held
from megatronish.data.indexed import IndexedWriter, token_dtype
from megatronish.data.inputs import input_files, listed, text_format_of
from megatronish.data.pieces import InputPiece, lines_before
from megatronish.data.readers import read_batches

MAX_WORKERS = 1024


@dataclass
class Summary:
    """Counts of documents, tokens and bad lines so far."""

    documents: int = 0
    tokens: int = 0
    bad_lines: int = 0
    seconds: float = 0.0
    removed: RemovedCounts = field(default_factory=RemovedCounts)
    """Documents that cleaning left out."""

    @property
    def lines(self) -> int:
        """Lines that are not blank, good and bad ones."""
        return self.documents + self.bad_lines + self.removed.total

    def __str__(self) -> str:
        done = f"{self.documents:,} documents | {self.tokens:,} tokens | "
        return f"{done}{self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s | {self.bad_lines:,} bad lines"


def preprocess(
    inputs: Sequence[str | Location],
    output_prefix: str,
    *,
    tokenizer: Callable[[], Encoder],
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    split_sentences: bool = False,
    cleaning: Cleaning = KEEP_ALL,
    workers: int = 1,
    strict: bool = False,
    max_bad_fraction: float = 1.0,
    on_bad_line: Callable[[str], None] = print,
    on_progress: Callable[[Summary, int], None] = lambda _summary, _num_bytes: None,
) -> Summary:
    """Write `<output_prefix>_<key>_document.bin/.idx` for each key from files of JSON or Parquet (data/inputs.py).

    With `split_sentences` they are `<output_prefix>_<key>_sentence`, with a sequence for each sentence of a document.
    `tokenizer` builds the tokenizer; it is pickled for the workers. `on_progress` hears after each batch how much is
    done and how many bytes of the files it took. Nothing is left under the final names unless all went well. UserError
    for bad input (with `strict`, any bad line; else more than `max_bad_fraction` of the lines) and a prefix that cannot
    be written, WorkerDiedError for a worker that was killed, RunError for a disk that is full or fails.
    """
    files = input_files(inputs)
    check_settings(json_keys=json_keys, workers=workers, max_bad_fraction=max_bad_fraction)
    names = [output_name(output_prefix, key, split_sentences=split_sentences) for key in json_keys]
    for name in names:
        for suffix in (".bin", ".idx"):
            refuse_input_as_output("--output-prefix", Path(name + suffix), files)
    job = EncodingJob(tokenizer, tuple(json_keys), append_eod, split_sentences, cleaning)
    with ExitStack() as stack:
        opened = partial(_open_writer, output_prefix=output_prefix)
        summary = encode_pieces(
            [InputPiece(str(path)) for path in files],
            names,
            job,
            own_tokenizer=tokenizer(),
            open_writer=lambda name, dtype: stack.enter_context(opened(name, dtype=dtype)),
            workers=workers,
            on_bad_line=told_bad_lines(lambda bad: on_bad_line(str(bad)), strict=strict),
            on_progress=on_progress,
        )
        refuse_too_few(summary, files, json_keys, max_bad_fraction)
    return summary


def encode_pieces(
    pieces: Sequence[InputPiece],
    names: Sequence[str],
    job: EncodingJob,
    *,
    own_tokenizer: Encoder,
    open_writer: Callable[[str, np.dtype[Any]], IndexedWriter],
    workers: int,
    on_bad_line: Callable[[BadLine], None],
    on_progress: Callable[[Summary, int], None],
) -> Summary:
    """Write the documents of pieces of files into the pairs `names`, one for each key of the job.

    The writers are those of `open_writer`, which keeps or discards what they wrote.
    """
    summary, start = Summary(), time.monotonic()
    batches = (batch for piece in pieces for batch in read_batches(location(piece.path), job.columns, piece))
    dtype = token_dtype(own_tokenizer.vocab_size)
    with signals_held():  # between a file and the note that it must be deleted
        writers = [open_writer(name, dtype) for name in names]
    with closing(encode_all(batches, job, own_tokenizer, workers=workers)) as all_encoded:
        for encoded in all_encoded:
            for bad in encoded.bad_lines:
                on_bad_line(bad)
            for writer, tokens, sequences in zip(writers, encoded.tokens, encoded.sequences, strict=True):
                writer.add_split_documents(tokens, sequences)
                summary.tokens += len(tokens)
            _count_removed(encoded.removed, summary.removed)
            summary.documents += len(encoded.lengths[0])
            summary.bad_lines += len(encoded.bad_lines)
            summary.seconds = time.monotonic() - start
            on_progress(summary, encoded.num_bytes)
    return summary


def _count_removed(documents: Sequence[RemovedDocument], removed: RemovedCounts) -> None:
    for document in documents:
        shown = removed.examples.setdefault(document.why, [])
        removed.counts[document.why] = removed.counts.get(document.why, 0) + 1
        if len(shown) < MAX_EXAMPLES:
            line = lines_before(document.origin, document.path) + document.line
            shown.append([document.path, line, document.excerpt])


def told_bad_lines(tell: Callable[[BadLine], None], *, strict: bool) -> Callable[[BadLine], None]:
    """What hears of each bad line, with its number counted from the beginning of the file; `strict`: UserError."""
    before: dict[tuple[str, int], int] = {}

    def hear(bad: BadLine) -> None:
        place = bad.path, bad.origin
        if place not in before:
            before[place] = lines_before(bad.origin, bad.path)
        bad = BadLine(bad.path, before[place] + bad.line, bad.why)
        if strict:
            raise UserError(f"{bad}; correct the line, or leave --strict out to skip such lines")
        tell(bad)

    return hear


def check_settings(*, json_keys: Sequence[str], workers: int, max_bad_fraction: float) -> None:
    """UserError for keys, workers or a fraction that make no sense."""
    if len(set(json_keys)) != len(json_keys) or not json_keys:
        raise UserError(f"--json-keys {' '.join(json_keys)} must be different keys, at least one; for example text")
    for key in json_keys:
        if "/" in key or "\0" in key:  # files are named by it, which would lie in another folder
            raise UserError(
                f"--json-keys {key!r} must not hold a slash or a zero byte: the files of a key have its name; rename "
                "it in the data"
            )
    if not 1 <= workers <= MAX_WORKERS:
        raise UserError(f"--workers {workers} must be at least 1 and at most {MAX_WORKERS}; use as many as CPU cores")
    if not 0 <= max_bad_fraction <= 1:
        raise UserError(f"--max-bad-fraction {max_bad_fraction} must be at least 0 and at most 1; for example 0.01")


def refuse_too_few(
    summary: Summary, files: Sequence[Location], json_keys: Sequence[str], max_bad_fraction: float
) -> None:
    """UserError if there is no document, or if too many lines are bad."""
    names, keys = listed(files), ", ".join(json_keys)
    if summary.documents == 0 and summary.removed.total:
        raise UserError(
            f"{names}: cleaning leaves no document ({'; '.join(summary.removed.lines(examples=False))}); correct the "
            "rule that takes most"
        )
    if summary.documents == 0:
        seems = next((f"; {path} seems to be {what}" for path in files if (what := text_format_of(path))), "")
        raise UserError(
            f"{names} holds no document ({summary.bad_lines} bad lines); each line must be a JSON object with a text "
            f"under {keys}{seems}"
        )
    if summary.bad_lines > max_bad_fraction * summary.lines:
        raise UserError(
            f"{summary.bad_lines:,} of {summary.lines:,} lines of {names} are bad, more than --max-bad-fraction "
            f"{max_bad_fraction:g} of them, and nothing was written; check --json-keys {keys}, or raise the fraction"
        )


def output_name(output_prefix: str, key: str, *, split_sentences: bool) -> str:
    """Prefix of the pair that is written for a key, as Megatron-LM names it."""
    return f"{output_prefix}_{key}_{'sentence' if split_sentences else 'document'}"


def _open_writer(name: str, output_prefix: str, *, dtype: np.dtype[Any]) -> IndexedWriter:
    try:
        return IndexedWriter(name, dtype=dtype)
    except OSError as error:
        raise UserError(
            f"--output-prefix {output_prefix} cannot be written: {error.filename}: {error.strerror}; choose another"
        ) from error
