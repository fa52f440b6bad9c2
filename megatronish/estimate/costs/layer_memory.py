"""Memory of a kind of layer on a rank: what it keeps for its backward, and what that backward needs in addition.

Kept is what the cost row says, and what the spec says that a GPU keeps more or fewer of (specs/attention.py, and
fused SwiGLU's activated gate in specs/layers.py). What all layers share, or a run adds, is here:

    RoPE       its tables
    SDPA       with `--attention-backend flash`, a dense mask of bools; ALiBi's biases
    adapters   a frozen product keeps no input; LoRA keeps the input of each section (with dropout a copy for each of
               them) and the product with A, IA3 the features that it scales

Not counted: statistics of norms and softmax (about 1 %).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatronish.core.remembered import remembered
from megatronish.estimate.costs.layer_kinds import ChunkKinds, LayerKind
from megatronish.estimate.costs.micro_batch import MicroBatchSizes
from megatronish.estimate.costs.parameters import frozen_bytes, largest_dequantised, quantised
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.specs.attention import AttentionRun, AttentionSpec
from megatronish.specs.chunk_sizes import LARGE_MATRIX, chunk_sizes
from megatronish.specs.costs import (
    ADDED_AT_ONCE,
    ActivationBytes,
    Count,
    DeviceType,
    LinearShape,
    WeightGradientBytes,
    sum_counts,
)
from megatronish.specs.ends import ends_of
from megatronish.specs.layers import attention_kind, layer_specs


class ChunkBytes(NamedTuple):
    """Bytes of a micro-batch in a chunk: what waits for its backward, and for its weight gradients alone.

    `again` is the largest group of layers that are computed again together, and `more` what is there in addition while
    its last layer is at work. `keeps_last` says that the last layer is not computed again.
    """

    live: float
    deferred: float
    again: float
    more: float
    recomputes: bool
    keeps_last: bool


@dataclass(eq=False)
class LayerMemory(MicroBatchSizes):
    """Bytes of layers on a rank of a layout, for one micro-batch; with `kernels` fused operators run."""

    device: DeviceType = "cuda"
    kernels: bool = True

    def __post_init__(self) -> None:
        model = self.config.model
        self.ep, self.etp = self.experts
        even, room = self.config.rows_of_experts if model.num_experts is not None else (1, 1)
        self.room = room / even
        """Rows of experts, over those of an even load."""
        self.residual = self.hidden / self.tp if self.cuts_sequence else float(self.hidden)
        self.feature = self.tokens * self.element / self.tp
        self.table = self.padded_vocab * model.hidden_size // self.tp
        """Elements of an embedding on this rank."""
        of_rank = self.tokens * self.padded_vocab // self.tp
        self.logits = float(of_rank * self.element * (1 - model.encoder_share))
        self.logits *= 1 + model.num_depths
        self.uncapped = 0.0
        """Gradient of the logits before their soft cap, which comes while that after it and the tanh are there."""
        if model.final_logit_softcapping is not None:  # and the tanh, which its backward needs
            self.uncapped = self.logits
            self.logits *= 2
        unfused = self.device == "cuda" and not self.kernels and self.element == 2
        self.exponentials = 4 * min(chunk_sizes(self.device).logits, of_rank) if unfused else 0
        """Those of some tokens' logits, in fp32, while the gradient of the logits is computed."""
        has_weight_gradients = SCHEDULES[self.config.parallel.schedule].has_weight_gradients
        self.defers = has_weight_gradients and not self.freezes  # those of adapters never wait
        """Whether weight gradients wait for actions of their own."""

    @property
    def adds_at_once(self) -> bool:
        """Whether products add gradients of weights to sums in fp32 where there are some."""
        return self.element == 4 or self.device == "cuda"

    @property
    def adds_by_expert(self) -> bool:
        """Whether products of experts in 16 bits add their gradients at once, too: large ones of known sizes."""
        config = self.config
        is_large = config.model.hidden_size * config.model.expert_ffn_size // self.etp >= LARGE_MATRIX
        return self.device == "cuda" and self.ep > 1 and is_large and not config.parallel.has_rooms

    # What waits for the backward

    @staticmethod
    def _sum(size: Callable[[LayerKind], float], kinds: Sequence[LayerKind]) -> float:
        return sum(size(kind) * number for kind, number in Counter(kinds).items())

    @remembered
    def of_chunk(self, chunk: ChunkKinds) -> ChunkBytes:
        """Bytes of a chunk."""
        model, kinds = self.config.model, chunk.kinds
        own, ahead = ([kind for kind in kinds if kind.is_ahead == is_ahead] for is_ahead in (False, True))
        groups = self.config.recompute.groups(own, ahead)
        again = [tuple(group) for group, is_again in groups if is_again]
        kept = self._sum(self.kept, [kind for group, is_again in groups if not is_again for kind in group])
        most = max((self._sum(self.kept, group) for group in set(again)), default=0.0)
        deferred = self._sum(self.deferred, kinds) if self.defers else 0.0
        number = sum(map(len, again))
        later = deferred * (number - len(again[0])) / number if again else 0.0
        has_tables = model.position_embedding_type == "rope" and self.device == "cuda"
        tables = 4 * self.tokens * model.rotary_size if has_tables else 0
        return ChunkBytes(
            live=len(again) * self._input + kept + tables,
            deferred=deferred,
            again=most,
            more=most + later - kept,
            recomputes=bool(again),
            keeps_last=number < len(kinds),
        )

    @property
    def _input(self) -> float:
        """Input of layers that are computed again together."""
        recompute = self.config.recompute
        if recompute.offload_saved_activations:
            return 0.0
        return self.hidden / self.tp if recompute.distribute_saved_activations else self.residual

    @remembered
    def kept(self, kind: LayerKind) -> float:
        """What a layer keeps for its backward."""
        run = self.run()
        attention = getattr(kind.spec, "attention", self.usual_attention)
        scores = 0 if run.is_selective or run.is_ring else attention.bytes_per_score(run)
        saved = kind.cost.saved_bytes(
            seq_length=run.seq_length, element_bytes=self.element, score_bytes=scores, device=self.device
        )
        kept = float(self.tokens * self._per_rank(saved)) - self._left_out(kind, run)
        kept += sum(each.kept_of_others(run) for each in getattr(kind.spec, "attentions", ()))
        kept += padding(run) if (padding := getattr(getattr(kind.spec, "mlp", None), "padding", None)) else 0.0
        if self.device == "cpu":
            return kept
        if (more_kept := getattr(kind.spec, "more_kept", None)) is not None:
            kept += more_kept(run, learns=not self.freezes)
        return kept + (self._kept_for_adapters(kind) if self.freezes else 0.0)

    def _left_out(self, kind: LayerKind, run: AttentionRun) -> float:
        """What a layer does not keep, as parts of it are computed again; those of a plug-in never are."""
        if (left_out := getattr(kind.spec, "left_out", None)) is None or not run.recomputed:
            return 0.0
        shares_norm = self.config.model.placement == "parallel"
        return float(left_out(run, learns=not self.freezes, shares_norm=shares_norm))

    @cached_property
    def usual_attention(self) -> AttentionSpec:
        """Attention as the options of the config describe it, for layers of a plug-in that do not say."""
        return attention_kind(self.config.model).of(self.config.model)

    def _per_rank(self, count: Count) -> int:
        return count.per_rank(self.tp, sequence_parallel=self.cuts_sequence, experts=self.tp // self.etp)

    def _kept_for_adapters(self, kind: LayerKind) -> float:
        """What a layer keeps more, or fewer, because its weights are frozen. Rows of experts have no dropout."""
        dense = [linear for linear in kind.cost.linears if linear.copies == 1 and linear.sections]
        # A norm whose heads have weights of their own keeps what they are multiplied by for their gradients alone.
        kept = -self.feature * sum(norm.size * norm.vectors for norm in kind.cost.norms if norm.each_weight)
        own = getattr(getattr(kind.spec, "attention", None), "kept_for_adapters", None)
        if own is not None:  # attention that is no pair of products
            number = next(place for place, linear in enumerate(dense) if linear.cut == "row") + 1
            adapted = [(linear, _number_of_adapters(kind, linear)) for linear in dense[:number]]
            kept += own(self.run(), adapted, self.config.adapter)
            dense = dense[number:]
        pairs = list(zip(dense[::2], dense[1::2], strict=False))
        if any(linear.copies > 1 for linear in kind.cost.linears):
            pairs = [pair for pair in pairs if any(section == "o" for section, _ in pair[1].sections)]
        for first, second in pairs:
            in_first, in_second = (_number_of_adapters(kind, linear) for linear in (first, second))
            is_attention = any(section == "o" for section, _ in second.sections)
            output = self.feature * second.in_features
            if self.config.adapter.adapter_type == "ia3":
                kept += self.feature * (first.out_features if in_first else 0) - self.residual
                continue
            drops = self.config.adapter.lora_dropout > 0
            kept += (in_first - 1) * self.residual if drops or not in_first else 0.0
            kept += self.tokens * self.element * self.config.adapter.lora_rank * (in_first + in_second)
            if is_attention:  # the operator of attention keeps its output, too
                kept += output if in_second and drops else 0.0
            else:
                kept -= 0.0 if in_second else output
        return kept

    def deferred(self, kind: LayerKind) -> float:
        """What a layer keeps for its weight gradients: input and output gradient of its linear layers."""
        inputs, gradients = kind.deferred
        # Inputs are kept in parts under sequence parallelism; whole output gradients have been gathered.
        split = (inputs.split + gradients.split) // self.tp
        split += (inputs.experts + gradients.experts) // (self.tp // self.etp)
        whole = inputs.whole // (self.tp if self.cuts_sequence else 1) + gradients.whole
        return float(self.tokens * self.element * (split + whole))

    # Masks

    @cached_property
    def masks(self) -> tuple[float, float]:
        """Bytes of masks that all micro-batches share, and of each that waits, whose documents have their own."""
        model, run = self.config.model, self.run()
        packs, has_alibi = run.packs_documents, run.has_alibi
        specs = {getattr(spec, "attention", None) for spec in layer_specs(model)}
        if self.device == "cpu":  # ALiBi's biases alone, if neither a ring nor blocks make them for a tile at a time
            by_blocks = run.backend in ("auto", "flash") and all(spec and spec.is_sparse(run) for spec in specs)
            biases = self.element * model.num_attention_heads // self.tp * run.seq_length
            samples = 1 if packs else run.micro_batch_size
            size = float(self.tokens * (biases // samples)) if has_alibi and not self.is_ring and not by_blocks else 0.0
            return (0.0, size) if packs else (size, 0.0)
        if not any(spec.has_dense_mask(run) for spec in specs if spec is not None):
            return 0.0, 0.0
        heads = model.num_attention_heads // (self.tp * self.cp)
        of_pair = 1 + (self.element * heads if has_alibi else 0)  # a bool, and biases
        if not packs:
            return float(run.masked_pairs * of_pair), 0.0
        # The mask of bools is kept for the layers that are computed again.
        again = self.config.recompute.recompute_granularity is not None
        return 0.0, float(run.masked_pairs * (of_pair - (0 if again else 1)))

    # What a backward needs in addition

    def run(self, gradient: WeightGradientBytes = ADDED_AT_ONCE) -> AttentionRun:
        """Sizes from which specs compute what they need; `gradient` is that of weights before it is in its sum."""
        model, training = self.config.model, self.config.training
        size = ActivationBytes(
            feature=self.feature,
            hidden=self.hidden,
            residual=self.residual,
            gathers=self.cuts_sequence,
            gradient=ADDED_AT_ONCE if self.defers else gradient,
            element=self.element,
            hidden_size=model.hidden_size,
            tp=self.tp,
            ep=self.ep,
            etp=self.etp,
            rows=self.room,
        )
        return AttentionRun(
            size=size,
            tokens=self.tokens,
            seq_length=training.seq_length,
            micro_batch_size=training.micro_batch_size,
            cp=self.cp,
            is_ring=self.is_ring,
            backend=training.attention_backend,
            has_dropout=model.attention_dropout > 0,
            has_rope=model.position_embedding_type == "rope",
            has_alibi=model.position_embedding_type == "alibi",
            packs_documents=self.config.data.packs_documents,
            recomputed=self.config.recompute.recomputed,
            kernels=self.kernels,
            device=self.device,
            sends_latents=self.config.sends_latents,
        )

    @remembered
    def transients(self, kind: LayerKind, gradient: WeightGradientBytes) -> float:
        """What the backward of a layer needs at most: gradients of its products, or the operators of attention."""
        run = self.run(gradient)
        if (transients := getattr(kind.spec, "transients", None)) is not None:
            size = transients(run)
        else:  # of a plug-in: gradients of the largest product
            size = 2 * self.residual + run.size.gradient.largest(kind.cost.linears, tp=self.tp, grid=run.size.grid)
        return float(size + self._hashes + self.dequantised(kind))

    @remembered
    def of_layers(self, chunk: ChunkKinds, gradient: WeightGradientBytes) -> float:
        """What the backward of a layer of a chunk needs, the largest."""
        return max((self.transients(kind, gradient) for kind in set(chunk.kinds)), default=0.0)

    @cached_property
    def _hashes(self) -> float:
        """Hashes of the mask of hidden states, int32, where no operator draws it."""
        drops = self.config.model.hidden_dropout > 0 and not self.kernels
        return 3 * 4 / self.element * self.residual if drops else 0.0

    def dequantised(self, kind: LayerKind) -> int:
        """The largest weight of a layer that is dequantised for the gradient of its input."""
        if self.config.adapter.quantize_base is None:
            return 0
        return self.element * largest_dequantised(self.config.model, [kind.first], tp=self.tp, etp=self.etp)

    @cached_property
    def of_embedding(self) -> float:
        """Input of the norm after the embedding, which waits with the first chunk."""
        model = self.config.model
        norm = ends_of(model, seq_length=self.config.training.seq_length).norm
        if norm is None:
            return 0.0
        saved = norm.saved_bytes(element_bytes=self.element, device=self.device).total
        return float(self.tokens * (saved // (self.tp if self.cuts_sequence else 1)))

    @cached_property
    def of_head(self) -> float:
        """What waits of the end of the model: inputs of its norms and dense layers, and of the output layer."""
        head = ends_of(self.config.model, seq_length=self.config.training.seq_length).head
        kept = sum(linear.in_features for linear in head.linears) + head.kept.total
        inputs = 1 + self.config.model.num_depths  # of the output layer
        return (inputs + len(head.norms) + kept / self.config.model.hidden_size) * self.residual

    @cached_property
    def learned_by_head(self) -> int:
        """Parameters of the dense layers at the end of the model."""
        ends = ends_of(self.config.model, seq_length=self.config.training.seq_length)
        dense = sum_counts(linear.parameters for linear in (*ends.head.linears, *ends.of_sequence.linears))
        return dense.per_rank(self.tp)

    def held(self, kind: LayerKind) -> int:
        """Parameters of a layer on this rank."""
        return kind.parameters.per_rank(self.tp, experts=self.ep * self.etp)

    def learned(self, kind: LayerKind) -> int:
        """Parameters of a layer on this rank that learn."""
        count = kind.adapters if self.freezes else kind.parameters
        return count.per_rank(self.tp, experts=self.ep * self.etp, etp=self.etp)

    @remembered
    def learned_by(self, chunk: ChunkKinds) -> int:
        """Parameters of a chunk on this rank that learn."""
        return sum(self.learned(kind) * number for kind, number in chunk.counts.items())

    def frozen(self, kind: LayerKind) -> int:
        """Bytes of a layer's frozen parameters on this rank, those in 4 bits as they are stored."""
        model, adapter = self.config.model, self.config.adapter
        blocks = quantised(model, [kind.first], adapter)
        return frozen_bytes(kind.parameters, blocks, tp=self.tp, experts=self.experts, element_bytes=self.element)

    @remembered
    def largest_gradient(self, kind: LayerKind, gradient: WeightGradientBytes) -> int:
        """Bytes of the largest gradient of a layer's weights on this rank, before it is in its sum."""
        return gradient.largest(kind.cost.linears, tp=self.tp, grid=self.ep * self.etp)


def _number_of_adapters(kind: LayerKind, linear: LinearShape) -> int:
    return sum(f"{linear.name}.{section}" in kind.adapted for section, _ in linear.sections)
