"""Memory of the fullest stage of a candidate, fast enough for a search.

Model state is put together from the functions of `expected_memory` (memory.py), and activations from the sizes of
the exact peak (peak.py) at the moments that are usually the fullest (stage_moments.py): what of it is the same in
many layouts is computed once. Of moments some are left out, and gradients that have not come yet are estimated, so a
layout is judged here where its size is far from the limit alone (search.py): near it the exact figures do (exact.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatronish.config.config import Config
from megatronish.core.names import OPTIMIZER_NAMES
from megatronish.estimate.costs.activations import Activations
from megatronish.estimate.costs.at_work import NEWTON_SCHULZ
from megatronish.estimate.costs.buckets import rounded_up
from megatronish.estimate.costs.memory import activations_of
from megatronish.estimate.costs.memory_table import Memory
from megatronish.estimate.costs.model_state import ZeroSettings, frozen_state, model_state, temporary_bytes
from megatronish.estimate.planner.candidate import Candidate, MeshSizes
from megatronish.estimate.planner.instants import in_flight
from megatronish.estimate.planner.kind_memory import KindBytes, bytes_of_kinds
from megatronish.estimate.planner.layout_config import config_of
from megatronish.estimate.planner.muon import MuonShare, matrix_sizes, rounds_of
from megatronish.estimate.planner.stage_layers import StageLayers
from megatronish.estimate.planner.stage_moments import StageMoments, StagePeak
from megatronish.estimate.planner.workload import Workload
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.specs.costs import Count, sum_counts


@dataclass
class MemoryScale:
    """Expected memory of the stages of candidates of one config."""

    config: Config
    work: Workload
    _layers: dict[tuple[object, ...], tuple[Activations, list[tuple[int, int, int]]]] = field(default_factory=dict)
    _kinds: dict[tuple[object, ...], KindBytes] = field(default_factory=dict)
    _updates: dict[tuple[object, ...], int] = field(default_factory=dict)
    _states: dict[tuple[object, ...], Memory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._moments = StageMoments(self.config, self.work)

    def fullest(self, candidate: Candidate, stages: StageLayers) -> int:
        """Bytes on a device of the stage that needs most."""
        return self.fullest_by_zero(candidate, stages, (candidate.zero,))[0]

    def fullest_by_zero(self, candidate: Candidate, stages: StageLayers, zeros: Sequence[int]) -> list[int]:
        """Bytes on a device of the stage that needs most, for each of several stages of ZeRO."""
        most = [0] * len(zeros)
        sums = self.config.reference == "model"  # as `memory_of_stages` has it
        sizes = self._bytes_of_kinds(candidate)
        for stage in stages.ends:
            waiting = sum(self._waiting(candidate, stages, stage)) if sums else 0
            peaks: dict[int, StagePeak] = {}
            for place, zero in enumerate(zeros):
                state, alike = self._state(candidate, stages, stage, zero), max(zero, 1)
                if sums:
                    most[place] = max(most[place], waiting + state.total)
                else:
                    if alike not in peaks:
                        peaks[alike] = self._moments.peak(sizes, candidate, stages, stage, alike)
                    peak = peaks[alike]
                    held = state.total - state.temporary
                    busy = self._busy(sizes, candidate.mesh, stages, stage, zero, peak)
                    most[place] = max(
                        most[place], held + max(busy, self._of_update(candidate.mesh, stages, stage, zero))
                    )
        return most

    def _busy(
        self, sizes: KindBytes, mesh: MeshSizes, stages: StageLayers, stage: int, zero: int, peak: StagePeak
    ) -> int:
        """Bytes at the fullest moment in addition to the model state, under a stage of ZeRO."""
        is_first, is_last = stage == stages.first, stage == stages.last
        freezes, model, width = self.config.adapter.is_used, self.work.model, self.work.element_bytes
        ties = model.tied and is_first and is_last
        gradient = sizes.gradient_width * sizes.table
        whole, before = (gradient if ties else 0.0), 0.0
        rest = sizes.table * (is_first + (is_last and not ties))
        if zero == 3:
            padded = self._padded(sizes, mesh)
            present = [size for size, count in zip(padded.sizes, stages.counts[stage], strict=True) if count]
            largest, reduced = max(present, default=0), 2 if self.config.parallel.grad_reduce_in_bf16 else 4
            before = reduced * (0 if freezes else rest)
            gathered = rest + (0 if freezes or not is_last else sizes.table) + (2 if freezes else 3) * largest
            whole = width * gathered + max(before, reduced * (0 if freezes else padded.largest_unit))
        output = (0.0 if sizes.defers else gradient) + sizes.hidden
        output += sizes.hidden + sizes.residual if sizes.gathers else 0.0
        begin = before + (output if is_last else 0.0)
        if zero == 3:
            begin = width * (rest + largest) + before + max(width * rest, output if is_last else 0.0)
        one = 0.0 if freezes or not is_first or zero == 2 else float(width * sizes.table)  # as in at_work.of_end
        table = one * (3 if ties and gradient else 1)
        moments = [peak.layer + whole, peak.apart, peak.end + table]
        if is_last or zero == 3:
            moments.append(peak.begin + begin)
        return int(max(moments) + peak.in_flight)

    def _padding(self, mesh: MeshSizes) -> float:
        """Factor of experts where ZeRO-3 pads their rows, so that all ranks have as many."""
        rows = (self.work.model.num_experts or 0) // mesh.ep
        if not rows or self.config.adapter.is_used:
            return 1.0
        copies = self.config.parallel.num_distributed_optimizer_instances
        return rounded_up(rows, max(1, mesh.edp // copies)) / rows

    def _padded(self, sizes: KindBytes, mesh: MeshSizes) -> KindBytes:
        """The same with padded experts."""
        factor = self._padding(mesh)
        if factor == 1:
            return sizes
        experts = [row.parameters.experts // (mesh.ep * mesh.etp) for row in self.work.kinds]
        added = [round(each * (factor - 1)) for each in experts]
        largest = max(sizes.largest_unit, *(number + more for number, more in zip(experts, added, strict=True)))
        grown = tuple(size + more for size, more in zip(sizes.sizes, added, strict=True))
        return sizes._replace(sizes=grown, largest_unit=largest)

    def _bytes_of_kinds(self, candidate: Candidate) -> KindBytes:
        mesh, defers = candidate.mesh, SCHEDULES[candidate.schedule].has_weight_gradients and candidate.mesh.pp > 1
        key = (
            *(mesh.tp, mesh.cp, mesh.ep, mesh.etp, candidate.micro_batch),
            *(candidate.recompute, candidate.sequence_parallel, defers),
        )
        if key not in self._kinds:
            self._kinds[key] = bytes_of_kinds(self.config, self.work, candidate, defers=defers)
        return self._kinds[key]

    def _waiting(self, candidate: Candidate, stages: StageLayers, stage: int) -> tuple[int, int]:
        """(activations, logits) of all micro-batches in flight, at the instant that holds most."""
        work, tp = self.work, candidate.mesh.tp
        activations, of_kinds = self._of_kinds(candidate)
        chunks, again = [], 0
        for counts in stages.chunks[stage]:
            kept = later = 0
            for count, (live, deferred, recomputed) in zip(counts, of_kinds, strict=True):
                if count:
                    kept, later, again = kept + count * live, later + count * deferred, max(again, recomputed)
            chunks.append((kept if activations.shares_bias else kept + activations.bias_bytes, later))
        again += activations.bias_bytes if activations.shares_bias else 0
        cut = tp if candidate.sequence_parallel else 1
        begins = activations.embedding_bytes // cut if stage == stages.first else 0
        ends = logits = 0
        if stage == stages.last:
            ends = 2 * work.model.hidden_size * activations.element_bytes // cut
            logits = work.model.padded_vocab_size(work.vocab_size, tp) * activations.element_bytes // tp
        m = candidate.num_microbatches(work.global_batch)
        most = (0, 0)
        for live_of, deferred_of in in_flight(candidate.schedule, candidate.mesh.pp, candidate.chunks, m, stage):
            losses = live_of[-1] + deferred_of[-1]
            nbytes = losses * ends + (live_of[0] + deferred_of[0]) * begins
            for (kept, later), live, deferred in zip(chunks, live_of, deferred_of, strict=True):
                nbytes += live * kept + deferred * later
            most = max(most, (nbytes, losses * logits), key=sum)
        tokens = work.seq_length * candidate.micro_batch // candidate.mesh.cp
        return int(tokens * (most[0] + again)), int(tokens * most[1])

    def _of_kinds(self, candidate: Candidate) -> tuple[Activations, list[tuple[int, int, int]]]:
        """For each kind of layer, bytes a token: live, deferred, and computed again."""
        mesh = candidate.mesh
        key = (mesh.tp, mesh.cp, mesh.etp, candidate.recompute, candidate.sequence_parallel)
        if key not in self._layers:
            alone = Candidate(
                mesh._replace(pp=1, dp=1, ep=1),
                recompute=candidate.recompute,
                sequence_parallel=candidate.sequence_parallel,
            )
            activations = activations_of(config_of(self.config, alone), "cuda")
            rows = []
            for cost in self.work.kinds:
                chunk = activations.of_chunk([cost])
                rows.append((chunk.live, chunk.deferred, chunk.recomputed))
            self._layers[key] = activations, rows
        return self._layers[key]

    def _state(self, candidate: Candidate, stages: StageLayers, stage: int, zero: int) -> Memory:
        """Parameters, gradients, optimizer and temporaries."""
        key = (candidate.mesh, stages.counts[stage], stage == stages.first, stage == stages.last, zero)
        if key not in self._states:
            self._states[key] = self._new_state(candidate.mesh, stages, stage, zero)
        return self._states[key]

    def _new_state(self, mesh: MeshSizes, stages: StageLayers, stage: int, zero_stage: int) -> Memory:
        parallel, counts, adapter = self.config.parallel, stages.counts[stage], self.config.adapter
        held, width = stages.parameters(stage, mesh.tp), self.work.element_bytes
        kinds = [(row, count) for row, count in zip(self.work.kinds, counts, strict=True) if count]
        matrices = sum_counts(row.matrices * count for row, count in kinds)
        learned, frozen, stored = held, Count(), Count()
        if adapter.is_used:
            blocks = [self.work.quantised_layers[layer] for layer in stages.layers[stage]]
            learned, matrices = stages.learned(stage, mesh.tp), Count()
            frozen = held + sum_counts(each.parameters for each in blocks) * -1
            stored = sum_counts(each.stored for each in blocks)
        zero = ZeroSettings(
            stage=zero_stage,
            ranks=mesh.dp * mesh.cp if zero_stage else 1,
            offloads_optimizer=parallel.optimizer_cpu_offload or parallel.param_cpu_offload,
            offloads_parameters=parallel.param_cpu_offload,
            bucket_size=parallel.ddp_bucket_size,
            overlap=parallel.overlap_grad_reduce,
        )
        experts = zero._replace(ranks=mesh.edp if zero_stage else 1)
        num_moments = OPTIMIZER_NAMES[self.config.optimizer.optimizer].num_moments
        state, total = Memory(0, 0, 0), 0
        for ranks, settings in ((None, zero), (mesh.ep * mesh.etp, experts)):
            count, in_matrices = (_on_rank(each, mesh.tp, ranks) for each in (learned, matrices))
            if ranks is not None and zero_stage == 3:
                count, in_matrices = (round(each * self._padding(mesh)) for each in (count, in_matrices))
            total += count
            moments = num_moments(count=count, in_matrices=in_matrices)
            state = state.plus(model_state(count, moments, settings, element_bytes=width))
            state = state.plus(frozen_state(_on_rank(frozen, mesh.tp, ranks), settings, element_bytes=width))
            state = state.plus(frozen_state(_on_rank(stored, mesh.tp, ranks), settings, element_bytes=1))
            if self.config.reference == "model":
                state = state.plus(frozen_state(_on_rank(held, mesh.tp, ranks), settings, element_bytes=width))
        return state._replace(temporary=self._temporary(mesh, stages, stage, zero, total))

    def _temporary(self, mesh: MeshSizes, stages: StageLayers, stage: int, zero: ZeroSettings, total: int) -> int:
        """Bytes that are whole for a part of a step, of what ZeRO shares."""
        if zero.stage < 2:
            return 0
        counts = zip(self.work.kinds, stages.counts[stage], strict=True)
        rows = [row for row, count in counts for _ in range(count if zero.stage == 3 else min(count, 1))]
        padded = self.work.model.padded_vocab_size(self.work.vocab_size, mesh.tp)
        table = padded * self.work.model.hidden_size // mesh.tp if stage in (stages.first, stages.last) else 0
        cut = mesh.tp, mesh.ep * mesh.etp
        if self.config.adapter.is_used and zero.stage == 2:
            table = 0
        return temporary_bytes(rows, zero, count=total, table=table, cut=cut, element_bytes=self.work.element_bytes)

    def _of_update(self, mesh: MeshSizes, stages: StageLayers, stage: int, zero: int) -> int:
        """Bytes of Muon's largest buffer, as `StageWork.of_update` has it."""
        if self.config.optimizer.optimizer != "muon":
            return 0
        key = mesh, stages.counts[stage], zero > 0
        if key not in self._updates:
            most = 0.0
            for is_experts in (False, True):
                share = MuonShare.of(mesh, is_experts=is_experts, shards=zero > 0)
                sizes = matrix_sizes(self.work, stages.counts[stage], is_experts=is_experts)
                widest = max((each.width for each in rounds_of(sizes, share.num_ranks)), default=0)
                before, found = 1, NEWTON_SCHULZ
                for ranks in share.axes:
                    found = max(found, (1 + before + before * ranks) if before > 1 else 1 + ranks)
                    before *= ranks
                most = max(most, 4.0 * widest * found)
            self._updates[key] = int(most)
        return self._updates[key]


def _on_rank(count: Count, tp: int, experts: int | None) -> int:
    """Elements on a rank: the dense ones, or those of experts that so many ranks share out."""
    return count.without_experts.per_rank(tp) if experts is None else count.experts // experts
