"""Preprocessing in tasks: a plan cuts the inputs, each task writes a shard, and the shards in order are the result.

A plan (`PREFIX.plan.json`) has all that the bytes of the result depend on: the settings, hashes of the tokenizer and of
the inputs, and the pieces of each task. A task writes into a folder of its own, syncs and sums its files, and renames
them into `PREFIX.shards`; its record, `task-00003.json`, comes last. A task is whole if there is a record of the plan's
task and the files that it names. As the bytes of a task follow from the plan, two runs of a task at once rename equal
files: whoever comes second finds the task whole, or replaces a file by the same.
"""

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from megatronish.core.errors import RunError, UserError
from megatronish.core.files import (
    remove_leftover_folders,
    sync_folder,
    unwritten,
    working_folder,
    write_durably,
    write_quickly,
)
from megatronish.core.remote import Location, location
from megatronish.data.cleaning import Cleaning, RemovedCounts
from megatronish.data.duplicates import Duplicates
from megatronish.data.encoding import BadLine, Encoder, EncodingJob
from megatronish.data.indexed import CODES, IndexedTokens, IndexedWriter, bin_path, idx_path
from megatronish.data.pieces import InputFile, InputPiece, cut_into_tasks
from megatronish.data.preprocess import (
    Summary,
    check_settings,
    encode_pieces,
    output_name,
    refuse_too_few,
    told_bad_lines,
)
from megatronish.data.shards import DataShard, copy_summed
from megatronish.tokenizer.trial import TEXTS

PLAN = ".plan.json"
FORMAT = "megatronish preprocess plan 1"
MAX_TASKS = 1_000_000
MAX_NAMED = 1000
"""Bad lines that a task's record names; all are counted."""
SECONDS_BETWEEN_SIGNS = 10.0
Phase = Literal["sign", "match", "run"]
"""What is done in tasks: the first two find duplicates, the last tokenizes."""


@dataclass(frozen=True)
class Plan:
    """Settings of preprocessing, and the pieces of input of each task. `tokenizer` is a hash of what it encodes."""

    path: Path
    settings: Mapping[str, Any]
    tokenizer: str
    inputs: tuple[InputFile, ...]
    tasks: tuple[tuple[InputPiece, ...], ...]
    references: tuple[InputFile, ...] = ()
    """Files that the rules of cleaning read."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Versions of libraries, and of Unicode, on which the rules of cleaning depend."""

    @property
    def prefix(self) -> str:
        """PREFIX of the result: the plan's path without its ending, so that a folder can be moved."""
        return str(self.path).removesuffix(PLAN)

    @property
    def folder(self) -> Path:
        """The folder of the shards and their records."""
        return Path(f"{self.prefix}.shards")

    def names_of_task(self, number: int) -> list[str]:
        """Prefixes of the pairs of a task, in `folder`: of all keys, and again for each further round of copies."""
        first, rounds = task_name(number), range(2, self.cleaning.weights.rounds + 1)
        return [name for prefix in (first, *(f"{first}-{each}" for each in rounds)) for name in self.names(prefix)]

    @property
    def signatures(self) -> Path:
        """The folder of what is needed to find duplicates, and of no use later."""
        return Path(f"{self.prefix}.signatures")

    @property
    def json_keys(self) -> list[str]:
        """Keys of an object that hold text, each with a pair of its own."""
        return list(self.settings["json_keys"])

    def names(self, prefix: str) -> list[str]:
        """Prefixes of the pairs of all keys, of a task or of the result."""
        splits = bool(self.settings["split_sentences"])
        return [output_name(prefix, key, split_sentences=splits) for key in self.json_keys]

    @cached_property
    def cleaning(self) -> Cleaning:
        """Rules of which documents stay."""
        return Cleaning.of(self.settings)

    @cached_property
    def pieces(self) -> list[InputPiece]:
        """Pieces of all tasks, in the order of the input."""
        return [piece for pieces in self.tasks for piece in pieces]

    @cached_property
    def first_pieces(self) -> list[int]:
        """Number, among the pieces of all tasks, of the first of each task; and the number of all."""
        return list(accumulate(map(len, self.tasks), initial=0))

    @cached_property
    def _all_inputs(self) -> str:
        return hashlib.sha256(json.dumps(self.inputs).encode()).hexdigest()

    @cached_property
    def _input_of(self) -> dict[str, InputFile]:
        return {file.path: file for file in self.inputs}

    def digest(self, task: int) -> str:
        """A hash of all that the bytes of a task's shard depend on."""
        # How many lines may be bad changes no byte of what was written.
        settings = {name: value for name, value in self.settings.items() if name not in ("max_bad_fraction", "strict")}
        # Numbers of tasks are not among them: a task with the same pieces stays whole when others are planned again.
        facts = [FORMAT, settings, self.tokenizer, self.facts_of_pieces(task)]
        facts += [part for part in (self.references, self.libraries) if part]
        if self.cleaning.deduplication.is_wanted:  # by documents of other tasks
            facts.append(self._all_inputs)
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def facts_of_pieces(self, task: int) -> list[list[Any]]:
        """The pieces of a task, and what is known of their files."""
        return [[*piece, *self._input_of[piece.path][1:]] for piece in self.tasks[task]]


