"""Peak of a rank's memory in a step: the moment when most is held, and what an operator at work needs in addition.

memory.py adds up the most of each kind of bytes, which are not there at the same time. Here every instant of the
schedule is looked at as a backward begins in it, at two moments of that:

    its begin         all activations and the logits are there; gradients of the output layer's weight and input are
                      added; with ZeRO-3 embedding and head are gathered
    a layer           the logits of the micro-batch are gone; of full recomputation the activations of a group of layers
                      are there once more, and the gradients of its weights, inputs and outputs are added, the largest
                      at a time

and at the update, where Muon's matrices are exchanged (at_work.py has what is added).

Layers are counted as they are on a GPU, with fused operators or without (`kernels`): RoPE keeps what it has turned
and what it was turned from, the router an fp32 copy of its tokens, SwiGLU without its operator the activated gate,
dropout of attention needs gradients in fp32 and some blocks of scores, and without operators hashes. Masks that SDPA
gets are dense (dense_masks.py), and rows that ZeRO-3 shares are padded (padded_rows.py). Not counted: what the
allocator and the device's libraries keep, 2 to 4 GiB on CUDA.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.estimate.costs.activations import Backward, StageLoad
from megatronish.estimate.costs.at_work import StageWork
from megatronish.estimate.costs.memory import expected_memory
from megatronish.estimate.costs.memory_table import Memory
from megatronish.specs.costs import DeviceType


class Moment(NamedTuple):
    """Bytes of activations, of logits and of what is at work, when a backward has come so far.

    `gradients` below zero are those of the step that have not come yet.
    """

    activations: float
    logits: float
    temporary: float
    gradients: float = 0.0


def expected_peak(
    config: Config,
    stages: Sequence[StageLoad],
    *,
    vocab_size: int,
    kernels: bool = True,
    shard_ranks: Mapping[str, int] = MappingProxyType({}),
) -> list[Memory]:
    """Bytes on a GPU of each pipeline stage when most is held, by owner.

    `shard_ranks` are the rank's places among those that shard each domain. By default it is the first one, which has
    most where ZeRO-3 has no even number of rows for each.
    """
    usual = expected_memory(config, stages, vocab_size=vocab_size)
    found = []
    for stage, memory in zip(stages, usual, strict=True):
        peak = _StagePeak(config, stage, memory, vocab_size, kernels, shard_ranks)
        memory, most = peak.state(), max(peak.moments(), key=sum)
        found.append(
            memory._replace(
                gradients=memory.gradients + round(most.gradients),
                activations=round(most.activations),
                logits=round(most.logits),
                temporary=round(most.temporary),
            )
        )
    return found


def memory_of_stages(
    config: Config, stages: Sequence[StageLoad], *, vocab_size: int, device: DeviceType, kernels: bool = True
) -> list[Memory]:
    """Bytes of each stage: on a GPU the peak; the sum of memory.py on a CPU, whose operators keep other tensors.

    So with a second model, whose forwards are no part of the moments here.
    """
    if device == "cpu" or config.reference == "model":
        return expected_memory(config, stages, vocab_size=vocab_size, device=device)
    return expected_peak(config, stages, vocab_size=vocab_size, kernels=kernels)


class _StagePeak(StageWork):
    """Moments of a stage's step; `memory` is what memory.py says of it. Sizes are bytes of one micro-batch."""

    def moments(self) -> Iterator[Moment]:
        """All that may be the fullest."""
        for instant in self.stage.instants:
            if self.defers and any(instant.deferred):  # weight gradients by themselves
                yield Moment(self.waiting(instant), self.of_logits(instant), self.in_flight + self.of_weight)
        for backward in self.stage.backwards:
            yield from self.of_backward(backward)
        if self.of_update:
            yield Moment(0, 0, self.of_update)

    def of_backward(self, backward: Backward) -> Iterator[Moment]:
        """Three moments of a backward: the output layer, the layer that needs most, the embedding."""
        instant, chunk, begun = backward
        activations, logits = self.waiting(instant), self.of_logits(instant)
        ends = self.stage.is_last and chunk == len(instant.live) - 1
        # Gradients of chunks without a backward have no memory yet, where it is given back.
        missing = sum(self.gradients_of(other) for other in range(len(instant.live)) if other not in begun)
        if ends or self.zero == 3:
            work = self.of_begin(self.before(chunk, begun), ends=ends)
            yield Moment(activations, logits, self.in_flight + work, -missing)
        gone = self.logits if ends and not self.defers else 0
        work = self.in_flight + self.shared_work(chunk, begun) + self.of_layers(chunk)
        again, layers = self.recomputed(chunk), self.specs[chunk]
        come = self.gradients_of(chunk) if chunk not in begun else 0.0
        if len(again) < len(
            layers
        ):  # the last one is not computed again: of gradients a bucket has come, and the head's
            bucket = min(come, 4 * (self.table * ends + self.config.parallel.ddp_bucket_size))
            few = come if self.merges_table else bucket
            yield Moment(activations, logits - gone, work - self.later_buffers(chunk, begun), few - missing)
        if again:
            kept = sum(self.of_layer(spec) for spec in layers[len(again) :])
            groups = self.groups(again)
            later = self.deferred_of_chunk(chunk) * (len(again) - len(groups[0])) / len(again) if self.defers else 0
            most = max(sum(map(self.of_layer, group)) for group in groups)
            held = come - (self.late_gradients if come and chunk == 0 else 0)
            yield Moment(activations - kept + most + later, logits - gone, work, held - missing)
        freed = 0 if self.defers else self.of_chunk(chunk) + (2 * self.residual if ends else 0)
        yield Moment(activations - freed, logits - gone, self.in_flight + self.of_end(chunk, begun), come - missing)

    def gradients_of(self, chunk: int) -> float:
        """Bytes of the gradients of a chunk, if they are given back when a step begins."""
        return self._gradients[chunk]

    @cached_property
    def _gradients(self) -> list[float]:
        chunks, found = range(len(self.specs)), []
        if self.zero > 1 or self.config.training.cuda_graph:
            return [0.0 for _ in chunks]
        for chunk in chunks:
            tables = (self.stage.is_first and chunk == 0) + (self.stage.is_last and chunk == chunks[-1])
            table = 0 if self.freezes else self.table * (1 if self.ties_here and len(chunks) == 1 else tables)
            found.append(4.0 * (table + sum(map(self.learned_of, self.specs[chunk]))))
        return found
