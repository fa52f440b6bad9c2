"""Adapters in PEFT's format, LoRA and IA3, read and written: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.core.errors import UserError
from megatronish.core.files import new_folder
from megatronish.formats.adapters import SavedAdapter
from megatronish.formats.hf import tensors as hf
from megatronish.formats.peft.config import CONFIG, our_config, read_config, their_config
from megatronish.formats.safetensors import read_file, write_file
from megatronish.formats.tensor_rule import TensorRule
from megatronish.formats.weights import Description, LazyTensor
from megatronish.specs.adapter_targets import linear_sections

# Linear modules of transformers as sections of our layers, and PEFT's tensors of a module as those of its sections.
#
# Where a module is one section of ours, its tensors are ours. Where several sections are one module (GPT-2's c_attn,
# BLOOM's query_key_value, packed gates and up-projections of experts), n adapters of rank r are exactly one of rank n
# r: A stacked, B block-diagonal. Experts are adapters of a parameter there, [E r, in] and [out, r E] for all of them.


PREFIX = "base_model.model."


class Module(NamedTuple):
    """Linear module of transformers, and our layer and sections that it is. `experts` is how many it holds packed.

    Where they are `turned` there, [E, in, out], and do not say so, PEFT takes inputs for outputs: A and B change
    places.
    """

    name: str  # model.layers.0.self_attn.q_proj
    layer: str  # layers.0.attention.qkv
    sections: tuple[str, ...]
    sizes: tuple[int, ...]
    rows: TensorRule | None = None  # of a module that is several sections: its rows as ours, and back
    experts: int = 0
    parameter: str = ""  # of packed experts: gate_up_proj
    turned: bool = False
    order: Tensor | None = None  # of packed experts: numbers of our rows, in their order

    @property
    def key(self) -> str:
        """Where its tensors are: packed experts are wrapped one around the other, the first parameter inmost."""
        inner = ".base_layer" if self.parameter == "gate_up_proj" else ""
        return f"{PREFIX}{self.name}{inner}"


def modules_of(description: Description) -> Iterator[Module]:
    """Modules of transformers in which the sections of a model are."""
    # 1. Our linear layers, each with its sections: what an adapter can be on.
    layers: dict[str, dict[str, tuple[int, int]]] = {}
    for each in linear_sections(description.model):
        layer, _, section = each.name.rpartition(".")
        layers.setdefault(layer, {})[section] = (each.out_features, each.copies)
    # 2. Their tensors, by the rules of the model's own conversion, so that names of every family come from one place.
    rules, names_of_experts = list(hf.rules(description)), hf.tensors_of(description).experts
    says_turned = names_of_experts is not None and names_of_experts.says_turned
    biases = {rule.ours.removesuffix(".bias"): rule for rule in rules if rule.ours.endswith(".bias")}
    for rule in rules:
        layer = rule.ours.removesuffix(".weight")
        if layer not in layers or not rule.ours.endswith(".weight") or rule.row:
            continue
        names = tuple(layers.pop(layer).items())
        sections, sizes = tuple(name for name, _ in names), tuple(size for _, (size, _) in names)
        theirs = [name.removesuffix(".weight") for name in rule.theirs]
        # Row 0 of a stack of experts stands for all of them (`rule.row` skipped the others): they are one parameter in
        # transformers 5.
        if rule.row == 0 or rule.by_row:
            packed = theirs[0].rpartition(".0.")[0]  # ...mlp.experts, as transformers 5 keeps them for most families
            packed = packed.replace("block_sparse_moe", "mlp")
            if rule.by_row:  # published as they are packed, perhaps under another name than there
                packed = f"{theirs[0].rpartition('.')[0].removesuffix('.experts')}.experts"
            parameter = "down_proj" if sections == ("down",) else "gate_up_proj"
            turned = rule.by_row and _turns(rule, len(sections)) and not says_turned
            order = _order(rule, sizes) if rule.by_row else None
            yield Module(packed, layer, sections, sizes, None, names[0][1][1], parameter, turned, order)
        # Each section is a module of its own there (q_proj, k_proj, v_proj).
        elif len(theirs) == len(sections):
            for name, section, size in zip(theirs, sections, sizes, strict=True):
                yield Module(name, layer, (section,), (size,))
        else:
            # The rule of the bias orders rows, and does not transpose; without biases that of the weight does neither.
            yield Module(theirs[0], layer, sections, sizes, biases.get(layer, rule))


def _turns(rule: TensorRule, num_sections: int) -> bool:
    """Whether the rule of packed experts of so many sections has inputs before outputs there."""
    shape = (1, 5, 3) if num_sections == 1 else (1, num_sections, 5, 3)
    return rule.split(torch.empty(shape, device="meta"))[0].shape[-1] != shape[-1]


def _order(rule: TensorRule, sizes: Sequence[int]) -> Tensor:
    """Numbers of our rows, of all sections, as the rule of packed experts orders them there."""
    rows = torch.arange(sum(sizes))
    shape = (1, sum(sizes), 1) if len(sizes) == 1 else (1, len(sizes), sizes[0], 1)
    return rule.split(rows.view(shape))[0].flatten()


def lora_tensors(module: Module, parts: Mapping[str, Mapping[str, Tensor]], rank: int) -> dict[str, Tensor]:
    """A and B of one module: several sections as one adapter, A stacked and B block-diagonal."""
    # Several sections of one module, [A1; A2] and diag(B1, B2): (B A) x has the outputs of each section from its own
    # adapter alone.
    dim = 1 if module.experts else 0
    a = torch.cat([each["A"] for each in parts.values()], dim=dim)
    sizes = dict(zip(module.sections, module.sizes, strict=True))
    first = next(iter(parts.values()))["B"]
    # Rows of B are outputs of all sections of the module, columns only the ranks of those that have an adapter.
    b = first.new_zeros(*first.shape[:-2], sum(module.sizes), rank * len(parts))
    row = 0
    for name, size in sizes.items():
        if name in parts:
            column = rank * list(parts).index(name)
            b[..., row : row + size, column : column + rank] = parts[name]["B"]
        row += size
    if module.order is not None:
        b = b[:, module.order]
    # PEFT has the experts' ranks side by side, in another order for A than for B.
    if module.turned:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    if module.experts:  # [E, r, in] -> [E r, in]; [E, out, r] -> [out, r E]
        a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1, 2)
    elif module.rows is not None:
        b = module.rows.split(b)[0]
    return {f"{module.key}.lora_A.weight": a.contiguous(), f"{module.key}.lora_B.weight": b.contiguous()}


def ia3_tensors(module: Module, parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Scales of one module: of its outputs [out, 1], ones where a section has none, or of its inputs [1, in]."""
    if module.experts:
        raise UserError(f"PEFT has no IA3 of packed experts, and {module.layer} has; leave down out of the targets")
    if module.sections == ("down",):
        return {f"{module.key}.ia3_l": parts["down"]["l"].unsqueeze(0)}
    sizes = zip(module.sections, module.sizes, strict=True)
    scale = torch.cat([parts[name]["l"] if name in parts else torch.ones(size) for name, size in sizes])
    if module.rows is not None:
        scale = module.rows.split(scale)[0]
    return {f"{module.key}.ia3_l": scale.unsqueeze(1)}


