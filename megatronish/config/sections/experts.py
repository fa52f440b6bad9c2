"""Options of the section [model] for mixture-of-experts layers, under Megatron-LM's flag names."""

import ast
from dataclasses import dataclass
from typing import Annotated, Literal

from megatronish.config.marks import TRAINING_ONLY, at_least, at_most, greater_than

MOST_LAYERS = 1_000_000
LOAD_BALANCING = ("none", "seq_aux_loss", "global_aux_loss")


@dataclass(frozen=True)
class ExpertOptions:
    """Experts in the place of MLPs: how many, how wide, in which layers, and how tokens choose them."""

    num_experts: Annotated[int | None, at_least(1), at_most(32_767)] = None
    """Routed experts E of a layer. Without it all layers are dense."""
    moe_router_topk: Annotated[int, at_least(1), at_most(32_767)] = 2
    """Experts K that each token chooses."""
    moe_ffn_hidden_size: Annotated[int | None, at_least(1), at_most(2**31 - 1)] = None
    """Inner width of one expert. Derived: --ffn-hidden-size."""
    moe_layer_freq: str = "1"
    """Which layers have experts: N, every Nth from the first on; or a list such as ([0]*3+[1]*58), 1 for experts."""
    moe_shared_expert_intermediate_size: Annotated[int | None, at_least(1), at_most(2**31 - 1)] = None
    """Inner width, in all, of experts that every token passes."""
    moe_shared_expert_gate: bool = False
    """The output of the shared experts is multiplied by a gate, one number a token (Qwen2-MoE)."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts from the router's logits."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice, instead of over the chosen ones."""
    moe_router_norm_topk_prob: bool = False
    """With --moe-router-pre-softmax: the weights of the chosen experts are divided by their sum (norm_topk_prob)."""
    moe_router_num_groups: Annotated[int | None, at_least(1), at_most(32_767)] = None
    """Groups of experts, of which a token may choose from --moe-router-group-topk."""
    moe_router_group_topk: Annotated[int | None, at_least(1), at_most(32_767)] = None
    """Groups that a token chooses from."""
    moe_router_topk_scaling_factor: Annotated[float | None, greater_than(0)] = None
    """Factor of the weights of the chosen experts."""
    moe_input_jitter_eps: Annotated[float, at_least(0), at_most(1), TRAINING_ONLY] = 0.0
    """The input of routers is multiplied by random values of 1 - eps to 1 + eps in training; 0: it is not."""
    moe_router_force_load_balancing: Annotated[bool, TRAINING_ONLY] = False
    """For benchmarks alone: tokens go to random experts in training, with the router's weights."""
    moe_expert_capacity_factor: Annotated[float | None, greater_than(0)] = None
    """Most tokens of a sequence that an expert takes, times the mean; later ones are dropped. Derived: no limit."""
    moe_router_enable_expert_bias: bool = False
    """A bias of each expert's score, for the choice alone, which every step moves towards balance (no loss)."""
    moe_router_bias_update_rate: Annotated[float, at_least(0), TRAINING_ONLY] = 1e-3
    """By how much a step moves that bias."""
    moe_router_load_balancing_type: Annotated[Literal["none", "seq_aux_loss", "global_aux_loss"], TRAINING_ONLY] = (
        "seq_aux_loss"
    )
    """Loss that balances the load: of each sequence, or of the whole batch with the choices of the step before."""
    moe_aux_loss_coeff: Annotated[float, at_least(0), TRAINING_ONLY] = 0.0
    """Coefficient of that loss."""
    moe_z_loss_coeff: Annotated[float, at_least(0), TRAINING_ONLY] = 0.0
    """Coefficient of the z-loss, which keeps the router's logits small."""


def has_experts(frequency: str, layer: int) -> bool:
    """Whether the layer has experts by --moe-layer-freq; ValueError for text that is neither a number nor a list.

    A list that is too short, which the rules refuse, has none in the layers after it.
    """
    pattern = parse_frequency(frequency)
    return layer % pattern == 0 if isinstance(pattern, int) else layer < len(pattern) and bool(pattern[layer])


def parse_frequency(text: str) -> int | list[int]:
    """ "2" -> 2, "([0]*1+[1]*3)" -> [0, 1, 1, 1]: numbers, lists, + and * alone; ValueError for anything else."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is neither a number nor a list such as ([0]*3+[1]*58)") from error


def _value(node: ast.AST) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) <= MOST_LAYERS:
        return node.value
    if isinstance(node, ast.List):
        return [_number(each) for each in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _value(node.left), _value(node.right)
        # Measured before it is made: a product of lists could fill the memory.
        lists = [value for value in (left, right) if isinstance(value, list)]
        times = [value for value in (left, right) if isinstance(value, int)]
        if isinstance(node.op, ast.Mult) and lists and times and len(lists[0]) * times[0] > MOST_LAYERS:
            raise ValueError("more layers than a model has")
        return left + right if isinstance(node.op, ast.Add) else left * right  # type: ignore[operator]
    raise SyntaxError("another expression")


def _number(node: ast.AST) -> int:
    value = _value(node)
    if isinstance(value, list):
        raise TypeError("a list in a list")
    return value
