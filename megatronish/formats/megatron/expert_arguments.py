"""Arguments of Megatron-LM on experts, in both directions.

Two differences are more than names. Megatron-LM has no flag for weights of a softmax over all experts that are divided
by the sum of the chosen ones; that is the softmax over the chosen experts, which is its default. And its capacity
counts the tokens of a rank's micro-batch, ours those of a sequence, so neither becomes the other.
"""

from collections.abc import Mapping
from typing import Any

from megatronish.config.config import Config
from megatronish.config.layer_pattern import parse_frequency
from megatronish.config.rules.experts import RULES
from megatronish.config.sections.experts import LOAD_BALANCING
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.megatron.values import LARGEST, is_on, pattern_of, quote, value_of

# Arguments that have the name and the meaning of a field of ModelConfig.
SAME_OF_EXPERTS = (
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
)
LARGEST_NUMBER = 32_767  # of experts, as the field of ModelConfig says

# Arguments of models with experts that change the model and have no counterpart here.
REFUSED_OF_EXPERTS: Mapping[str, tuple[Any, ...]] = {
    "moe_apply_probs_on_input": (),
    "moe_expert_capacity_factor": (),
    "moe_latent_size": (),
    "moe_router_topk_limited_devices": (),
    "moe_use_legacy_grouped_gemm": (),
}


def refused_of_experts(args: Mapping[str, Any]) -> Mapping[str, tuple[Any, ...]]:
    """Arguments without a counterpart, with their harmless values; those of experts where the model has some."""
    return REFUSED_OF_EXPERTS if args.get("num_experts") else {"expert_model_parallel_size": (1,)}


def expert_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig on experts; none of a dense model, whose arguments have idle values."""
    if not args.get("num_experts"):
        return {}
    fields = {name: value_of(args, name) for name in SAME_OF_EXPERTS if args.get(name) is not None}
    if fields["num_experts"] > LARGEST_NUMBER:
        raise UserError(f"its argument num_experts is {fields['num_experts']}, and may be {LARGEST_NUMBER} at most")
    fields["moe_add_bias_linear"] = is_on(args, "add_bias_linear", default=not is_on(args, "disable_bias_linear"))
    if fields["moe_add_bias_linear"] and fields.get("moe_shared_expert_intermediate_size"):
        raise UserError("its shared experts have biases (add_bias_linear), which neither our model nor Megatron-LM has")
    fields["moe_layer_freq"] = pattern_of(args, "moe_layer_freq") or "1"
    return fields | _balancing(args)


def _balancing(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the balancing loss, of which a router has one; that of a micro-batch is that of a sequence."""
    kinds = args.get("moe_router_load_balancing_type")
    kind = _only_one(args, "moe_router_load_balancing_type")
    coefficient = _only_one(args, "moe_aux_loss_coeff")
    kind = {None: LOAD_BALANCING[0], "aux_loss": "seq_aux_loss"}.get(kind, kind) if isinstance(kind, str | None) else ""
    if kind not in LOAD_BALANCING:
        raise UserError(
            f"its argument moe_router_load_balancing_type is {quote(kinds)}; supported are aux_loss, "
            f"{', '.join(LOAD_BALANCING)}"
        )
    fields: dict[str, Any] = {"moe_router_load_balancing_type": kind}
    for name, value in (("moe_aux_loss_coeff", coefficient), ("moe_z_loss_coeff", args.get("moe_z_loss_coeff"))):
        if value is not None:
            fields[name] = value_of({name: value}, name)
    return fields


def _only_one(args: Mapping[str, Any], name: str) -> Any:
    """Value of an argument that may be a list, of one entry; UserError for a list of several."""
    value = args.get(name)
    if not isinstance(value, list | tuple) or not value:
        return value
    if len(value) > 1:
        raise UserError(
            f"its argument {name} is {quote(value)}, and a router has one balancing loss here; load it into "
            "Megatron-LM with one and save it again"
        )
    return value[0]


