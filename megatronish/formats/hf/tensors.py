"""Folders of Hugging Face models, read and written as tensors under the names of transformers.

`config.py` finds the family of a folder, and the family for a model. Published weights have a tensor for each matrix
of each expert. transformers 5 keeps the experts of a layer in two tensors, gate_up_proj [E, 2 F, D] and down_proj
[E, D, F], and some write it so: this packed form is renamed when it is read, a row at a time, so there is one set of
rules, and a stack is never whole in memory.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatronish.config.sections.data import DataConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.core.files import new_folder
from megatronish.formats import tokenizer_files
from megatronish.formats.hf.config import hf_config_of, read_hf_config
from megatronish.formats.hf.families import FAMILIES
from megatronish.formats.hf.family import CONFIG, ConfigJson, ExpertNames, FamilyTensors
from megatronish.formats.hf.quantised import quantisation
from megatronish.formats.safetensors import FILE, INDEX, NAMES, nbytes_of, read_folder, write_folder
from megatronish.formats.tensor_rule import TensorRule
from megatronish.formats.weights import Description, LazyTensor, Model
from megatronish.tokenizer.settings import stops_of_generation

FORMAT = "hf"
MAX_SHARD_BYTES = 5_000_000_000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Masks and wavelengths that older versions stored with the weights; both follow from the config.
BUFFERS = re.compile(r"(.*\.)?(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)")


def describe(load: Path) -> Description:
    """Description of the model in a Hugging Face folder; its weights are not opened."""
    if not load.is_dir():
        raise UserError(f"{load} is no folder; download the model, and name the folder with its config.json")
    config = read_hf_config(load)
    stops = sorted({*config.eos_token_ids, *stops_of_generation(load)})
    return Description(
        model=ModelConfig(**config.model),
        vocab_size=config.vocab_size,
        seq_length=config.seq_length,
        data=DataConfig(**config.data),
        eod=next(iter(config.eos_token_ids), None),
        tokenizer_files=tokenizer_files.in_folder(load),
        origin={FORMAT: config.origin} | ({"stops": stops} if len(stops) > 1 else {}),
    )


def read(load: Path) -> Model:
    """Model of a Hugging Face folder, with tensors that are read when they are used."""
    description = describe(load)
    if not any((load / name).is_file() for name in (FILE, INDEX)):
        old = next((path.name for path in sorted(load.glob("*.bin"))), None)
        why = f"only {old}, a pickle" if old else "no weights"
        raise UserError(
            f"{load} holds {why}, and what is read is {FILE}; fetch that, or load the model with transformers and "
            "save_pretrained it"
        )
    tensors = read_folder(load)
    dequantise = quantisation(ConfigJson(load / CONFIG, description.origin[FORMAT], {}))
    if dequantise is not None:
        tensors = dequantise(load, tensors)
    buffers = {name: tensors.pop(name) for name in [*tensors] if BUFFERS.fullmatch(name)}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"{load}: {name} is of type {NAMES[tensor.dtype]}, and weights are read in "
                f"{', '.join(NAMES[dtype] for dtype in DTYPES)}; save the model in one of these with transformers"
            )
    family = tensors_of(description)
    tensors = {family.new_name(name): tensor for name, tensor in tensors.items()}
    if family.experts is not None and not family.experts.is_packed:
        tensors = published(tensors, family.experts)
    tensors = _with_prefix(load, description, tensors)
    left_out = dict.fromkeys(buffers, "a buffer that follows from config.json")
    reasons = {name: family.left_out(description.model, name) for name in tensors}
    left_out |= {name: reason for name, reason in reasons.items() if reason is not None}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    written = family.written_copies(description.model)
    for copy, original in _copies(description).items():
        if {copy, original} <= tensors.keys():
            what = "the embedding" if copy == family.head else original
            left_out[copy] = f"a second copy of {what}, compared with it when that is read"
        why = "although they are one tensor of its model; fetch it again, whole" if copy in written else TIED
        tensors = _with_one(load, copy, original, tensors, why=why)
    return Model(replace(description, left_out=left_out), tensors)


def _copies(description: Description) -> dict[str, str]:
    """Tensors that may be there twice, the copy first."""
    family, words = tensors_of(description), next(iter(rules(description))).theirs[0]
    copies = {**family.copies, **family.written_copies(description.model)}
    return copies | ({family.head: words} if description.model.tied else {})


def _with_prefix(load: Path, description: Description, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Tensors with full names: a model saved without its head has names without a prefix. Unknown names stay."""
    known, base = {name for rule in rules(description) for name in rule.theirs}, tensors_of(description).base
    renamed = {}
    for name, tensor in tensors.items():
        whole = f"{base}.{name}"
        if whole in known and whole in tensors:
            raise UserError(
                f"{load} holds both {name} and {whole}, which are one tensor of its model; remove the wrong one"
            )
        renamed[whole if whole in known else name] = tensor
    return renamed


