"""Timelines: a plan with the times of its actions, simulated or recorded; derived numbers, and text drawings."""

from statistics import median
from typing import NamedTuple

from megatronish.parallel.schedules.plan import Action, Kind


class Timed(NamedTuple):
    """An action with its start and end."""

    action: Action
    start: float
    end: float


Timeline = list[list[Timed]]
"""The actions of each stage, in order."""


class TimedPlan(NamedTuple):
    """A plan with times, and its makespan, bubble rate and peaks of live activations.

    `makespan` is the end of the last action. `bubble_rate` is the idle fraction of the span, the longest time from a
    stage's first start to its last end: 1 - m (T_F + T_B + T_W) / span, for m micro-batches (in a recorded step, with
    the work of the mean stage). `peak_live[s]` is the largest number of activations (of one micro-batch in one chunk)
    that stage s holds at once, from their F until their backward is complete: B, or W in a plan with W.
    """

    timeline: Timeline
    makespan: float
    bubble_rate: float
    peak_live: list[int]


def measure(timeline: Timeline) -> TimedPlan:
    """The derived numbers of a timeline in which every stage has at least one action."""
    span = max(row[-1].end - row[0].start for row in timeline)
    work = sum(timed.end - timed.start for row in timeline for timed in row) / len(timeline)
    splits = any(timed.action.kind == "W" for row in timeline for timed in row)
    return TimedPlan(
        timeline=timeline,
        makespan=max(row[-1].end for row in timeline),
        bubble_rate=1 - work / span if span else 0.0,
        peak_live=[_peak_live(row, released_by="W" if splits else "B") for row in timeline],
    )


def label(action: Action, *, num_chunks: int = 1) -> str:
    """The short name of an action: F0, or F0a for the first of several chunks."""
    chunk = chunk_letter(action.chunk) if num_chunks > 1 else ""
    return f"{action.kind}{action.micro_batch}{chunk}"


def chunk_letter(chunk: int) -> str:
    """The letter of a chunk, from a to z, then its number in brackets."""
    return chr(ord("a") + chunk) if chunk < 26 else f"[{chunk}]"


def chunks_of(timeline: Timeline) -> int:
    """The number of chunks of a stage."""
    return 1 + max((timed.action.chunk for row in timeline for timed in row), default=0)


def _peak_live(row: list[Timed], *, released_by: Kind) -> int:
    """The largest number of activations that a stage holds at once."""
    live = peak = 0
    for timed in row:
        live += (timed.action.kind == "F") - (timed.action.kind == released_by)
        peak = max(peak, live)
    return peak


ROUNDING = 1e-9  # of a tick: sums of costs like 0.1 must not fall into the cell before


def tick_of(timeline: Timeline) -> float:
    """The time of the shortest kind of action: the median over its actions, which differ in a recorded run."""
    durations: dict[str, list[float]] = {}
    for timed in (timed for row in timeline for timed in row if timed.end > timed.start):
        durations.setdefault(timed.action.kind, []).append(timed.end - timed.start)
    return min((median(times) for times in durations.values()), default=1.0)


def draw(timeline: Timeline, *, until: float | None = None, most_columns: int | None = None) -> str:
    """A row for each stage and a column for each tick, the length of the shortest action; `--` continues an action.

    The drawing ends at `until`, by default at the end of the last action. With `most_columns` a tick is long enough for
    that many columns. Every action has a column of its own: a very short one moves the next one to the right.
    """
    until = max((timed.end for row in timeline for timed in row), default=0.0) if until is None else until
    tick, num_chunks = tick_of(timeline), chunks_of(timeline)
    if most_columns is not None:
        tick = max(tick, until / most_columns)
    rows = [_cells(row, tick=tick, until=until, num_chunks=num_chunks) for row in timeline]
    width = 2 + max((len(text) for cells in rows for text in cells), default=2)
    margin = len(str(len(timeline) - 1))
    return "\n".join(
        f"stage {stage:>{margin}}:" + "".join(f"{text:>{width}}" for text in cells) for stage, cells in enumerate(rows)
    )


def _cells(row: list[Timed], *, tick: float, until: float, num_chunks: int) -> list[str]:
    """The text of each column of a stage's row."""

    def cell(time: float) -> int:
        return int(time / tick + ROUNDING)

    cells = ["."] * cell(until)
    free = 0
    for timed in row:
        if timed.end > timed.start:
            first = max(free, cell(timed.start))
            free = first + 1
            last = max(free, cell(timed.end))
            cells[first:last] = [label(timed.action, num_chunks=num_chunks)] + ["--"] * (last - free)
    return cells
