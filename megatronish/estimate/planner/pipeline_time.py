"""Time of a step of a pipeline in closed form, for the search; the simulator has the exact one for a few layouts.

A schedule without a closed form, of a plug-in, is simulated on a few stages.
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
    """Seconds that the slowest stage computes, that it waits in fill and drain, and that it waits for transfers."""

    compute: float
    bubble: float
    transfers: float

    @property
    def total(self) -> float:
        """Seconds of all three together."""
        return self.compute + self.bubble + self.transfers


class Waits(NamedTuple):
    """Seconds of the bubble, and those that transfers add."""

    bubble: float
    transfers: float


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
    def fill_hops(self) -> float:
        """Transfers of fill and drain."""
        return 2 * (self.stages - 1) * self.hop

    @property
    def steady_hops(self) -> float:
        """Transfers that each micro-batch waits for where a backward follows a forward."""
        return 2 * self.hop * self.microbatches * (self.stages - 1) / self.stages


EXPOSED_INTERLEAVED = 0.25  # of the transfers of chunks
MOST_SIMULATED = 8
"""Stages that are simulated at most: bubble and transfers of more stages grow with their number."""
ROUNDS = 3  # of as many micro-batches as there are stages
PARTS = 20
"""Durations are simulated as so many parts of a micro-batch's, so that layouts which are nearly alike share them."""


def _one_f_one_b(sizes: PipelineSizes) -> Waits:
    return Waits(sizes.spread, sizes.steady_hops)


def _gpipe(sizes: PipelineSizes) -> Waits:
    return Waits(sizes.spread, sizes.fill_hops)


def _interleaved(sizes: PipelineSizes) -> Waits:
    v, p = sizes.chunks, sizes.stages
    missing = -sizes.microbatches % p  # the last group of micro-batches is not full: its chunks wait for each other
    bubble = sizes.spread / v + missing * (v - 1) / v * sizes.times.together / p
    return Waits(bubble, v * EXPOSED_INTERLEAVED * sizes.steady_hops + sizes.fill_hops)


def _zb_h1(sizes: PipelineSizes) -> Waits:
    times = sizes.times
    return Waits((sizes.stages - 1) * max(0.0, times.forward + times.backward - times.weight), sizes.fill_hops)


def _zb_v(sizes: PipelineSizes) -> Waits:
    # Half a stage's forward or backward a stage, by the simulator.
    return Waits((sizes.stages - 1) * max(sizes.times.forward, sizes.times.backward) / 2, sizes.fill_hops)


CLOSED_FORMS: dict[str, Callable[[PipelineSizes], Waits]] = {
    "1f1b": _one_f_one_b,
    "gpipe": _gpipe,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
}
"""Waits of a pipeline by its schedule; of other schedules they are simulated."""


def pipeline_seconds(
    times: StageTimes, *, schedule: str, stages: int, chunks: int, microbatches: int, hop: float
) -> PipelineSeconds:
    """Seconds of all micro-batches through all stages."""
    compute = microbatches * times.slowest
    if stages == 1:
        return PipelineSeconds(compute, 0.0, 0.0)
    sizes = PipelineSizes(times, stages, chunks, microbatches, hop)
    bubble, transfers = CLOSED_FORMS[schedule](sizes) if schedule in CLOSED_FORMS else simulated(schedule, sizes)
    return PipelineSeconds(compute, bubble, transfers)


def simulated(schedule: str, sizes: PipelineSizes) -> Waits:
    """Waits by the simulator, on stages that take the mean time."""
    times, few = sizes.times, min(sizes.stages, MOST_SIMULATED)
    whole = times.forward + times.backward + times.weight
    parts = tuple(round(PARTS * each / whole) for each in (times.forward, times.backward, times.weight, sizes.hop))
    m = min(sizes.microbatches, ROUNDS * few)
    bubble, transfers = _simulated(schedule, few, sizes.chunks, m, parts)
    more = (sizes.stages - 1) / (few - 1) * whole / PARTS
    return Waits(more * bubble, more * transfers * sizes.microbatches / m)


@lru_cache(maxsize=10_000)
def _simulated(schedule: str, stages: int, chunks: int, m: int, parts: tuple[int, ...]) -> Waits:
    """Bubble, and what transfers add to it, in parts of a micro-batch's duration."""
    plug_in, (forward, backward, weight, hop) = SCHEDULES[schedule], parts
    backward += 0 if plug_in.has_weight_gradients else weight
    of_kind = {"F": forward / chunks, "B": backward / chunks, "W": weight / chunks}

    def duration(_stage: int, action: Action) -> float:
        return of_kind[action.kind]

    plan = plug_in.plan(num_stages=stages, num_microbatches=m, num_chunks=chunks)
    placement = plug_in.place(num_stages=stages, num_chunks=chunks)
    return waits(plan, placement, duration, hop=float(hop), compute=float(m * sum(parts[:3])))


def waits(plan: Plan, placement: Placement, duration: Durations, *, hop: float, compute: float) -> Waits:
    """Waits of a plan by the simulator: what it takes more than to `compute`, and what transfers of `hop` add."""
    alone, together = (
        simulate(plan, costs=Costs(transfer=each), placement=placement, durations=duration).makespan
        for each in (0.0, hop)
    )
    return Waits(max(0.0, alone - compute), max(0.0, together - alone))
