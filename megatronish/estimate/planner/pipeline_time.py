"""Time of a step of a pipeline in closed form, for the search; the simulator has the exact one for a few layouts.

The bubble of a schedule without a closed form, of a plug-in, is simulated on a few stages. Stages wait for every
transfer, as Megatron-LM's do; what starting them early hides is the simulator's to say.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from megatronish.parallel.schedules.plan import Action, Placement, Plan
from megatronish.parallel.schedules.simulate import Costs, Durations, simulate
from megatronish.parallel.schedules.table import SCHEDULES


class StageTimes(NamedTuple):
    """Seconds of F, B and W of a micro-batch: of the slowest stage, of all stages together, and of a mean one."""

    slowest: float
    together: float
    forward: float
    backward: float
    weight: float


class PipelineSeconds(NamedTuple):
    """Seconds that the slowest stage computes, that it waits in fill and drain, and that it waits for transfers.

    `hidden` is what of the transfers computation hides where they are started early.
    """

    compute: float
    bubble: float
    transfers: float
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the first three together."""
        return self.compute + self.bubble + self.transfers


class PipelineSizes(NamedTuple):
    """A pipeline of so many stages and chunks a stage, its micro-batches, and the seconds of a transfer."""

    times: StageTimes
    stages: int
    chunks: int
    microbatches: int
    hop: float

    @property
    def spread(self) -> float:
        """Seconds of a micro-batch on all stages but the slowest."""
        return self.times.together - self.times.slowest

    @property
    def transfers(self) -> float:
        """Seconds of the transfers that a stage waits for: of each micro-batch and chunk, forward and backward."""
        return 2 * self.hop * self.chunks * self.microbatches * (self.stages - 1) / self.stages

    @property
    def looped_transfers(self) -> float:
        """The same of interleaved stages, where all send at once, both ways, the last one to the first, too."""
        return self.hop * (self.chunks * self.microbatches + 2 * (self.stages - 1))


MOST_SIMULATED = 8
"""Stages that are simulated at most: bubble and transfers of more stages grow with their number."""
ROUNDS = 3  # of as many micro-batches as there are stages
PARTS = 20
"""Durations are simulated as so many parts of a micro-batch's, so that layouts which are nearly alike share them."""


def _interleaved(sizes: PipelineSizes) -> float:
    v, p = sizes.chunks, sizes.stages
    missing = -sizes.microbatches % p  # the last group of micro-batches is not full: its chunks wait for each other
    return sizes.spread / v + missing * (v - 1) / v * sizes.times.together / p


def _zb_h1(sizes: PipelineSizes) -> float:
    times = sizes.times
    return (sizes.stages - 1) * max(0.0, times.forward + times.backward - times.weight)


def _zb_v(sizes: PipelineSizes) -> float:
    # Half a stage's forward or backward a stage, by the simulator.
    return (sizes.stages - 1) * max(sizes.times.forward, sizes.times.backward) / 2


CLOSED_FORMS: dict[str, Callable[[PipelineSizes], float]] = {
    "1f1b": lambda sizes: sizes.spread,
    "gpipe": lambda sizes: sizes.spread,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
}
"""Bubbles of a pipeline by its schedule; those of other schedules are simulated."""


def pipeline_seconds(
    times: StageTimes, *, schedule: str, stages: int, chunks: int, microbatches: int, hop: float
) -> PipelineSeconds:
    """Seconds of all micro-batches through all stages."""
    compute = microbatches * times.slowest
    if stages == 1:
        return PipelineSeconds(compute, 0.0, 0.0)
    sizes = PipelineSizes(times, stages, chunks, microbatches, hop)
    bubble = CLOSED_FORMS[schedule](sizes) if schedule in CLOSED_FORMS else simulated(schedule, sizes)
    return PipelineSeconds(compute, bubble, sizes.looped_transfers if schedule == "interleaved" else sizes.transfers)


def simulated(schedule: str, sizes: PipelineSizes) -> float:
    """Seconds of the bubble by the simulator, on stages that take the mean time."""
    times, few = sizes.times, min(sizes.stages, MOST_SIMULATED)
    whole = times.forward + times.backward + times.weight
    parts = tuple(round(PARTS * each / whole) for each in (times.forward, times.backward, times.weight))
    bubble = _simulated(schedule, few, sizes.chunks, min(sizes.microbatches, ROUNDS * few), parts)
    return (sizes.stages - 1) / (few - 1) * whole / PARTS * bubble


@lru_cache(maxsize=10_000)
def _simulated(schedule: str, stages: int, chunks: int, m: int, parts: tuple[int, ...]) -> float:
    """Bubble in parts of a micro-batch's duration."""
    plug_in, (forward, backward, weight) = SCHEDULES[schedule], parts
    backward += 0 if plug_in.has_weight_gradients else weight
    of_kind = {"F": forward / chunks, "B": backward / chunks, "W": weight / chunks}

    def duration(_stage: int, action: Action) -> float:
        return of_kind[action.kind]

    plan = plug_in.plan(num_stages=stages, num_microbatches=m, num_chunks=chunks)
    placement = plug_in.place(num_stages=stages, num_chunks=chunks)
    return max(0.0, makespan(plan, placement, duration) - float(m * sum(parts)))


def makespan(plan: Plan, placement: Placement, duration: Durations, hop: float = 0.0) -> float:
    """Seconds of a plan by the simulator, where a transfer takes `hop`."""
    return simulate(plan, costs=Costs(transfer=hop), placement=placement, durations=duration).makespan
