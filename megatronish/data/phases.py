"""Phases of a plan that finds duplicates: `sign` and `match`, each in as many tasks as the plan has, before `run`.

Files lie in `PREFIX.signatures`. Task i of `sign` writes the keys of its documents, task i of `match` the links of the
i-th range of keys, and whichever task of `match` is the last joins the links of minhash to groups. Each file is written
next to its name, synced and renamed, and its record, with its sum, comes last. The content follows from the plan.
"""

import hashlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import BinaryIO, Literal, NamedTuple

import numpy as np

from megatronish.core.errors import RunError, UserError
from megatronish.core.files import AtomicFile, write_durably
from megatronish.data.duplicates import (
    KEY_RANGE,
    Duplicates,
    Links,
    SignatureFile,
    SignedPieces,
    SigningJob,
    between_positions,
    joined_groups,
    matched,
    sign_pieces,
)
from megatronish.data.shards import copy_summed
from megatronish.data.tasks import Plan, Signs, ranges, refuse_changed_inputs, stored

FORMAT = "megatronish duplicates 2"
NOT_SIGNED = (
    *("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size", "plugin", "tiktoken_pattern"),
    *("tiktoken_num_special_tokens", "tiktoken_special_tokens", "append_eod", "split_sentences"),
    *("min_tokens", "max_tokens", "sample_weights", "strict", "max_bad_fraction"),
)
"""Settings on which no key of a document depends. What is not listed is taken for one that matters."""
ROW_BYTES, LINK_BYTES = 24, 16
GROUPS = "groups"

SearchPhase = Literal["sign", "match"]


class PhaseRecord(NamedTuple):
    """What a whole task has written: documents, or links, rows of each run, and the sum of the file."""

    task: str
    rows: int
    runs: list[int]
    sha256: str
    host: str
    seconds: float


