"""What is a plan? The work of each pipeline stage, as plain data.

A plan is a list of actions for each stage: forward (F), backward (B) or weight gradient (W) of one micro-batch
through one of the stage's model chunks. Nothing here computes, waits or sends: `simulate` times a plan on paper and
`run` carries it out on ranks, both with one loop for every schedule.

The model is cut into positions, first layers first. A `Placement` says where each position sits: with one chunk a
stage, position p is stage p; interleaving goes round the stages again for the second chunk; a V comes back the way
it went. A plan with W actions splits the backward: its B yields the input gradient alone. In a plan without them B
is the whole backward.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W"]


class Action(NamedTuple):
    """One piece of work of one stage."""

    kind: Kind
    chunk: int
    micro_batch: int


class StageChunk(NamedTuple):
    """Where a piece of the model sits."""

    stage: int
    chunk: int


Plan = list[list[Action]]
"""The actions of each stage, in order."""

Placement = list[StageChunk]
"""The place of each model position, first layers first."""


def looped(*, num_stages: int, num_chunks: int = 1) -> Placement:
    """Positions go round the stages, once for each chunk (arXiv:2104.04473, section 2.2)."""
    return [StageChunk(stage, chunk) for chunk in range(num_chunks) for stage in range(num_stages)]


def v_shaped(*, num_stages: int, num_chunks: int = 2) -> Placement:
    """Positions go down the stages and up again, so that the first stage holds the first position and the last one."""
    stages = range(num_stages)
    return [
        StageChunk(stage, chunk) for chunk in range(num_chunks) for stage in (reversed(stages) if chunk % 2 else stages)
    ]


def one_by_one(forwards: Sequence[Action], backwards: Sequence[Action], *, ahead: int) -> list[Action]:
    """`ahead` forwards, then a backward and a forward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    steady = len(forwards) - ahead
    pairs = zip(backwards[:steady], forwards[ahead:], strict=True)
    return [*forwards[:ahead], *(action for pair in pairs for action in pair), *backwards[steady:]]


class Route(NamedTuple):
    """Where the work of a kind in one place gets its input from, and where its output goes; None: the model ends."""

    source: StageChunk | None
    target: StageChunk | None


def routes(placement: Placement) -> dict[tuple[Kind, StageChunk], Route]:
    """F comes from the position before and goes to the one after, B the other way; W stays where it is."""
    found: dict[tuple[Kind, StageChunk], Route] = {}
    padded = [None, *placement, None]
    for before, place, after in zip(padded, placement, padded[2:], strict=False):
        found["F", place] = Route(before, after)
        found["B", place] = Route(after, before)
        found["W", place] = Route(None, None)
    return found
