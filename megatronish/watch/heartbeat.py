"""Beats: what a rank says of itself to the other ranks, once a second or so, as JSON.

Clocks of machines differ, so a beat has durations and no times; a reader notes by its own clock when a beat was new.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Collective:
    """An entry of a rank's record in words: `where` is "layer 12, forward of micro-batch 3" or empty."""

    line: str
    axis: str
    number: int
    operation: str
    shape: list[int] | None = None
    dtype: str = ""
    where: str = ""
    seconds: float = 0.0
    peer: int | None = None
    by: int = 0  # the rank that entered it

    @property
    def name(self) -> str:
        """all_gather 4,711 of tp."""
        return f"{self.operation} {self.number:,} of {self.axis}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What ranks of one line must agree on for one number. Pieces of all_to_all_rows and objects may differ."""
        if self.operation in ("all_to_all_rows", "all_gather_object"):
            return (self.operation,)
        return self.operation, tuple(self.shape or ()), self.dtype


@dataclass(frozen=True)
class ThreadBeat:
    """What one thread of a rank does: "main", or "save" in the background.

    `idle` are the seconds since its last progress, `limit` how many are allowed. `stack` has the innermost frame first.
    `in_torch`: no collective of ours is waited for, but one of torch's own.
    """

    name: str
    phase: str
    detail: str
    idle: float
    limit: float
    waiting: Collective | None = None
    stack: list[str] = field(default_factory=list)
    in_torch: str = ""
    helper_stack: list[str] = field(default_factory=list)

    @property
    def is_overdue(self) -> bool:
        """Whether it has made no progress for longer than its phase may take."""
        return self.idle > self.limit


@dataclass(frozen=True)
class Beat:
    """The state of one rank. `number` grows with every beat; `ended` says how a rank left that is no longer there.

    `lines` has the number of the newest collective of each line. A rank that pauses adds the last ones of each,
    `recent`, and the ranks of each, `members`.
    """

    rank: int
    number: int
    host: str
    pid: int
    born: str
    step: int
    threads: list[ThreadBeat]
    lines: dict[str, int]
    recent: dict[str, list[Collective]] = field(default_factory=dict)
    members: dict[str, list[int]] = field(default_factory=dict)
    ended: str = ""

    def thread(self, name: str) -> ThreadBeat | None:
        """The thread of this name, if the rank has it."""
        return next((each for each in self.threads if each.name == name), None)

    def to_json(self) -> str:
        """The beat as text."""
        return json.dumps(asdict(self), separators=(",", ":"))


def bare_beat(rank: int, recent: dict[str, list[Collective]]) -> Beat:
    """A beat of a rank of which only the last collectives are known."""
    return Beat(rank, 0, "", 0, "", 0, [], {line: several[-1].number for line, several in recent.items()}, recent)


def beat_of(text: str) -> Beat:
    """The beat that a text holds."""
    found = json.loads(text)
    threads = [
        ThreadBeat(**{**each, "waiting": None if each["waiting"] is None else Collective(**each["waiting"])})
        for each in found.pop("threads")
    ]
    recent = {line: [Collective(**each) for each in several] for line, several in found.pop("recent").items()}
    return Beat(**found, threads=threads, recent=recent)
