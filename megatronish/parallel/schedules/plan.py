"""Pipeline plans: the actions of each stage in a step, as plain data.

A plan is a list of actions for each stage: forward (F), backward (B) or weight gradient (W) of one micro-batch
through one of the stage's model chunks. Nothing here computes or communicates: `simulate` computes the times of a plan
and `Executor.run` executes it on ranks, both with one loop for every schedule.

The model is cut into positions, first layers first. A `Placement` maps positions to stages: with one chunk a stage,
position p is stage p; interleaving goes round the stages again for the second chunk; in a V the second chunk goes back
from the last stage to the first. In a plan with W actions the backward is split: its B computes the input gradient
alone. In a plan without W actions B is the whole backward.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

Kind = Literal["F", "B", "W"]


class Action(NamedTuple):
    """One action of one stage: a micro-batch through a chunk, forward, backward or its weight gradients."""

    kind: Kind
    chunk: int
    micro_batch: int


class StageChunk(NamedTuple):
    """The place of a position of the model: a stage, and a chunk of that stage."""

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


Item = TypeVar("Item")  # an action, or None for padding


def one_by_one(forwards: Sequence[Item], backwards: Sequence[Item], *, ahead: int) -> list[Item]:
    """`ahead` forwards, then one backward and one forward in turn, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    steady = len(forwards) - ahead
    pairs = zip(backwards[:steady], forwards[ahead:], strict=True)
    return [*forwards[:ahead], *(action for pair in pairs for action in pair), *backwards[steady:]]


class Route(NamedTuple):
    """Source of the input and target of the output of a kind of action in one place; None at an end of the model."""

    source: StageChunk | None
    target: StageChunk | None


EVERY_LINE: tuple[tuple[Kind, bool], ...] = (("F", True), ("F", False), ("B", True), ("B", False))
"""Kind and direction (True: to a later stage) of all that stages may send."""


def lines(placement: Placement) -> set[tuple[Kind, bool]]:
    """Kind and direction of what stages send under this placement. Activations go to a later stage in every one."""
    directions: set[tuple[Kind, bool]] = {("F", True)}
    for before, after in pairwise(placement):
        if before.stage != after.stage:
            directions |= {("F", after.stage > before.stage), ("B", before.stage > after.stage)}
    return directions


def routes(placement: Placement) -> dict[tuple[Kind, StageChunk], Route]:
    """Routes by kind and place: F goes to the next position, B to the previous one, W has no transfer."""
    route_by_place: dict[tuple[Kind, StageChunk], Route] = {}
    padded = [None, *placement, None]
    for before, place, after in zip(padded, placement, padded[2:], strict=False):
        route_by_place["F", place] = Route(before, after)
        route_by_place["B", place] = Route(after, before)
        route_by_place["W", place] = Route(None, None)
    return route_by_place
