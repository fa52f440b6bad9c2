"""Observer of one rank: its record and its stacks as a beat, and how long each of its threads has made no progress.

Progress is any change of what a thread does: another phase, action or layer, a newer collective, another one to wait
for. It is seen by comparing with the look before, so that the threads themselves note no times for it. The clock of an
observer pauses while its process is stopped: after Ctrl-Z and fg a run continues, and nothing has hung.

`HangLimits` says how long a rank may make no progress in a phase before it counts as hanging.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from megatronish.watch.heartbeat import Beat, Collective, ThreadBeat
from megatronish.watch.record import Entry, PhaseName, RankRecord, RunPhase

TIMES_MEDIAN = 20.0
AT_LEAST = 30.0  # seconds
SHARE_OF_TIMEOUT = 0.9  # of torch's timeout of a collective, whose message names a rank that is sound


@dataclass(frozen=True)
class HangLimits:
    """Seconds without progress that each phase may have. `step` None: 20 times the median step, at least 30 s."""

    step: float | None
    start: float
    evaluation: float
    save: float
    timeout: float

    @classmethod
    def of(
        cls, *, step: float | None, start: float | None, evaluation: float | None, save: float | None, timeout: float
    ) -> "HangLimits":
        """Limits of the flags that are given. What is open is that of a step, or else just below torch's timeout."""
        others = SHARE_OF_TIMEOUT * timeout if step is None else step
        start, evaluation, save = (others if given is None else given for given in (start, evaluation, save))
        return cls(step, start, evaluation, save, timeout)

    def of_phase(self, phase: PhaseName, *, median_step: float | None) -> float:
        """Limit of a phase, where a step takes `median_step`; None as long as there were too few steps."""
        if phase in ("start", "evaluation"):
            return self.start if phase == "start" else self.evaluation
        if phase in ("save", "end"):
            return self.save
        if self.step is not None:
            return self.step
        if median_step is None:
            return self.start
        return min(max(AT_LEAST, TIMES_MEDIAN * median_step), SHARE_OF_TIMEOUT * self.timeout)


# Stacks of this process's threads as lines of text, read from outside while the threads wait in C++ code.
_PACKAGE = Path(__file__).parents[2]
_TORCH = "/torch/distributed/"
_COMPILER = tuple(
    f"/torch/{file}.py"
    for file in ("_dynamo/convert_frame", "_inductor/graph", "_inductor/codecache", "_inductor/async_compile")
)
_WAITING = ("/threading.py", "/concurrent/futures/")


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread, by its identifier; None if it has ended."""
    return sys._current_frames().get(thread)


def lines_of(frame: FrameType | None, *, most: int = 12) -> list[str]:
    """`file:line function` of the frames, the innermost first. Files of this repository are relative to it."""
    lines: list[str] = []
    while frame is not None and len(lines) < most:
        path = Path(frame.f_code.co_filename)
        name = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else Path(*path.parts[-2:])
        lines.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return lines


def torch_call(frame: FrameType | None) -> str:
    """Name of torch's collective that a frame is in; empty if it is in none. Of a wait it is the caller of the wait."""
    depth, name = 0, ""
    while frame is not None and depth < 6:
        file = frame.f_code.co_filename
        if _TORCH in file and "/checkpoint/filesystem" not in file:
            name = frame.f_code.co_name
            if name != "wrapper":
                return name
        elif not any(part in file for part in _WAITING):
            return name
        frame, depth = frame.f_back, depth + 1
    return name


def is_compiling(frame: FrameType | None) -> bool:
    """Whether a frame is inside torch's compiler, which may take longer than any step."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILER):
            return True
        frame = frame.f_back
    return False


def thread_named(prefix: str) -> int | None:
    """Identifier of the thread whose name starts so, None if there is none."""
    return next((thread.ident for thread in threading.enumerate() if thread.name.startswith(prefix)), None)


MAIN = "main"
COMPOSITE = ("writing of tensors", "reading of tensors")
"""Operations of torch that communicate by themselves, and work in between."""
_KINDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
_HELPERS = {"data": "prefetch", "save": "save", "hook": "save", "end": "save"}
_LONGEST_GAP = 2.5  # seconds between two looks, beyond which this process was stopped meanwhile
_GAP = 0.5  # seconds that count then
_RECENT = 64  # collectives of each line that a pausing rank adds to its beat


def birth_of(pid: int) -> str | None:
    """Time at which a process began, as the system counts, and its state (R, S, T ...); None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return f"{fields[19]} {fields[0]}"