def make_plan(
    prefix: str, files: Sequence[Location], *, num_tasks: int, settings: Mapping[str, Any], tokenizer: str
) -> Plan:
    """Write the plan of these files, `<prefix>.plan.json`. UserError for files that cannot be read."""
    if not 1 <= num_tasks <= MAX_TASKS:
        raise UserError(f"--tasks {num_tasks} must be at least 1 and at most {MAX_TASKS:,}; for example 16")
    inputs = [_facts_of(str(path), "input") for path in files]
    tasks = tuple(tuple(pieces) for pieces in cut_into_tasks(inputs, num_tasks))
    cleaning = Cleaning.of(settings)
    references = tuple(_facts_of(path, flag) for flag, path in cleaning.files)
    libraries = cleaning.libraries
    plan = Plan(Path(prefix + PLAN), dict(settings), tokenizer, tuple(inputs), tasks, references, libraries)
    fields = {
        "format": FORMAT,
        "settings": plan.settings,
        "tokenizer": tokenizer,
        "inputs": [file._asdict() for file in inputs],
        "tasks": [[list(piece) for piece in pieces] for pieces in tasks],
        "references": [file._asdict() for file in references],
        "libraries": libraries,
    }
    # The plan is written last and durably: tasks on other machines read it as soon as a scheduler starts them.
    with stored("the plan", plan.path):
        plan.path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(plan.path, json.dumps(fields, indent=1) + "\n")
    return plan


def read_plan(path: Path) -> Plan:
    """The plan of a file; UserError if it is none."""
    if not path.name.endswith(PLAN):
        raise UserError(f"--plan {path} must end in {PLAN}, as megatronish preprocess plan names it")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise ValueError(f"its format is {fields['format']!r}")
        inputs = tuple(InputFile(**facts) for facts in fields["inputs"])
        tasks = tuple(tuple(InputPiece(*piece) for piece in pieces) for pieces in fields["tasks"])
        references = tuple(InputFile(**facts) for facts in fields.get("references", ()))
        libraries = dict(fields.get("libraries", {}))
        plan = Plan(path, fields["settings"], fields["tokenizer"], inputs, tasks, references, libraries)
        _check(plan)
        return plan
    except OSError as error:
        raise UserError(f"--plan {path} cannot be read: {error.strerror}; name a file of preprocess plan") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"--plan {path} is not a plan ({error}); make it again: megatronish preprocess plan") from error


def _check(plan: Plan) -> None:
    """ValueError for a plan that was written or changed by hand so that it says what no plan says."""
    settings = plan.settings
    kinds = {"append_eod": bool, "split_sentences": bool, "strict": bool, "json_keys": list, "plugin": list}
    for name, kind in kinds.items():
        if not isinstance(settings[name], kind):
            raise ValueError(f"its {name} is {settings[name]!r}")
    if not all(isinstance(word, str) for word in (*settings["json_keys"], *settings["plugin"])):
        raise ValueError("its json_keys and its plugin must be texts")
    # A key is a part of the names of files: none may lead to another folder.
    check_settings(json_keys=plan.json_keys, workers=1, max_bad_fraction=float(settings["max_bad_fraction"]))
    if [file.path for file in plan.references] != [path for _, path in plan.cleaning.files]:
        raise ValueError("its references are not the files of its rules")
    # A plan may come from another machine by mail: what it says of pieces is checked before a byte is read.
    known = {file.path for file in plan.inputs}
    for piece in (piece for pieces in plan.tasks for piece in pieces):
        ends = (piece.start,) if piece.end is None else (piece.start, piece.end)
        if piece.path not in known or not all(isinstance(place, int) for place in ends) or not 0 <= ends[0] <= ends[-1]:
            raise ValueError(f"a piece of it is {tuple(piece)!r}")


