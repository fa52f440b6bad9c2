"""Peak of a rank's memory in a step: the moment when most is held, and what an operator at work needs in addition.

memory.py adds up the most of each kind of bytes, which are not there at the same time. Here every instant of the
schedule is looked at as a backward begins in it, at two of its moments:

    the output layer  all activations and the logits are there; its weight's gradient and its input's are added
    a layer           the logits of the micro-batch are gone; of full recomputation its activations are there once more,
                      and the gradients of its weights, inputs and outputs are added, the largest at a time

Layers are counted as they are on a GPU, with fused operators or without (`kernels`): RoPE keeps what it has turned
and what it was turned from, the router an fp32 copy of its tokens, SwiGLU without its operator the activated gate,
dropout of attention needs gradients in fp32 and some blocks of scores, and without operators hashes. Not counted: what
the allocator and the device's libraries keep, 2 to 4 GiB on CUDA.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.costs.activations import Backward, StageLoad
from megatronish.costs.memory import expected_memory
from megatronish.costs.memory_table import Memory
from megatronish.costs.stage_sizes import StageSizes
from megatronish.layer_specs import ExpertsSpec, LayerSpec

BLOCK_BYTES = 8 * 2**20
"""Scores of a block of attention with dropout, in fp32: two blocks at a time, and without operators eight."""
BLOCK_QUERIES = 64


class Moment(NamedTuple):
    """Bytes of activations, of logits and of what is at work, when a backward has come so far.

    `gradients` below zero are those of the step that have not come yet.
    """

    activations: float
    logits: float
    temporary: float
    gradients: float = 0.0


def expected_peak(
    config: Config, stages: Sequence[StageLoad], *, vocab_size: int, kernels: bool = True
) -> list[Memory]:
    """Bytes on a GPU of each pipeline stage when most is held, by owner."""
    usual = expected_memory(config, stages, vocab_size=vocab_size)
    found = []
    for stage, memory in zip(stages, usual, strict=True):
        most = max(_StagePeak(config, stage, memory, vocab_size, kernels).moments(), key=sum)
        found.append(
            memory._replace(
                gradients=memory.gradients + round(most.gradients),
                activations=round(most.activations),
                logits=round(most.logits),
                temporary=round(most.temporary),
            )
        )
    return found


@dataclass
class _StagePeak(StageSizes):
    """Moments of a stage's step; `memory` is what memory.py says of it. Sizes are bytes of one micro-batch."""

    def moments(self) -> Iterator[Moment]:
        """All that may be the fullest."""
        for instant in self.stage.instants:
            if any(instant.deferred):  # weight gradients by themselves
                yield Moment(self.waiting(instant), self.of_logits(instant), self.in_flight + self.of_weight)
        for backward in self.stage.backwards:
            yield from self.of_backward(backward)

    def of_backward(self, backward: Backward) -> Iterator[Moment]:
        """Three moments of a backward: the output layer, the layer that needs most, the embedding."""
        instant, chunk, begun = backward
        activations, logits = self.waiting(instant), self.of_logits(instant)
        ends = self.stage.is_last and chunk == len(instant.live) - 1
        before = self.before(begun)
        # Gradients of chunks without a backward have no memory yet, where it is given back.
        missing = sum(self.gradients_of(other) for other in range(len(instant.live)) if other not in begun)
        if ends:
            yield Moment(activations, logits, self.in_flight + self.of_head(before), -missing)
        gone = self.logits if ends and not self.defers else 0
        work = self.in_flight + self.shared_work(before) + self.of_layers(chunk)
        again, layers = self.recomputed(chunk), self.specs[chunk]
        come = self.gradients_of(chunk) if chunk not in begun else 0.0
        if len(again) < len(
            layers
        ):  # the last one is not computed again: of gradients the head's and a bucket have come
            few = min(come, 4 * (self.table * ends + self.config.parallel.ddp_bucket_size))
            yield Moment(activations, logits - gone, work, few - missing)
        if again:
            kept = sum(self.of_layer(spec) for spec in layers[len(again) :])
            later = self.deferred_of_chunk(chunk) * (len(again) - 1) / len(again) if self.defers else 0
            most = max(self.of_layer(spec) for spec in again)
            yield Moment(activations - kept + most + later, logits - gone, work, come - missing)
        freed = 0 if self.defers else self.of_chunk(chunk) + (2 * self.residual if ends else 0)
        yield Moment(activations - freed, logits - gone, self.in_flight + self.of_end, come - missing)

    def gradients_of(self, chunk: int) -> float:
        """Bytes of the gradients of a chunk, if they are given back when a step begins."""
        if self.zero > 1 or self.config.training.cuda_graph:
            return 0
        last = len(self.specs) - 1
        tables = (self.stage.is_first and chunk == 0) + (self.stage.is_last and chunk == last)
        table = self.table * (1 if self.ties_here and last == 0 else tables)
        return 4 * (table + sum(self.parameters_of(spec) for spec in self.specs[chunk]))

    # What is at work

    @cached_property
    def layer_sizes(self) -> list[int]:
        """Parameters of each layer on this rank."""
        return [self.parameters_of(spec) for chunk in self.specs for spec in chunk]

    @property
    def largest_chunk(self) -> int:
        """Parameters of the layers of a chunk: buckets hold those of one."""
        return max(sum(map(self.parameters_of, chunk)) for chunk in self.specs)

    @property
    def largest_unit(self) -> int:
        """Parameters of the largest part that ZeRO-3 reduces at once: a layer, or its experts."""
        grid, found = self.config.parallel.expert_layout, 0
        for spec in chain(*self.specs):
            count = spec.cost(self.config.model).parameters
            found = max(found, count.without_experts.per_rank(self.tp), count.experts // (grid.ep * grid.etp))
        return found

    def before(self, begun: Collection[int]) -> float:
        """Gradients of backwards before, of these chunks, that are still on their way when another one begins."""
        if self.zero < 2 or not begun:
            return 0
        width = 2 if self.config.parallel.grad_reduce_in_bf16 else 4
        if self.zero == 3:  # the last unit's: with several chunks it may be a layer's
            return width * (self.rest if len(self.specs) == 1 else self.largest_unit)
        bucket, layers, table = self.config.parallel.ddp_bucket_size, self.largest_chunk, 0
        if self.stage.is_first and 0 in begun:
            table = self.table
        has_layers = layers < bucket and (self.merges_table or not table)
        return 4 * (table + (layers if has_layers else bucket / 16))

    @property
    def merges_table(self) -> bool:
        """Whether the embedding is in the bucket of layers, which alone do not fill one."""
        is_apart = self.config.model.tied and self.config.layout.pp > 1
        return self.stage.is_first and self.largest_chunk < self.config.parallel.ddp_bucket_size and not is_apart

    def shared_work(self, before: float) -> float:
        """What ZeRO has whole while a layer is at work, and the gradient of a tied table, which waits for its sum."""
        tied = self.width * self.table if self.ties_here else 0
        sizes = self.layer_sizes
        if self.zero == 2:
            layers, bucket = self.largest_chunk, self.config.parallel.ddp_bucket_size
            filling = min(layers, bucket + max(map(self.matrix_of, chain(*self.specs)), default=0) / 2)
            # The head's bucket is on its way; the embedding's is the last one, unless it is that of layers.
            is_with_table = (self.stage.is_last and not self.ties_here) or self.merges_table
            if self.stage.is_last and not self.ties_here:
                before = 0  # the head's takes its place
            return tied + before + 4 * (filling + self.table * is_with_table)
        if self.zero == 3 and sizes:
            # Gathered: the rest of the stage, a layer and the next one; of the gradients the head's and the layer's.
            following = max((a + b + a for a, b in pairwise(sizes)), default=2 * max(sizes))
            head = self.table if self.stage.is_last else 0
            reduced = max(before, (2 if self.config.parallel.grad_reduce_in_bf16 else 4) * self.largest_unit)
            return self.width * (self.rest + head + following) + reduced
        return tied

    @property
    def of_end(self) -> float:
        """Gradient of the embedding, and of a table that is also the head's two and their sum."""
        if self.zero == 3:
            return self.rest * (2 * self.width + (2 if self.config.parallel.grad_reduce_in_bf16 else 4))
        table = self.width * self.table * (3 if self.ties_here else 1) if self.stage.is_first else 0
        if self.zero == 2:
            layers = min(self.largest_chunk, 2 * self.config.parallel.ddp_bucket_size)
            bucket = 4 * self.table if self.stage.is_first else 0
            # Unless the table's bucket is there already, it comes once the two gradients have become one.
            table = table + bucket if self.merges_table else max(table, self.width * self.table + bucket)
            table += 4 * layers
        return table

    def of_head(self, before: float) -> float:
        """Gradients of the output layer's weight and input."""
        weight = 0 if self.defers else self.table * self.width
        gathered = self.hidden + self.residual if self.cuts_sequence else 0
        found = weight + self.hidden + gathered
        if self.zero == 3:
            # The rest of the stage is gathered into one buffer, and then copied out of it; then the last layer comes.
            rest = self.width * self.rest
            return rest + before + max(rest, found + self.width * max(self.layer_sizes, default=0))
        return found + before

    @cached_property
    def of_weight(self) -> float:
        """Weight gradient of an action of its own."""
        model = self.config.model
        sizes = [float(self.matrix_of(spec)) for chunk in self.specs for spec in chunk]
        if self.stage.is_last:
            sizes.append(model.padded_vocab_size(self.vocab_size, self.tp) * model.hidden_size / self.tp)
        return self.width * max(sizes) + (self.hidden if self.cuts_sequence else 0)

    def of_layers(self, chunk: int) -> float:
        """What the backward of a layer of the chunk needs, the largest."""
        return max(self._work(spec) for spec in self.specs[chunk]) if self.specs[chunk] else 0

    def _work(self, spec: LayerSpec) -> float:
        model, unit = self.config.model, self.tokens * self.width / self.tp
        gathered, reduced = (self.hidden, self.residual) if self.cuts_sequence else (0.0, 0.0)
        if isinstance(spec.mlp, ExpertsSpec):
            grid = self.config.parallel.expert_layout
            used, features = spec.mlp.num_chosen, spec.mlp.expert.ffn_size
            up = sum(spec.mlp.expert.sections.values())
            rows = unit * used * model.hidden_size
            matrix = self.width * spec.mlp.num_experts * model.hidden_size / (grid.ep * grid.etp)
            experts = 0 if self.defers or self.zero == 3 else matrix
            down = rows + unit * used * features + experts * features
            back = rows - unit * used * features + experts * up
            weight = max(down, back)
            mlp = self.residual + weight
        else:
            features, up = spec.mlp.ffn_size, sum(spec.mlp.sections.values())
            matrix = 0 if self.defers or self.zero == 3 else self.width * model.hidden_size / self.tp
            down = gathered + unit * features + matrix * features
            back = self.hidden + gathered + reduced - unit * features + matrix * up
            mlp = self.residual + max(down, back)
        return max(mlp, self._attention_work(spec) - self._mlp_freed(spec)) + self._hashes

    def _attention_work(self, spec: LayerSpec) -> float:
        model, attention = self.config.model, spec.attention
        heads = attention.num_heads * attention.head_size
        sizes = heads + 2 * attention.num_kv_heads * attention.head_size
        unit = self.tokens / self.tp
        is_ring = self.config.layout.cp > 1 and self.config.parallel.cp_comm_type == "p2p"
        if not is_ring and model.attention_dropout == 0:
            return self.residual + unit * self.width * (sizes + heads)
        found = self.residual + unit * (4 * sizes + self.width * (sizes + heads))
        if is_ring:
            found += unit * 3 * 4 * (sizes - heads)
        if model.attention_dropout:
            training = self.config.training
            row = 4 * training.micro_batch_size * training.seq_length * attention.num_heads // self.tp
            block = min(BLOCK_BYTES, BLOCK_QUERIES * row)
            if is_ring:  # tiles of half of what a rank has
                block = row * training.seq_length // (2 * self.config.layout.cp) ** 2
            found += block * (3 if self.kernels else 8)
        return found

    def _mlp_freed(self, spec: LayerSpec) -> float:
        """What the MLP has freed before attention is at work."""
        unit = self.tokens * self.width / self.tp
        if isinstance(spec.mlp, ExpertsSpec):
            return unit * spec.mlp.num_chosen * (2 * self.config.model.hidden_size + 3 * spec.mlp.expert.ffn_size)
        return unit * (sum(spec.mlp.sections.values()) + spec.mlp.ffn_size) + 2 * self.residual

    @property
    def _hashes(self) -> float:
        """Hashes of the mask of hidden states, int32, where no operator draws it."""
        if self.kernels or not self.config.model.hidden_dropout:
            return 0
        return 3 * 4 / self.width * self.residual
