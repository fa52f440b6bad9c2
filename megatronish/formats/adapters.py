"""Adapters on disk, independent of their format, and a model with them merged into its weights.

The tensors of an adapter are named by the section of a linear layer that they are for: layers.0.attention.qkv.q.A.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megatronish.checkpoint.checksums import DamagedError
from megatronish.checkpoint.folder import find_checkpoint, read_state
from megatronish.config.dump import section_of
from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats import native
from megatronish.formats.weights import LazyTensor
from megatronish.model.adapters import DEFAULT, lora_settings
from megatronish.specs.adapter_targets import linear_sections

INFIX = f".adapters.{DEFAULT}."  # in the names of a checkpoint: layers.0.attention.qkv.adapters.default.q.A


class SavedAdapter(NamedTuple):
    """An adapter that is not read yet: its config, tensors by section, and the identity of its base, if it has one.

    `folder` is where it was read. `base_name` is what PEFT calls the base, which tells nothing of its weights.
    """

    folder: Path
    config: AdapterConfig
    tensors: dict[str, LazyTensor]
    base: str | None = None
    base_name: str | None = None

    @property
    def sections(self) -> dict[str, dict[str, LazyTensor]]:
        """{section: {"A": ..., "B": ...}}, or {"l": ...} of IA3."""
        parts_by_section: dict[str, dict[str, LazyTensor]] = {}
        for name, tensor in self.tensors.items():
            section, _, part = name.rpartition(".")
            parts_by_section.setdefault(section, {})[part] = tensor
        return parts_by_section


def read_native(load: Path, *, step: int | None = None) -> SavedAdapter:
    """Adapter of a run folder, its checkpoints folder or one step's folder; UserError if it holds none."""
    folder = find_checkpoint(load, step=step) if load.is_dir() else None
    if folder is None:
        what = "holds no adapter" if load.is_dir() else "does not exist"
        raise UserError(f"{load} {what}; name the folder of a run with adapters, or one that PEFT has saved")
    state = read_state(folder)
    if (base := state.get("base")) is None:
        raise UserError(f"{folder} holds a whole model and no adapter; name the folder of a run with adapters")
    try:
        saved = section_of(AdapterConfig, state["config"].get("adapter", {}))
    except (AttributeError, TypeError) as error:
        raise DamagedError(folder, f"its config of adapters is not one of this version ({error})") from error
    config = replace(saved, quantize_base=None)  # the base is used as it is, however the run held it
    tensors = {name.replace(INFIX, "."): tensor for name, tensor in native.tensors_in(folder).items()}
    return SavedAdapter(load, config, tensors, base.get("identity"))


def under_names_of_checkpoints(adapter: SavedAdapter, *, name: str = DEFAULT) -> dict[str, LazyTensor]:
    """Tensors of an adapter under the names that a model gives them, in which the adapter is called `name`."""
    tensors = {}
    for key, tensor in adapter.tensors.items():
        layer, section, part = key.rsplit(".", 2)
        tensors[f"{layer}.adapters.{name}.{section}.{part}"] = tensor
    return tensors


def merged(base: Mapping[str, LazyTensor], adapter: SavedAdapter, model: ModelConfig) -> dict[str, LazyTensor]:
    """The base's tensors with the adapter merged into them: computed in fp32 and rounded once, to each one's dtype."""
    tensors, sections = dict(base), adapter.sections
    layers: dict[str, list[str]] = {}
    for each in linear_sections(model):
        layer, _, section = each.name.rpartition(".")
        layers.setdefault(layer, []).append(section)
    for layer, names in layers.items():
        parts = {name: sections[f"{layer}.{name}"] for name in names if f"{layer}.{name}" in sections}
        if not parts:
            continue
        for kind in ("weight", "bias"):
            if (tensor := tensors.get(f"{layer}.{kind}")) is not None:
                merge = partial(_merged, parts=parts, adapter=adapter.config, sizes=_sizes(model, layer), kind=kind)
                tensors[f"{layer}.{kind}"] = _replaced(tensor, merge)
    return tensors


def _sizes(model: ModelConfig, layer: str) -> dict[str, int]:
    """Outputs of each section of a layer."""
    return {
        section.name.rpartition(".")[2]: section.out_features
        for section in linear_sections(model)
        if section.name.rpartition(".")[0] == layer
    }


def _replaced(tensor: LazyTensor, merge: partial[Tensor]) -> LazyTensor:
    part = tensor.part
    return LazyTensor(
        tensor.shape,
        tensor.dtype,
        lambda: merge(tensor.read(), first=0),
        None if part is None else lambda start, stop: merge(part(start, stop), first=start),
    )


def _merged(
    whole: Tensor,
    *,
    first: int,
    parts: Mapping[str, Mapping[str, LazyTensor]],
    adapter: AdapterConfig,
    sizes: Mapping[str, int],
    kind: str,
) -> Tensor:
    """Weight [out, in] or bias [out] of a layer; of experts the weights [n, (sections,) out, in] from `first` on."""
    is_stack = whole.dim() > 2 or (kind == "weight" and len(next(iter(next(iter(parts.values())).values())).shape) > 2)
    result = whole.float()
    for number, (name, size) in enumerate(sizes.items()):
        if name not in parts:
            continue
        rows = slice(first, first + len(whole)) if is_stack else slice(None)
        tensors = {part: tensor.read()[rows].float() for part, tensor in parts[name].items()}
        if is_stack:
            place = result[:, number] if result.dim() == 4 else result
        else:
            begin = sum(list(sizes.values())[:number])
            place = result[begin : begin + size]
        _merge_section(place, tensors, adapter, scales_input=name == "down", kind=kind)
    return result.to(whole.dtype)


def _merge_section(
    place: Tensor, tensors: Mapping[str, Tensor], adapter: AdapterConfig, *, scales_input: bool, kind: str
) -> None:
    """Merge one section into its rows, [..., out, in] or [out], in place."""
    if "l" in tensors:
        scale = tensors["l"]
        if kind == "weight":
            place *= scale.unsqueeze(-2) if scales_input else scale.unsqueeze(-1)
        elif not scales_input:
            place *= scale
    elif kind == "weight":
        place += lora_settings(adapter).scale * (tensors["B"] @ tensors["A"])