def tokenizer_digest(tokenizer: Encoder, files: Sequence[Path]) -> str:
    """A hash of a tokenizer: of its files, and of what it makes of some texts, which another library may change."""
    digest = hashlib.sha256(repr((tokenizer.vocab_size, tokenizer.eod)).encode())
    # Files say which tokenizer it is, trial texts what this machine's version of its library makes of it.
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    for text in TEXTS:
        try:
            ids: list[Any] = tokenizer.encode_all([text])
        except ValueError:  # the null tokenizer reads numbers alone
            ids = ["refused"]
        digest.update(repr(ids).encode())
    return digest.hexdigest()


@contextmanager
def stored(what: str, path: Path) -> Iterator[None]:
    """A sentence in place of an OSError where something is written."""
    try:
        yield
    except OSError as error:
        raise unwritten(f"{what} ({path})", path, error) from error


class TaskRecord(NamedTuple):
    """What a whole task has written: counts, the first bad lines, and the shard of each key with its sums."""

    task: str
    documents: int
    tokens: int
    bad_lines: int
    first_bad_lines: list[list[Any]]
    host: str
    seconds: float
    shards: list[dict[str, Any]]
    removed: dict[str, int] | None = None
    """Documents that cleaning left out, by reason."""
    removed_examples: dict[str, list[list[Any]]] | None = None
    copied: dict[str, int] | None = None
    """Copies of documents, by rule."""
    copied_examples: dict[str, list[list[Any]]] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the .bin files."""
        return sum(each["tokens"] * np.dtype(each["dtype"]).itemsize for each in self.shards)


class Sign(NamedTuple):
    """What is known of the last run of a task: where it was, when it was last heard of, and why it failed."""

    host: str
    pid: int
    job: str
    started: float
    heard: float
    documents: int
    failure: str = ""


def task_name(number: int) -> str:
    """Beginning of the names of a task's files."""
    return f"task-{number:05d}"


def record_of(plan: Plan, number: int, *, sums: bool = False) -> TaskRecord | None:
    """The record of a task that is whole, None for any other. With `sums` every byte of its shards is read."""
    try:
        record = TaskRecord(**json.loads((plan.folder / f"{task_name(number)}.json").read_text(encoding="utf-8")))
        # A record of another plan with the same prefix has another digest: its files are written again.
        names = [Path(name).name for name in plan.names_of_task(number)]
        if record.task != plan.digest(number) or [each["name"] for each in record.shards] != names:
            return None
        if not all(np.dtype(each["dtype"]) in CODES for each in record.shards):
            return None
        for shard in shards_of(plan, record):
            if bin_path(shard.prefix).stat().st_size != shard.tokens * shard.dtype.itemsize:
                return None
            # Sizes are compared always, sums where bytes are to be believed: sums read terabytes.
            assert shard.sums is not None
            idx_path(shard.prefix).stat()
            for path, digest in zip((bin_path(shard.prefix), idx_path(shard.prefix)), shard.sums, strict=True):
                if sums:
                    copy_summed(path, None, digest)
    except (OSError, ValueError, KeyError, TypeError, RunError):
        return None
    return record


def shards_of(plan: Plan, record: TaskRecord) -> list[DataShard]:
    """The shards of a record, one for each key, and again for each further round of copies."""
    return [
        DataShard(
            str(plan.folder / each["name"]),
            np.dtype(each["dtype"]),
            each["sequences"],
            each["documents"],
            each["tokens"],
            (each["bin_sha256"], each["idx_sha256"]),
        )
        for each in record.shards
    ]


def shards_by_key(plan: Plan, records: Sequence[TaskRecord]) -> list[list[DataShard]]:
    """The shards of each key in the order of the result: those of all tasks, and then of each round of copies."""
    of_tasks, num_keys = [shards_of(plan, record) for record in records], len(plan.json_keys)
    places = range(len(plan.names_of_task(0)))
    return [[shards[place] for place in places[key::num_keys] for shards in of_tasks] for key in range(num_keys)]


@dataclass(frozen=True)
class TaskRun:
    """What a run of tasks has: the tokenizer, its hash, worker processes, and what hears of bad lines and progress."""

    tokenizer: Callable[[], Encoder]
    digest: str
    workers: int
    on_bad_line: Callable[[str], None]
    on_progress: Callable[[Summary, int], None]
    duplicates: Duplicates | None = None
    """Documents of the task that are left out, of a plan that finds them (data/phases.py)."""


