"""Adapters in PEFT's format, LoRA and IA3, read and written: adapter_config.json and adapter_model.safetensors."""

import json
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megatronish.core.errors import UserError
from megatronish.core.files import new_folder
from megatronish.estimate.costs.adapters import linear_sections
from megatronish.formats.adapters import SavedAdapter
from megatronish.formats.peft.config import CONFIG, our_config, read_config, their_config
from megatronish.formats.peft.modules import ia3_tensors, lora_tensors, modules_of, our_parts
from megatronish.formats.safetensors import read_file, write_file
from megatronish.formats.weights import Description, LazyTensor

FILE = "adapter_model.safetensors"
PARTS = {"lora": ("lora_A.weight", "lora_B.weight"), "ia3": ("ia3_l",)}


def write(save: Path, adapter: SavedAdapter, description: Description, *, base: str) -> None:
    """Write an adapter into a new folder that `PeftModel.from_pretrained` reads; `base` is the base's name there."""
    config, sections = adapter.config, adapter.sections
    tensors: dict[str, Tensor] = {}
    modules: list[str] = []
    parameters: list[str] = []
    ranks: dict[str, int] = {}
    for module in modules_of(description):
        found = {
            name: sections[f"{module.layer}.{name}"] for name in module.sections if f"{module.layer}.{name}" in sections
        }
        if not found:
            continue
        read = {name: {part: each.read() for part, each in parts.items()} for name, parts in found.items()}
        whole = module.name if not module.experts else f"{module.name}.{module.parameter}"
        (parameters if module.experts else modules).append(whole)
        if config.adapter_type == "ia3":
            tensors |= ia3_tensors(module, read)
            continue
        tensors |= lora_tensors(module, read, config.lora_rank)
        if len(found) > 1:
            ranks[whole] = len(found)
    _refuse_dense_next_to_packed(modules, parameters)
    with new_folder(save, decisive=CONFIG) as partial:
        write_file(partial / FILE, {name: _lazy(each) for name, each in tensors.items()})
        text = json.dumps(their_config(config, modules, parameters, ranks, description, base), indent=2)
        (partial / CONFIG).write_text(text + "\n", encoding="utf-8")


def _lazy(tensor: Tensor) -> LazyTensor:
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def _refuse_dense_next_to_packed(modules: list[str], parameters: list[str]) -> None:
    """UserError for adapters of dense or shared MLPs in a model with packed experts.

    PEFT takes every gate_proj, up_proj and down_proj of such a model for experts as transformers 4 had them.
    """
    dense = [name for name in modules if name.endswith((".gate_proj", ".up_proj", ".down_proj"))]
    if dense and any(".experts." in name for name in parameters):
        raise UserError(
            f"PEFT cannot load an adapter of {dense[0]} together with one of packed experts; merge it with megatronish "
            "convert --adapter, or train with other --adapter-targets, such as q k v o layers.*.experts.*"
        )


def read(load: Path, description: Description) -> SavedAdapter:
    """Adapter of a folder in PEFT's format, for a model of this description; UserError for what is not supported."""
    theirs = read_config(load / CONFIG)
    config = our_config(load / CONFIG, theirs)
    tensors = read_file(load / FILE)
    found: dict[str, LazyTensor] = {}
    used: set[str] = set()
    targets: list[str] = []
    for module in modules_of(description):
        names = [f"{module.key}.{part}" for part in PARTS[config.adapter_type or "lora"]]
        if names[0] not in tensors:
            continue
        if missing := [name for name in names if name not in tensors]:
            raise UserError(f"{load / FILE} lacks {missing[0]}; fetch it again, whole")
        used.update(names)
        parts = our_parts(module, [tensors[name].read() for name in names], config, load / FILE)
        targets += [f"{module.layer}.{section}" for section in parts]
        found |= {
            f"{module.layer}.{section}.{part}": _lazy(tensor)
            for section, of_section in parts.items()
            for part, tensor in of_section.items()
        }
    if left := sorted(tensors.keys() - used):
        raise UserError(
            f"{load / FILE} holds {left[0]}, which is no adapter of a linear layer of this model; the adapter is of "
            "another model, or was trained with modules_to_save"
        )
    name = theirs.get("base_model_name_or_path")
    config = replace(config, adapter_targets=_short(targets, description))
    return SavedAdapter(load, config, found, base_name=None if name is None else str(name))


def _short(targets: list[str], description: Description) -> tuple[str, ...]:
    """Names of sections where all layers have them, whole names where only some have."""
    every = [each.name for each in linear_sections(description.model)]
    by_section: dict[str, list[str]] = {}
    for name in every:
        by_section.setdefault(name.rpartition(".")[2], []).append(name)
    has = set(targets)
    whole = [section for section, names in by_section.items() if has.issuperset(names)]
    return (*whole, *(name for name in targets if name.rpartition(".")[2] not in whole))
