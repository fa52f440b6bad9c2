"""Search over every legal layout: memory first, then time, ranked by the worse end of the interval.

The minimum over tens of thousands of predictions is where the model is most optimistic, so the search guards against
it: overlap is charged at its worse end, a chunk must compute longer than its transfer takes, ZeRO-3 under a pipeline
has to be asked for, and a result is one layout for each mesh and not one winner.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple, get_args

from megatronish.config.check import problems
from megatronish.config.config import Config
from megatronish.core.garbage import uncollected
from megatronish.core.remembered import remembered
from megatronish.estimate.costs.candidate import UNASKED, Candidate, MeshSizes, Recompute, config_of, least_zero
from megatronish.estimate.costs.layer_kinds import StageKinds
from megatronish.estimate.costs.memory import MemoryModel
from megatronish.estimate.planner.device_speed import Efficiencies, KnownError, known_error, unconfirmed
from megatronish.estimate.planner.devices import Device
from megatronish.estimate.planner.step_time import StepClock, StepSeconds
from megatronish.estimate.planner.workload import StageLayers, Workload
from megatronish.parallel.schedules.live_activations import StagePlan
from megatronish.parallel.schedules.table import SCHEDULES

FILLED = 0.87
"""Part of a device's memory that a plan may fill: allocator, context and libraries take 2 to 4 GiB of the rest."""
MOST_SAMPLES = 16  # of a micro-batch
MOST_NODES_OF_TP = 2  # tensor parallelism over more nodes than this is never fast
FEWEST_TOKENS = 512  # of a sequence on a rank of cp
MOST_CHUNKS = 16
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


class Found(NamedTuple):
    """A layout that fits, with the worse end of its step time and the memory of its fullest stage."""

    seconds: float
    nbytes: int
    candidate: Candidate


class SearchResult(NamedTuple):
    """Result of a search: legal layouts that were tried, those that fit, best first, and the smallest one."""

    legal: int
    found: list[Found]
    smallest: tuple[int, Candidate] | None


