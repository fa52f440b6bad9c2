"""Memory of the fullest stage of a candidate, fast enough for a search.

It is put together from the same functions as `expected_memory` (costs/memory.py): what of it is the same in many
layouts is computed once, and the activations in flight are counted in closed form. Layouts that are printed have the
exact figures (exact.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from megatronish.config.config import Config
from megatronish.config.names import OPTIMIZER_NAMES
from megatronish.costs.activations import Activations, Instant
from megatronish.costs.memory import activations_of
from megatronish.costs.memory_table import Memory
from megatronish.costs.model_state import ZeroSettings, model_state, temporary_bytes
from megatronish.layer_costs import Count, sum_counts
from megatronish.planner.candidate import Candidate, MeshSizes
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
def in_flight(schedule: str, stages: int, chunks: int, microbatches: int, stage: int) -> tuple[Instant, ...]:
    """The instants of a step of which one holds most."""
    if schedule == "1f1b":
        return (Instant((min(stages - stage, microbatches),), (0,)),)
    if schedule == "gpipe":
        return (Instant((microbatches,), (0,)),)
    return _counted(schedule, stages, chunks, min(microbatches, 3 * stages), stage)


@lru_cache(maxsize=10_000)
def _counted(schedule: str, stages: int, chunks: int, microbatches: int, stage: int) -> tuple[Instant, ...]:
    """The same, counted from the plan; without instants that hold no more than another one in any respect."""
    live, deferred = [0] * chunks, [0] * chunks
    found = set()
    plan = SCHEDULES[schedule]
    for action in plan.row(stage=stage, num_stages=stages, num_microbatches=microbatches, num_chunks=chunks):
        live[action.chunk] += (action.kind == "F") - (action.kind == "B")
        if plan.has_weight_gradients:
            deferred[action.chunk] += (action.kind == "B") - (action.kind == "W")
        if action.kind != "W":
            found.add(Instant(tuple(live), tuple(deferred)))
    if chunks > 2:  # of many chunks: those with most of them all, or one less, that differ at the ends of the model
        most = max(sum(each.live) for each in found)
        near = [each for each in found if sum(each.live) >= most - 1]
        return tuple({(sum(each.live), each.live[0], each.live[-1]): each for each in near}.values())
    flat = {(*each.live, *each.deferred): each for each in found}
    return tuple(
        each
        for one, each in flat.items()
        if not any(other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in flat)
    )