def check_experts(model: ModelConfig) -> None:
    """Check that the fields on experts are one model; UserError, with the rule, if not."""
    if model.num_experts is None:
        return
    for rule in RULES:
        if complaint := rule.complaint(Config(model=model)):
            raise UserError(f"its arguments do not fit together: {complaint}")
    if model.num_experts * 2 * model.expert_ffn_size * model.hidden_size > LARGEST:
        raise UserError(
            f"its arguments, moe_ffn_hidden_size={model.expert_ffn_size} among them, ask for a tensor larger than any "
            "model has"
        )


def without_counterpart(model: ModelConfig) -> str | None:
    """What of a model with experts Megatron-LM cannot have; None for all that it can."""
    if model.num_experts is None:
        return None
    after_choice = model.moe_router_score_function == "softmax" and (
        not model.moe_router_pre_softmax or model.moe_router_norm_topk_prob
    )
    if model.linear_bias and not model.moe_add_bias_linear:
        return "experts without biases in a model with biases"
    if model.moe_router_score_function == "sparsemixer":
        return "moe_router_score_function=sparsemixer"
    if model.moe_apply_probs_on_input:
        return "moe_apply_probs_on_input"
    if model.moe_add_bias_linear and not model.linear_bias:
        return "moe_add_bias_linear with disable_bias_linear (there all layers have biases, or none)"
    if model.moe_add_bias_linear and model.moe_shared_expert_intermediate_size is not None:
        return "moe_add_bias_linear with shared experts"
    if model.moe_add_bias_linear and model.activation == "gelu_tanh":
        return (
            "moe_add_bias_linear with openai_gelu (it has the tanh form in a fused operator, which experts cannot use)"
        )
    if model.moe_expert_capacity_factor is not None:
        return "moe_expert_capacity_factor (a limit for each sequence; it has one for each micro-batch)"
    if after_choice and model.moe_router_topk == 1:
        return "moe_router_topk=1 with a weight that is always 1"
    best, kept = model.scores_per_group, model.moe_router_group_topk
    if best is not None and kept is not None and best * kept != model.moe_router_topk:
        return f"moe_router_scores_per_group={best} (there it is moe_router_topk over moe_router_group_topk)"
    if model.moe_router_norm_topk_prob and model.moe_router_num_groups is not None:
        return "moe_router_norm_topk_prob with moe_router_num_groups"
    return None


def arguments_of_experts(model: ModelConfig, *, ep: int, etp: int, is_grouped: bool) -> dict[str, Any]:
    """Arguments on experts under which Megatron-LM builds this model, its experts in one grouped product or apart."""
    if model.num_experts is None:
        return {"num_experts": None, "expert_model_parallel_size": 1}
    frequency = parse_frequency(model.moe_layer_freq)
    return {name: getattr(model, name) for name in SAME_OF_EXPERTS} | {
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "moe_layer_freq": frequency,
        "moe_router_pre_softmax": model.moe_router_pre_softmax and not model.moe_router_norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_z_loss_coeff": model.moe_z_loss_coeff or None,
        "moe_grouped_gemm": is_grouped,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }


def expert_flags(args: Mapping[str, Any]) -> list[str]:
    """Flags of a model with experts, all of them: which of them --use-checkpoint-args takes depends on the version."""
    if args["num_experts"] is None:
        return []
    names = (*SAME_OF_EXPERTS, "moe_layer_freq", "moe_router_dtype", "moe_grouped_gemm", "moe_token_dispatcher_type")
    flags = []
    for name in names:
        value, flag = args[name], f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value not in (None, False):
            flags.append(f"{flag} '{value}'" if isinstance(value, list) else f"{flag} {value}")
    if args["add_bias_linear"]:  # what it asks for where experts have biases
        flags.append("--expert-tensor-parallel-size 1 --no-bias-dropout-fusion")
    return flags