@dataclass
class Search:
    """Search over the layouts of a config on a number of devices."""

    config: Config
    work: Workload
    device: Device
    gpus: int
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    zero3_in_pipelines: bool = False

    def __post_init__(self) -> None:
        self.clock = StepClock(self.work, self.device, self.efficiencies)
        settings = self.config, self.work.vocab_size, self.work.layers
        self.memory = MemoryModel(*settings, partial(config_of, self.config))

    @property
    def error(self) -> KnownError:
        """What is known of the error of its times."""
        return known_error(self.device, self.config.model)

    def interval(self, step: StepSeconds, candidate: Candidate) -> tuple[float, float]:
        """Both ends of a step's seconds, with that error and what is not known of the schedule."""
        return self.error.interval(step.low, step.high, unconfirmed(candidate.schedule, candidate.mesh.pp))

    @property
    def limit(self) -> int:
        """Bytes that a layout may fill."""
        return int(FILLED * 2**30 * self.device.memory_gib)

    def run(self) -> SearchResult:
        """Try every legal layout."""
        with uncollected():  # nearly all that a search makes stays: to look through it takes a third of its time
            return self._run()

    def _run(self) -> SearchResult:
        legal, fitting_layouts = 0, []
        smallest: tuple[int, Candidate] | None = None
        for mesh in self.meshes():
            for candidate, zeros in self.families(mesh):
                legal += len(zeros)
                stages = self.stages(candidate)
                # Once something fits, what cannot is left out before its peaks are computed.
                if smallest is not None and smallest[0] <= self.limit and not self.may_fit(candidate, zeros):
                    continue
                sizes = self.bytes_by_zero(candidate, zeros)
                least = min(range(len(sizes)), key=sizes.__getitem__)
                if smallest is None or sizes[least] < smallest[0]:
                    smallest = sizes[least], candidate._replace(zero=zeros[least])
                if sizes[least] > self.limit:
                    continue
                ends = self.clock.worse_ends(candidate, stages, zeros)
                longer = 1 + unconfirmed(candidate.schedule, mesh.pp)
                fitting_layouts += [
                    Found(longer * seconds, nbytes, candidate._replace(zero=zero))
                    for zero, nbytes, seconds in zip(zeros, sizes, ends, strict=True)
                    if nbytes <= self.limit
                ]
        fitting_layouts.sort()
        return SearchResult(legal, fitting_layouts, smallest)

    def nbytes(self, candidate: Candidate) -> int:
        """Bytes on a device of the stage that needs most."""
        return self.bytes_by_zero(candidate, (candidate.zero,))[0]

    def may_fit(self, candidate: Candidate, zeros: Sequence[int]) -> bool:
        """Whether no stage needs more than there is by its model state and what waits in it alone."""
        plans, least = self._plans(candidate), max(zeros)  # a higher stage of ZeRO keeps no more
        return all(self.memory.floor(candidate, kinds, plan, least) <= self.limit for plan, kinds in plans)

    def _plans(self, candidate: Candidate) -> list[tuple[StagePlan, StageKinds]]:
        """Plans and layers of the stages that may need most."""
        m = candidate.num_microbatches(self.work.global_batch)
        return [(plan._replace(num_microbatches=m), kinds) for plan, kinds in self.stages(candidate).fullest]

    def bytes_by_zero(self, candidate: Candidate, zeros: Sequence[int]) -> list[int]:
        """Bytes on a device of the stage that needs most, for each of several stages of ZeRO."""
        most = [0] * len(zeros)
        for plan, kinds in self._plans(candidate):
            peaks = self.memory.peaks(candidate, kinds, plan, zeros)
            most = [max(before, memory.total) for before, memory in zip(most, peaks, strict=True)]
        return most

    def stages(self, candidate: Candidate) -> StageLayers:
        """Layers of the stages in this layout."""
        return self._stages(candidate.mesh.pp, candidate.schedule, candidate.chunks)

    @remembered
    def _stages(self, pp: int, schedule: str, chunks: int) -> StageLayers:
        alone = Candidate(MeshSizes(pp=pp), schedule=schedule, chunks=chunks)
        return StageLayers.of(self.work, config_of(self.config, alone).parallel)

    def meshes(self) -> Iterator[MeshSizes]:
        """All meshes that the rules allow."""
        most_tp = MOST_NODES_OF_TP * self.device.gpus_per_node
        for tp in divisors(self.gpus):
            most_cp = max(1, self.work.seq_length // FEWEST_TOKENS)
            for cp in divisors(self.gpus // tp) if tp <= most_tp else ():
                if cp > most_cp:
                    break
                for pp in divisors(self.gpus // (tp * cp)):
                    dense = MeshSizes(tp, pp, self.gpus // (tp * cp * pp), cp, 1, tp)
                    if pp > self._parts or self.work.global_batch % dense.dp:
                        continue
                    for mesh in self._grids(dense):
                        if self._sequence_cuts(mesh):
                            yield mesh

    def _grids(self, dense: MeshSizes) -> Iterator[MeshSizes]:
        """The mesh with every grid of experts."""
        number = self.work.model.num_experts
        if number is None:
            yield dense
            return
        ranks = dense.tp * dense.cp * dense.dp
        for etp in sorted({1, dense.tp}):
            for ep in divisors(number):
                if ranks % (ep * etp) == 0:
                    yield dense._replace(ep=ep, etp=etp)

    def is_legal(self, candidate: Candidate) -> bool:
        """Whether the project's own rules accept the layout."""
        return not problems(config_of(self.config, candidate), invalid=UNASKED)

    @remembered
    def _sequence_cuts(self, mesh: MeshSizes) -> list[bool]:
        """Values of sequence_parallel that the rules allow in a mesh: both, one, or none if the mesh is not legal."""
        choices = (False, True) if mesh.tp > 1 else (False,)
        zero = self._least_zero
        return [cuts for cuts in choices if self.is_legal(Candidate(mesh, zero=zero, sequence_parallel=cuts))]

    def families(self, mesh: MeshSizes) -> Iterator[tuple[Candidate, list[int]]]:
        """All layouts of a mesh: each that differs in more than ZeRO, with the stages of ZeRO that it may have."""
        for micro, zeros in self._sizes_of_steps(mesh):
            for recompute in RECOMPUTE:
                for sequence_parallel in self._sequence_cuts(mesh):
                    plain = Candidate(mesh, micro, "1f1b", 1, 0, recompute, sequence_parallel)
                    for schedule, chunks in self._schedules(plain):
                        if not zeros[schedule]:  # offloading needs more of ZeRO than the schedule allows
                            continue
                        candidate = Candidate(mesh, micro, schedule, chunks, 0, recompute, sequence_parallel)
                        yield candidate, zeros[schedule]

    def _sizes_of_steps(self, mesh: MeshSizes) -> Iterator[tuple[int, dict[str, list[int]]]]:
        """Micro-batches, each with the stages of ZeRO that it may have under every schedule."""
        by_schedule = {name: self._zeros(mesh, name) for name in SCHEDULES}
        training = self.config.training
        has_rules = training.cuda_graph or training.rampup_batch_size or training.step_batch_size_schedule
        for micro in range(1, MOST_SAMPLES + 1):
            if self.work.global_batch // mesh.dp % micro:
                continue
            alike = Candidate(mesh, micro, sequence_parallel=self._sequence_cuts(mesh)[-1])
            legal = [zero for zero in range(4) if not has_rules or self.is_legal(alike._replace(zero=zero))]
            yield micro, {name: [zero for zero in zeros if zero in legal] for name, zeros in by_schedule.items()}

    def _schedules(self, candidate: Candidate) -> Iterator[tuple[str, int]]:
        """Schedules with their chunks a stage."""
        stages, layers = candidate.mesh.pp, self._parts
        if stages == 1:
            yield "1f1b", 1
            return
        for name, schedule in SCHEDULES.items():
            if schedule.num_chunks is not None:
                if layers >= stages * schedule.num_chunks:
                    yield name, schedule.num_chunks
                continue
            for chunks in self._chunks(stages, layers):
                if self._is_worth_it(candidate, chunks):
                    yield name, chunks

    @staticmethod
    def _chunks(stages: int, layers: int) -> list[int]:
        """Numbers of chunks of interleaved stages: those that cut a stage evenly, or the smallest ones."""
        most = min(MOST_CHUNKS, layers // stages)
        even = [number for number in range(2, most + 1) if layers % (stages * number) == 0]
        return even or list(range(2, min(most, 4) + 1))

    def _is_worth_it(self, candidate: Candidate, chunks: int) -> bool:
        """Whether a chunk computes longer than its transfer takes."""
        stages = self.stages(candidate)
        times, _ = self.clock.stage_times(candidate, stages)
        return times.forward / chunks > self.clock.hop(candidate)

    def _zeros(self, mesh: MeshSizes, schedule: str) -> range:
        """Stages of ZeRO that the schedule allows; the least one alone where no ranks hold the same parameters."""
        most = 3 if mesh.pp == 1 or self.zero3_in_pipelines else 2
        if SCHEDULES[schedule].has_weight_gradients and mesh.pp > 1:
            most = 1
        if max(mesh.dp * mesh.cp, mesh.edp if self.work.model.num_experts is not None else 1) == 1:
            most = min(most, self._least_zero)
        return range(self._least_zero, most + 1)

    @cached_property
    def _parts(self) -> int:
        """Layers that stages share, with embedding and head where these count as layers."""
        return self.work.model.num_layers + sum(self.config.parallel.ends_in_split)

    @cached_property
    def _least_zero(self) -> int:
        return least_zero(self.config)


def divisors(number: int) -> list[int]:
    """All divisors of a number, in their order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]
