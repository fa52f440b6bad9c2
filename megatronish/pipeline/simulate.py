"""How long does a plan take, how much does it hold alive, and does it hang? A plan on paper.

Each stage does its actions in the plan's order, each as soon as what it needs has arrived:
F of a position needs F of the position before it, B needs B of the position after it (and its own F), W its own B.
That decides every start time, so times are exact, and a hang is a fact: no stage's next action can ever start.

Times suppose that a sender never waits. A hang is looked for under what `run` really does: a receive is posted one
action early, and a send waits until the last one in its direction is received. So a plan that passes cannot hang there.
"""

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from megatronish.pipeline.draw import Timed, draw, label
from megatronish.pipeline.plan import Action, Kind, Place, Placement, Plan, looped, routes
from megatronish.pipeline.schedule import RECEIVES_AHEAD


class Costs(NamedTuple):
    """Times of one micro-batch through one chunk. B of a plan without W takes backward + weight."""

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    transfer: float = 0.0


class Simulation(NamedTuple):
    """A plan with times.

    `bubble_rate` is 1 - m (T_F + T_B + T_W) / span, for m micro-batches and the longest span of a stage from its first
    start to its last end. `peak_live[s]` is the most activations (of one micro-batch in one chunk) that stage s holds
    at once, from their F until their backward is complete: B, or W in a plan with W.
    """

    timeline: list[list[Timed]]
    makespan: float
    bubble_rate: float
    peak_live: list[int]


def simulate(plan: Plan, *, costs: Costs | None = None, placement: Placement | None = None) -> Simulation:
    """Times of every action. ValueError for a plan that is not whole or hangs, a hang with its picture.

    `placement` is `looped` over the plan's chunks unless given.
    """
    costs = costs or Costs()
    num_chunks = 1 + max((action.chunk for row in plan for action in row), default=0)
    placement = placement or looped(num_stages=len(plan), num_chunks=num_chunks)
    refuse_broken(plan, placement)
    has_weight = any(action.kind == "W" for row in plan for action in row)
    backward = costs.backward if has_weight else costs.backward + costs.weight
    durations: dict[Kind, float] = {"F": costs.forward, "B": backward, "W": costs.weight}
    refuse_hang(plan, placement)
    timeline = _times(plan, placement, durations, costs.transfer)
    span = max(row[-1].end - row[0].start for row in timeline)
    work = max(sum(durations[action.kind] for action in row) for row in plan)
    return Simulation(
        timeline=timeline,
        makespan=max(row[-1].end for row in timeline),
        bubble_rate=1 - work / span if span else 0.0,
        peak_live=[_peak_live(row, released_by="W" if has_weight else "B") for row in plan],
    )


def refuse_broken(plan: Plan, placement: Placement) -> None:
    """ValueError unless each stage does F, B (and W) of every micro-batch once in each of its chunks, in that order."""
    kinds: tuple[Kind, ...] = ("F", "B", "W") if any(a.kind == "W" for row in plan for a in row) else ("F", "B")
    num_microbatches = 1 + max((action.micro_batch for row in plan for action in row), default=-1)
    num_chunks = 1 + max(place.chunk for place in placement)
    if num_microbatches == 0:
        raise ValueError("schedule is empty: it needs at least one micro-batch")

    def name(action: Action) -> str:
        return label(action, num_chunks=num_chunks)

    for stage, row in enumerate(plan):
        chunks = [place.chunk for place in placement if place.stage == stage]
        wanted = [Action(kind, chunk, i) for chunk in chunks for i in range(num_microbatches) for kind in kinds]
        counts = Counter(row)
        for action in wanted:
            if counts[action] != 1:
                problem = f"repeats {name(action)}" if counts[action] else f"misses {name(action)}"
                raise ValueError(f"schedule of stage {stage} {problem}; every action must appear once")
        if foreign := sorted(counts.keys() - set(wanted)):
            raise ValueError(f"schedule of stage {stage} has {name(foreign[0])}, but the stage holds chunks {chunks}")
        order = {action: index for index, action in enumerate(row)}
        for first, then in pairwise(wanted):
            same = (first.chunk, first.micro_batch) == (then.chunk, then.micro_batch)
            if same and order[first] > order[then]:
                raise ValueError(f"schedule of stage {stage} does {name(then)} before {name(first)}; swap them")


def refuse_hang(plan: Plan, placement: Placement) -> None:
    """ValueError, with a picture, for a plan that cannot go on after some tick: its last column is all silence."""
    timeline = _times(plan, placement, {"F": 1.0, "B": 1.0, "W": 1.0}, 0.0, waiting_sends=True)
    if sum(map(len, timeline)) < sum(map(len, plan)):
        tick = int(max((row[-1].end for row in timeline if row), default=0.0))
        raise ValueError(f"schedule hangs at tick {tick}:\n{draw(timeline, until=tick + 1)}")


def _times(
    plan: Plan, placement: Placement, durations: dict[Kind, float], transfer: float, *, waiting_sends: bool = False
) -> list[list[Timed]]:
    """Times of all actions that can ever start: shorter rows than the plan's where it hangs."""
    network = Network(plan, placement)
    ends: dict[tuple[int, Action], float] = {}
    timeline: list[list[Timed]] = [[] for _ in plan]
    progress = True
    while progress:
        progress = False
        for stage, (row, done) in enumerate(zip(plan, timeline, strict=True)):
            while len(done) < len(row):
                action = row[len(done)]
                start = done[-1].end if done else 0.0
                if cause := network.source(stage, action):
                    if cause not in ends:
                        break
                    start = max(start, ends[cause] + (transfer if cause[0] != stage else 0.0))
                if waiting_sends and not network.send(stage, action, timeline):
                    break
                end = ends[stage, action] = start + durations[action.kind]
                done.append(Timed(action, start, end))
                progress = True
    return timeline


class Network:
    """Who hears from whom under a placement, and which sends are on their way."""

    def __init__(self, plan: Plan, placement: Placement) -> None:
        self._routes = routes(placement)
        self._order = {(stage, action): index for stage, row in enumerate(plan) for index, action in enumerate(row)}
        self._last: dict[tuple[int, Kind, bool], tuple[int, int]] = {}  # of a line: the receiver, what it needs it for

    def source(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """The stage and the action that this one gets its input from."""
        place = self._routes[action.kind, Place(stage, action.chunk)].source
        return place and (place.stage, action._replace(chunk=place.chunk))

    def target(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """The stage and the action that this one's output goes to."""
        place = self._routes[action.kind, Place(stage, action.chunk)].target
        return place and (place.stage, action._replace(chunk=place.chunk))

    def send(self, stage: int, action: Action, timeline: list[list[Timed]]) -> bool:
        """Take the action's line for what it sends, if the last send on it has a receive posted."""
        target = self.target(stage, action)
        if target is None or target[0] == stage:
            return True
        line = (stage, action.kind, target[0] > stage)
        if line in self._last:
            receiver, index = self._last[line]
            if len(timeline[receiver]) < index - RECEIVES_AHEAD:
                return False
        self._last[line] = target[0], self._order[target]
        return True


def _peak_live(row: list[Action], *, released_by: Kind) -> int:
    """The most activations that a stage holds at once, in its order of actions."""
    live = peak = 0
    for action in row:
        live += (action.kind == "F") - (action.kind == released_by)
        peak = max(peak, live)
    return peak
