"""In which order does each pipeline stage work? Schedules as plain data.

A plan is a list of actions for each stage: forward (F), backward (B) or weight gradient (W) of one micro-batch
through one of the stage's model chunks. Nothing here computes, waits or sends: `simulate` times a plan on paper and
`run` carries it out on ranks, both with one loop for every schedule. So a new schedule is a generator below and a
line in `SCHEDULES`.

The model is cut into positions, first layers first. A `Placement` says where each position sits: with one chunk a
stage, position p is stage p; interleaving goes round the stages again for the second chunk; a zero-bubble V comes
back the way it went. A plan with W actions splits the backward: its B yields the input gradient alone. In a plan
without them B is the whole backward.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W"]


class Action(NamedTuple):
    """One piece of work of one stage."""

    kind: Kind
    chunk: int
    micro_batch: int


class Place(NamedTuple):
    """Where a piece of the model sits."""

    stage: int
    chunk: int


Plan = list[list[Action]]
"""The actions of each stage, in order."""

Placement = list[Place]
"""The place of each model position, first layers first."""


def looped(*, num_stages: int, num_chunks: int = 1) -> Placement:
    """Positions go round the stages, once for each chunk (arXiv:2104.04473, section 2.2)."""
    return [Place(stage, chunk) for chunk in range(num_chunks) for stage in range(num_stages)]


def gpipe(*, num_stages: int, num_microbatches: int) -> Plan:
    """All forwards, then all backwards: GPipe of Huang et al. 2019 (arXiv:1811.06965, fig. 2).

    Every stage holds num_microbatches live activations.
    """
    micro_batches = range(num_microbatches)
    actions = [Action("F", 0, i) for i in micro_batches] + [Action("B", 0, i) for i in micro_batches]
    return [list(actions) for _ in range(num_stages)]


def one_f_one_b(*, num_stages: int, num_microbatches: int) -> Plan:
    """1F1B of Narayanan et al. 2021 (arXiv:2104.04473, fig. 4).

    Stage s holds at most min(num_stages - s, num_microbatches) live activations.
    """
    forwards = [Action("F", 0, i) for i in range(num_microbatches)]
    backwards = [Action("B", 0, i) for i in range(num_microbatches)]
    plan = []
    for stage in range(num_stages):
        live = min(num_stages - stage, num_microbatches)
        steady = num_microbatches - live
        pairs = zip(backwards[:steady], forwards[live:], strict=True)
        plan.append(forwards[:live] + [action for pair in pairs for action in pair] + backwards[steady:])
    return plan


SCHEDULES: dict[str, Callable[..., Plan]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""The schedules of --pipeline-schedule. All take num_stages and num_microbatches."""
