"""Arguments of Megatron-LM checkpoints: translation to ModelConfig. (From it: our_arguments.py.)

Megatron-LM saves all values of its command line, hundreds of them. The arguments that change what the model computes
are either read here or, where our model has no counterpart, refused by name. An argument that is absent is older than
its flag: its value is the one that was built in before, which is the default of ModelConfig.

Some arguments mean something else than their names say. GELU is the tanh form where `bias_gelu_fusion` is on, the
default, and linear layers have biases; `openai_gelu` has an effect only in models older than megatron-core.
`window_size` is a pair, (tokens before, tokens after), and our window counts the token itself too.
`activation_func_clamp_value` has no effect on SwiGLU where `bias_swiglu_fusion` is on, the default.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.megatron.expert_arguments import check_experts, expert_fields, refused_of_experts
from megatronish.formats.megatron.latent import check_latent, latent_fields
from megatronish.formats.megatron.values import LARGEST, is_on, pattern_of, quote, value_of

logger = logging.getLogger(__name__)

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
    "mtp_num_layers",
    "mtp_loss_scaling_factor",
)
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
LINEAR_SCALING = "rotary_seq_len_interpolation_factor"
PATTERNS = ("window_attn_skip_freq", "no_rope_freq")
POSITIONS = ("learned_absolute", "rope", "none")
LLAMA3 = {"rope_original_max_positions": 8192, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0}
ADDS_A_TOKEN = ("NullTokenizer", "NullMultimodalTokenizer")  # their vocab_size does not count the end-of-document token

# Arguments that change the model and have no counterpart here, with values other than None, False, 0 that do not.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": (),
    "attention_output_gate": (),
    "experimental_attention_variant": (),
    "heterogeneous_layers_config_path": (),
    "hybrid_layer_pattern": (),
    "hybrid_override_pattern": (),
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
    latent = latent_fields(args)
    model = ModelConfig(**fields | (latent or _positions(args)))
    _check_patterns(model)
    check_experts(model)
    check_latent(model)
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


def vocab_size_of(args: Mapping[str, Any], asked: int | None, *, padded: int, path: Path) -> int:
    """Vocabulary without padding: what is asked for, else what the arguments say, else all `padded` rows."""
    if asked is not None and not 0 < asked <= padded:
        raise UserError(f"vocab_size={asked} does not fit the {padded} rows of the embedding; give the true vocabulary")
    # Megatron-LM pads the vocabulary for its tensor ranks, and old arguments do not say by how much.
    given = _true_vocab_size(args)
    if asked is None and (given is None or given > padded):
        logger.warning(
            "%s does not say its true vocabulary; all %d rows are kept, padding included, unless vocab_size says less",
            path,
            padded,
        )
        return padded
    return asked or given or padded


def _true_vocab_size(args: Mapping[str, Any]) -> int | None:
    """Vocabulary size without padding; None where the arguments do not say it."""
    size = args.get("vocab_size")
    if type(size) is not int or size < 1:
        return None
    return size + (args.get("tokenizer_type") in ADDS_A_TOKEN)
