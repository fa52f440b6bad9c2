"""When does each stage do what, and what follows from that? A plan with times, on paper or as it ran."""

from typing import NamedTuple

from megatronish.schedule.plan import Action, Kind


class Timed(NamedTuple):
    """An action with its time."""

    action: Action
    start: float
    end: float


Timeline = list[list[Timed]]
"""The actions of each stage, in order."""


class TimedPlan(NamedTuple):
    """A plan with times.

    `makespan` is when the last action ends. `bubble_rate` is the idle share of the span, which is the longest that a
    stage takes from its first start to its last end: 1 - m (T_F + T_B + T_W) / span, for m micro-batches (on a real
    machine, of the mean stage). `peak_live[s]` is the most activations (of one micro-batch in one chunk) that stage s
    holds at once, from their F until their backward is complete: B, or W in a plan with W.
    """

    timeline: Timeline
    makespan: float
    bubble_rate: float
    peak_live: list[int]


def measure(timeline: Timeline) -> TimedPlan:
    """The numbers of a timeline in which every stage does something."""
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
    """F0, or F0a for its first chunk where there are several."""
    chunk = chunk_letter(action.chunk) if num_chunks > 1 else ""
    return f"{action.kind}{action.micro_batch}{chunk}"


def chunk_letter(chunk: int) -> str:
    """a, b, ... z, then the chunk's number in brackets."""
    return chr(ord("a") + chunk) if chunk < 26 else f"[{chunk}]"


def chunks_of(timeline: Timeline) -> int:
    """How many chunks a stage has."""
    return 1 + max((timed.action.chunk for row in timeline for timed in row), default=0)


def _peak_live(row: list[Timed], *, released_by: Kind) -> int:
    """The most activations that a stage holds at once, in its order of actions."""
    live = peak = 0
    for timed in row:
        live += (timed.action.kind == "F") - (timed.action.kind == released_by)
        peak = max(peak, live)
    return peak