def run_task(plan: Plan, number: int, run: TaskRun) -> TaskRecord:
    """Write the shard of a task that is not whole; its record.

    UserError for an input or a tokenizer that is not that of the plan, RunError where the disk is full.
    """
    signs = Signs(plan, number, "run")
    try:
        assert plan.cleaning.deduplication.is_wanted == (run.duplicates is not None)
        if run.digest != plan.tokenizer:
            raise UserError(
                f"the tokenizer is not the one that {plan.path} was made with, so tokens would differ between tasks; "
                "bring the same files and versions of libraries to this machine, or plan again"
            )
        refuse_changed_inputs(plan, number)
        # Each run has a folder of its own name, so that two runs of a task never write into one file.
        with stored("the folder of shards", plan.folder):
            folder = ExitStack()
            own = folder.enter_context(working_folder(plan.folder / task_name(number)))
        with folder:
            return _publish(plan, number, own, _encode(plan, number, own, run, signs))
    # `status` on another machine then tells why, without a look at logs of the scheduler.
    except (UserError, RunError, OSError) as error:
        signs.give(failure=str(error))
        raise


def _encode(plan: Plan, number: int, own: Path, run: TaskRun, signs: "Signs") -> TaskRecord:
    """Write the pairs of a task into its own folder; their record."""
    settings, first_bad = plan.settings, list[list[Any]]()

    def on_bad_line(bad: BadLine) -> None:
        # All are counted and printed; the record keeps the first, or a bad input of millions of lines would fill it.
        if len(first_bad) < MAX_NAMED:
            first_bad.append([bad.path, bad.line, bad.why])
        run.on_bad_line(str(bad))

    def on_progress(summary: Summary, num_bytes: int) -> None:
        signs.give(summary.documents)
        run.on_progress(summary, num_bytes)

    job = EncodingJob(
        run.tokenizer, tuple(plan.json_keys), settings["append_eod"], settings["split_sentences"], plan.cleaning
    )
    names = [str(own / name) for name in plan.names_of_task(number)]
    with ExitStack() as stack:
        summary = encode_pieces(
            plan.tasks[number],
            names,
            job,
            own_tokenizer=run.tokenizer(),
            open_writer=lambda name, dtype: stack.enter_context(IndexedWriter(name, dtype=dtype)),
            workers=run.workers,
            on_bad_line=told_bad_lines(on_bad_line, strict=settings["strict"]),
            on_progress=on_progress,
            first_piece=plan.first_pieces[number],
            duplicates=run.duplicates,
        )
    refuse_changed_inputs(plan, number)  # while it was read
    return TaskRecord(
        plan.digest(number),
        summary.documents,
        summary.tokens,
        summary.bad_lines,
        first_bad,
        socket.gethostname(),
        round(summary.seconds, 3),
        [_summed(name) for name in names],
        summary.removed.counts,
        summary.removed.examples,
        summary.copied.counts,
        summary.copied.examples,
    )


def _summed(name: str) -> dict[str, Any]:
    """Facts of a pair that has been written, read back."""
    # What is on the disk is summed, not what was in memory: a write that went wrong is found here.
    pair = IndexedTokens(name)
    return {
        "name": Path(name).name,
        "dtype": pair.dtype.str,
        "sequences": len(pair),
        "documents": pair.num_documents,
        "tokens": pair.num_tokens,
        "bin_sha256": copy_summed(bin_path(name), None, None),
        "idx_sha256": copy_summed(idx_path(name), None, None),
    }


def _publish(plan: Plan, number: int, own: Path, record: TaskRecord) -> TaskRecord:
    """Rename the files of a task into the folder of all shards, the record last."""
    if (other := record_of(plan, number, sums=True)) is not None:  # of another run of this task, which was faster
        return other
    # The order makes a kill at any moment harmless: no record while files are replaced, and it comes after them.
    final = plan.folder / f"{task_name(number)}.json"
    with stored(f"task {number}", final):
        final.unlink(missing_ok=True)  # of another plan, or of files that are damaged
        for each in record.shards:
            for path in (bin_path(own / each["name"]), idx_path(own / each["name"])):
                path.replace(plan.folder / path.name)
        # Renames must be on the disk before the record says that they happened.
        sync_folder(plan.folder)
        write_durably(own / final.name, json.dumps(record._asdict(), indent=1) + "\n")
        (own / final.name).replace(final)
        sync_folder(plan.folder)
    return record


def _facts_of(path: str, flag: str) -> InputFile:
    try:
        return InputFile.of(path, what=f"--{flag}")
    except OSError as error:
        raise UserError(f"--{flag} {path} cannot be read: {error.strerror}; check the path") from error


