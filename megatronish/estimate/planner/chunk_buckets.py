"""Gradient buckets of the chunks of candidates, by the functions of the exact peak (estimate/costs/at_work.py).

Buckets differ with the parameters of a chunk and how they are cut, but not with the micro-batch or what is computed
again, so few of them are computed for many layouts. Padding is left out.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.estimate.costs.activations import StageLoad
from megatronish.estimate.costs.at_work import StageWork
from megatronish.estimate.costs.memory_table import Memory
from megatronish.estimate.planner.candidate import Candidate
from megatronish.estimate.planner.layout_config import config_of
from megatronish.estimate.planner.stage_layers import StageLayers
from megatronish.estimate.planner.workload import Workload


class ChunkBuffers(NamedTuple):
    """Bytes of ZeRO-2's buffers in a backward of a chunk: as it begins, while layers are at work, and at its end.

    Of a layer that is not computed again the last one needs most: `last_layer` are the buffers of that time. `end` has
    the gradient of the embedding, too.
    """

    before: float
    layers: float
    last_layer: float
    end: float


@dataclass
class ChunkBuckets:
    """Buckets of chunks, each computed once."""

    config: Config
    work: Workload
    _late: dict[tuple[object, ...], float] = field(default_factory=dict)
    _buffers: dict[tuple[object, ...], ChunkBuffers] = field(default_factory=dict)

    def late_gradients(self, candidate: Candidate, stages: StageLayers, *, defers: bool) -> float:
        """Bytes of the embedding's bucket, if it comes after the layers of the first chunk (`StageWork`)."""
        mesh, chunks = candidate.mesh, stages.chunks[stages.first]
        key = mesh.tp, mesh.pp > 1, len(chunks), chunks[0], stages.first == stages.last, defers
        if key not in self._late:
            alone = candidate._replace(zero=0, sequence_parallel=False)
            layers = (range(sum(chunks[0])), *(range(0) for _ in chunks[1:]))
            stage = StageLoad(layers, frozenset(), is_first=True, is_last=stages.first == stages.last)
            self._late[key] = self._of(alone, stage).late_gradients
        return self._late[key]

    def zero2_buffers(self, candidate: Candidate, stages: StageLayers, stage: int, chunk: int) -> ChunkBuffers:
        """Buffers of ZeRO-2 in a backward of the chunk of a stage."""
        mesh, counts = candidate.mesh, stages.chunks[stage]
        is_first = stage == stages.first and chunk == 0
        is_last = stage == stages.last and chunk == len(counts) - 1
        # A backward begins with the buffers of the one before, of the same chunk if there is no other.
        is_alone = is_last and candidate.num_microbatches(self.work.global_batch) == 1
        key = mesh.tp, mesh.ep, mesh.etp, mesh.pp > 1, counts[chunk], is_first, is_last, is_alone
        if key not in self._buffers:
            start = sum(map(sum, counts[:chunk]))
            layers = stages.layers[stage][start : start + sum(counts[chunk])]
            consecutive = range(layers[0], layers[-1] + 1) if layers else range(0)
            load = StageLoad((consecutive,), frozenset(), is_first=is_first, is_last=is_last)
            work = self._of(Candidate(mesh), load)
            begun = frozenset[int]() if is_alone else frozenset({0})
            found = work.buffers(0, begun)
            one = work.gradient_width * work.table if is_first else 0
            table = one * (3 if work.ties_here else 1)
            end = max(table + found.end - found.table, one + found.end)
            self._buffers[key] = ChunkBuffers(found.before, found.layers, found.first, end)
        return self._buffers[key]

    def _of(self, candidate: Candidate, stage: StageLoad) -> StageWork:
        return StageWork(config_of(self.config, candidate), stage, Memory(0, 0, 0), self.work.vocab_size, kernels=True)