class DuplicateSearch:
    """Search for duplicates in the tasks of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.deduplication = plan, plan.cleaning.deduplication
        self.phases: tuple[SearchPhase, ...] = ("sign", "match") if self.deduplication.is_wanted else ()

    def record(self, phase: SearchPhase, number: int, *, sums: bool = False) -> PhaseRecord | None:
        """The record of a task that is whole, None for any other. With `sums` every byte of its file is read."""
        row_bytes = ROW_BYTES if phase == "sign" else LINK_BYTES
        digest = self._sign_digests[number] if phase == "sign" else self._digest(self._all_signed, number)
        return self._record(_name(phase, number), digest, row_bytes, sums=sums)

    def missing(self, phase: SearchPhase, *, sums: bool = False) -> list[int]:
        """Tasks of a phase that are not whole."""
        return [number for number in range(len(self.plan.tasks)) if self.record(phase, number, sums=sums) is None]

    def refuse_missing(self, phase: SearchPhase) -> None:
        """UserError if a task of a phase is not whole, which the next phase needs."""
        if missing := self.missing(phase):
            raise UserError(
                f"{len(missing):,} of {len(self.plan.tasks):,} tasks of {phase}, which come before, are not whole: "
                f"{ranges(missing)}; run them: megatronish preprocess {phase} --plan {self.plan.path} --task "
                f"{missing[0] if len(missing) == 1 else '0::1'}"
            )

    def refuse_not_ready(self) -> None:
        """UserError before it is known which documents are left out."""
        if self._needs_groups and self.has_groups:  # which were made when all was whole
            return
        for phase in self.phases:
            self.refuse_missing(phase)
        if not self.has_groups:
            raise UserError(
                f"the links of {self.plan.path} are not joined to groups yet, which the last task of match does; run "
                f"one again: megatronish preprocess match --plan {self.plan.path} --task 0"
            )

    def sign(self, number: int, *, workers: int, on_signed: Callable[[int, int], object]) -> PhaseRecord:
        """Write the keys of a task's documents. UserError for an input that is not that of the plan."""
        plan = self.plan
        with self._signs("sign", number) as signs:
            refuse_changed_inputs(plan, number)

            def hear(documents: int, num_bytes: int) -> None:
                signs.give(documents)
                on_signed(documents, num_bytes)

            def write(file: BinaryIO) -> SignedPieces:
                signed = sign_pieces(
                    plan.tasks[number],
                    SigningJob(tuple(plan.json_keys), plan.cleaning),
                    file,
                    workers=workers,
                    on_signed=hear,
                    first_piece=plan.first_pieces[number],
                )
                refuse_changed_inputs(plan, number)  # while it was read
                return signed

            return self._write(_name("sign", number), self._sign_digests[number], write)

    def match(self, number: int) -> PhaseRecord:
        """Write the links of a range of keys; the task that comes last joins those of minhash. UserError before it is
        their turn."""
        with self._signs("match", number):
            self.refuse_missing("sign")
            record = self.record("match", number, sums=True)
            if record is None:
                files = [self._signed(task) for task in range(len(self.plan.tasks))]
                start, end = (KEY_RANGE * place // len(self.plan.tasks) for place in (number, number + 1))
                links = matched(files, start, end)
                digest = self._digest(self._all_signed, number)
                record = self._write(_name("match", number), digest, lambda file: _write_links(links, file))
            tasks = range(len(self.plan.tasks))
            if self._needs_groups and all(self.record("match", task) is not None for task in tasks):
                self._join()
            return record

    @property
    def has_groups(self) -> bool:
        """Whether nothing is left to do for the last task of `match`."""
        return not self._needs_groups or self._record(GROUPS, self._all_signed, LINK_BYTES) is not None

    @property
    def _needs_groups(self) -> bool:
        return self.deduplication.kind == "minhash"

    def _join(self) -> None:
        if not self.has_groups:
            links = (self._links(_name("match", number)) for number in range(len(self.plan.tasks)))
            groups = joined_groups(map(np.array, links))
            self._write(GROUPS, self._all_signed, lambda file: _write_links(groups, file))

    def of_task(self, number: int) -> Duplicates:
        """Documents of a task that are left out. UserError before all phases are whole."""
        self.refuse_not_ready()
        tasks = range(len(self.plan.tasks))
        names = [GROUPS] if self._needs_groups else [_name("match", task) for task in tasks]
        pieces = self.plan.first_pieces[number : number + 2]
        links = [
            np.empty((2, 0), np.int64),
            *(np.array(between_positions(self._links(name), *pieces)) for name in names),
        ]
        joined = np.concatenate(links, axis=1)
        return Duplicates(joined[:, joined[0].argsort()], self.plan.pieces)

    def _signed(self, number: int) -> SignatureFile:
        record = self.record("sign", number)
        assert record is not None
        return SignatureFile(self.plan.signatures / f"{_name('sign', number)}.bin", record.runs)

    def _links(self, name: str) -> Links:
        path = self.plan.signatures / f"{name}.bin"
        with stored("links", path):
            size = path.stat().st_size
            return np.memmap(path, "<i8", "r").reshape(2, -1) if size else np.empty((2, 0), np.int64)

    @cached_property
    def _sign_digests(self) -> list[str]:
        settings = {name: value for name, value in self.plan.settings.items() if name not in NOT_SIGNED}
        common = self._digest(FORMAT, settings, self.plan.references, dict(self.plan.libraries))
        return [
            self._digest(common, self.plan.first_pieces[task], self.plan.facts_of_pieces(task))
            for task in range(len(self.plan.tasks))
        ]

    @cached_property
    def _all_signed(self) -> str:
        return self._digest(self._sign_digests)

    def _digest(self, *facts: object) -> str:
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @contextmanager
    def _signs(self, phase: SearchPhase, number: int) -> Iterator[Signs]:
        signs = Signs(self.plan, number, phase)
        try:
            yield signs
        except (UserError, RunError, OSError) as error:
            signs.give(failure=str(error))
            raise

    def _record(self, name: str, digest: str, row_bytes: int, *, sums: bool = False) -> PhaseRecord | None:
        path = self.plan.signatures / f"{name}.bin"
        try:
            record = PhaseRecord(**json.loads(path.with_suffix(".json").read_text(encoding="utf-8")))
            if record.task != digest or path.stat().st_size != row_bytes * sum(record.runs):
                return None
            if sums:
                copy_summed(path, None, record.sha256)
        except (OSError, ValueError, KeyError, TypeError, RunError, UserError):
            return None
        return record

    def _write(self, name: str, digest: str, write: Callable[[BinaryIO], SignedPieces]) -> PhaseRecord:
        """Write a file, and its record last: whoever is killed, or comes second, leaves the same bytes or none."""
        path, start = self.plan.signatures / f"{name}.bin", time.monotonic()
        with stored("signatures", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with AtomicFile(path) as file:
                written = write(file.file)
                path.with_suffix(".json").unlink(missing_ok=True)  # of another plan, or of a file that is damaged
            seconds = round(time.monotonic() - start, 3)
            record = PhaseRecord(
                digest, *written, sha256=copy_summed(path, None, None), host=socket.gethostname(), seconds=seconds
            )
            write_durably(path.with_suffix(".json"), json.dumps(record._asdict()) + "\n")
        return record


def _name(phase: SearchPhase, number: int) -> str:
    return f"{phase}-{number:05d}"


def _write_links(links: Links, file: BinaryIO) -> SignedPieces:
    file.write(np.ascontiguousarray(links, "<i8").data)
    return SignedPieces(links.shape[1], [links.shape[1]])
