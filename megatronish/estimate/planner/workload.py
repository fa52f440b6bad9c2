"""What a plan is made for: a model's layers by kind, its batch, precision and attention, as plain numbers."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from megatronish.config.config import Config
from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.core.names import OBJECTIVE_NAMES
from megatronish.estimate.costs.parameters import adapter_parameters
from megatronish.estimate.costs.quantised import Quantised, quantised
from megatronish.specs.adapter_targets import LinearSection, all_patterns, is_target, sections_of_layer
from megatronish.specs.costs import Count, LayerCost
from megatronish.specs.layers import layer_specs

Attention = Literal["flash", "unfused", "blocks"]
"""flash: scores are never in memory; unfused: they are; blocks: with dropout, block by block, computed twice."""


@dataclass(frozen=True)
class Workload:
    """A model with its batch, and how a step computes it."""

    model: ModelConfig
    vocab_size: int
    seq_length: int
    global_batch: int
    precision: str = "bf16"
    attention: Attention = "flash"
    fused: bool = False
    """Whether pointwise operations are fused, by kernels or by a compiler."""
    gradient_bytes: int = 4
    """Bytes of a gradient as data-parallel ranks exchange it."""
    ring: bool = True
    """Whether cp sends keys and values round a ring, and does not trade heads."""
    optimizer_bytes: int = 40
    """Bytes a parameter that the optimizer step reads and writes."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """Adapters that learn in the place of the model, if there are any."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer, of which Muon has matrix products of its own."""
    extra_forwards: int = 0
    """Forward passes over the micro-batches of a step besides its own: of a reference, and for KTO of the model."""

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> "Workload":
        """The workload that a config describes."""
        training, model = config.training, config.model
        attention: Attention = "unfused"
        if training.attention_backend in ("auto", "flash"):
            attention = "blocks" if model.attention_dropout > 0 else "flash"
        return cls(
            model=model,
            vocab_size=vocab_size,
            seq_length=training.seq_length,
            global_batch=config.global_batch_size,
            precision=training.precision,
            attention=attention,
            fused=training.compile,
            gradient_bytes=2 if config.parallel.grad_reduce_in_bf16 else 4,
            ring=config.parallel.cp_comm_type == "p2p",
            adapter=config.adapter,
            optimizer=config.optimizer,
            extra_forwards=(config.reference in ("model", "adapters-off"))
            + (OBJECTIVE_NAMES[training.objective].learns_from == "labelled"),
        )

    @cached_property
    def kinds(self) -> tuple[LayerCost, ...]:
        """Cost rows of the different layers."""
        return tuple(dict.fromkeys(self._rows))

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Number of the kind of each layer."""
        place = {row: number for number, row in enumerate(self.kinds)}
        return tuple(place[row] for row in self._rows)

    @cached_property
    def adapters_of_layers(self) -> tuple[Count, ...]:
        """Parameters of the adapters of each layer."""
        return tuple(adapter_parameters(self.model, [layer], self.adapter) for layer in range(self.model.num_layers))

    @cached_property
    def quantised_layers(self) -> tuple[Quantised, ...]:
        """What of each layer is held in blocks of 4 bits."""
        return tuple(quantised(self.model, [layer], self.adapter) for layer in range(self.model.num_layers))

    @cached_property
    def adapted_sections(self) -> tuple[tuple[LinearSection, ...], ...]:
        """Sections with an adapter, of the first layer of each kind."""
        if not self.adapter.is_used:
            return tuple(() for _ in self.kinds)
        return tuple(
            tuple(each for each in sections if is_target(each.name, all_patterns(self.adapter)))
            for sections in self.sections
        )

    @cached_property
    def sections(self) -> tuple[tuple[LinearSection, ...], ...]:
        """Sections of the linear layers of the first layer of each kind, without routers; of a plug-in none."""
        if self.model.block != "transformer":
            return tuple(() for _ in self.kinds)
        specs = layer_specs(self.model)
        firsts = [self.layers.index(kind) for kind in range(len(self.kinds))]
        return tuple(tuple(sections_of_layer(self.model, layer, specs[layer])) for layer in firsts)

    @cached_property
    def _rows(self) -> tuple[LayerCost, ...]:
        rows: dict[int, LayerCost] = {}
        return tuple(
            rows[id(spec)] if id(spec) in rows else rows.setdefault(id(spec), spec.cost(self.model))
            for spec in layer_specs(self.model)
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq_length

    @property
    def has_dropout(self) -> bool:
        """Whether hidden states are dropped."""
        return self.model.hidden_dropout > 0