def our_parts(
    module: Module, tensors: list[Tensor], config: AdapterConfig, source: Path
) -> dict[str, dict[str, Tensor]]:
    """Tensors of one module as those of its sections: {section: {"A": ..., "B": ...}} or {section: {"l": ...}}."""
    # IA3: scales of the outputs, in our order of rows, or of the inputs of a down-projection.
    if config.adapter_type == "ia3":
        _refuse_other_side(module, tensors[0], source)
        scale = tensors[0].flatten()
        if module.rows is not None:
            scale = module.rows.join([scale])
        sizes = module.sizes if len(module.sections) > 1 else (len(scale),)
        scales = dict(zip(module.sections, scale.split(sizes), strict=True))
        # A section of a fused module that is multiplied by ones has no adapter.
        return {name: {"l": part} for name, part in scales.items() if len(scales) == 1 or not (part == 1).all()}
    # LoRA: the layouts that `lora_tensors` makes are undone in reverse.
    a, b = tensors
    if module.experts:
        a = a.unflatten(0, (module.experts, -1))  # [E r, in] -> [E, r, in]
        b = b.unflatten(1, (-1, module.experts)).permute(2, 0, 1)  # [out, r E] -> [E, out, r]
        if module.turned:
            a, b = b.transpose(1, 2), a.transpose(1, 2)
    elif module.rows is not None:
        b = module.rows.join([b])
    # Before any split: an adapter of another model would fail in one, without a sentence.
    if a.shape[-2] != b.shape[-1] or b.shape[-2] != sum(module.sizes):
        raise UserError(
            f"{source}: {module.name} has A {list(a.shape)} and B {list(b.shape)}, and the model's layer has "
            f"{sum(module.sizes)} outputs; the adapter is of another model"
        )
    if module.order is not None:
        b = b[:, module.order.argsort()]
    parts = _apart(module, a, b, config.lora_rank)
    if wrong := next((name for name, each in parts.items() if each["A"].shape[-2] != config.lora_rank), None):
        raise UserError(
            f"{source.parent}: {module.name} ({wrong}) has rank {parts[wrong]['A'].shape[-2]} and others "
            f"{config.lora_rank}; adapters of one rank are read, train it so or merge it with PEFT"
        )
    return parts


def _refuse_other_side(module: Module, scale: Tensor, source: Path) -> None:
    """UserError for IA3 of the inputs [1, in] where ours is of the outputs [out, 1], or the other way round."""
    of_inputs = module.sections == ("down",)
    if (scale.shape[0] == 1) != of_inputs:
        sides = ("inputs", "outputs") if of_inputs else ("outputs", "inputs")
        raise UserError(
            f"{source.parent}: IA3 multiplies the {sides[1]} of {module.name} (feedforward_modules), and here the "
            f"{sides[0]}; merge the adapter with PEFT"
        )