TIED = "although tie_word_embeddings in config.json makes them one; set that to false, or remove the head"


def _with_one(load: Path, copy: str, name: str, tensors: dict[str, LazyTensor], *, why: str) -> dict[str, LazyTensor]:
    """Tensors without a second copy of one; UserError, with the reason, if the two differ."""
    if copy not in tensors:
        return tensors
    head = tensors.pop(copy)
    if name in tensors:
        table = tensors[name]
        if head.dtype != table.dtype:
            raise UserError(f"{load}: {copy} is of type {NAMES[head.dtype]} and {name} of {NAMES[table.dtype]}, {why}")

        def read_both() -> Tensor:
            tensor = table.read()
            if not torch.equal(tensor, head.read()):
                raise UserError(f"{load}: {copy} is not {name}, {why}")
            return tensor

        return {**tensors, name: LazyTensor(table.shape, table.dtype, read_both)}
    # Only the copy is there, such as the head of a tied model: it is the original.
    return {**tensors, name: head}


_PACKED = re.compile(r"(.*layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)")
_ROUTER = re.compile(r"(.*layers\.\d+\.)mlp\.(?:(?:gate|router)\.weight|(e_score_correction_bias))")


def published(tensors: Mapping[str, LazyTensor], names: ExpertNames) -> dict[str, LazyTensor]:
    """Tensors with packed experts under the names of single ones; UserError for experts that are there twice."""
    unpacked: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        renamed = {name: tensor}
        if match := _PACKED.fullmatch(name):
            renamed = _unpacked(name, tensor, f"{match[1]}{names.part}.experts", names)
        elif (match := _ROUTER.fullmatch(name)) and names.part != "mlp":
            renamed = {f"{match[1]}{names.part}.{match[2] or 'gate.weight'}": tensor}
        for other, each in renamed.items():
            if other in unpacked or (other != name and other in tensors):
                raise UserError(f"{name} is {other} in another form, and both are there; remove the wrong one")
            unpacked[other] = each
    return unpacked


def _unpacked(name: str, tensor: LazyTensor, experts: str, names: ExpertNames) -> dict[str, LazyTensor]:
    """Single experts of a packed tensor: [E, 2 F, D], gates before up-projections, or [E, D, F]."""
    if len(tensor.shape) != 3 or (name.endswith("gate_up_proj") and tensor.shape[1] % 2):
        raise UserError(f"{name} is {list(tensor.shape)} and must be one matrix for each expert; fetch it again")
    number, rows, columns = tensor.shape
    kinds = [names.gate, names.up] if name.endswith("gate_up_proj") else [names.down]
    size = rows // len(kinds)

    def read(expert: int, start: int) -> Tensor:
        return tensor.rows(expert, expert + 1)[0, start : start + size]

    return {
        f"{experts}.{expert}.{kind}.weight": LazyTensor(
            (size, columns), tensor.dtype, partial(read, expert, place * size)
        )
        for expert in range(number)
        for place, kind in enumerate(kinds)
    }


def config_json(description: Description) -> dict[str, Any]:
    """The config.json of a model; UserError, with the field, if transformers has no such model."""
    return hf_config_of(
        description.model,
        vocab_size=description.vocab_size,
        seq_length=description.seq_length,
        eos_token_id=description.eod,
        origin=description.origin.get(FORMAT),
    )


def rules(description: Description) -> list[TensorRule]:
    """Rules for all tensors of a model, embedding first. UserError if transformers has no such model."""
    return list(tensors_of(description).rules(description.model))


def tensors_of(description: Description) -> FamilyTensors:
    """Tensors of the family that a model is written as."""
    return FAMILIES[config_json(description)["model_type"]].tensors


def write(save: Path, model: Model, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write a folder that `from_pretrained` reads; it must not exist, or be empty."""
    if max_shard_bytes < 1:
        raise UserError(f"--max-shard-bytes {max_shard_bytes} must be at least 1; for example {MAX_SHARD_BYTES}")
    config = config_json(model.description)
    sizes = Counter[torch.dtype]()
    for tensor in model.tensors.values():
        sizes[tensor.dtype] += nbytes_of(tensor)
    copies = tensors_of(model.description).written_copies(model.description.model)
    tensors = model.tensors | {copy: model.tensors[name] for copy, name in copies.items() if name in model.tensors}
    key = "dtype" if "dtype" in config else "torch_dtype"  # transformers' name of it, from 4.56 on and before
    config[key] = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
    with new_folder(save, decisive=CONFIG) as partial:
        write_folder(partial, tensors, max_shard_bytes=max_shard_bytes)
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tokenizer_files.copy(model.description.tokenizer_files, partial)
