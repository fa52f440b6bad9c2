"""Rules on the sizes of a model, its position embedding, gates, patterns of layers and multi-token prediction."""

import math
from collections.abc import Callable

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS
from megatronish.config.layer_pattern import marked_layers
from megatronish.config.rules.rule import ConfigRule, divide
from megatronish.config.sections.model import ModelConfig

_SCALING = ("rope_low_freq_factor", "rope_high_freq_factor", "rope_beta_fast", "rope_beta_slow")


def _heads_of_hidden(config: Config) -> str | None:
    model = config.model
    if model.kv_channels is not None or model.multi_latent_attention:
        return None
    return divide("hidden_size", model.hidden_size, "num_attention_heads", model.num_attention_heads)


def _key_value_heads(config: Config) -> str | None:
    model = config.model
    groups, heads = model.num_query_groups, model.num_attention_heads
    if groups is None:
        return None
    if not model.group_query_attention and groups != heads:
        return (
            f"num_query_groups={groups} needs group_query_attention (Megatron-LM would ignore it silently); "
            "add --group-query-attention, or leave it out"
        )
    return divide("num_attention_heads", heads, "num_query_groups", groups)


def _positions(config: Config) -> str | None:
    rows, tokens = config.model.max_position_embeddings, config.training.seq_length
    if config.model.position_embedding_type != "learned_absolute" or rows is None or rows >= tokens:
        return None
    if config.checkpoint.load_hf is not None or config.checkpoint.use_checkpoint_args:
        return too_few_positions(rows, seq_length=tokens)
    return (
        f"max_position_embeddings={rows} must be at least seq_length={tokens}; "
        f"use --max-position-embeddings {tokens}, or a shorter --seq-length"
    )


def too_few_positions(rows: int, *, seq_length: int) -> str | None:
    """Complaint about sequences that are longer than the position table of a trained model."""
    if seq_length <= rows:
        return None
    return (
        f"seq_length={seq_length} exceeds the {rows} positions that the model has learned; "
        f"use --seq-length {rows} or less"
    )


def _rope_head(config: Config) -> str | None:
    model = config.model
    if model.position_embedding_type != "rope" or model.multi_latent_attention:  # whose rules are of its own
        return None
    turned = model.rotary_size
    if turned >= 2 and turned % 2 == 0:
        return None
    return (
        f"rotary_percent={model.rotary_percent} of a head of size {model.head_size} is {turned}, but RoPE turns pairs: "
        "it must be even and at least 2; change --rotary-percent, --kv-channels or --num-attention-heads"
    )


def _rope_scaling(config: Config) -> str | None:
    model = config.model
    if model.rope_scaling_type != "none" and model.position_embedding_type != "rope":
        return (
            f"rope_scaling_type={model.rope_scaling_type} needs position_embedding_type=rope, "
            f"not {model.position_embedding_type}; add --position-embedding-type rope, or leave the scaling out"
        )
    if model.rope_scaling == "llama3" and model.rope_high_freq_factor <= model.rope_low_freq_factor:
        return (
            f"rope_high_freq_factor={model.rope_high_freq_factor} must be greater than "
            f"rope_low_freq_factor={model.rope_low_freq_factor}; Llama 3 has 4 and 1"
        )
    if model.rope_scaling == "yarn" and model.rope_beta_fast <= model.rope_beta_slow:
        return (
            f"rope_beta_fast={model.rope_beta_fast} must be greater than rope_beta_slow={model.rope_beta_slow}; "
            "the defaults are 32 and 1"
        )
    return None


def _factors_of_longrope(config: Config) -> str | None:
    model = config.model
    if model.rope_scaling != "longrope":
        return None
    pairs = model.rotary_size // 2
    for name in ("rope_short_factor", "rope_long_factor"):
        factors, flag = getattr(model, name), FIELDS[name].flag
        if len(factors) != pairs:
            return (
                f"{name} has {len(factors)} numbers, and rope_scaling_type=longrope needs one for each of the {pairs} "
                f"pairs of a head that RoPE turns; give {pairs} with {flag}"
            )
        if not all(0 < factor < math.inf for factor in factors):
            return f"{name} has {min(factors):g}, and frequencies are divided by it; use numbers above 0 with {flag}"
    return None


