"""Simulator of plans: times of every action, peak of live activations, bubble rate, and a picture of a hang.

Each stage executes its actions in the plan's order, each as soon as its input has arrived: F of a position needs F of
the previous position, B needs B of the next position (and its own F), W needs its own B. This determines every start
time, so times are exact, and so are hangs: in a hang no stage's next action can ever start.

Times assume that a sender never waits. The check for hangs uses the rules of the executor. Stage a sends to stage b on
the line (a, kind, b > a). Before a new send, the last send on that line must be complete, for which its receive must be
posted; a receive is posted RECEIVES_AHEAD actions before the action that needs it. Transfers within a stage use no
line. So a plan that passes the check cannot hang in the executor.
"""

from collections import Counter, deque
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from megatronish.core.errors import UserError
from megatronish.parallel.schedules.plan import Action, Kind, Placement, Plan, StageChunk, looped, routes
from megatronish.parallel.schedules.table import RECEIVES_AHEAD, PipelineSchedule
from megatronish.parallel.schedules.timeline import Timed, TimedPlan, Timeline, draw, label, measure


class Costs(NamedTuple):
    """Times of F, B and W of one micro-batch in one chunk, and of a transfer between two stages, in any unit.

    B of a plan without W takes backward + weight. Schedules with different numbers of chunks compare by the times of
    a whole stage: `Costs(...).per_chunk(num_chunks)`.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    transfer: float = 0.0

    def per_chunk(self, num_chunks: int) -> "Costs":
        """The costs of a chunk, from those of a stage. A transfer takes the same time: its tensor has the same size."""
        forward, backward, weight, transfer = self
        return Costs(forward / num_chunks, backward / num_chunks, weight / num_chunks, transfer)


Durations = Callable[[int, Action], float]
"""How long a stage is at work on an action, by its number and the action."""


def simulate(
    plan: Plan,
    *,
    costs: Costs | None = None,
    placement: Placement | None = None,
    durations: Durations | None = None,
) -> TimedPlan:
    """Times of every action. ValueError for a plan that is incomplete or hangs; for a hang, with a picture.

    `placement` is `looped` over the plan's chunks unless given. `durations`, where stages or chunks differ, replace all
    costs except that of a transfer.
    """
    costs = costs or Costs()
    num_chunks = 1 + max((action.chunk for row in plan for action in row), default=0)
    placement = placement or looped(num_stages=len(plan), num_chunks=num_chunks)
    refuse_broken(plan, placement)
    refuse_hang(plan, placement)
    return measure(_times(plan, placement, durations or _alike(plan, costs), costs.transfer))


def _alike(plan: Plan, costs: Costs) -> Durations:
    """Durations of stages that are all alike."""
    has_weight = any(action.kind == "W" for row in plan for action in row)
    backward = costs.backward if has_weight else costs.backward + costs.weight
    of_kind: dict[Kind, float] = {"F": costs.forward, "B": backward, "W": costs.weight}
    return lambda _stage, action: of_kind[action.kind]


def refuse_broken(plan: Plan, placement: Placement) -> None:
    """ValueError unless each stage has F, B (and W) of every micro-batch once for each of its chunks, in that order."""
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
    """ValueError, with a picture that ends in the first column without actions, for a plan that hangs."""
    # 1. Execute the plan under the rules of the executor, with all actions one tick long.
    timeline = _times(plan, placement, lambda _stage, _action: 1.0, 0.0, waiting_sends=True)
    # 2. The actions that never started are missing from the timeline: the plan hangs after the last end.
    if sum(map(len, timeline)) < sum(map(len, plan)):
        tick = int(max((row[-1].end for row in timeline if row), default=0.0))
        raise ValueError(f"schedule hangs at tick {tick}:\n{draw(timeline, until=tick + 1)}")


def _times(
    plan: Plan, placement: Placement, duration: Durations, transfer: float, *, waiting_sends: bool = False
) -> Timeline:
    """Times of all actions that can start. If the plan hangs, rows are shorter than the plan's.

    With `waiting_sends` an action also waits until its line is free, as in the executor.
    """
    network = Network(plan, placement)
    ends: dict[tuple[int, Action], float] = {}
    timeline: Timeline = [[] for _ in plan]
    waiting: dict[tuple[int, Action | None], list[int]] = {}  # stages, by the action, or the stage, that they wait for
    ready = deque(range(len(plan)))
    # Take stages that can go on until there are none: then the plan is finished, or it hangs.
    while ready:
        stage = ready.popleft()
        row, done = plan[stage], timeline[stage]
        # As many of the stage's next actions as possible.
        while len(done) < len(row):
            action = row[len(done)]
            # 1. The action starts after the stage's previous one, and after its input has arrived.
            start = done[-1].end if done else 0.0
            if cause := network.source(stage, action):
                if cause not in ends:
                    waiting.setdefault(cause, []).append(stage)
                    break
                start = max(start, ends[cause] + (transfer if cause[0] != stage else 0.0))
            # 2. Its output needs a free line.
            if waiting_sends and (receiver := network.send(stage, action, timeline)) is not None:
                waiting.setdefault((receiver, None), []).append(stage)
                break
            # 3. It can start: its end, and that its stage goes on, may be what other stages wait for.
            end = ends[stage, action] = start + duration(stage, action)
            done.append(Timed(action, start, end))
            ready.extend(waiting.pop((stage, action), ()))
            ready.extend(waiting.pop((stage, None), ()))
    return timeline


def refuse_crossing(plan: Plan, placement: Placement) -> None:
    """ValueError if a stage sends in another order than the receiver posts its receives.

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
    """UserError, with the picture, for a schedule whose plan is incomplete, hangs, or crosses messages.

    With many micro-batches a smaller plan is simulated: whole rounds of `num_stages` micro-batches are left out, down
    to two rounds, which fill and drain every pipeline here. The rounds left out repeat the steady state between the
    two. A plan that still has more than MAX_ACTIONS actions is not simulated.
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
            "Use another --pipeline-schedule, or correct the generator of this one"
        ) from error


class Network:
    """The routes of messages under a placement, and the last send of each line."""

    def __init__(self, plan: Plan, placement: Placement) -> None:
        self._routes = routes(placement)
        self._order = {(stage, action): index for stage, row in enumerate(plan) for index, action in enumerate(row)}
        self._last: dict[
            tuple[int, Kind, bool], tuple[int, int]
        ] = {}  # by line: the receiver, and the index of the action that needs the message

    def source(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """The stage and the action whose output is this action's input; None at the start of the model."""
        place = self._routes[action.kind, StageChunk(stage, action.chunk)].source
        return place and (place.stage, Action(action.kind, place.chunk, action.micro_batch))

    def target(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """The stage and the action whose input is this action's output; None at the end of the model."""
        place = self._routes[action.kind, StageChunk(stage, action.chunk)].target
        return place and (place.stage, Action(action.kind, place.chunk, action.micro_batch))

    def send(self, stage: int, action: Action, timeline: Timeline) -> int | None:
        """Send the action's output on its line. If the last send there has no receive posted yet: its receiver."""
        target = self.target(stage, action)
        if target is None or target[0] == stage:
            return None
        line = (stage, action.kind, target[0] > stage)
        if line in self._last:
            receiver, index = self._last[line]
            if len(timeline[receiver]) < index - RECEIVES_AHEAD:
                return receiver
        self._last[line] = target[0], self._order[target]
        return None
