"""Experts in families: keys of config.json (how many, how wide, which layers, what a router does), and tensors.

Losses that balance the load (`router_aux_loss_coef`) are training's concern and defined otherwise here: they are not
taken over, and they come back with the config.json that they came with.
"""

from collections.abc import Iterator
from typing import Any

from megatronish.config.sections.model import ModelConfig, canonical
from megatronish.formats.hf.family import CORRECT, ConfigJson, ExpertNames, first_true
from megatronish.formats.tensor_rule import TensorRule, stack


def read_experts(config: ConfigJson, *, number: str, width: str) -> dict[str, Any]:
    """Fields of the experts, whose number and inner width are these keys."""
    experts, chosen = config.whole(number), config.whole("num_experts_per_tok")
    if chosen > experts:
        config.refuse("num_experts_per_tok", f"must be at most {number}={experts}", remedy=CORRECT)
    return {"num_experts": experts, "moe_router_topk": chosen, "moe_ffn_hidden_size": config.whole(width)}


def read_choice(config: ConfigJson) -> dict[str, Any]:
    """Fields of a router that takes the softmax before the choice, whose weights norm_topk_prob makes sum to one."""
    return {"moe_router_pre_softmax": True, "moe_router_norm_topk_prob": config.flag("norm_topk_prob")}


def write_choice(model: ModelConfig) -> dict[str, Any]:
    """Keys of the choice of experts."""
    return {"num_experts_per_tok": model.moe_router_topk, "norm_topk_prob": is_normalised(model)}


def is_normalised(model: ModelConfig) -> bool:
    """Whether the weights of a token's experts sum to one: always where the softmax comes after the choice."""
    return model.moe_router_norm_topk_prob or not model.moe_router_pre_softmax


def read_layers(config: ConfigJson) -> dict[str, Any]:
    """Which layers have experts: every decoder_sparse_step-th, except for mlp_only_layers."""
    step, dense = config.whole("decoder_sparse_step"), config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        config.refuse("mlp_only_layers", "must be a list of layers", remedy=CORRECT)
    marks = tuple(n not in dense and (n + 1) % step == 0 for n in range(config.whole("num_hidden_layers")))
    if not any(marks):
        key = "mlp_only_layers" if dense else "decoder_sparse_step"
        config.refuse(key, "leaves no layer with experts", remedy="take the dense family of this model")
    return {"moe_layer_freq": "1" if all(marks) else canonical(marks)}


def write_layers(model: ModelConfig) -> dict[str, Any]:
    """Keys of the layers without experts."""
    dense = [layer for layer, has_experts in enumerate(model.expert_layers) if not has_experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def not_experts_alone(model: ModelConfig) -> str | None:
    """Field of a model that families do not have whose layers are experts, all of them, without shared ones."""
    shared = model.moe_shared_expert_intermediate_size
    return first_true(
        {
            f"moe_layer_freq={model.moe_layer_freq}": not all(model.expert_layers),
            f"moe_shared_expert_intermediate_size={shared}": shared is not None,
        }
    )


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
            stack,
            lambda whole: whole.unbind(),
            row,
        )
    for row in range(model.num_experts):
        yield TensorRule(f"{ours}.mlp.experts.down.weight", (f"{part}.experts.{row}.{names.down}.weight",), row=row)
