"""Preprocessing: JSON lines to .bin/.idx files, read in order, tokenized by many workers, written in the order read.

The parent reads batches of lines, keeps at most two a worker in work, and writes what comes back in the order it went
out: the files do not depend on the number of workers, and memory does not grow with the input. A line that is no
JSON, lacks a key or holds no text there is reported with its place and counted; its other keys are dropped too, so
that the files of several keys stay aligned. Blank lines are skipped.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronish.core.errors import UserError
from megatronish.core.files import refuse_input_as_output, unwritten, working_folder
from megatronish.core.remote import Location
from megatronish.data.batch_work import in_order, signals_held
from megatronish.data.cleaning import KEEP_ALL, MAX_EXAMPLES, Cleaning, RemovedCounts, RemovedDocument
from megatronish.data.duplicates import Duplicates, SigningJob, find_duplicates
from megatronish.data.encoding import BadLine, Encoded, Encoder, EncodingJob
from megatronish.data.indexed import IndexedWriter, token_dtype
from megatronish.data.inputs import input_files, listed, text_format_of
from megatronish.data.pieces import InputPiece, lines_before
from megatronish.data.readers import batches_of

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
    copied: RemovedCounts = field(default_factory=RemovedCounts)
    """Copies of documents, which are not counted as documents."""

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
    pieces, duplicates = [InputPiece(str(path)) for path in files], None
    if cleaning.deduplication.is_wanted:
        duplicates = _duplicates(pieces, output_prefix, job, workers=workers, on_progress=on_progress)
    with _Pairs(output_prefix, names, rounds=cleaning.weights.rounds) as pairs:
        summary = encode_pieces(
            pieces,
            pairs.names,
            job,
            own_tokenizer=tokenizer(),
            open_writer=pairs.open_writer,
            workers=workers,
            on_bad_line=told_bad_lines(lambda bad: on_bad_line(str(bad)), strict=strict),
            on_progress=on_progress,
            duplicates=duplicates,
        )
        refuse_too_few(summary, files, json_keys, max_bad_fraction)
        pairs.add_copies()
    return summary


class _Pairs(ExitStack):
    """Pairs of all keys, and of the copies of documents, which are added to those at the end."""

    def __init__(self, output_prefix: str, names: Sequence[str], *, rounds: int) -> None:
        super().__init__()
        self._prefix, self._num_keys = output_prefix, len(names)
        self.names = list(names)
        if rounds > 1:
            folder = self.enter_context(working_folder(Path(f"{output_prefix}.copies")))
            self.names += [str(folder / f"{number}-{key}") for number in range(1, rounds) for key in range(len(names))]
        self._of_copies = self.enter_context(ExitStack())
        self._writers = list[IndexedWriter]()

    def open_writer(self, name: str, dtype: np.dtype[Any]) -> IndexedWriter:
        """The writer of the next of `names`."""
        writer = _open_writer(name, self._prefix, dtype=dtype)
        self._writers.append(writer)
        return (self if len(self._writers) <= self._num_keys else self._of_copies).enter_context(writer)

    def add_copies(self) -> None:
        """Add the copies of each round after those of the round before."""
        self._of_copies.close()
        for number, name in enumerate(self.names[self._num_keys :]):
            self._writers[number % self._num_keys].add_prefix(name)


def _duplicates(
    pieces: Sequence[InputPiece],
    output_prefix: str,
    job: EncodingJob,
    *,
    workers: int,
    on_progress: Callable[[Summary, int], None],
) -> Duplicates:
    """Documents that are left out, found in a folder next to the result, which is removed at the end."""
    place, signing = Path(f"{output_prefix}.signatures"), SigningJob(job.json_keys, job.cleaning)
    try:
        with working_folder(place) as folder:
            return find_duplicates(
                pieces,
                signing,
                folder / "signatures",
                workers=workers,
                on_bytes=lambda num_bytes: on_progress(Summary(), num_bytes),
            )
    except OSError as error:
        raise unwritten(f"--output-prefix {output_prefix}", place, error) from error


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
    first_piece: int = 0,
    duplicates: Duplicates | None = None,
) -> Summary:
    """Write the documents of pieces of files into the pairs `names`, one for each key of the job.

    Where documents have weights, there is a pair for each key and round of copies, those of a round together.

    The writers are those of `open_writer`, which keeps or discards what they wrote. `first_piece` is the number of the
    first piece among those of all tasks, and `duplicates` are left out.
    """
    summary, start = Summary(), time.monotonic()
    batches = batches_of(pieces, job.columns, first_piece=first_piece)
    if duplicates is not None:
        batches = (batch._replace(duplicates=duplicates.of(batch)) for batch in batches)
    dtype = token_dtype(own_tokenizer.vocab_size)
    with signals_held():  # between a file and the note that it must be deleted
        writers = [open_writer(name, dtype) for name in names]
    own_work = job.with_tokenizer(own_tokenizer)
    with closing(in_order(batches, job, own_work, workers=workers)) as all_encoded:
        for encoded in all_encoded:
            for bad in encoded.bad_lines:
                on_bad_line(bad)
            for number, writer in enumerate(writers):
                round_number, key = divmod(number, len(job.json_keys))
                tokens, sequences = _of_round(encoded, key, round_number)
                writer.add_split_documents(tokens, sequences)
                summary.tokens += len(tokens)
            _count_removed(encoded.removed, summary.removed, duplicates)
            _count_removed(encoded.copied, summary.copied, None)
            summary.documents += len(encoded.lengths[0])
            summary.bad_lines += len(encoded.bad_lines)
            summary.seconds = time.monotonic() - start
            on_progress(summary, encoded.num_bytes)
    return summary


def _of_round(encoded: Encoded, key: int, round_number: int) -> tuple[NDArray[Any], list[list[int]]]:
    """Tokens and sequences of the documents that are written in a round: in the first one all."""
    tokens, sequences = encoded.tokens[key], encoded.sequences[key]
    if round_number == 0:
        return tokens, sequences
    chosen = [number for number, copies in enumerate(encoded.num_copies) if copies > round_number]
    starts = np.concatenate(([0], np.cumsum(encoded.lengths[key], dtype=np.int64)))
    parts = [tokens[starts[number] : starts[number + 1]] for number in chosen]
    return np.concatenate([tokens[:0], *parts]), [sequences[number] for number in chosen]


def _count_removed(documents: Sequence[RemovedDocument], removed: RemovedCounts, duplicates: Duplicates | None) -> None:
    for document in documents:
        shown = removed.examples.setdefault(document.why, [])
        removed.counts[document.why] = removed.counts.get(document.why, 0) + 1
        if len(shown) < MAX_EXAMPLES:
            line = lines_before(document.origin, document.path) + document.line
            stays = f" (as {duplicates.place(document.kept)})" if duplicates and document.kept is not None else ""
            shown.append([document.path, line, document.excerpt + stays])


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


def refuse_no_name(prefix: str) -> None:
    """UserError for a PREFIX that is no beginning of the names of files."""
    name = prefix.rpartition("/")[2]
    if name in ("", ".", ".."):
        raise UserError(
            f"--output-prefix {prefix!r} names a folder and no files; add a name, of which all files begin, such as "
            f"{os.path.join(prefix, 'my')}"
        )


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
