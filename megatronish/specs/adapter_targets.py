"""Targets of adapters: linear layers of a model by name, and which of their sections have an adapter."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.specs.layers import LayerSpec, layer_specs

LATENT_SECTIONS = ("q_down", "kv_down", "kv_up")
AHEAD_SECTIONS = ("projection",)  # of layers of multi-token prediction
SECTIONS = ("q", "k", "v", *LATENT_SECTIONS, "o", "gate", "up", "down", *AHEAD_SECTIONS)
DEFAULT_TARGETS = {"lora": SECTIONS, "ia3": ("k", "v", "kv_up", "down")}
OTHER_NAMES = {
    "all-linear": SECTIONS,
    # PEFT's, of the Llama family and of GPT-2
    **{f"{name}_proj": (name,) for name in SECTIONS if name not in (*LATENT_SECTIONS, *AHEAD_SECTIONS)},
    "q_a_proj": ("q_down",),
    "q_b_proj": ("q",),
    "kv_a_proj_with_mqa": ("kv_down",),
    "kv_b_proj": ("kv_up",),
    "eh_proj": ("projection",),
    "c_attn": ("q", "k", "v"),
    "c_fc": ("up",),
    # Megatron-LM's
    "linear_qkv": ("q", "k", "v"),
    "linear_proj": ("o",),
    "linear_fc1": ("gate", "up"),
    "linear_fc2": ("down",),
    "linear_q_proj": ("q",),
    "linear_q_down_proj": ("q_down",),
    "linear_q_up_proj": ("q",),
    "linear_kv_down_proj": ("kv_down",),
    "linear_kv_up_proj": ("kv_up",),
}
"""Names of sections in other systems. GPT-2's c_proj is missing: it names the sections o and down alike."""


class LinearSection(NamedTuple):
    """Section of a linear layer, [in] -> [out], of which a layer of experts has `copies`."""

    name: str  # layers.0.attention.qkv.q
    in_features: int
    out_features: int
    copies: int = 1
    cut: Literal["column", "row", "none"] = "column"

    @property
    def section(self) -> str:
        """Last part of the name."""
        return self.name.rpartition(".")[2]


def linear_sections(model: ModelConfig) -> Iterator[LinearSection]:
    """Sections of all linear layers that may have an adapter: not router, embedding and output layer."""
    for number, spec in enumerate(layer_specs(model)):
        yield from sections_of_layer(model, number, spec)


def sections_of_layer(model: ModelConfig, number: int, spec: LayerSpec) -> Iterator[LinearSection]:
    """Sections of one layer."""
    for linear in spec.cost(model).linears:
        for section, size in linear.sections:
            name = f"layers.{number}.{linear.name}.{section}"
            yield LinearSection(name, linear.in_features, size, linear.copies, linear.cut)


def target_patterns(config: AdapterConfig) -> dict[str, tuple[str, ...]]:
    """What --adapter-targets says, or the default, each entry with our names of the sections that it stands for."""
    assert config.adapter_type is not None
    given = config.adapter_targets or DEFAULT_TARGETS[config.adapter_type]
    return {name: OTHER_NAMES.get(name, (name,)) for name in given}


def is_target(name: str, patterns: Sequence[str]) -> bool:
    """Whether a section, layers.0.attention.qkv.q, is called as one of the patterns, or its whole name is like it."""
    return any(name.rpartition(".")[2] == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def all_patterns(config: AdapterConfig) -> tuple[str, ...]:
    """Patterns of all entries together."""
    return tuple(pattern for patterns in target_patterns(config).values() for pattern in patterns)


def adapted_sections(model: ModelConfig, config: AdapterConfig) -> list[LinearSection]:
    """Sections of the model that have an adapter."""
    patterns = all_patterns(config)
    return [section for section in linear_sections(model) if is_target(section.name, patterns)]


def complaint_about_targets(model: ModelConfig, config: AdapterConfig) -> str | None:
    """Sentence about a target that matches nothing, or that has no adapter of this type; None if all do."""
    sections = list(linear_sections(model))
    names = [section.name for section in sections]
    there = " ".join(dict.fromkeys(section.section for section in sections))
    for given, patterns in target_patterns(config).items():
        matched = [name for name in names if is_target(name, patterns)]
        if not matched and (given in config.adapter_targets or given not in SECTIONS):
            return (
                f"adapter_targets: {given} matches no linear layer of this model; its sections are {there}, with names "
                f"such as {names[0]}"
            )
        if config.adapter_type == "ia3" and any(name.endswith((".gate", ".up")) for name in matched):
            return (
                f"adapter_targets: {given} matches gate and up-projections, which have no IA3: it scales the input of "
                "the down-projection behind them; name down instead"
            )
        if config.adapter_type == "ia3" and any(name.endswith("_down") for name in matched):
            return (
                f"adapter_targets: {given} matches the ways down to latents, which have no IA3: it scales what comes "
                "up from them; name q or kv_up instead"
            )
        if config.adapter_type == "ia3" and any(name.endswith(".projection") for name in matched):
            return (
                f"adapter_targets: {given} matches projections of multi-token prediction, which have no IA3; name "
                "sections of the layer behind them, such as k, v and down"
            )
    return None


def refuse_wrong_targets(model: ModelConfig, config: AdapterConfig) -> None:
    """UserError for adapters that would match nothing, or that a layer cannot have."""
    if not config.is_used:
        return
    complaint = complaint_about_targets(model, config)
    if (
        complaint is None
        and config.lora_dropout > 0
        and any(section.copies > 1 for section in adapted_sections(model, config))
    ):
        complaint = (
            f"lora_dropout={config.lora_dropout} is not for the adapters of experts, whose rows have no position; use "
            "--lora-dropout 0, or name the sections of attention in --adapter-targets"
        )
    if complaint is not None:
        raise UserError(complaint)
