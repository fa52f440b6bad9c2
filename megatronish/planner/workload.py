"""What a plan is made for: a model's layers by kind, its batch, precision and attention, as plain numbers."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatronish.config.config import Config
from megatronish.config.model import ModelConfig
from megatronish.layer_costs import LayerCost
from megatronish.layer_specs import layer_specs

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
