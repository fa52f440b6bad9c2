"""Activations that wait for the backward: bytes a token, for each chunk of a pipeline stage, and their peak in a step.

They follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4), with flash attention and without dropout masks, which
are computed again: 32 s b h bytes a layer for a GPT in bf16, of which tensor parallelism splits 24 and sequence
parallelism the rest. Not counted: statistics of norms
and softmax (about 1 %), the bias that SDPA makes of a window's mask in every layer, and, with RoPE and SDPA, what the
values keep alive: they are a view of the output of the qkv projection, whose queries and keys were replaced.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.recompute import RecomputeConfig
from megatronish.config.sections.training import AttentionBackend
from megatronish.specs.costs import DeviceType, LayerCost


class Instant(NamedTuple):
    """Micro-batches of each chunk that wait: `live` for their backward, `deferred` for their weight gradients alone."""

    live: tuple[int, ...]
    deferred: tuple[int, ...]


class Backward(NamedTuple):
    """A backward of a chunk begins at an instant; `begun` are the chunks that had one before."""

    instant: Instant
    chunk: int
    begun: frozenset[int]


class StageLoad(NamedTuple):
    """What a pipeline stage holds: the layers of each of its chunks, and the instants and backwards of a step."""

    layers: tuple[range, ...]
    instants: frozenset[Instant]
    is_first: bool
    is_last: bool
    backwards: frozenset[Backward] = frozenset()

    @property
    def all_layers(self) -> tuple[int, ...]:
        """Layers of all its chunks, in the order of a forward."""
        return tuple(layer for chunk in self.layers for layer in chunk)


class ChunkBytes(NamedTuple):
    """Bytes a token of a micro-batch in one chunk.

    `live` wait for the backward, `deferred` for the weight gradients alone; `recomputed` are those of the layers that
    are computed again together, held once.
    """

    live: int
    deferred: int
    recomputed: int


class Activations(NamedTuple):
    """Settings that decide what layers keep of each token."""

    hidden_size: int
    seq_length: int
    element_bytes: int
    score_bytes: int
    tp: int
    sequence_parallel: bool
    recompute: RecomputeConfig
    device: DeviceType
    embedding_bytes: int = 0  # of the input of a norm after the embedding
    bias_bytes: int = 0  # of ALiBi's biases
    shares_bias: bool = True  # all micro-batches have the same
    routed_over: int = 1  # tp / etp: ranks of tp that share out the rows of experts

    def peak(self, stage: StageLoad, costs: Sequence[LayerCost], *, padded_vocab_size: int) -> tuple[int, int]:
        """(activations, logits) in bytes a token, at the instant of a step that holds most; `costs` of all layers."""
        chunks = [self.of_chunk([costs[layer] for layer in layers]) for layers in stage.layers]
        # The final norm and the head stand in the last chunk: their two inputs, and the logits, whose gradient takes
        # their place.
        ends, logits = (size * self.element_bytes for size in (2 * self.hidden_size, padded_vocab_size))
        ends_cut = self.tp if self.sequence_parallel else 1
        begins = self.embedding_bytes // ends_cut if stage.is_first else 0

        def held(instant: Instant) -> tuple[int, int]:
            live = sum(count * chunk.live for count, chunk in zip(instant.live, chunks, strict=True))
            waiting = sum(count * chunk.deferred for count, chunk in zip(instant.deferred, chunks, strict=True))
            live += (instant.live[0] + instant.deferred[0]) * begins
            live += 0 if self.shares_bias else sum(instant.live) * self.bias_bytes
            losses = instant.live[-1] + instant.deferred[-1] if stage.is_last else 0
            return live + waiting + losses * ends // ends_cut, losses * logits // self.tp

        activations, in_logits = max(map(held, stage.instants), key=sum)
        shared = self.bias_bytes if self.shares_bias else 0
        return activations + max(chunk.recomputed for chunk in chunks) + shared, in_logits

    def of_chunk(self, costs: Sequence[LayerCost]) -> ChunkBytes:
        """Bytes of the layers of a chunk, as the method of recomputation says."""
        deferred = sum(map(self.deferred, costs))
        granularity, size = self.recompute.recompute_granularity, self.recompute.recompute_num_layers
        if granularity != "full":
            live = sum(self.of_layer(cost, scores=granularity is None) for cost in costs)
            return ChunkBytes(live, deferred, 0)
        whole = [self.of_layer(cost) for cost in costs]
        if self.recompute.recompute_method == "block":
            again, others = whole[:size], whole[size:]
            return ChunkBytes(len(again) * self._input + sum(others), deferred, max(again, default=0))
        groups = [whole[start : start + size] for start in range(0, len(whole), size)]
        return ChunkBytes(len(groups) * self._input, deferred, max(map(sum, groups), default=0))

    def of_layer(self, cost: LayerCost, *, scores: bool = True) -> int:
        """Bytes that one layer keeps for its backward, with the scores of its attention or without."""
        saved = cost.saved_bytes(
            seq_length=self.seq_length,
            element_bytes=self.element_bytes,
            score_bytes=self.score_bytes if scores else 0,
            device=self.device,
        )
        return saved.per_rank(self.tp, sequence_parallel=self.sequence_parallel, experts=self.routed_over)

    def deferred(self, cost: LayerCost) -> int:
        """Bytes that one layer keeps for its weight gradients: input and output gradient of its linear layers."""
        inputs, gradients = cost.deferred_inputs * self.element_bytes, cost.deferred_gradients * self.element_bytes
        # Inputs are kept in parts under sequence parallelism; whole output gradients have been gathered.
        split = (inputs.split + gradients.split) // self.tp + (inputs.experts + gradients.experts) // self.routed_over
        return split + inputs.whole // (self.tp if self.sequence_parallel else 1) + gradients.whole

    @property
    def _input(self) -> int:
        """Bytes of the input of layers that are computed again together."""
        if self.recompute.offload_saved_activations:
            return 0
        is_shared = self.sequence_parallel or self.recompute.distribute_saved_activations
        return self.hidden_size * self.element_bytes // (self.tp if is_shared else 1)


def bytes_per_score(model: ModelConfig, backend: AttentionBackend, element_bytes: int) -> int:
    """Bytes that attention keeps of each query with each key: probabilities, dropout's mask, and what that left.

    The fused softmax keeps its output, in the dtype of the model; torch's one in fp32, and a copy for the product with
    the values where these are shorter; with ALiBi or sinks there is only torch's. SDPA, and attention with dropout
    block by block, keep nothing.
    """
    if backend in ("auto", "flash"):
        return 0
    dropout = model.attention_dropout > 0
    if not has_fused_softmax(model, backend):
        return 4 + (1 + element_bytes if dropout else 2 if element_bytes == 2 else 0)
    return element_bytes + (1 + element_bytes if dropout else 0)


def has_fused_softmax(model: ModelConfig, backend: AttentionBackend) -> bool:
    """Whether the softmax of explicit scores is the fused one, which knows no ALiBi and no sinks."""
    return backend == "fused_softmax" and model.position_embedding_type != "alibi" and model.softmax_type == "vanilla"