class Observer:
    """Observer of the threads of this process that have a phase; `main` is that of the training."""

    def __init__(self, record: RankRecord, limits: HangLimits, *, rank: int, main: int) -> None:
        self.record, self.limits, self.rank, self.main = record, limits, rank, main
        self.host, self.pid = socket.gethostname(), os.getpid()
        self.born = (birth_of(self.pid) or "").split(" ")[0]
        self._seen: dict[int, tuple[tuple[Any, ...], float]] = {}
        self._number = 0
        self.clock, self._looked = 0.0, time.monotonic()

    def look(self, *, recent: bool = False, ended: str = "") -> Beat:
        """The beat of this moment; with `recent` it has the last collectives of each line, and its ranks."""
        self._number += 1
        now = time.monotonic()
        self.clock += now - self._looked if now - self._looked < _LONGEST_GAP else _GAP
        self._looked = now
        record = self.record
        return Beat(
            rank=self.rank,
            number=self._number,
            host=self.host,
            pid=self.pid,
            born=self.born,
            step=record.step,
            threads=list(self._threads()),
            lines={line.key: line.last for line in list(record.lines)},
            recent=self._recent() if recent else {},
            members={line.key: list(line.ranks) for line in list(record.lines)} if recent else {},
            ended=ended,
        )

    def _threads(self) -> Iterator[ThreadBeat]:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        now = time.monotonic()
        for ident, phase in list(self.record.phases.items()):
            if ident not in names:  # it has ended
                self.record.phases.pop(ident, None)
                continue
            yield self._thread(ident, phase, MAIN if ident == self.main else names[ident], now)

    def _thread(self, ident: int, phase: RunPhase, name: str, now: float) -> ThreadBeat:
        record, entry = self.record, self.record.waiting.get(ident)
        newest = record.newest.get(ident)
        what = (phase, newest, entry, record.action, record.layer) if name == MAIN else (phase, newest, entry)
        before = self._seen.get(ident)
        # Entries are compared by identity: torch's shapes and dtypes take part in no comparison.
        if before is None or any(old is not new for old, new in zip(before[0], what, strict=True)):
            self._seen[ident] = (what, self.clock)
        idle = self.clock - self._seen[ident][1]
        if idle < 0.5:
            return ThreadBeat(name, phase.name, phase.detail, idle, self._limit(phase), self._collective(entry, now))
        frame = frame_of(ident)
        torch_wait, helper = torch_call(frame), None
        if entry is not None and entry.operation in COMPOSITE and not torch_wait:
            entry = None  # inside of it, this rank is at work by itself: on the disk
        if name == MAIN and entry is None and phase.name in _HELPERS:
            helper = thread_named(_HELPERS[phase.name])
        return ThreadBeat(
            name,
            phase.name,
            phase.detail,
            idle,
            max(self.limits.start, self._limit(phase)) if is_compiling(frame) else self._limit(phase),
            self._collective(entry, now),
            lines_of(frame),
            "" if entry is not None else torch_wait,
            lines_of(frame_of(helper)) if helper is not None else [],
        )

    def _collective(self, entry: Entry | None, now: float) -> Collective | None:
        return None if entry is None else _words(entry, now, self.rank)

    def _limit(self, phase: RunPhase) -> float:
        return self.limits.of_phase(phase.name, median_step=self.record.median_step)

    def _recent(self) -> dict[str, list[Collective]]:
        now, entries_by_line = time.monotonic(), dict[str, list[Collective]]()
        entries = sorted((each for each in list(self.record.ring) if each is not None), key=lambda each: each.since)
        for entry in entries:
            if entry.peer is None:
                entries_by_line.setdefault(entry.line.key, []).append(_words(entry, now, self.rank))
        return {line: several[-_RECENT:] for line, several in entries_by_line.items()}


def _words(entry: Entry, now: float, rank: int) -> Collective:
    return Collective(
        line=entry.line.key,
        axis=entry.line.name,
        number=entry.number,
        operation=entry.operation,
        shape=None if entry.shape is None else list(entry.shape),
        dtype=str(entry.dtype or "").removeprefix("torch."),
        where=_where(entry),
        seconds=round(now - entry.since, 2),
        peer=entry.peer,
        by=rank,
    )


def _where(entry: Entry) -> str:
    parts = [] if entry.layer is None else [f"layer {entry.layer}"]
    if entry.action is not None:
        parts.append(f"{_KINDS.get(entry.action.kind, entry.action.kind)} of micro-batch {entry.action.micro_batch}")
    return ", ".join(parts)
