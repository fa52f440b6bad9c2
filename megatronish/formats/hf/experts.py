"""Experts in families: keys of config.json (how many, how wide, which layers, what a router does), and tensors.

Losses that balance the load (`router_aux_loss_coef`) are training's concern and defined otherwise here: they are not
taken over, and they come back with the config.json that they came with.
"""

from collections.abc import Iterator
from typing import Any

from megatronish.config.layer_pattern import canonical
from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.family import CORRECT, ConfigJson, ExpertNames, first_true
from megatronish.formats.tensor_rule import TensorRule, concatenated_tensors, same_tensors, stack


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


def read_first_dense(config: ConfigJson) -> dict[str, Any]:
    """Which layers have experts: those from first_k_dense_replace on."""
    layers, dense = config.whole("num_hidden_layers"), config.whole("first_k_dense_replace", least=0)
    if dense >= layers:
        config.refuse("first_k_dense_replace", f"leaves none of {layers} layers with experts")
    return {"moe_layer_freq": canonical((False,) * dense + (True,) * (layers - dense)) if dense else "1"}


def write_first_dense(model: ModelConfig) -> dict[str, Any]:
    """Key of the first layers, which have no experts."""
    return {"first_k_dense_replace": [*model.expert_layers, True].index(True)}


def read_sigmoids(config: ConfigJson) -> dict[str, Any]:
    """Fields of a router that scores by sigmoids and chooses with a bias, whose weights norm_topk_prob divides."""
    sums_to_one = config.whole("num_experts_per_tok") > 1
    if config.flag("norm_topk_prob") != sums_to_one:
        config.refuse("norm_topk_prob", "is not supported: weights sum to one where a token chooses several experts")
    return {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def write_sigmoids(model: ModelConfig) -> dict[str, Any]:
    """Keys of such a choice."""
    return {"num_experts_per_tok": model.moe_router_topk, "norm_topk_prob": model.moe_router_topk > 1}


def read_groups(config: ConfigJson, *, best: int) -> dict[str, Any]:
    """Groups of experts, of which a token chooses from some; none where it may choose from all.

    `best` scores of a group add up to the group's.
    """
    groups, kept = config.whole("n_group", null=1), config.whole("topk_group", null=1)
    experts, chosen = config.whole("n_routed_experts"), config.whole("num_experts_per_tok")
    if experts % groups:
        config.refuse("n_group", f"must divide n_routed_experts={experts}", remedy=CORRECT)
    if kept > groups:
        config.refuse("topk_group", f"must be at most n_group={groups}", remedy=CORRECT)
    if chosen > kept * (experts // groups):
        config.refuse("topk_group", f"leaves fewer experts than num_experts_per_tok={chosen}", remedy=CORRECT)
    if kept == groups:
        return {}
    if best > experts // groups:
        config.refuse("n_group", f"leaves groups of fewer than {best} experts, whose scores make a group's")
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": kept,
        "moe_router_scores_per_group": best,
    }


def not_experts_alone(model: ModelConfig) -> str | None:
    """Field of a model that families do not have whose layers are experts, all of them, without shared ones."""
    shared = model.moe_shared_expert_intermediate_size
    return first_true(
        {
            f"moe_layer_freq={model.moe_layer_freq}": not all(model.expert_layers),
            f"moe_shared_expert_intermediate_size={shared}": shared is not None,
        }
    )


def expert_tensors(model: ModelConfig, ours: str, theirs: str, *, names: ExpertNames) -> Iterator[TensorRule]:
    """Rules of router, experts and shared experts of a layer, whose names begin with `ours` and `theirs`."""
    assert model.num_experts is not None
    part = f"{theirs}.{names.part}"
    yield TensorRule(f"{ours}.mlp.router.weight", (f"{part}.gate.weight",))
    if model.moe_router_enable_expert_bias:
        yield TensorRule(f"{ours}.mlp.router.bias", (f"{part}.{names.bias}",))
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
    if (shared := model.moe_shared_expert_intermediate_size) is not None:
        yield from gated_mlp_tensors(f"{ours}.mlp.shared", f"{part}.{names.shared}", shared, bias=False)
    if model.moe_shared_expert_gate:
        yield TensorRule(f"{ours}.mlp.shared_gate.weight", (f"{part}.{names.shared}_gate.weight",))


def gated_mlp_tensors(ours: str, theirs: str, size: int, *, bias: bool) -> Iterator[TensorRule]:
    """Rules of a gated MLP, whose gate and up-projection are one tensor here."""
    yield from concatenated_tensors(
        f"{ours}.fc1", [f"{theirs}.gate_proj", f"{theirs}.up_proj"], (size, size), bias=bias
    )
    yield from same_tensors(f"{ours}.fc2", f"{theirs}.down_proj", bias=bias)
