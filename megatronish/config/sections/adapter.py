"""Section [adapter] of a config: adapters of a frozen model, and which of its layers have one."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatronish.config.marks import at_least, at_most, fraction, greater_than


@dataclass(frozen=True)
class AdapterConfig:
    """Adapters of linear layers. With them the model itself is frozen."""

    adapter_type: Literal["lora", "ia3"] | None = None
    """Learn low-rank updates of weights (lora) or scales of features (ia3), and freeze the model."""
    adapter_targets: tuple[str, ...] = ()
    """Sections that have one: q k v o gate up down, PEFT's or Megatron-LM's names, patterns such as layers.0.*.q."""
    lora_rank: Annotated[int, at_least(1), at_most(65_536)] = 16
    """Rank r of the updates."""
    lora_alpha: Annotated[float, greater_than(0)] = 32.0
    """The updates are multiplied by alpha / r."""
    lora_dropout: Annotated[float, fraction(excluding=1)] = 0.0
    """Dropout on the input of the updates."""
    use_rslora: bool = False
    """Multiply by alpha / sqrt(r) instead (rsLoRA)."""
    quantize_base: Literal["nf4"] | None = None
    """Hold the frozen linear layers in 4 bits (QLoRA), the others in the precision of the run."""
    double_quantization: bool = True
    """Quantise the scales of a quantised base too, to 0.516 bytes a parameter instead of 0.5625."""

    @property
    def is_used(self) -> bool:
        """Whether adapters learn, and the model is frozen."""
        return self.adapter_type is not None