def _pattern(name: str, needed: str, has: Callable[[ModelConfig], bool], remedy: str) -> ConfigRule:
    """Rule on a pattern over the layers, which needs a setting, such as `needed`, that it takes from some of them."""

    def complaint(config: Config) -> str | None:
        text = getattr(config.model, name)
        if text is None:
            return None
        if not has(config.model):
            return f"{name}={text} needs {needed}; {remedy}, or leave it out"
        try:
            marked_layers(text, num_layers=config.model.num_layers, every_nth=True)
        except ValueError as error:
            return f"{name}={text} {error}; change {FIELDS[name].flag}"
        return None

    return ConfigRule((name, "num_layers", *(each.partition("=")[0] for each in needed.split(" or "))), complaint)


def _pattern_or_window(config: Config) -> str | None:
    model = config.model
    if model.attention_pattern == "none" or model.window_size is None:
        return None
    return (
        f"attention_pattern={model.attention_pattern} has local blocks of its own, and window_size={model.window_size} "
        "is another way to see less; leave one of them out"
    )


def _window_rotary_base(config: Config) -> str | None:
    model = config.model
    if model.window_rotary_base is None:
        return None
    if model.position_embedding_type != "rope":
        needed, remedy = "position_embedding_type=rope", "add --position-embedding-type rope"
    elif model.window_size is None and model.attention_pattern == "none":
        needed, remedy = "layers with window_size or attention_pattern", "add --window-size or --attention-pattern"
    else:
        return None
    return f"window_rotary_base={model.window_rotary_base:g} needs {needed}; {remedy}, or leave it out"


def _fixed_pattern(config: Config) -> str | None:
    model = config.model
    if model.attention_pattern != "fixed" or model.attention_global_blocks <= model.attention_local_blocks:
        return None
    return (
        f"attention_global_blocks={model.attention_global_blocks} of attention_pattern=fixed are the last ones of a "
        f"window of attention_local_blocks={model.attention_local_blocks}; use at most as many"
    )


def _gate(config: Config) -> str | None:
    model = config.model
    given = [
        f"{name}={getattr(model, name)}"
        for name in ("glu_linear_offset", "activation_func_clamp_value")
        if getattr(model, name) != FIELDS[name].default
    ]
    if not given or model.is_gated:
        return None
    return f"{', '.join(given)} needs a gated MLP; add --quick-geglu or --swiglu, or leave it out"


def _xielu(config: Config) -> str | None:
    model = config.model
    if not model.xielu:
        return None
    if model.model_type != "gpt":
        return f"xielu is of the layers of a GPT, and model_type={model.model_type} has others; use another activation"
    if model.num_experts is not None:
        return (
            f"xielu learns two numbers for each layer, and num_experts={model.num_experts} leaves open for which MLP; "
            "use another activation"
        )
    return None


def _norm_across_heads(config: Config) -> str | None:
    model = config.model
    if not model.qk_layernorm_across_heads:
        return None
    if not model.qk_layernorm:
        return "qk_layernorm_across_heads says how --qk-layernorm normalises; add --qk-layernorm, or leave it out"
    if model.normalization != "RMSNorm":
        return (
            f"qk_layernorm_across_heads with normalization={model.normalization} is not supported; "
            "add --normalization RMSNorm, or leave it out"
        )
    return None


SIGHT_RULES = (
    ConfigRule(("attention_pattern", "window_size"), _pattern_or_window),
    ConfigRule(("attention_pattern", "attention_local_blocks", "attention_global_blocks"), _fixed_pattern),
)

