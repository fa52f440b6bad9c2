"""Time of a step: layers on stages, the pipeline, the data-parallel exchange and the optimizer, as an interval.

Two ends: the better one hides as much of each transfer as overlapping computation can, the worse one hides nothing. A
plan is ranked by the worse end; what is expected is the middle.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from megatronish.planner.candidate import Candidate
from megatronish.planner.devices import Device
from megatronish.planner.efficiencies import Efficiencies
from megatronish.planner.layer_time import NOTHING, LayerClock, Parts, Passes
from megatronish.planner.links import Links
from megatronish.planner.pipeline_time import PipelineSeconds, StageTimes, pipeline_seconds
from megatronish.planner.products import Machine
from megatronish.planner.stage_layers import StageLayers
from megatronish.planner.workload import Workload


class Exchange(NamedTuple):
    """Seconds of the data-parallel exchange of a step, and how much of it computation can hide."""

    seconds: float = 0.0
    hideable: float = 0.0


class StepSeconds(NamedTuple):
    """Seconds of a step by what they are for. `parts` are those of the slowest stage, over all micro-batches."""

    parts: Parts
    pipeline: PipelineSeconds
    exchange: float
    optimizer: float
    fixed: float
    hidden: float
    """What overlap hides at the better end."""
    uneven: float
    """What an uneven load of experts adds at the worse end."""

    @property
    def low(self) -> float:
        """The better end: as much as can be is hidden."""
        return self._sum - self.hidden

    @property
    def high(self) -> float:
        """The worse end: nothing is hidden, and experts are unevenly loaded."""
        return self._sum + self.uneven

    @property
    def expected(self) -> float:
        """The middle of both ends."""
        return (self.low + self.high) / 2

    @property
    def _sum(self) -> float:
        return self.pipeline.total + self.exchange + self.optimizer + self.fixed


@dataclass
class StepClock:
    """Times of steps of one workload on one device. It keeps what layouts share: layers, stages, head."""

    work: Workload
    device: Device
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    overlaps: bool = True
    """Whether transfers overlap with computation at all."""
    _passes: dict[Candidate, tuple[tuple[Passes, ...], Passes, Passes]] = field(default_factory=dict)
    _stages: dict[tuple[Candidate, StageLayers], tuple[StageTimes, Passes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machine = Machine.of(self.device, self.efficiencies, self.work.precision)
        self.links = Links.of(self.device, self.efficiencies)
        self.layers = LayerClock(
            self.work, self.machine, self.links, self.efficiencies, 1e-6 * self.device.host_us
        )

    def step(self, candidate: Candidate, stages: StageLayers) -> StepSeconds:
        """Seconds of a step in this layout, with these layers on the stages."""
        mesh, eff = candidate.mesh, self.efficiencies
        m = candidate.num_microbatches(self.work.global_batch)
        times, slowest = self.stage_times(candidate, stages)
        pipeline = pipeline_seconds(
            times,
            schedule=candidate.schedule,
            stages=mesh.pp,
            chunks=candidate.chunks,
            microbatches=m,
            hop=self.hop(candidate),
        )
        exchange = self._exchange(candidate, stages, slowest, m)
        optimizer = self._optimizer(candidate, stages)
        parts = Parts().plus(slowest.forward, m).plus(slowest.backward, m).plus(slowest.weight, m)
        spent = pipeline.total + exchange.seconds + optimizer + eff.step_seconds
        hidden = 0.0
        if self.overlaps:
            behind = 0.0 if candidate.schedule in ("zb-h1", "zb-v") else eff.hidden * m * slowest.hideable
            hidden = exchange.hideable + behind
        return StepSeconds(
            parts,
            pipeline,
            exchange.seconds,
            optimizer,
            eff.step_seconds + eff.jitter * spent,
            hidden * (1 + eff.jitter),
            (eff.uneven - 1) * self._of_experts(candidate, parts),
        )

    def hop(self, candidate: Candidate) -> float:
        """Seconds of a transfer between stages."""
        mesh = candidate.mesh
        if mesh.pp == 1:
            return 0.0
        nbytes = self.work.element_bytes * self.layers.tokens(candidate) * self.work.model.hidden_size
        return self.links.send(mesh.tp * mesh.cp * mesh.dp, nbytes / (mesh.tp if mesh.tp > 1 else 1))

    def of_kinds(self, candidate: Candidate) -> tuple[tuple[Passes, ...], Passes, Passes]:
        """Times of each kind of layer, of the embedding and of the head; the same in many layouts."""
        mesh = candidate.mesh
        key = Candidate(
            mesh._replace(pp=1, dp=1),
            candidate.micro_batch,
            recompute=candidate.recompute,
            sequence_parallel=candidate.sequence_parallel,
        )
        if key not in self._passes:
            kinds = tuple(self.layers.passes(row, key) for row in self.work.kinds)
            self._passes[key] = kinds, self.layers.embedding(key), self.layers.head(key)
        return self._passes[key]

    def stage_times(self, candidate: Candidate, stages: StageLayers) -> tuple[StageTimes, Passes]:
        """Times of a micro-batch on the stages, and the passes of the slowest one."""
        key = (candidate._replace(mesh=candidate.mesh._replace(dp=1), zero=0, schedule="", chunks=1), stages)
        if key not in self._stages:
            passes = self.passes_of_stages(candidate, stages)
            totals = [each.total for each in passes]
            p = len(passes)
            slowest = passes[max(range(p), key=totals.__getitem__)]
            self._stages[key] = (
                StageTimes(
                    max(totals),
                    sum(totals),
                    sum(each.forward.total for each in passes) / p,
                    sum(each.backward.total for each in passes) / p,
                    sum(each.weight.total for each in passes) / p,
                ),
                slowest,
            )
        return self._stages[key]

    def passes_of_stages(self, candidate: Candidate, stages: StageLayers) -> list[Passes]:
        """Times of a micro-batch on each stage, embedding and head where they are."""
        kinds, embedding, head = self.of_kinds(candidate)
        found: dict[tuple[int, ...], Passes] = {}
        passes = []
        for number, counts in enumerate(stages.counts):
            if counts not in found:
                found[counts] = NOTHING
                for kind, count in zip(kinds, counts, strict=True):
                    found[counts] = found[counts].plus(kind, count) if count else found[counts]
            of_stage = found[counts]
            of_stage = of_stage.plus(embedding) if number == stages.first else of_stage
            passes.append(of_stage.plus(head) if number == stages.last else of_stage)
        return passes

    def _exchange(self, candidate: Candidate, stages: StageLayers, slowest: Passes, m: int) -> Exchange:
        """Gradients over data-parallel ranks, parameters back under ZeRO, and the tied embedding."""
        mesh, work, links = candidate.mesh, self.work, self.links
        seconds = 0.0
        stride, size = mesh.tp, mesh.cp * mesh.dp
        dense, experts = stages.largest_parameters(mesh)
        gradients = 1 if candidate.zero < 2 else m  # ZeRO-2 exchanges after every backward
        wanted = work.gradient_bytes if candidate.zero < 3 else 4
        groups = ((dense, size, stride), (experts, mesh.edp, mesh.ep * mesh.etp))
        for count, ranks, apart in groups:
            if count == 0 or ranks == 1:
                continue
            half = links.gather(ranks, apart, wanted * count)
            if candidate.zero == 0:
                seconds += 2 * half
            elif candidate.zero == 3:
                seconds += m * (half + 2 * links.gather(ranks, apart, work.element_bytes * count))
            else:
                seconds += gradients * half + links.gather(ranks, apart, work.element_bytes * count)
        behind = slowest.backward.total + slowest.weight.total
        behind = m * (behind + slowest.forward.total) if candidate.zero == 3 else behind * max(1, gradients)
        hideable = min(self.efficiencies.hidden * seconds, self.efficiencies.hidden * behind)
        if mesh.pp > 1 and work.model.tied:
            table = work.model.padded_vocab_size(work.vocab_size, mesh.tp) * work.model.hidden_size / mesh.tp
            seconds += links.all_reduce(2, mesh.tp * mesh.cp * mesh.dp, wanted * table)
        return Exchange(seconds, hideable)

    def _optimizer(self, candidate: Candidate, stages: StageLayers) -> float:
        """Reading and writing of parameters, masters, moments and gradients."""
        mesh = candidate.mesh
        dense, experts = stages.largest_parameters(mesh)
        shared = (mesh.cp * mesh.dp, mesh.edp) if candidate.zero else (1, 1)
        count = dense / shared[0] + experts / shared[1]
        return self.work.optimizer_bytes * count / self.machine.hbm

    def _of_experts(self, candidate: Candidate, parts: Parts) -> float:
        """Seconds of experts' products and transfers in a step, which an uneven load makes longer."""
        if candidate.mesh.ep == 1 or not any(linear.copies > 1 for row in self.work.kinds for linear in row.linears):
            return 0.0
        flops = experts = 0
        for row in self.work.kinds:
            for linear in row.linears:
                flops += linear.flops
                experts += linear.flops if linear.copies > 1 else 0
        return parts.experts + parts.products * experts / max(1, flops)
