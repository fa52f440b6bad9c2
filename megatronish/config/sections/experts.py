"""Options of experts in section [model]: how many, how wide, in which layers, and how tokens choose them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatronish.config.marks import TRAINING_ONLY, at_least, at_most, greater_than

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
    moe_add_bias_linear: bool = False
    """Biases on the router and on both products of each routed expert, also with --disable-bias-linear (gpt-oss)."""
    moe_shared_expert_gate: bool = False
    """The output of the shared experts is multiplied by a gate, one number a token (Qwen2-MoE)."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    """Scores of the experts from the router's logits. sparsemixer: each among its rivals alone (Phi-3.5-MoE)."""
    moe_sparsemixer_eps: Annotated[float, at_least(0), at_most(1)] = 0.01
    """sparsemixer: rivals of an expert are at most twice this below it, relative to the larger logit."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice, instead of over the chosen ones."""
    moe_router_norm_topk_prob: bool = False
    """With --moe-router-pre-softmax: the weights of the chosen experts are divided by their sum (norm_topk_prob)."""
    moe_router_num_groups: Annotated[int | None, at_least(1), at_most(32_767)] = None
    """Groups of experts, of which a token may choose from --moe-router-group-topk."""
    moe_router_group_topk: Annotated[int | None, at_least(1), at_most(32_767)] = None
    """Groups that a token chooses from."""
    moe_router_scores_per_group: Annotated[int | None, at_least(1), at_most(32_767)] = None
    """Best scores of a group that add up to the group's. Derived: --moe-router-topk over --moe-router-group-topk."""
    moe_router_topk_scaling_factor: Annotated[float | None, greater_than(0)] = None
    """Factor of the weights of the chosen experts."""
    moe_apply_probs_on_input: bool = False
    """The weight of a token's one expert multiplies what the expert is given, not what it makes of it (Llama 4)."""
    moe_input_jitter_eps: Annotated[float, at_least(0), at_most(1), TRAINING_ONLY] = 0.0
    """The input of routers is multiplied by random values of 1 - eps to 1 + eps in training; 0: it is not."""
    moe_router_force_load_balancing: Annotated[bool, TRAINING_ONLY] = False
    """For benchmarks alone: tokens go to random experts in training, with the router's weights."""
    moe_expert_capacity_factor: Annotated[float | None, greater_than(0), at_most(2**31 - 1)] = None
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
