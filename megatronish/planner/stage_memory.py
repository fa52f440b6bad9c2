"""Memory of the fullest stage of a candidate, fast enough for a search.

It is put together from the same functions as `expected_memory` (costs/memory.py): what of it is the same in many
layouts is computed once, and the activations in flight are counted in closed form. Layouts that are printed have the
exact figures (exact.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil

from megatronish.config.config import Config
from megatronish.config.names import OPTIMIZER_NAMES
from megatronish.costs.activations import Activations
from megatronish.costs.memory import activations_of
from megatronish.costs.memory_table import Memory
from megatronish.costs.model_state import ZeroSettings, model_state, temporary_bytes
from megatronish.layer_costs import Count, sum_counts
from megatronish.planner.candidate import Candidate, Mesh
from megatronish.planner.layout_config import config_of
from megatronish.planner.stage_layers import StageLayers
from megatronish.planner.workload import Workload
from megatronish.schedule.schedules import SCHEDULES


@dataclass
class MemoryScale:
    """Expected memory of the stages of candidates of one config."""

    config: Config
    work: Workload
    _layers: dict[tuple[object, ...], tuple[Activations, list[tuple[int, int, int]]]] = field(default_factory=dict)
    _states: dict[tuple[object, ...], Memory] = field(default_factory=dict)

    def fullest(self, candidate: Candidate, stages: StageLayers) -> int:
        """Bytes on a device of the stage that needs most."""
        return self.fullest_by_zero(candidate, stages, (candidate.zero,))[0]

    def fullest_by_zero(self, candidate: Candidate, stages: StageLayers, zeros: Sequence[int]) -> list[int]:
        """Bytes on a device of the stage that needs most, for each of several stages of ZeRO."""
        most = [0] * len(zeros)
        for stage in stages.ends:
            waiting = sum(self._waiting(candidate, stages, stage))
            for place, zero in enumerate(zeros):
                most[place] = max(most[place], waiting + self._state(candidate, stages, stage, zero).total)
        return most

    def of_stage(self, candidate: Candidate, stages: StageLayers, stage: int) -> Memory:
        """Bytes on a device of one stage."""
        activations, logits = self._waiting(candidate, stages, stage)
        state = self._state(candidate, stages, stage, candidate.zero)
        return state._replace(activations=activations, logits=logits)

    def _waiting(self, candidate: Candidate, stages: StageLayers, stage: int) -> tuple[int, int]:
        """(activations, logits) of all micro-batches in flight."""
        work, tp = self.work, candidate.mesh.tp
        live, deferred = in_flight(
            candidate.schedule,
            candidate.mesh.pp,
            candidate.chunks,
            candidate.num_microbatches(work.global_batch),
            stage,
        )
        activations, of_kinds = self._of_kinds(candidate)
        tokens = work.seq_length * candidate.micro_batch // candidate.mesh.cp
        nbytes, again = 0.0, 0
        for count, (kept, later, recomputed) in zip(stages.counts[stage], of_kinds, strict=True):
            if count:
                nbytes += count * (live * kept + deferred * later)
                again = max(again, recomputed)
        nbytes += again
        if activations.bias_bytes:
            nbytes += activations.bias_bytes * (1 if activations.shares_bias else live * candidate.chunks)
        cut = tp if candidate.sequence_parallel else 1
        if stage == stages.first:
            nbytes += live * activations.embedding_bytes // cut
        logits = 0.0
        if stage == stages.last:
            losses = (1 + deferred) * activations.element_bytes
            nbytes += losses * 2 * work.model.hidden_size // cut
            logits = losses * work.model.padded_vocab_size(work.vocab_size, tp) // tp
        return int(tokens * nbytes), int(tokens * logits)

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

    def _new_state(self, mesh: Mesh, stages: StageLayers, stage: int, zero_stage: int) -> Memory:
        parallel, counts = self.config.parallel, stages.counts[stage]
        held = stages.parameters(stage, mesh.tp)
        kinds = [(row, count) for row, count in zip(self.work.kinds, counts, strict=True) if count]
        matrices = sum_counts(row.matrices * count for row, count in kinds)
        rows = [row for row, count in kinds for _ in range(count if zero_stage == 3 else 1)]
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
            count, in_matrices = (_on_rank(each, mesh.tp, ranks) for each in (held, matrices))
            total += count
            moments = num_moments(count=count, in_matrices=in_matrices)
            state = state.plus(model_state(count, moments, settings, element_bytes=self.work.element_bytes))
        has_table = stage in (stages.first, stages.last)
        padded = self.work.model.padded_vocab_size(self.work.vocab_size, mesh.tp)
        table = padded * self.work.model.hidden_size // mesh.tp if has_table else 0
        temporary = temporary_bytes(
            rows,
            zero,
            count=total,
            table=table,
            cut=(mesh.tp, mesh.ep * mesh.etp),
            element_bytes=self.work.element_bytes,
        )
        return state._replace(temporary=temporary)


def _on_rank(count: Count, tp: int, experts: int | None) -> int:
    """Elements on a rank: the dense ones, or those of experts that so many ranks share out."""
    return count.without_experts.per_rank(tp) if experts is None else count.experts // experts


@lru_cache(maxsize=100_000)
def in_flight(schedule: str, stages: int, chunks: int, microbatches: int, stage: int) -> tuple[float, float]:
    """Micro-batches of a whole stage whose activations wait at most, and those that wait for weight gradients alone."""
    p, v, m = stages, chunks, microbatches
    if p == 1 and schedule in ("1f1b", "zb-h1"):
        return (1.0, 0.0) if schedule == "1f1b" else (1.0, 1.0)
    if schedule == "1f1b":
        return float(min(p - stage, m)), 0.0
    if schedule == "gpipe":
        return float(m), 0.0
    if schedule == "interleaved":
        return min(2 * (p - stage - 1) + (v - 1) * p + 1, m * v) / v, 0.0
    return _counted(schedule, p, min(m, 3 * p), stage)


@lru_cache(maxsize=10_000)
def _counted(schedule: str, stages: int, microbatches: int, stage: int) -> tuple[float, float]:
    """The same, counted from the plan, for schedules with weight gradients: where the weighted sum is largest."""
    plan = SCHEDULES[schedule]
    chunks = plan.num_chunks or 1
    row = plan.row(stage=stage, num_stages=stages, num_microbatches=microbatches)
    live = deferred = 0
    most = (0, 0)
    for action in row:
        live += (action.kind == "F") - (action.kind == "B")
        deferred += (action.kind == "B") - (action.kind == "W")
        if 2 * live + deferred > 2 * most[0] + most[1]:
            most = live, deferred
    return most[0] / chunks, ceil(most[1]) / chunks
