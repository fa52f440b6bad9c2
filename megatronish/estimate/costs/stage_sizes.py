"""Sizes on a rank of a pipeline stage, and what waits there for a backward, for the peak of its memory (peak.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatronish.config.config import Config
from megatronish.estimate.costs.activations import Instant, StageLoad
from megatronish.estimate.costs.adapter_activations import AdapterActivations
from megatronish.estimate.costs.adapters import adapter_parameters
from megatronish.estimate.costs.dense_masks import DenseMasks
from megatronish.estimate.costs.memory import activations_of
from megatronish.estimate.costs.memory_table import Memory
from megatronish.specs.layers import ExpertsSpec, LayerSpec, layer_specs


@dataclass
class StageSizes:
    """Sizes of a stage; `memory` is what memory.py says of it. Bytes are those of one micro-batch.

    With `kernels` fused operators run.
    """

    config: Config
    stage: StageLoad
    memory: Memory
    vocab_size: int
    kernels: bool

    @cached_property
    def width(self) -> int:
        """Bytes of an element."""
        return 4 if self.config.training.precision == "fp32" else 2

    @cached_property
    def zero(self) -> int:
        """What ZeRO shares, 0 to 3."""
        return self.config.parallel.zero

    @cached_property
    def tp(self) -> int:
        """Ranks of tensor parallelism."""
        return self.config.layout.tp

    @cached_property
    def cuts_sequence(self) -> bool:
        """Whether there is sequence parallelism."""
        return self.config.parallel.sequence_parallel and self.tp > 1

    @cached_property
    def defers(self) -> bool:
        """Whether weight gradients wait for actions of their own: those of adapters never do."""
        return not self.freezes and any(any(instant.deferred) for instant in self.stage.instants)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a cp rank."""
        training = self.config.training
        return training.seq_length * training.micro_batch_size // self.config.layout.cp

    @cached_property
    def hidden(self) -> float:
        """Hidden states of whole sequences (of a cp rank)."""
        return self.tokens * self.config.model.hidden_size * self.width

    @cached_property
    def residual(self) -> float:
        """Hidden states between layers."""
        return self.hidden / self.tp if self.cuts_sequence else self.hidden

    @cached_property
    def table(self) -> int:
        """Elements of an embedding on this rank."""
        model = self.config.model
        return model.padded_vocab_size(self.vocab_size, self.tp) * model.hidden_size // self.tp

    @cached_property
    def freezes(self) -> bool:
        """Whether adapters learn, and the model itself is frozen."""
        return self.config.adapter.is_used

    @cached_property
    def gradient_width(self) -> int:
        """Bytes of an element of a weight's gradient before it is added to its sum: none where it is added at once."""
        return 0 if self.freezes or (self.width == 4 and self.zero < 2) else self.width

    @cached_property
    def ties_here(self) -> bool:
        """Whether embedding and head are one table on this stage."""
        return self.config.model.tied and self.stage.is_first and self.stage.is_last

    @cached_property
    def rest(self) -> float:
        """Elements of embedding and head on this rank."""
        model, table = self.config.model, self.table
        tables = self.stage.is_first + (self.stage.is_last and not (model.tied and self.stage.is_first))
        learned = model.position_embedding_type == "learned_absolute" and self.stage.is_first
        positions = (model.max_position_embeddings or self.config.training.seq_length) if learned else 0
        return table * tables + positions * model.hidden_size

    @cached_property
    def logits(self) -> float:
        """Logits of a micro-batch."""
        model = self.config.model
        return self.tokens * model.padded_vocab_size(self.vocab_size, self.tp) // self.tp * self.width

    @cached_property
    def specs(self) -> list[list[LayerSpec]]:
        """Layers of each chunk."""
        specs = layer_specs(self.config.model)
        return [[specs[layer] for layer in layers] for layers in self.stage.layers]

    @property
    def in_flight(self) -> float:
        """A tensor that arrives early and one that is sent."""
        return 2 * self.hidden / self.tp if self.config.layout.pp > 1 else 0

    def of_logits(self, instant: Instant) -> float:
        """Logits of all micro-batches at an instant."""
        return self.losses(instant) * self.logits if self.stage.is_last else 0

    def losses(self, instant: Instant) -> int:
        """Micro-batches whose loss has a backward, or weight gradients, before it."""
        return instant.live[-1] + (instant.deferred[-1] if self.defers else 0)

    # What waits

    def waiting(self, instant: Instant) -> float:
        """Activations of all micro-batches at an instant."""
        found = 0.0
        for chunk, (live, deferred) in enumerate(zip(instant.live, instant.deferred, strict=True)):
            found += live * self.of_chunk(chunk) + deferred * self.deferred_of_chunk(chunk)
        if self.stage.is_last:  # inputs of the final norm and of the head
            found += self.losses(instant) * 2 * self.residual
        return found + self.shared_masks + max(instant.live) * self.own_masks

    def of_chunk(self, chunk: int) -> float:
        """What a micro-batch keeps in a chunk."""
        return self._of_chunks[chunk]

    @cached_property
    def _of_chunks(self) -> list[float]:
        return [self._kept_in(chunk) for chunk in range(len(self.specs))]

    def _kept_in(self, chunk: int) -> float:
        again = self.recomputed(chunk)
        kept = self.specs[chunk][len(again) :] if self.config.recompute.recompute_method == "block" else []
        if self.config.recompute.recompute_granularity != "full":
            again, kept = [], self.specs[chunk]
        size = self.config.recompute.recompute_num_layers
        inputs = len(again) if self.config.recompute.recompute_method == "block" else -(-len(again) // size)
        offloads, shares = (
            self.config.recompute.offload_saved_activations,
            self.config.recompute.distribute_saved_activations,
        )
        one = 0 if offloads else self.hidden / self.tp if shares else self.residual
        model = self.config.model
        tables = 4 * self.tokens * model.head_size if model.position_embedding_type == "rope" else 0
        return inputs * one + sum(self.of_layer(spec) for spec in kept) + tables

    def recomputed(self, chunk: int) -> list[LayerSpec]:
        """Layers of a chunk that are computed again."""
        recompute, specs = self.config.recompute, self.specs[chunk]
        if recompute.recompute_granularity != "full":
            return []
        return specs[: recompute.recompute_num_layers] if recompute.recompute_method == "block" else specs

    def groups(self, again: Sequence[LayerSpec]) -> list[Sequence[LayerSpec]]:
        """Those layers by what is computed again together: the method `block` takes each by itself."""
        recompute = self.config.recompute
        size = 1 if recompute.recompute_method == "block" else recompute.recompute_num_layers
        return [again[start : start + size] for start in range(0, len(again), size)]

    def deferred_of_chunk(self, chunk: int) -> float:
        """What a micro-batch keeps for its weight gradients alone."""
        return self._deferred_of_chunks[chunk]

    @cached_property
    def _deferred_of_chunks(self) -> list[float]:
        if not self.defers:
            return [0.0] * len(self.specs)
        settings, model = activations_of(self.config, "cuda"), self.config.model
        return [float(self.tokens * sum(settings.deferred(spec.cost(model)) for spec in specs)) for specs in self.specs]

    def of_layer(self, spec: LayerSpec) -> float:
        """What a layer keeps for its backward."""
        return self._of_specs[spec]

    @cached_property
    def _of_specs(self) -> dict[LayerSpec, float]:
        return {spec: self._kept_by(spec) for specs in self.specs for spec in specs}

    def _kept_by(self, spec: LayerSpec) -> float:
        model, training, attention = self.config.model, self.config.training, spec.attention
        settings = activations_of(self.config, "cuda")
        scores = self.config.recompute.recompute_granularity != "selective"
        found = float(self.tokens * settings.of_layer(spec.cost(model), scores=scores))
        unit = self.tokens * self.width / self.tp
        heads, kv_heads = attention.num_heads * attention.head_size, attention.num_kv_heads * attention.head_size
        drops, by_heads = model.attention_dropout > 0, self.config.parallel.cp_comm_type == "a2a"
        if self.config.layout.cp > 1 and by_heads:
            found += unit * heads  # the output as it was computed, and as it has come back
        else:
            if model.position_embedding_type == "rope" and attention.rotary:
                found += unit * (heads + kv_heads)
            copies = training.micro_batch_size > 1 and not drops and not self.is_flex(spec)
            if self.config.layout.cp == 1 and copies:
                found += unit * heads  # in the order of the heads, and in that of the sequence
        if isinstance(spec.mlp, ExpertsSpec):
            routed = (
                0 if self.freezes else self.tokens * model.hidden_size * 4 / self.tp
            )  # in fp32, if the router learns
            found += routed - self.residual
            if self.kernels and spec.mlp.expert.activation == "swiglu":
                found -= unit * spec.mlp.num_chosen * spec.mlp.expert.ffn_size
        elif self.kernels and spec.mlp.activation == "swiglu" and spec.mlp.is_plain:
            found -= unit * spec.mlp.ffn_size
        return found + self.masks.of_layer(attention, unit=unit) + self.of_adapters(spec)

    @cached_property
    def masks(self) -> DenseMasks:
        """Dense masks of attention."""
        return DenseMasks(self.config, width=self.width)

    @cached_property
    def shared_masks(self) -> float:
        """Bytes of masks that all micro-batches share."""
        return self.masks.shared([spec.attention for specs in self.specs for spec in specs])

    @cached_property
    def own_masks(self) -> float:
        """Bytes of the masks of a micro-batch."""
        return self.masks.of_micro_batch([spec.attention for specs in self.specs for spec in specs])

    def is_flex(self, spec: LayerSpec) -> bool:
        """Whether a mask needs FlexAttention, whose output is in the order of the sequence."""
        data, window = self.config.data, spec.attention.window
        is_windowed = window is not None and window < self.config.training.seq_length
        is_masked = is_windowed or self.config.model.position_embedding_type == "alibi" or data.packs_documents
        return is_masked and self.config.training.attention_backend == "auto"

    def of_adapters(self, spec: LayerSpec) -> float:
        """What a layer keeps more, or fewer, because its weights are frozen; of layers alike the first one's."""
        if not self.freezes:
            return 0
        number = next(
            layer
            for layers, specs in zip(self.stage.layers, self.specs, strict=True)
            for layer, each in zip(layers, specs, strict=True)
            if each == spec
        )
        unit = self.tokens * self.width
        activations = AdapterActivations(self.config.adapter, unit=unit, tp=self.tp, residual=self.residual)
        return activations.of_layer(f"layers.{number}", spec)

    def matrix_of(self, spec: LayerSpec) -> int:
        """Elements of a layer's largest weight on this rank."""
        grid = self.config.parallel.expert_layout
        return spec.cost(self.config.model).largest_matrix.per_rank(self.tp, experts=grid.ep * grid.etp)

    def parameters_of(self, spec: LayerSpec) -> int:
        """Parameters of a layer on this rank."""
        grid = self.config.parallel.expert_layout
        return spec.cost(self.config.model).parameters.per_rank(self.tp, experts=grid.ep * grid.etp)

    def learned_of(self, spec: LayerSpec) -> int:
        """Parameters of a layer on this rank that learn; of adapters the mean of all layers."""
        return self._mean_of_adapters if self.freezes else self.parameters_of(spec)

    @cached_property
    def _mean_of_adapters(self) -> int:
        layers = self.stage.all_layers
        grid = self.config.parallel.expert_layout
        adapters = adapter_parameters(self.config.model, layers, self.config.adapter)
        return adapters.per_rank(self.tp, experts=grid.ep * grid.etp) // max(1, len(layers))
