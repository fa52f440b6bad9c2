"""Bytes that a backward needs in addition to what waits for it: gradients, gathered parameters, outputs of operators.

The largest at a time: sums of what an operator reads and writes besides activations, as it is on a GPU.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise

from megatronish.estimate.costs.activations import bytes_per_score, has_fused_softmax
from megatronish.estimate.costs.memory_table import Memory
from megatronish.estimate.costs.padded_rows import PaddedRows
from megatronish.estimate.costs.stage_sizes import StageSizes
from megatronish.estimate.costs.state_traffic import StateTraffic
from megatronish.estimate.costs.zero2_buffers import TABLE, BufferBytes, Zero2Buffers
from megatronish.specs.layers import AttentionSpec, ExpertsSpec, LayerSpec

BLOCK_BYTES = 8 * 2**20
"""Scores of a block of attention with dropout, in fp32: two blocks at a time, and without operators eight."""
BLOCK_QUERIES = 64
NEWTON_SCHULZ = 4
"""Matrices at once in a step of Muon's iterations: the matrix, two of its steps and its square."""


@dataclass
class StageWork(StageSizes):
    """What is at work on a stage; sizes are bytes of one micro-batch."""

    shard_ranks: Mapping[str, int] = field(default_factory=dict)
    """Places of the rank among those that shard each domain, the first by default, which has most."""
    _buffers: dict[tuple[int, frozenset[int]], BufferBytes] = field(default_factory=dict)

    @cached_property
    def layer_sizes(self) -> list[int]:
        """Parameters of each layer on this rank, as they are when ZeRO-3 has gathered them: with padding."""
        if self.zero == 3 and not self.freezes:
            return [sum(each.values()) for each in self._gathered.values()]
        return [self.parameters_of(spec) for chunk in self.specs for spec in chunk]

    @cached_property
    def rows(self) -> PaddedRows:
        """Rows that ZeRO-3 shares."""
        return PaddedRows(self._traffic.data_ranks, self.shard_ranks)

    def state(self) -> Memory:
        """Model state of memory.py, with the rows that this rank has."""
        if self.zero < 3 or self.freezes:
            return self.memory
        return self.rows.state(self.memory, self._traffic.parameters)

    @cached_property
    def _gathered(self) -> dict[str, Counter[str]]:
        """Elements of each gathered layer by domain, which are its units, with padding."""
        found: dict[str, Counter[str]] = {f"layers.{layer}": Counter() for layer in self.stage.all_layers}
        for each in self._traffic.parameters:
            if each.name.startswith("layers."):
                found[".".join(each.name.split(".")[:2])][each.domain] += self.rows.gathered(each)
        return found

    @property
    def largest_chunk(self) -> int:
        """Parameters of the layers of a chunk that learn: buckets hold those of one."""
        return max(sum(map(self.learned_of, chunk)) for chunk in self.specs)

    @property
    def learned_table(self) -> int:
        """Elements of an embedding on this rank that learn."""
        return 0 if self.freezes else self.table

    @property
    def learned_rest(self) -> float:
        """Elements of embedding and head on this rank that learn."""
        return 0 if self.freezes else self.rest

    @property
    def reduced_width(self) -> int:
        """Bytes of an element of a gradient on its way."""
        return 2 if self.config.parallel.grad_reduce_in_bf16 else 4

    @property
    def largest_unit(self) -> int:
        """Parameters of the largest part that ZeRO-3 reduces at once: a layer, or its experts."""
        grid, found = self.config.parallel.expert_layout, 0
        if self.freezes:
            return max(map(self.learned_of, chain(*self.specs)), default=0)
        if self.zero == 3:
            return max((size for layer in self._gathered.values() for size in layer.values()), default=0)
        for spec in chain(*self.specs):
            count = spec.cost(self.config.model).parameters
            found = max(found, count.without_experts.per_rank(self.tp), count.experts // (grid.ep * grid.etp))
        return found

    @cached_property
    def _traffic(self) -> StateTraffic:
        return StateTraffic(self.config, self.stage, 0, self.vocab_size)

    def buffers(self, chunk: int, begun: frozenset[int]) -> BufferBytes:
        """Buffers of ZeRO-2 in a backward of a chunk, when these chunks have had one before."""
        key = (chunk, begun)
        if key not in self._buffers:
            buffers = Zero2Buffers(
                self._traffic.parameters,
                list(self._traffic.buckets()),
                overlaps=self.config.parallel.overlap_grad_reduce,
            )
            for other in (*sorted(begun - {chunk}), *sorted(begun & {chunk})):
                buffers.backward(other)
            self._buffers[key] = buffers.backward(chunk)
        return self._buffers[key]

    def later_buffers(self, chunk: int, begun: frozenset[int]) -> float:
        """Of the buffers in `shared_work`, those that are not there yet while the last layer of a chunk is at work."""
        if self.zero != 2:
            return 0
        buffers = self.buffers(chunk, begun)
        return buffers.layers - buffers.first

    def before(self, chunk: int, begun: frozenset[int]) -> float:
        """Gradients of backwards before, of these chunks, that are still on their way when another one begins."""
        if self.zero < 2 or not begun:
            return 0
        if self.zero == 3:  # the last unit's: with several chunks it may be a layer's
            return self.reduced_width * (self.learned_rest if len(self.specs) == 1 else self.largest_unit)
        return self.buffers(chunk, begun).before

    @property
    def merges_table(self) -> bool:
        """Whether the embedding is in the bucket of layers, which alone do not fill one."""
        is_apart = self.config.model.tied and self.config.layout.pp > 1
        return self.stage.is_first and self.largest_chunk < self.config.parallel.ddp_bucket_size and not is_apart

    @cached_property
    def late_gradients(self) -> float:
        """Bytes of the embedding's bucket, if gradients of the first layer and its own alone are in it."""
        if not self.stage.is_first or self.ties_here or not self.stage.layers[0]:
            return 0
        own = ("embedding.", f"layers.{self.stage.layers[0][0]}.")
        for bucket in self._traffic.buckets():
            if TABLE in bucket.names:
                return 4.0 * bucket.size if all(name.startswith(own) for name in bucket.names) else 0
        return 0

    def shared_work(self, chunk: int, begun: frozenset[int]) -> float:
        """What ZeRO has whole while a layer is at work, and the gradient of a tied table, which waits for its sum."""
        tied = self.gradient_width * self.table if self.ties_here else 0
        sizes = self.layer_sizes
        if self.zero == 2:
            return tied + self.buffers(chunk, begun).layers
        if self.zero == 3 and sizes:
            # Gathered: the rest of the stage, a layer and the next one; of the gradients the head's and the layer's.
            again = 0 if self.freezes else 1
            following = max((a + b + again * a for a, b in pairwise(sizes)), default=(1 + again) * max(sizes))
            head = self.learned_table if self.stage.is_last else 0
            reduced = max(self.before(chunk, begun), self.reduced_width * self.largest_unit)
            return self.width * (self.rest + head + following) + reduced
        return tied

    def of_end(self, chunk: int, begun: frozenset[int]) -> float:
        """Gradient of the embedding, and of a table that is also the head's two and their sum."""
        if self.zero == 3:
            # What was gathered is freed before the gradients are copied to where they are reduced.
            return self.learned_rest * self.width + max(self.rest * self.width, self.learned_rest * self.reduced_width)
        # The embedding's gradient is an operator's output also where products add theirs to the sum at once.
        one = 0 if self.freezes or not self.stage.is_first else self.width * self.table
        table = one * (3 if self.ties_here and self.gradient_width else 1)
        if self.zero == 2:
            buffers = self.buffers(chunk, begun)
            # Unless the table's bucket is there already, it comes once the two gradients have become one.
            return max(table + buffers.end - buffers.table, one + buffers.end)
        return table

    def of_begin(self, before: float, *, ends: bool) -> float:
        """As a backward begins: gradients of the output layer's weight and input, if it `ends` the model; ZeRO-3."""
        weight = 0 if self.defers else self.table * self.gradient_width
        gathered = self.hidden + self.residual if self.cuts_sequence else 0
        found = weight + self.hidden + gathered if ends else 0
        if self.zero == 3:
            # The rest of the stage is gathered into one buffer, and then copied out of it; a layer is there, too.
            rest, layer = self.width * self.rest, self.width * max(self.layer_sizes, default=0)
            return rest + before + max(rest, found) + layer
        return found + before

    @cached_property
    def of_weight(self) -> float:
        """Weight gradient of an action of its own."""
        model = self.config.model
        sizes = [float(self.matrix_of(spec)) for chunk in self.specs for spec in chunk]
        if self.stage.is_last:
            sizes.append(model.padded_vocab_size(self.vocab_size, self.tp) * model.hidden_size / self.tp)
        return self.gradient_width * max(sizes) + (self.hidden if self.cuts_sequence else 0)

    def of_layers(self, chunk: int) -> float:
        """What the backward of a layer of the chunk needs, the largest."""
        return self._of_layers[chunk]

    @cached_property
    def _of_layers(self) -> list[float]:
        return [max(map(self._work, dict.fromkeys(specs)), default=0.0) for specs in self.specs]

    def _work(self, spec: LayerSpec) -> float:
        model, unit = self.config.model, self.tokens * self.width / self.tp
        gathered, reduced = (self.hidden, self.residual) if self.cuts_sequence else (0.0, 0.0)
        if isinstance(spec.mlp, ExpertsSpec):
            grid = self.config.parallel.expert_layout
            used, features = spec.mlp.num_chosen, spec.mlp.expert.ffn_size
            up = sum(spec.mlp.expert.sections.values())
            rows = unit * used * model.hidden_size
            matrix = self.gradient_width * spec.mlp.num_experts * model.hidden_size / (grid.ep * grid.etp)
            experts = 0 if self.defers or self.zero == 3 else matrix
            down = rows + unit * used * features + experts * features
            back = rows - unit * used * features + experts * up
            weight = max(down, back)
            mlp = self.residual + weight
        else:
            features, up = spec.mlp.ffn_size, sum(spec.mlp.sections.values())
            matrix = 0 if self.defers or self.zero == 3 else self.gradient_width * model.hidden_size / self.tp
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
        if self.config.training.attention_backend in ("fused_softmax", "unfused"):
            return self.residual + unit * self.width * (sizes + heads) + self._explicit_work(attention)
        if not is_ring and model.attention_dropout == 0:
            repeated = 2 * heads if self.masks.repeats_heads(attention) else 0  # gradients of copied keys and values
            return self.residual + unit * self.width * (sizes + heads + repeated)
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

    def _explicit_work(self, attention: AttentionSpec) -> float:
        """Scores in the backward of explicit attention, and the probabilities that selective recomputation restores."""
        model, training, width = self.config.model, self.config.training, self.width
        backend = training.attention_backend
        # Gradients of probabilities and of scores. What the product with the values has kept is gone by then: with
        # dropout the dropped probabilities, else those in half precision where the softmax is in fp32.
        if has_fused_softmax(model, backend):
            more = width if model.attention_dropout else 2 * width
        else:
            more = 6 if width == 2 else 4 if model.attention_dropout else 8
        if self.config.recompute.recompute_granularity == "selective":
            more += bytes_per_score(model, backend, width)
        return more * self.tokens * training.seq_length * attention.num_heads / self.tp

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

    @cached_property
    def of_update(self) -> float:
        """Muon's largest buffer: the rows of some owners, and those of more of them as they are gathered."""
        if self.config.optimizer.optimizer != "muon":
            return 0
        traffic, most = self._traffic, 0.0
        for domain in traffic.data_ranks:
            width, before, found = max(traffic.round_widths(domain), default=0), 1, NEWTON_SCHULZ
            for _, ranks in traffic.owners(domain):
                found = max(found, (1 + before + before * ranks) if before > 1 else 1 + ranks)
                before *= ranks
            most = max(most, 4.0 * width * found)
        return most
