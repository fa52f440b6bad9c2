"""Sections [adapter] and [preference] of a config: adapters of a frozen model, and preferred completions."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from megatronish.config.marks import Range, at_least, at_most, fraction, greater_than


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
    quantize_base: Literal["nf4", "int8"] | None = None
    """Hold the frozen linear layers in 4 bits (nf4: QLoRA) or 8 (int8: LLM.int8), others in the run's precision."""
    double_quantization: bool = True
    """Quantise the scales of nf4 too, to 0.516 bytes a parameter instead of 0.5625."""

    @property
    def is_used(self) -> bool:
        """Whether adapters learn, and the model is frozen."""
        return self.adapter_type is not None


HALF = Range("must be at least 0 and less than 0.5", lambda value: 0 <= value < 0.5)

ReferenceKind = Literal["adapters-off", "stored", "model"]


@dataclass(frozen=True)
class PreferenceConfig:
    """Objectives of preferences: dpo, ipo, simpo, cpo, orpo and kto, of --objective."""

    beta: Annotated[float, greater_than(0), tyro.conf.arg(aliases=("--dpo-beta", "--kto-beta", "--orpo-lambda"))] = 0.1
    """Weight of a difference of log-probabilities; of orpo, of the odds ratio (lambda in its paper)."""
    dpo_loss_type: Literal["sigmoid", "hinge", "robust", "ipo"] = "sigmoid"
    """Loss of dpo. robust is for labels of which a known part, --label-smoothing, is wrong."""
    label_smoothing: Annotated[float, HALF] = 0.0
    """Part of the pairs whose labels are taken to be swapped: of dpo (sigmoid, robust), simpo and cpo."""
    simpo_gamma: Annotated[float, at_least(0)] = 0.5
    """Margin of simpo between the rewards of chosen and rejected."""
    cpo_alpha: Annotated[float | None, at_least(0)] = None
    """Weight of the mean loss of the chosen tokens, of cpo and simpo. Derived: 1 of cpo, 0 of simpo."""
    desirable_weight: Annotated[float, at_least(0), tyro.conf.arg(aliases=("--kto-desirable-weight",))] = 1.0
    """Weight of wanted completions, of kto."""
    undesirable_weight: Annotated[float, at_least(0), tyro.conf.arg(aliases=("--kto-undesirable-weight",))] = 1.0
    """Weight of unwanted completions, of kto."""
    reference: ReferenceKind | None = None
    """Reference of dpo, ipo, kto: the model without adapters, its numbers stored before the first step, or a second
    model. Derived: adapters-off with adapters, else model."""
