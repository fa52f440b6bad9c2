"""Time of a step: layers on stages, the pipeline, the data-parallel exchange and the optimizer, as an interval.

Two ends: the better one hides as much of each transfer as overlapping computation can, the worse one hides nothing. A
plan is ranked by the worse end; what is expected is the middle.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import log2, prod
from operator import truediv
from typing import NamedTuple

from megatronish.core.remembered import remembered
from megatronish.estimate.costs.candidate import Candidate, MeshSizes
from megatronish.estimate.costs.layer_kinds import LayerKind
from megatronish.estimate.costs.parameters import quantised
from megatronish.estimate.costs.state_traffic import DataRanks, matrix_groups, matrix_rounds, owners
from megatronish.estimate.planner.device_speed import Efficiencies, Links, Machine, product_seconds
from megatronish.estimate.planner.devices import Device
from megatronish.estimate.planner.layer_time import NOTHING, Brief, LayerClock, Passes
from megatronish.estimate.planner.pipeline_time import PipelineSeconds, StageTimes, pipeline_seconds
from megatronish.estimate.planner.workload import OPTIMIZER_BYTES, StageLayers, Workload
from megatronish.parallel.bucketing import CODE_BLOCK, bytes_of_block
from megatronish.parallel.schedules.table import SCHEDULES

NO_SECONDS = (0.0,) * len(Brief._fields)


class StepSeconds(NamedTuple):
    """Seconds of a step by what they are for."""

    pipeline: PipelineSeconds
    exchange: float
    optimizer: float
    fixed: float
    """What no model of a step accounts for: fixed costs, and waiting for the slowest rank."""
    hidden: float
    """What overlap hides at the better end."""
    others: float
    """Forward passes besides those of the model that learns: of a reference."""
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
        return self.pipeline.total + self.exchange + self.optimizer + self.fixed + self.others


@dataclass
class StepClock:
    """Times of steps of one workload on one device. It keeps what layouts share: layers, stages, head."""

    work: Workload
    device: Device
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    overlaps: bool = True
    """Whether transfers overlap with computation at all."""

    def __post_init__(self) -> None:
        self.machine = Machine.of(self.device, self.efficiencies, self.work.precision)
        self.links = Links.of(self.device, self.efficiencies)
        host_us = self.device.host_us or self.efficiencies.host_us
        self.layers = LayerClock(self.work, self.machine, self.links, self.efficiencies, 1e-6 * host_us)
        self._keeps_schedule = self.work.model.multi_latent_attention  # by which its latents go round a ring, or not

    def step(self, candidate: Candidate, stages: StageLayers) -> StepSeconds:
        """Seconds of a step in this layout, with these layers on the stages."""
        times, slowest = self.stage_times(candidate, stages)
        m = candidate.num_microbatches(self.work.global_batch)
        return self.around(candidate, stages, self._pipeline(candidate, times, m), times, slowest)

    def around(
        self,
        candidate: Candidate,
        stages: StageLayers,
        pipeline: PipelineSeconds,
        times: StageTimes,
        slowest: Brief,
    ) -> StepSeconds:
        """Seconds of a step whose pipeline takes so long."""
        eff, m = self.efficiencies, candidate.num_microbatches(self.work.global_batch)
        once, each, optimizer = self._around_passes(candidate.mesh, stages, candidate.zero)
        exchange = once + m * each
        others = self._others(candidate, times, slowest, m)
        spent = pipeline.total + exchange + optimizer + others + eff.step_seconds
        hidden, waiting = 0.0, eff.jitter * log2(candidate.mesh.world_size)
        if self.overlaps:
            hides = not (candidate.mesh.pp > 1 and SCHEDULES[candidate.schedule].has_weight_gradients)
            hidden = pipeline.hidden + eff.hidden * min(exchange, self._behind(candidate, slowest, m))
            hidden += eff.hidden * m * slowest.hideable if hides else 0.0
        return StepSeconds(
            pipeline,
            exchange,
            optimizer,
            eff.step_seconds + waiting * spent,
            hidden * (1 + waiting),
            others,
            (eff.uneven - 1) * m * slowest.experts if candidate.mesh.ep > 1 else 0.0,
        )

    @staticmethod
    def _behind(candidate: Candidate, slowest: Brief, m: int) -> float:
        """Seconds of computation that the exchange can overlap with: the last backward, with ZeRO-2 every one."""
        backward = slowest.backward + slowest.weight
        if candidate.zero == 3:
            return m * (backward + slowest.forward)
        return backward * (m if candidate.zero == 2 else 1)

    def hop(self, candidate: Candidate) -> float:
        """Seconds of a transfer between stages, with the gather of the slices that ranks of tp send."""
        mesh = candidate.mesh
        if mesh.pp == 1:
            return 0.0
        nbytes = self.work.sizes(self._layer(candidate)).hidden
        joined = 0.0 if candidate.sequence_parallel else self.links.gather(mesh.tp, 1, nbytes)
        return self.links.send(mesh.tp * mesh.cp * mesh.dp, mesh.pp, nbytes / mesh.tp) + joined

    def of_kinds(self, candidate: Candidate) -> tuple[dict[LayerKind, Passes], Passes, Passes]:
        """Times of each kind of layer, of the embedding and of the head; the same in many layouts."""
        return self._of_kinds(self._layer(candidate))

    @remembered
    def _layer(self, candidate: Candidate) -> Candidate:
        """What of a layout decides the times of a layer."""
        return candidate.of_a_layer(candidate.schedule) if self._keeps_schedule else candidate.of_a_layer()

    @remembered
    def _of_kinds(self, layer: Candidate) -> tuple[dict[LayerKind, Passes], Passes, Passes]:
        passes = {kind: self.layers.passes(kind, layer) for kind in self.work.kinds}
        return passes, self.layers.embedding(layer), self.layers.head(layer)

    def stage_times(self, candidate: Candidate, stages: StageLayers) -> tuple[StageTimes, Brief]:
        """Times of a micro-batch on the stages, and those of the slowest one."""
        return self._stage_times(self._layer(candidate), stages)

    @remembered
    def _briefs(self, layer: Candidate) -> tuple[dict[LayerKind, Brief], Brief, Brief]:
        kinds, first, last = self._of_kinds(layer)
        return {kind: Brief.of(passes) for kind, passes in kinds.items()}, Brief.of(first), Brief.of(last)

    @remembered
    def _stage_times(self, layer: Candidate, stages: StageLayers) -> tuple[StageTimes, Brief]:
        of_kinds, embedding, head = self._briefs(layer)
        slowest, most, together, sums, p = Brief(*NO_SECONDS), -1.0, 0.0, [0.0, 0.0, 0.0], 0
        for stage, number in stages.numbers.items():
            numbers = [*NO_SECONDS]
            of_stage = [(of_kinds[kind], times) for kind, times in stage.counts.items()]
            for brief, times in (*of_stage, (embedding, stage.is_first), (head, stage.is_last)):
                if times:
                    numbers = [value + times * more for value, more in zip(numbers, brief, strict=True)]
            seconds = numbers[0] + numbers[1] + numbers[2]
            together += number * seconds
            p += number
            for place in range(3):
                sums[place] += number * numbers[place]
            if seconds > most:
                slowest, most = Brief(*numbers), seconds
        return StageTimes(most, together, *(each / p for each in sums)), slowest

    def passes_of(
        self, candidate: Candidate, counts: Mapping[LayerKind, int], *, is_first: bool, is_last: bool
    ) -> Passes:
        """Times of a micro-batch on so many layers of each kind, with embedding and head where they are."""
        kinds, embedding, head = self.of_kinds(candidate)
        passes = NOTHING
        of_layers = [(kinds[kind], number) for kind, number in counts.items()]
        for part, number in (*of_layers, (embedding, is_first), (head, is_last)):
            passes = passes.plus(part, number) if number else passes
        return passes

    def worse_ends(self, candidate: Candidate, stages: StageLayers, zeros: Iterable[int]) -> list[float]:
        """Worse ends of the step in this layout under several stages of ZeRO, which differ in little."""
        times, slowest = self.stage_times(candidate, stages)
        pipeline = self._pipeline(candidate, times, candidate.num_microbatches(self.work.global_batch))
        layouts = (candidate._replace(zero=zero) for zero in zeros)
        return [self.around(layout, stages, pipeline, times, slowest).high for layout in layouts]

    def _others(self, candidate: Candidate, times: StageTimes, slowest: Brief, m: int) -> float:
        """Seconds of forward passes alone over all micro-batches, which fill the pipeline once each."""
        p = candidate.mesh.pp
        fill = (p - 1) * (times.forward / candidate.chunks + self.hop(candidate))
        return self.work.extra_forwards * (m * slowest.forward + fill) if self.work.extra_forwards else 0.0

    def _pipeline(self, candidate: Candidate, times: StageTimes, m: int) -> PipelineSeconds:
        return pipeline_seconds(
            times,
            schedule=candidate.schedule,
            stages=candidate.mesh.pp,
            chunks=candidate.chunks,
            microbatches=m,
            hop=self.hop(candidate),
        )

    @remembered
    def _around_passes(self, mesh: MeshSizes, stages: StageLayers, zero: int) -> tuple[float, float, float]:
        """Seconds of the data-parallel exchange, once a step and for each micro-batch, and of the optimizer.

        Gradients over data-parallel ranks, parameters back under ZeRO, and the tied embedding; the update.
        """
        work, links = self.work, self.links
        once = each = 0.0
        all_of, learned = (
            stages.largest_parameters(mesh.tp, mesh.ep, mesh.etp, learned=learns) for learns in (False, True)
        )
        wanted = work.gradient_bytes if zero < 3 else 4
        codes = work.config.parallel.zero_quantized_gradients
        sent = bytes_of_block(codes) / CODE_BLOCK if codes is not None and zero else wanted
        for whole, count, (ranks, apart) in zip(all_of, learned, mesh.copies.values(), strict=True):
            if whole == 0 or ranks == 1:
                continue
            gradients = links.gather(ranks, apart, sent * count) if count else 0.0
            parameters = links.gather(ranks, apart, work.gathered_bytes * count) if count else 0.0
            if zero < 2:
                once += gradients + (parameters if zero else gradients)
            elif zero == 2:  # exchanges after every backward
                each, once = each + gradients, once + parameters
            else:  # gathers all of them, those of a frozen base too, for each pass
                gathers = 2 + work.extra_forwards
                each += gradients + gathers * links.gather(ranks, apart, self._gathered_bytes(whole, count))
        if mesh.pp > 1 and work.model.embeds_at_end and not work.adapter.is_used:
            table = work.model.padded_vocab_size(work.vocab_size, mesh.tp) * work.model.hidden_size / mesh.tp
            once += links.all_reduce(2, mesh.tp * mesh.cp * mesh.dp, wanted * table)
        shared = [ranks if zero else 1 for ranks, _ in mesh.copies.values()]
        of_rank, on_rank = (sum(map(truediv, counts, shared)) for counts in (all_of, learned))
        update = OPTIMIZER_BYTES * on_rank / self.machine.hbm + self._muon(mesh, stages, zero)
        update += self._disk_seconds(mesh, work.disk.step * on_rank)
        each += self._disk_seconds(mesh, work.disk.pass_read * of_rank)
        return once, each, update

    def _disk_seconds(self, mesh: MeshSizes, of_rank: float) -> float:
        """Seconds of the disk of a node, which its ranks share, for so many bytes of each of them."""
        ranks = min(self.device.gpus_per_node, mesh.dp * mesh.tp * mesh.pp * mesh.cp)
        return of_rank * ranks / (1e9 * self.device.nvme_gb_s)

    def _gathered_bytes(self, whole: float, learned: float) -> float:
        """Bytes of the parameters that ZeRO-3 gathers: a base in 4 bits as it is stored."""
        work = self.work
        if not work.adapter.is_used:
            return work.gathered_bytes * whole
        stored = quantised(work.model, [0], work.adapter)
        width = stored.bytes_per_parameter if stored.parameters.total else work.element_bytes
        return width * whole + work.element_bytes * learned

    def _muon(self, mesh: MeshSizes, stages: StageLayers, zero: int) -> float:
        """Seconds of Muon's iterations and of the exchange of its matrices in fp32, on the stage with most layers.

        In a round each rank owns one matrix of nearly equal size, so a rank computes every num_ranks-th of the matrices
        in the order of their sizes (bucketing.py).
        """
        work, optimizer, seconds = self.work, self.work.config.optimizer, 0.0
        if optimizer.optimizer != "muon" or work.adapter.is_used:
            return 0.0
        machine = muon_machine(self.device, self.efficiencies, optimizer.muon_fp32_matmul_prec)
        for domain, (ranks, apart) in mesh.copies.items():  # ranks of the model lie inside
            axes = owners(mesh, DataRanks.of(ranks, 1 if zero else ranks), domain)
            groups = matrix_groups(stages.longest.counts, domain)
            num_ranks, before = prod(number for _, number in axes), 0
            for rows, columns, number in groups:
                owned = -(-(before + number) // num_ranks) + (-before // num_ranks)
                before += number
                seconds += owned * optimizer.muon_num_ns_steps * iteration_seconds(machine, rows, columns)
            rounds = matrix_rounds(groups, num_ranks)
            size = 4.0 * sum(each.width for each in rounds) / max(1, len(rounds))
            strides = {"replicate": apart, "tp": 1, "etp": 1, "ep": mesh.etp, "shard": apart}
            for axis, number in axes:
                size *= number
                times = 1 if axis == "replicate" else 2  # copies are not reduced
                seconds += len(rounds) * times * self.links.gather(number, strides[axis], size)
        return seconds


def muon_machine(device: Device, efficiencies: Efficiencies, precision: str) -> Machine:
    """Rates of Muon's iterations: in fp32, in TF32 with half of the rate of 16 bits, or in bf16."""
    if precision == "medium":
        return Machine.of(device, efficiencies, "bf16")
    if precision == "highest":
        return Machine.of(device, efficiencies, "fp32")
    return Machine.of(device, efficiencies, "bf16")._replace(
        flops=max(device.flops("bf16") / 2, device.flops("fp32")) * efficiencies.gemm, element_bytes=4
    )


def iteration_seconds(machine: Machine, rows: int, columns: int) -> float:
    """Seconds of a Newton-Schulz iteration of a matrix [m, n], m <= n (optim/muon.py).

    Its products are those of [m, n] with its transpose, of the square with itself, and of the polynomial with the
    matrix.
    """
    return (
        product_seconds(machine, rows, columns, rows)
        + product_seconds(machine, rows, rows, rows)
        + product_seconds(machine, rows, rows, columns)
    )
