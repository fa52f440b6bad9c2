"""Tensors of experts in Hugging Face families: rules of a layer, and the packed form as the published one.

Published weights have a tensor for each matrix of each expert. transformers 5 keeps the experts of a layer in two
tensors, gate_up_proj [E, 2 F, D] and down_proj [E, D, F], and some write it so. The packed form is renamed when it is
read, a row at a time, so there is one set of rules, and a stack is never whole in memory.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatronish.config.model import ModelConfig
from megatronish.errors import UserError
from megatronish.formats.weights import LazyTensor, TensorRule


class ExpertNames(NamedTuple):
    """Names of a family in a layer: of the part that holds router and experts, and of an expert's matrices."""

    part: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


MIXTRAL_NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")


def expert_tensors(model: ModelConfig, names: ExpertNames, *, ours: str, theirs: str) -> Iterator[TensorRule]:
    """Rules of router and experts of a layer, whose names begin with `ours` and `theirs`."""
    assert model.num_experts is not None
    part = f"{theirs}.{names.part}"
    yield TensorRule(f"{ours}.mlp.router.weight", (f"{part}.gate.weight",))
    for row in range(model.num_experts):
        gate_up = tuple(f"{part}.experts.{row}.{name}.weight" for name in (names.gate, names.up))
        yield TensorRule(
            f"{ours}.mlp.experts.gate_up.weight",
            gate_up,
            lambda parts: torch.stack(tuple(parts)),
            lambda whole: whole.unbind(),
            row,
        )
    for row in range(model.num_experts):
        yield TensorRule(f"{ours}.mlp.experts.down.weight", (f"{part}.experts.{row}.{names.down}.weight",), row=row)


_PACKED = re.compile(r"(.*layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)")
_ROUTER = re.compile(r"(.*layers\.\d+\.)mlp\.gate\.weight")


def published(tensors: Mapping[str, LazyTensor], names: ExpertNames) -> dict[str, LazyTensor]:
    """Tensors with packed experts under the names of single ones; UserError for experts that are there twice."""
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        renamed = {name: tensor}
        if match := _PACKED.fullmatch(name):
            renamed = _unpacked(name, tensor, f"{match[1]}{names.part}.experts", names)
        elif (match := _ROUTER.fullmatch(name)) and names.part != "mlp":
            renamed = {f"{match[1]}{names.part}.gate.weight": tensor}
        for other, each in renamed.items():
            if other in found or (other != name and other in tensors):
                raise UserError(f"{name} is {other} in another form, and both are there; remove the wrong one")
            found[other] = each
    return found


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
