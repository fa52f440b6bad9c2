"""Arguments of Megatron-LM checkpoints: translation to ModelConfig. (From it: our_arguments.py.)

Megatron-LM saves all values of its command line, hundreds of them. The arguments that change what the model computes
are either read here or, where our model has no counterpart, refused by name. An argument that is absent is older than
its flag: its value is the one that was built in before, which is the default of ModelConfig.

Some arguments mean something else than their names say. GELU is the tanh form where `bias_gelu_fusion` is on, the
default, and linear layers have biases; `openai_gelu` has an effect only in models older than megatron-core.
`window_size` is a pair, (tokens before, tokens after), and our window counts the token itself too.
`activation_func_clamp_value` has no effect on SwiGLU where `bias_swiglu_fusion` is on, the default.

Arguments on experts are translated in both directions. Two differences are more than names. Megatron-LM has no flag for
weights of a softmax over all experts that are divided by the sum of the chosen ones; that is the softmax over the
chosen experts, which is its default. And its capacity counts the tokens of a rank's micro-batch, ours those of a
sequence, so neither becomes the other.
"""

from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS
from megatronish.config.rules.experts import RULES
from megatronish.config.sections.model import LOAD_BALANCING, LONGEST, ModelConfig, parse_frequency
from megatronish.core.errors import UserError

# Arguments that have the name and the meaning of a field of ModelConfig.
SAME = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "group_query_attention",
    "max_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "normalization",
    "apply_layernorm_1p",
    "swiglu",
    "quick_geglu",
    "glu_linear_offset",
    "activation_func_clamp_value",
    "softmax_type",
    "squared_relu",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "make_vocab_size_divisible_by",
)
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
LINEAR_SCALING = "rotary_seq_len_interpolation_factor"
PATTERNS = ("window_attn_skip_freq", "no_rope_freq")
POSITIONS = ("learned_absolute", "rope", "none")
LLAMA3 = {"rope_original_max_positions": 8192, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0}
LARGEST = 2**40  # elements of a tensor, more than any model has
ADDS_A_TOKEN = ("NullTokenizer", "NullMultimodalTokenizer")  # their vocab_size does not count the end-of-document token

# Arguments that change the model and have no counterpart here, with values other than None, False, 0 that do not.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": (),
    "attention_output_gate": (),
    "experimental_attention_variant": (),
    "heterogeneous_layers_config_path": (),
    "hybrid_layer_pattern": (),
    "hybrid_override_pattern": (),
    "mtp_num_layers": (),
    "multi_latent_attention": (),
    "onnx_safe": (),
    "qk_l2_norm": (),
}


def model_of(args: Mapping[str, Any], *, before_core: bool) -> ModelConfig:
    """Model of these arguments; `before_core` if the checkpoint is older than megatron-core.

    UserError, with the argument, for one that is missing, of a wrong type, or without a counterpart.
    """
    _check(args)
    # Fields of the same name; an argument that is absent keeps the default of ModelConfig.
    fields: dict[str, Any] = {name: value_of(args, name) for name in SAME if args.get(name) is not None}
    if is_on(args, "group_query_attention"):
        fields["num_query_groups"] = value_of(args, "num_query_groups")
    # Fields under other names.
    epsilon = "norm_epsilon" if "norm_epsilon" in args else "layernorm_epsilon"
    if epsilon in args:
        fields["norm_epsilon"] = value_of({"norm_epsilon": args[epsilon]}, "norm_epsilon")
    bias = is_on(args, "add_bias_linear", default=not is_on(args, "disable_bias_linear"))
    fields["disable_bias_linear"] = not bias
    if not any(fields.get(name) for name in ("swiglu", "quick_geglu", "squared_relu")):
        fused = is_on(args, "bias_gelu_fusion", default=True) and bias
        fields["openai_gelu"] = fused or (before_core and is_on(args, "openai_gelu"))
    if fields.get("swiglu") and is_on(args, "bias_swiglu_fusion", default=True):  # which knows no clamp
        fields.pop("activation_func_clamp_value", None)
    fields["window_size"] = _window(args)
    fields |= {name: pattern_of(args, name) for name in PATTERNS} | expert_fields(args)
    model = ModelConfig(**fields | _positions(args))
    _check_patterns(model)
    check_experts(model)
    # Numbers that are valid one by one, and together no model: unequal groups, tensors beyond any memory.
    if model.num_attention_heads % model.num_kv_heads:
        raise UserError(f"its {model.num_attention_heads} heads cannot share {model.num_kv_heads} key/value heads")
    rows = max(3 * model.num_attention_heads * model.head_size, 2 * model.ffn_size, model.max_position_embeddings or 0)
    if max(rows, seq_length_of(args)) * model.hidden_size > LARGEST:
        raise UserError(
            f"its arguments, hidden_size={model.hidden_size} among them, ask for a tensor larger than any model has"
        )
    return model


def seq_length_of(args: Mapping[str, Any]) -> int:
    """Sequence length of the training; UserError if it is absent or no number."""
    length = args.get("seq_length")
    if type(length) is not int or not 0 < length < 2**63:
        raise UserError(f"its argument seq_length is {quote(length)}, and must be a number of at least 1, in 64 bits")
    return length


