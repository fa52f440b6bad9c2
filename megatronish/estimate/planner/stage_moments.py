"""Moments of a candidate's stage at which most is held: the backwards of a step, as peak.py looks at them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.estimate.planner.candidate import Candidate, MeshSizes
from megatronish.estimate.planner.chunk_buckets import ChunkBuckets, ChunkBuffers
from megatronish.estimate.planner.instants import first_backwards, in_flight, later_backwards
from megatronish.estimate.planner.kind_memory import KindBytes
from megatronish.estimate.planner.stage_layers import StageLayers
from megatronish.estimate.planner.workload import Workload


class StagePeak(NamedTuple):
    """Bytes of activations and logits as a backward begins, with a layer at work, and at its end; and in transfer.

    `apart` are those while a weight gradient is computed by itself.
    """

    begin: float
    layer: float
    end: float
    apart: float
    in_flight: float


class Chunk(NamedTuple):
    """Bytes of a chunk: what waits for its backward, for weight gradients, is at work, and of that computed again."""

    live: float
    deferred: float
    busy: float
    again: float


@dataclass
class StageMoments:
    """Moments of the stages of candidates of one config."""

    config: Config
    work: Workload
    _of_chunks: dict[tuple[object, ...], list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._buckets = ChunkBuckets(self.config, self.work)

    def peak(self, sizes: KindBytes, candidate: Candidate, stages: StageLayers, stage: int, zero: int) -> StagePeak:
        """The most of each moment. With ZeRO 0 and 1 gradients are given back at the end of a step."""
        sizes = sizes._replace(work=sizes.sharded_work) if zero == 3 else sizes
        chunks, mesh = self._chunks(sizes, stages.chunks[stage]), candidate.mesh
        m = candidate.num_microbatches(self.work.global_batch)
        is_few = m < 2 * mesh.pp or candidate.schedule == "gpipe"
        gradients = self._gradients(mesh, stages, stage) if zero < 2 and is_few else []
        late, buffers = 0.0, list[ChunkBuffers]()
        if gradients and stage == stages.first:
            late = self._buckets.late_gradients(candidate, stages, defers=sizes.defers)
        if zero == 2:
            places = range(len(chunks))
            buffers = [self._buckets.zero2_buffers(candidate, stages, stage, place) for place in places]
        begin = layer = end = -inf
        moments = first_backwards if gradients else later_backwards
        logits = sizes.logits if stage == stages.last else 0.0
        of_loss, bucket = (2 * sizes.residual + sizes.logits) if logits else 0.0, self._bucket_bytes
        for (live_of, deferred_of), of, begun in moments(candidate.schedule, mesh.pp, candidate.chunks, m, stage):
            held, come = live_of[-1] * of_loss, 0.0
            for place, number in enumerate(live_of):
                held += number * chunks[place][0]
            if sizes.defers:
                held += deferred_of[-1] * of_loss
                for place, number in enumerate(deferred_of):
                    held += number * chunks[place][1]
            if gradients:
                for place, size in enumerate(gradients):
                    held -= 0.0 if place in begun else size
                come = 0.0 if of in begun else gradients[of]
            live, _, busy, again = chunks[of]
            before, last = 0.0, come
            if buffers:
                before, layers, last_layer, last = buffers[of]
                busy += layers if again else last_layer
            elif again:  # all gradients of the chunk have come but the embedding's
                busy += come - late if come and of == 0 else come
            else:
                busy += come if come < bucket else bucket
            gone = held - logits if of == len(chunks) - 1 and not sizes.defers else held
            begin = max(begin, held + before)
            layer = max(layer, gone + busy)
            end = max(end, gone + last - (0.0 if sizes.defers else live))
        apart = self._apart(sizes, candidate, stages, stage, chunks) if sizes.defers else 0.0
        always = sizes.shared_masks + (2 * sizes.hidden / mesh.tp if mesh.pp > 1 else 0.0)
        return StagePeak(begin, layer, end, apart, always)

    def _apart(
        self, sizes: KindBytes, candidate: Candidate, stages: StageLayers, stage: int, chunks: Sequence[Chunk]
    ) -> float:
        """Bytes while weight gradients are computed in an action of their own."""
        is_last, most = stage == stages.last, 0.0
        m = candidate.num_microbatches(self.work.global_batch)
        of_loss = is_last * (2 * sizes.residual + sizes.logits)
        of_weight: float = sizes.gradient_width * max(sizes.matrix, sizes.table if is_last else 0)
        of_weight += sizes.hidden if sizes.gathers else 0
        for live_of, deferred_of in in_flight(candidate.schedule, candidate.mesh.pp, candidate.chunks, m, stage):
            held = (live_of[-1] + deferred_of[-1]) * of_loss + of_weight
            for (live, deferred, _, _), number, later in zip(chunks, live_of, deferred_of, strict=True):
                held += number * live + later * deferred
            most = max(most, held if any(deferred_of) else 0.0)
        return most

    @staticmethod
    def _chunks(sizes: KindBytes, chunks: Sequence[tuple[int, ...]]) -> list[Chunk]:
        """Bytes of each chunk."""
        found: list[Chunk] = []
        for place, counts in enumerate(chunks):
            if place and counts == chunks[place - 1]:
                found.append(found[-1])
                continue
            live, deferred, busy, again = sizes.tables, 0.0, 0.0, 0.0
            for kind, count in enumerate(counts):
                if count:
                    live += count * sizes.live[kind]
                    deferred += count * sizes.deferred[kind]
                    busy, again = max(busy, sizes.work[kind]), max(again, sizes.again[kind])
            if again and sizes.defers:
                busy += deferred * (1 - 1 / sum(counts))
            found.append(Chunk(live, deferred, busy + again, again))
        return found

    @property
    def _bucket_bytes(self) -> float:
        return 4.0 * self.config.parallel.ddp_bucket_size

    def _gradients(self, mesh: MeshSizes, stages: StageLayers, stage: int) -> list[float]:
        """Bytes of the gradients of each chunk of a stage, which have no memory before the first backward."""
        if self.config.training.cuda_graph:
            return []
        key = mesh, stages, stage
        if key not in self._of_chunks:
            learned = stages.learned(stage, mesh.tp).per_rank(mesh.tp, experts=mesh.ep * mesh.etp)
            of_layers = [sum(counts) for counts in stages.chunks[stage]]
            padded = self.work.model.padded_vocab_size(self.work.vocab_size, mesh.tp)
            table = 0 if self.config.adapter.is_used else padded * self.work.model.hidden_size // mesh.tp
            tables = [0] * len(of_layers)
            if stage == stages.first:
                tables[0] += table
            if stage == stages.last and not (stage == stages.first and self.work.model.tied):
                tables[-1] += table
            each = (learned - sum(tables)) / max(1, sum(of_layers))
            self._of_chunks[key] = [4.0 * (each * n + size) for n, size in zip(of_layers, tables, strict=True)]
        return self._of_chunks[key]