def _apart(module: Module, a: Tensor, b: Tensor, rank: int) -> dict[str, dict[str, Tensor]]:
    """Adapters of the sections of one module: blocks of a block-diagonal B, or one A for all of them."""
    rows = dict(zip(module.sections, b.split(module.sizes, dim=-2), strict=True))
    # 1. A rank that is a multiple of the config's can be that of n adapters in blocks; one adapter of that rank has the
    # same shapes, so the elements of B decide.
    number = a.shape[-2] // rank
    if number > 1 and a.shape[-2] == number * rank:
        blocks, adapters = list(zip(a.split(rank, dim=-2), range(0, number * rank, rank), strict=True)), {}
        # 2. As many blocks as sections, or as the sections whose rows are not all zero, in their order.
        names = list(module.sections) if number == len(rows) else [name for name, each in rows.items() if each.any()]
        for name, (block, column) in zip(names, blocks, strict=False):
            adapters[name] = {"A": block.contiguous(), "B": rows[name][..., column : column + rank].contiguous()}
        # 3. Block-diagonal: B has no element outside of the blocks.
        others = sum(int(each.count_nonzero()) for each in rows.values())
        if len(adapters) == number and others == sum(int(each["B"].count_nonzero()) for each in adapters.values()):
            return adapters
    # 4. Else the sections share one A, and each has its rows of B: the same product, with copies of A.
    return {name: {"A": a.clone(), "B": each.contiguous()} for name, each in rows.items()}


FILE = "adapter_model.safetensors"
PARTS = {"lora": ("lora_A.weight", "lora_B.weight"), "ia3": ("ia3_l",)}


def write(save: Path, adapter: SavedAdapter, description: Description, *, base: str) -> None:
    """Write an adapter into a new folder that `PeftModel.from_pretrained` reads; `base` is the base's name there.

    Without that of layers of multi-token prediction, which the model that PEFT wraps does not have.
    """
    description = replace(description, model=replace(description.model, mtp_num_layers=None))
    config, sections = adapter.config, adapter.sections
    tensors: dict[str, Tensor] = {}
    modules: list[str] = []
    parameters: list[str] = []
    ranks: dict[str, int] = {}
    # Module by module in the model's order; PEFT's config then names exactly the modules that have tensors.
    for module in modules_of(description):
        parts_by_section = {
            name: sections[f"{module.layer}.{name}"] for name in module.sections if f"{module.layer}.{name}" in sections
        }
        if not parts_by_section:
            continue
        read = {
            name: {part: tensor.read() for part, tensor in parts.items()} for name, parts in parts_by_section.items()
        }
        whole = module.name if not module.experts else f"{module.name}.{module.parameter}"
        (parameters if module.experts else modules).append(whole)
        if config.adapter_type == "ia3":
            tensors |= ia3_tensors(module, read)
            continue
        tensors |= lora_tensors(module, read, config.lora_rank)
        # Sections merged to one module have the sum of their ranks, which PEFT must find in its pattern of ranks.
        if len(parts_by_section) > 1:
            ranks[whole] = len(parts_by_section)
    _refuse_dense_next_to_packed(modules, parameters)
    with new_folder(save, decisive=CONFIG) as partial:
        write_file(partial / FILE, {name: _lazy(tensor) for name, tensor in tensors.items()})
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
    our_tensors: dict[str, LazyTensor] = {}
    used: set[str] = set()
    targets: list[str] = []
    for module in modules_of(description):
        names = [f"{module.key}.{part}" for part in PARTS[config.adapter_type or "lora"]]
        # A module without its first tensor has no adapter; one with the first and not the second is damaged.
        if names[0] not in tensors:
            continue
        if missing := [name for name in names if name not in tensors]:
            raise UserError(f"{load / FILE} lacks {missing[0]}; fetch it again, whole")
        used.update(names)
        parts = our_parts(module, [tensors[name].read() for name in names], config, load / FILE)
        targets += [f"{module.layer}.{section}" for section in parts]
        our_tensors |= {
            f"{module.layer}.{section}.{part}": _lazy(tensor)
            for section, of_section in parts.items()
            for part, tensor in of_section.items()
        }
    # What no module has claimed would be silently lost: full weights of modules_to_save, or another model's names.
    if left := sorted(tensors.keys() - used):
        raise UserError(
            f"{load / FILE} holds {left[0]}, which is no adapter of a linear layer of this model; the adapter is of "
            "another model, or was trained with modules_to_save"
        )
    name = theirs.get("base_model_name_or_path")
    config = replace(config, adapter_targets=_short(targets, description))
    return SavedAdapter(load, config, our_tensors, base_name=None if name is None else str(name))


def _short(targets: list[str], description: Description) -> tuple[str, ...]:
    """Names of sections where all layers have them, whole names where only some have."""
    every = [each.name for each in linear_sections(description.model)]
    by_section: dict[str, list[str]] = {}
    for name in every:
        by_section.setdefault(name.rpartition(".")[2], []).append(name)
    has = set(targets)
    whole = [section for section, names in by_section.items() if has.issuperset(names)]
    return (*whole, *(name for name in targets if name.rpartition(".")[2] not in whole))