def _check(args: Mapping[str, Any]) -> None:
    if absent := [name for name in REQUIRED if args.get(name) is None]:
        raise UserError(f"its arguments lack {', '.join(absent)}, so it is not known which model it holds")
    for name, harmless in {**REFUSED, **refused_of_experts(args)}.items():
        value = args.get(name)
        if value and value not in harmless:
            raise UserError(f"it was trained with {name} ({quote(value)}), which our model does not have")


def _window(args: Mapping[str, Any]) -> int | None:
    window = args.get("window_size")
    if window is None:
        return None
    match window:
        case [-1, 0 | -1]:
            return None
        case [int(before), 0 | -1] if before >= 0:
            return before + 1
    raise UserError(f"its argument window_size is {quote(window)}; of a window, (tokens before, 0) is supported")


def _check_patterns(model: ModelConfig) -> None:
    """Read both patterns once; UserError for one that does not fit the number of layers."""
    assert len(model.windowed_layers) == len(model.rotated_layers)


def _positions(args: Mapping[str, Any]) -> dict[str, Any]:
    kind = args.get("position_embedding_type", "learned_absolute")
    if is_on(args, "use_rotary_position_embeddings"):
        kind = "rope"
    elif kind == "learned_absolute" and not is_on(args, "add_position_embedding", default=True):
        kind = "none"
    if kind not in POSITIONS:
        raise UserError(f"its argument position_embedding_type is {quote(kind)}; supported are {', '.join(POSITIONS)}")
    fields: dict[str, Any] = {"position_embedding_type": kind}
    stretch = args.get(LINEAR_SCALING)
    if kind != "rope":
        return fields
    if is_on(args, "use_rope_scaling"):
        if stretch not in (None, 1):
            raise UserError(
                f"its arguments have both use_rope_scaling and {LINEAR_SCALING}; only one of them is supported"
            )
        factor = value_of({"rope_scaling_factor": args.get("rope_scaling_factor", 8.0)}, "rope_scaling_factor")
        fields |= {"rope_scaling_type": "llama3", "rope_scaling_factor": factor} | LLAMA3
    elif stretch not in (None, 1):
        factor = value_of({"rope_scaling_factor": stretch}, "rope_scaling_factor")
        fields |= {"rope_scaling_type": "linear", "rope_scaling_factor": factor}
    return fields


def true_vocab_size(args: Mapping[str, Any]) -> int | None:
    """Vocabulary size without padding; None where the arguments do not say it."""
    size = args.get("vocab_size")
    if type(size) is not int or size < 1:
        return None
    return size + (args.get("tokenizer_type") in ADDS_A_TOKEN)


def quote(value: Any) -> str:
    """Value of an argument as text for an error: a pickle may hold anything, of any length."""
    items = value if isinstance(value, list | tuple) and len(value) <= 4 else [value]
    if not all(item is None or isinstance(item, bool | int | float | str) for item in items):
        return "no number or word"
    if any(isinstance(item, int) and abs(item) >= 2**63 for item in items):
        return "beyond 64 bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def value_of(args: Mapping[str, Any], name: str) -> Any:
    """Value of an argument in the type of our field; UserError for another type or a number out of range."""
    value: Any = args.get(name)
    hint = get_type_hints(ModelConfig)[name]
    kinds = get_args(hint) or (hint,)
    if float in kinds and type(value) is int and abs(value) < 2**63:
        return float(value)
    if value is None or (type(value) not in kinds and value not in kinds):
        raise UserError(f"its argument {name} is {quote(value)}, which is not possible")
    if int in kinds and not 0 < value < 2**63:
        raise UserError(f"its argument {name} is {quote(value)}, and must be at least 1, in 64 bits")
    for bound in FIELDS[name].ranges:
        if isinstance(value, int) and bound.is_maximum and not bound.holds(value):
            raise UserError(f"its argument {name} is {value}, and {bound.rule}")
    return value


def is_on(args: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    return bool(args.get(name, default))


def pattern_of(args: Mapping[str, Any], name: str) -> str | None:
    """Pattern of layers: a number or a list there, a text here."""
    value = args.get(name)
    if not value:  # 0 is none, too
        return None
    numbers = value if isinstance(value, list | tuple) else [value]
    if len(numbers) > LONGEST or any(type(number) not in (int, bool) for number in numbers):
        raise UserError(f"its argument {name} is {quote(value)}; a number or a list of 0 and 1 is known here")
    return str([int(number) for number in numbers]) if isinstance(value, list | tuple) else str(value)


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
    if is_on(args, "add_bias_linear", default=not is_on(args, "disable_bias_linear")):
        raise UserError("its experts have biases (add_bias_linear), which our model does not have")
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
    if model.linear_bias:
        return "experts without biases in a model with biases"
    if model.moe_router_score_function == "sparsemixer":
        return "moe_router_score_function=sparsemixer"
    if model.moe_apply_probs_on_input:
        return "moe_apply_probs_on_input"
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
    return flags
