"""Timelines: a plan with the times of its actions, simulated or recorded, and the numbers derived from them."""

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
