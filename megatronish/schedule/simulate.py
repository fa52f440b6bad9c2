"""The simulator of plans: times of every action, peak of live activations, bubble, and a picture of a hang.

Each stage does its actions in the plan's order, each as soon as what it needs has arrived:
F of a position needs F of the position before it, B needs B of the position after it (and its own F), W its own B.
That decides every start time, so times are exact, and a hang is a fact: no stage's next action can ever start.

Times suppose that a sender never waits. A hang is looked for under what `run` really does. Stage a sends to stage b on
the line (kind, b > a); before a new send the last one on that line must be received, and a receive is posted
RECEIVES_AHEAD actions before the one that needs it. What stays on a stage uses no line. So a plan that passes cannot
hang there.
"""

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from megatronish.errors import UserError
from megatronish.schedule.draw import draw
from megatronish.schedule.plan import Action, Kind, Placement, Plan, StageChunk, looped, routes
from megatronish.schedule.schedules import RECEIVES_AHEAD, PipelineSchedule
from megatronish.schedule.timeline import Timed, TimedPlan, Timeline, label, measure


class Costs(NamedTuple):
    """Times of one micro-batch through one chunk, and from one stage to another.

    B of a plan without W takes backward + weight. Schedules with different numbers of chunks compare by the times of
    a whole stage: `Costs(...).per_chunk(num_chunks)`.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    transfer: float = 0.0

    def per_chunk(self, num_chunks: int) -> "Costs":
        """These costs, of a stage, shared by its chunks. A transfer takes as long as before: its tensor is as large."""
        forward, backward, weight, transfer = self
        return Costs(forward / num_chunks, backward / num_chunks, weight / num_chunks, transfer)


def simulate(plan: Plan, *, costs: Costs | None = None, placement: Placement | None = None) -> TimedPlan:
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
    return measure(_times(plan, placement, durations, costs.transfer))


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
) -> Timeline:
    """Times of all actions that can ever start: shorter rows than the plan's where it hangs."""
    network = Network(plan, placement)
    ends: dict[tuple[int, Action], float] = {}
    timeline: Timeline = [[] for _ in plan]
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


def refuse_crossing(plan: Plan, placement: Placement) -> None:
    """ValueError where a stage sends in another order than the receiver posts its receives.

    NCCL ignores tags and matches the messages between two ranks by their order.
    """
    network = Network(plan, placement)
    sent: dict[tuple[Kind, int, int], list[Action]] = {}
    awaited: dict[tuple[Kind, int, int], list[Action]] = {}
    for stage, row in enumerate(plan):
        for action in row:
            if (target := network.target(stage, action)) and target[0] != stage:
                sent.setdefault((action.kind, stage, target[0]), []).append(target[1])
            if (source := network.source(stage, action)) and source[0] != stage:
                awaited.setdefault((action.kind, source[0], stage), []).append(action)
    num_chunks = 1 + max(place.chunk for place in placement)
    for (kind, source_stage, target_stage), order in sent.items():
        for first, other in zip(order, awaited[kind, source_stage, target_stage], strict=True):
            if first != other:
                raise ValueError(
                    f"schedule crosses messages: stage {source_stage} sends what {label(first, num_chunks=num_chunks)} "
                    f"of stage {target_stage} needs while that waits for {label(other, num_chunks=num_chunks)}; "
                    "send in the order of receiving"
                )


MAX_ACTIONS = 6000
"""The largest plan that `refuse_schedule` simulates: about a quarter of a second."""


def refuse_schedule(
    schedule: PipelineSchedule, *, num_stages: int, num_microbatches: int, num_chunks: int | None = None
) -> None:
    """UserError, with the picture, for a schedule whose plan is not whole, hangs, or crosses messages.

    For many micro-batches the plan of fewer is simulated: whole rounds of `num_stages` micro-batches are left out, down
    to two rounds, which fill and drain every pipeline here. What they repeat is the steady state between the two. A
    plan of more than MAX_ACTIONS even so is not simulated.
    """
    few = min(num_microbatches, 2 * num_stages + num_microbatches % num_stages)
    sizes = {"num_stages": num_stages, "num_chunks": num_chunks}
    placement = schedule.place(**sizes)  # type: ignore[arg-type]
    if len(placement) * few * (3 if schedule.has_weight_gradients else 2) > MAX_ACTIONS:
        return
    plan = schedule.plan(num_microbatches=few, **sizes)  # type: ignore[arg-type]
    try:
        for refuse in (refuse_broken, refuse_hang, refuse_crossing):
            refuse(plan, placement)
    except ValueError as error:
        raise UserError(
            f"pipeline_schedule={schedule.name} cannot run {few} micro-batches on {num_stages} stages: {error}\n"
            "Use another --pipeline-schedule, or mend the generator of this one"
        ) from error


class Network:
    """The routes of messages under a placement, and the sends that are under way."""

    def __init__(self, plan: Plan, placement: Placement) -> None:
        self._routes = routes(placement)
        self._order = {(stage, action): index for stage, row in enumerate(plan) for index, action in enumerate(row)}
        self._last: dict[tuple[int, Kind, bool], tuple[int, int]] = {}  # of a line: the receiver, what it needs it for

    def source(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """The stage and the action that this one gets its input from."""
        place = self._routes[action.kind, StageChunk(stage, action.chunk)].source
        return place and (place.stage, Action(action.kind, place.chunk, action.micro_batch))

    def target(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """The stage and the action that this one's output goes to."""
        place = self._routes[action.kind, StageChunk(stage, action.chunk)].target
        return place and (place.stage, Action(action.kind, place.chunk, action.micro_batch))

    def send(self, stage: int, action: Action, timeline: Timeline) -> bool:
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