def refuse_changed_inputs(plan: Plan, number: int) -> None:
    """UserError if an input of a task is not there, or is not what it was when the plan was made, or a library is."""
    for name, version in plan.cleaning.libraries.items():
        if version != (planned_version := plan.libraries.get(name, "of another release")):
            remedy = "take the same Python" if name == "Unicode" else f"pip install {name}=={planned_version}"
            raise UserError(
                f"{plan.path} was made with {name} {planned_version}, and this machine has {version}, which may judge "
                f"otherwise; {remedy}, or plan again"
            )
    # Only the files that this task reads: an input that another task has used up may be gone.
    paths = {*(piece.path for piece in plan.tasks[number]), *(path for _, path in plan.cleaning.files)}
    for planned in (*plan.inputs, *plan.references):
        if planned.path not in paths:
            continue
        try:
            current = InputFile.of(planned.path)
        except OSError as error:
            raise UserError(
                f"input {planned.path} of {plan.path} cannot be read: {error.strerror}; bring it back, and start where "
                "its path leads to it"
            ) from error
        if current != planned:
            sizes = "" if current.size == planned.size else f" ({planned.size:,} bytes then, {current.size:,} now)"
            raise UserError(
                f"input {planned.path} was changed since {plan.path} was made{sizes}; bring back the file, with its "
                "time (cp -p, rsync -a), or plan again, which redoes the tasks that read it"
            )


class Signs:
    """Signs of life of a task, for `status`. They decide nothing, so one that cannot be written is left out."""

    def __init__(self, plan: Plan, number: int, phase: Phase) -> None:
        job = os.environ.get("SLURM_JOB_ID", "")
        self._path = sign_path(plan, number, phase)
        self._sign = Sign(socket.gethostname(), os.getpid(), job, time.time(), 0.0, 0)
        self.give()

    def give(self, documents: int = 0, *, failure: str = "") -> None:
        """Write a sign, unless the last one is fresh."""
        now = time.time()
        # Thousands of tasks share a file system: a sign for each document would be its main load.
        if now - self._sign.heard > SECONDS_BETWEEN_SIGNS or failure:
            documents = max(documents, self._sign.documents)
            self._sign = self._sign._replace(heard=now, documents=documents, failure=failure)
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_quickly(self._path, json.dumps(self._sign._asdict()) + "\n")


def sign_path(plan: Plan, number: int, phase: Phase) -> Path:
    """The file of the last sign of life of a task."""
    return (
        plan.folder / f"{task_name(number)}.sign" if phase == "run" else plan.signatures / f"{phase}-{number:05d}.sign"
    )


def sign_of(plan: Plan, number: int, phase: Phase = "run") -> Sign | None:
    """The last sign of life of a task; None if there is none that can be read."""
    try:
        return Sign(**json.loads(sign_path(plan, number, phase).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def whole_result(plan: Plan) -> list[TaskRecord]:
    """The records of all tasks. UserError if one is not whole, or too many lines of all are bad."""
    records = [record_of(plan, number) for number in range(len(plan.tasks))]
    missing = [number for number, record in enumerate(records) if record is None]
    if missing:
        raise UserError(
            f"{len(missing):,} of {len(records):,} tasks are not whole: {ranges(missing)}; run them: megatronish "
            f"preprocess run --plan {plan.path} --task {missing[0]}"
        )
    whole_records = [record for record in records if record is not None]
    total = Summary(sum(each.documents for each in whole_records), 0, sum(each.bad_lines for each in whole_records))
    total.removed = removed_of(whole_records)
    files = [location(file.path) for file in plan.inputs]
    refuse_too_few(total, files, plan.json_keys, plan.settings["max_bad_fraction"])
    remove_leftover_folders(plan.folder)
    return whole_records


def removed_of(records: Sequence[TaskRecord]) -> RemovedCounts:
    """What cleaning left out in tasks, whose order is that of the input."""
    removed = RemovedCounts()
    for record in records:
        removed.add(RemovedCounts(record.removed or {}, record.removed_examples or {}))
    return removed


def copied_of(records: Sequence[TaskRecord]) -> RemovedCounts:
    """Copies of documents in tasks."""
    copied = RemovedCounts()
    for record in records:
        copied.add(RemovedCounts(record.copied or {}, record.copied_examples or {}))
    return copied


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as Slurm's --array has them: 1,4-9,12."""
    parts, start = list[str](), 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            first, last = numbers[start], numbers[place - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = place
    return ",".join(parts)
