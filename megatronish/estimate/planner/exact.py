"""Exact figures of a few layouts: the simulator's pipeline instead of the closed form, and the memory of each stage."""

from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.estimate.costs.candidate import Candidate, candidate_of, complaints, config_of
from megatronish.estimate.costs.memory import MemoryModel
from megatronish.estimate.costs.memory_table import Memory
from megatronish.estimate.planner.layer_time import Passes
from megatronish.estimate.planner.pipeline_time import PipelineSeconds, makespan
from megatronish.estimate.planner.search import Search
from megatronish.estimate.planner.step_time import StepClock, StepSeconds
from megatronish.estimate.planner.workload import StageLayers
from megatronish.parallel.schedules.plan import Action, StageChunk
from megatronish.parallel.stages import Stages, stage_loads
from megatronish.specs.costs import DeviceType

MOST_ACTIONS = 12_000
"""Of a plan that is simulated; a longer one is, with fewer micro-batches, and the rest is added at the steady rate."""


class StageMemory(NamedTuple):
    """Memory of the fullest stage; `in_flight` is what of the activations other micro-batches than one keep."""

    stage: int
    memory: Memory
    in_flight: int

    @property
    def owners(self) -> dict[str, int]:
        """Bytes on the device by what they are for; what is on the host or a disk is not among them."""
        memory = self.memory._asdict()
        names = {"parameters": "weights", "temporary": "temporaries"}
        owners = {names.get(name, name): size for name, size in memory.items() if name not in ("host", "disk")}
        owners["activations"] -= self.in_flight
        return owners | {"in flight": self.in_flight}


class Planned(NamedTuple):
    """A layout with its exact figures, and the config that runs it."""

    candidate: Candidate
    config: Config
    step: StepSeconds
    fullest: StageMemory


def plan_of(search: Search, candidate: Candidate) -> Planned:
    """The exact figures of a layout."""
    stages = search.stages(candidate)
    config = config_of(search.config, candidate)
    return Planned(
        candidate,
        config,
        exact_step(search.clock, candidate, stages, config),
        fullest_stage(config, search.work.vocab_size),
    )


def refusal(search: Search, planned: Planned) -> str | None:
    """Why a layout cannot be printed after all: a rule of the config, or its exact memory."""
    if problems := complaints(planned.config):
        return problems[0]
    total = planned.fullest.memory.total
    return None if total <= search.limit else f"needs {total / 2**30:.1f} GiB"


def fullest_stage(config: Config, vocab_size: int, device: DeviceType = "cuda", *, kernels: bool = True) -> StageMemory:
    """Expected memory of the stage that needs most: on a GPU at its peak, with fused operators or without."""
    model, candidate = MemoryModel.alone(config, vocab_size, device, kernels=kernels), candidate_of(config)
    loads = stage_loads(config, vocab_size)
    expected = model.of_stages(candidate, loads)
    number = max(range(len(expected)), key=lambda stage: expected[stage].total)
    of_one = model.of_one_micro_batch(candidate, model.layers.stage(loads[number]))
    return StageMemory(number, expected[number], max(0, expected[number].activations - of_one))


def exact_step(clock: StepClock, candidate: Candidate, stages: StageLayers, config: Config) -> StepSeconds:
    """Seconds of a step, with the pipeline's from the simulator."""
    closed = clock.step(candidate, stages)
    if candidate.mesh.pp == 1:
        return closed
    times, slowest = clock.stage_times(candidate, stages)
    return clock.around(candidate, stages, _simulated(clock, candidate, config, closed.pipeline), times, slowest)


def _simulated(clock: StepClock, candidate: Candidate, config: Config, closed: PipelineSeconds) -> PipelineSeconds:
    work = clock.work
    stages = Stages.of(config.parallel, work.model, vocab_size=work.vocab_size, seq_length=work.seq_length)
    times: dict[StageChunk, Passes] = {}
    for place in stages.placement:
        counts = work.layers.chunk(stages.layers_at(place)).counts
        ends = {"is_first": stages.is_first(place), "is_last": stages.is_last(place)}
        times[place] = clock.passes_of(candidate, counts, **ends)
    splits = stages.schedule.has_weight_gradients

    def duration(stage: int, action: Action) -> float:
        passes = times[StageChunk(stage, action.chunk)]
        if action.kind == "F":
            return passes.forward.total
        if action.kind == "W":
            return passes.weight.total
        return passes.backward.total + (0.0 if splits else passes.weight.total)

    def of(number: int) -> tuple[float, float]:
        """Seconds of so many micro-batches without transfers, and what these add where they are started early."""
        plan = stages.schedule.plan(num_stages=stages.num_stages, num_microbatches=number, num_chunks=stages.num_chunks)
        alone, together = (makespan(plan, stages.placement, duration, hop) for hop in (0.0, clock.hop(candidate)))
        return alone, max(0.0, together - alone)

    m = candidate.num_microbatches(work.global_batch)
    few = _few(m, stages.num_stages, stages.num_chunks * (3 if splits else 2))
    alone, transfers = of(few)
    if few < m:  # in the steady state each further round of micro-batches costs transfers, too
        before = of(few - stages.num_stages)[1]
        transfers += (m - few) / stages.num_stages * max(0.0, transfers - before)
    whole = max(closed.transfers, transfers)  # of the closed form, where each stage waits for each of them
    return PipelineSeconds(closed.compute, max(0.0, alone - closed.compute / m * few), whole, whole - transfers)


def _few(m: int, stages: int, actions: int) -> int:
    """Micro-batches to simulate: all, or as many whole rounds as are few enough and at least three."""
    most = max(3, MOST_ACTIONS // (actions * stages * stages)) * stages
    return m if m <= most else most + m % stages
