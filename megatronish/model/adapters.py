"""Construction of adapters in the modules of a stage (specs/adapter_targets.py says which layers have one)."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.layers.experts import StackedLinear
from megatronish.layers.ia3 import ColumnIA3, GroupedIA3, RowIA3
from megatronish.layers.linear import ColumnParallelLinear, LinearLayer, RowParallelLinear, WholeLinear
from megatronish.layers.lora import ColumnLoRA, GroupedLoRA, LoRASettings, RowLoRA, WholeLoRA
from megatronish.model.gpt import GPT
from megatronish.specs.adapter_targets import all_patterns, is_target

DEFAULT = "default"


class Target(NamedTuple):
    """Linear layer by its name, and the sections of it that have an adapter."""

    name: str
    layer: LinearLayer
    sections: tuple[str, ...]

    @property
    def site(self) -> str:
        """Name of its dropout masks within the transformer layer: layers.0.mlp.fc1 -> lora.mlp.fc1."""
        return "lora." + self.name.split(".", 2)[2]


def targets_of(model: nn.Module, config: AdapterConfig) -> Iterator[Target]:
    """The layers of this stage that have an adapter, with their sections."""
    patterns = all_patterns(config)
    for name, layer in model.named_modules():
        if isinstance(layer, LinearLayer) and layer.section_names:
            sections = tuple(section for section in layer.section_names if is_target(f"{name}.{section}", patterns))
            if sections:
                yield Target(name, layer, sections)


def add_adapters(model: GPT, config: AdapterConfig, *, name: str = DEFAULT) -> None:
    """Give the chosen layers of this stage adapters of this name, uninitialised, and apply them."""
    sites: dict[str, None] = dict.fromkeys(model.adapter_sites)
    for target in list(targets_of(model, config)):
        target.layer.adapters[name] = make_adapter(target, config)
        target.layer.active_adapter = name
        if config.lora_dropout > 0:
            sites |= dict.fromkeys(f"{target.site}.{section}" for section in target.sections)
    model.adapter_sites = tuple(sites)


def make_adapter(target: Target, config: AdapterConfig) -> nn.Module:
    """Adapter of one layer, of the kind of the config and of the layer."""
    layer, sections = target.layer, target.sections
    if config.adapter_type == "ia3":
        if isinstance(layer, ColumnParallelLinear):
            return ColumnIA3(layer, sections)
        return GroupedIA3(layer) if isinstance(layer, StackedLinear) else RowIA3(_row(layer))
    settings = lora_settings(config)
    if isinstance(layer, StackedLinear):
        return GroupedLoRA(layer, sections, settings)
    if isinstance(layer, ColumnParallelLinear):
        return ColumnLoRA(layer, sections, settings, site=target.site)
    if isinstance(layer, WholeLinear):
        return WholeLoRA(layer, settings, site=target.site)
    return RowLoRA(_row(layer), settings, site=target.site)


def lora_settings(config: AdapterConfig) -> LoRASettings:
    """Settings of LoRA that a config describes."""
    return LoRASettings(config.lora_rank, config.lora_alpha, config.lora_dropout, config.use_rslora)


def _row(layer: LinearLayer) -> RowParallelLinear:
    assert isinstance(layer, RowParallelLinear)
    return layer


def is_adapter(name: str) -> bool:
    """Whether this is the name of an adapter's parameter."""
    return ".adapters." in name