RULES = (
    ConfigRule(("qk_layernorm_across_heads", "qk_layernorm", "normalization"), _norm_across_heads),
    ConfigRule(("hidden_size", "num_attention_heads", "kv_channels", "multi_latent_attention"), _heads_of_hidden),
    ConfigRule(("num_attention_heads", "num_query_groups", "group_query_attention"), _key_value_heads),
    ConfigRule(("max_position_embeddings", "seq_length", "position_embedding_type"), _positions),
    ConfigRule(
        (
            "hidden_size",
            "num_attention_heads",
            "kv_channels",
            "rotary_percent",
            "position_embedding_type",
            "multi_latent_attention",
            "rope_scaling_type",
        ),
        _rope_head,
    ),
    ConfigRule(("rope_scaling_type", "position_embedding_type", *_SCALING), _rope_scaling),
    ConfigRule(
        (
            *("rope_scaling_type", "position_embedding_type", "rope_short_factor", "rope_long_factor", "hidden_size"),
            *("num_attention_heads", "kv_channels", "rotary_percent", "multi_latent_attention", "qk_pos_emb_head_dim"),
        ),
        _factors_of_longrope,
    ),
    _pattern(
        "window_attn_skip_freq",
        "window_size or attention_pattern",
        lambda model: model.window_size is not None or model.attention_pattern != "none",
        "add --window-size or --attention-pattern",
    ),
    *SIGHT_RULES,
    ConfigRule(
        ("window_rotary_base", "position_embedding_type", "window_size", "attention_pattern"), _window_rotary_base
    ),
    _pattern(
        "no_rope_freq",
        "position_embedding_type=rope",
        lambda model: model.position_embedding_type == "rope",
        "add --position-embedding-type rope",
    ),
    ConfigRule(("xielu", "model_type", "num_experts"), _xielu),
    ConfigRule(("glu_linear_offset", "activation_func_clamp_value", "swiglu", "geglu", "quick_geglu"), _gate),
)


# Multi-token prediction: which models and objectives have it.

_OF_PREDICTION = {"model_type": "gpt", "block": "transformer", "embed_layernorm": False}
_PREDICTION_POSITIONS = ("rope", "alibi", "none")


def _said(config: Config) -> str:
    return f"mtp_num_layers={config.model.mtp_num_layers}"


def _prediction_by_gpt(config: Config) -> str | None:
    if config.model.num_depths == 0:
        return None
    for name, needed in _OF_PREDICTION.items():
        value = getattr(config.model, name)
        if value != needed:
            return (
                f"{_said(config)} is for the layers and words of a plain GPT, and not for {name}={value}; leave one out"
            )
    return None


def _prediction_positions(config: Config) -> str | None:
    kind = config.model.position_embedding_type
    if config.model.num_depths == 0 or kind in _PREDICTION_POSITIONS:
        return None
    return (
        f"{_said(config)} looks words up where the model ends, and position_embedding_type={kind} adds to them where "
        "it begins; add --position-embedding-type rope, or leave --mtp-num-layers out"
    )


def _prediction_objective(config: Config) -> str | None:
    name = config.training.objective
    if config.model.num_depths == 0 or name == "causal_lm":
        return None
    return f"{_said(config)} adds to a loss of each next token, which objective={name} is not; use --mtp-num-layers 0"


def _prediction_length(config: Config) -> str | None:
    length = config.training.seq_length
    if config.model.num_depths < length:
        return None
    return f"{_said(config)} must be less than seq_length={length}, or nothing is there to predict; use less"


PREDICTION_RULES = (
    ConfigRule(("mtp_num_layers", *_OF_PREDICTION), _prediction_by_gpt),
    ConfigRule(("mtp_num_layers", "position_embedding_type"), _prediction_positions),
    ConfigRule(("mtp_num_layers", "objective"), _prediction_objective),
    ConfigRule(("mtp_num_layers", "seq_length"), _prediction_length),
)
