"""Tensors of expert layers in Megatron-LM: their names and cuts, and the rules to our stacked weights.

    mlp.router.weight, mlp.router.bias, mlp.router.expert_bias
    mlp.experts.linear_fc1.weight{i}, mlp.experts.linear_fc2.weight{i}            grouped (Transformer Engine)
    mlp.experts.local_experts.{i}.linear_fc1.weight, ....linear_fc2.weight        one expert after the other
    mlp.shared_experts.linear_fc1.weight, ....linear_fc2.weight, ....gate_weight

In a rank's file {i} counts the experts of that rank; here, where no rank is meant, those of the layer. fc1 of a gated
expert has the gate's rows before the up-projection's. Ours are stacks, [E, 2, F, D] and [E, D, F]. With biases, which
no rank cuts there, `weight` is also `bias`. The norm before an expert layer is no part of a linear layer:
pre_mlp_layernorm in every implementation.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from megatronish.core.errors import UserError
from megatronish.formats.megatron.grid import RankGrid, RankTensor, one_of
from megatronish.formats.tensor_rule import TensorRule
from megatronish.parallel.sharding import Cut, Sharding

NAMES = {
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.expert_bias",
    "mlp.router.logit_bias": "mlp.router.bias",
    "mlp.shared.fc1.weight": "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared.fc2.weight": "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_gate.weight": "mlp.shared_experts.gate_weight",
}
STACKS = {
    f"mlp.experts.{ours}.{kind}": f"{theirs}.{kind}"
    for ours, theirs in (("gate_up", "linear_fc1"), ("down", "linear_fc2"))
    for kind in ("weight", "bias")
}
EXPERT = re.compile(r"(decoder\.layers\.\d+\.mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d{1,9})")
SEQUENTIAL = {r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$": r"mlp.experts.\2\1"}
PACKED = re.compile(r".*\.mlp\.experts\.weight[12]")
NORM = "pre_mlp_layernorm."


def expert_rules(ours: str, layer: int, shape: tuple[int, ...]) -> Iterator[TensorRule]:
    """Rules of a tensor of our expert layers, `layers.{layer}.{ours}`; none where it is that of a dense layer."""
    name, prefix = f"layers.{layer}.{ours}", f"decoder.layers.{layer}."
    if ours in NAMES:
        yield TensorRule(name, (prefix + NAMES[ours],))
    elif ours in STACKS:
        parts = _vector if ours.endswith(".bias") else _matrix
        for expert in range(shape[0]):  # one at a time: a stack need never be whole in memory
            theirs = f"{prefix}mlp.experts.{STACKS[ours]}{expert}"
            yield TensorRule(name, (theirs,), partial(_row, shape=shape[1:]), parts, expert)


def _row(parts: Sequence[Tensor], *, shape: tuple[int, ...]) -> Tensor:
    """[out, in] or a bias [out] of an expert -> [..., out, in] or [..., out], its row of our stack."""
    return parts[0].view(shape)


def _matrix(row: Tensor) -> Sequence[Tensor]:
    """Inverse of `_row`: [..., out, in] -> [out, in]."""
    return (row.flatten(0, -2),)


def _vector(row: Tensor) -> Sequence[Tensor]:
    """Inverse of `_row` for biases: [..., out] -> [out]."""
    return (row.flatten(),)


def expert_sharding(name: str, sharding: Sharding) -> Sharding:
    """Sharding of their tensor of an expert layer, from that of ours: of a stack, that of one expert's tensor.

    Matrices are cut over etp by the features of the expert; biases are whole, since with them etp is 1 there.
    """
    if not EXPERT.fullmatch(name):
        return sharding
    if ".bias" in name:
        return Sharding((math.prod(sharding.shape[1:]),), role="vector")
    _, *sections, out_size, in_size = sharding.shape
    if not sections:  # down-projection [D, F]
        return Sharding((out_size, in_size), (Cut(1, "etp"),))
    return Sharding((sections[0] * out_size, in_size), (Cut(0, "etp", (out_size,) * sections[0]),))


def name_in_file(rest: str, *, is_grouped: bool) -> str:
    """Name of a tensor of an expert layer in a file, after `decoder.layers.N.`; the expert's number is the rank's."""
    rest = rest.replace("mlp.linear_fc1.layer_norm_", NORM)
    if is_grouped:
        return rest
    numbered = r"mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)"
    return re.sub(numbered, r"mlp.experts.local_experts.\2.\1", rest, count=1)


def by_expert(
    parts: Mapping[str, Sequence[RankTensor]], grid: RankGrid, num_experts: int | None, *, folder: Path
) -> dict[str, list[RankTensor]]:
    """Parts of each tensor over its own axis, from one part of every rank of a stage, in the order of the grid.

    A dense tensor has one for each tensor rank. Expert i of expert rank e is number e E/ep + i of the layer, and has
    one part for each expert tensor rank. Copies on several ranks are compared when they are read.
    UserError for experts that the arguments do not know.
    """
    ranks = list(grid.ranks())
    parts_by_name: dict[str, list[RankTensor]] = {}
    for name, of_ranks in parts.items():
        if PACKED.fullmatch(name):
            raise UserError(
                f"{folder} holds {name}, all experts of a rank in one tensor; load it into Megatron-LM without "
                "--moe-use-legacy-grouped-gemm and save it again"
            )
        match = EXPERT.fullmatch(name)
        if match is None:
            copies = (
                [of for (tp, _), of in zip(ranks, of_ranks, strict=True) if tp == rank] for rank in range(grid.tp)
            )
            parts_by_name[name] = [one_of(name, each) for each in copies]
            continue
        number, here = int(match[2]), (num_experts or 0) // grid.ep
        if number >= here:
            raise UserError(f"{folder} holds {name}, and its arguments say {here} experts a rank; it is of two models")
        for ep in range(grid.ep):
            here_too = [(tp % grid.etp, of) for (tp, e), of in zip(ranks, of_ranks, strict=True) if e == ep]
            whole = f"{match[1]}{ep * here + number}"
            parts_by_name[whole] = [one_of(whole, [of for e, of in here_too if e == etp]) for etp in range(grid.etp)]
    return parts_by_name
