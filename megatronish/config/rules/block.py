"""Rules on the norms, factors and caps of a layer: which models have them, and what they do not go with."""

from dataclasses import fields

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS
from megatronish.config.rules.rule import ConfigRule
from megatronish.config.sections.block import BlockOptions

_OWN = tuple(field.name for field in fields(BlockOptions))
_OF_LAYERS = ("norm_placement", "residual_multiplier")
_EXPLICIT = ("auto", "unfused")


def _gpt_alone(config: Config) -> str | None:
    """BERT and T5 have layers of their own, and so have plug-ins."""
    model = config.model
    kind, names = f"model_type={model.model_type}", _OWN
    if model.model_type == "gpt":
        kind, names = f"block={model.block}", _OF_LAYERS if model.block != "transformer" else ()
    for name in names:
        if getattr(model, name) != FIELDS[name].default:
            return (
                f"{name}={getattr(model, name)} is of the layers of a GPT, and {kind} has others; leave "
                f"{FIELDS[name].flag} out"
            )
    return None


def _cap(config: Config) -> str | None:
    cap, backend = config.model.attn_logit_softcapping, config.training.attention_backend
    if cap is None:
        return None
    if backend not in _EXPLICIT:
        return (
            f"attention_backend={backend} knows no attn_logit_softcapping={cap}, which needs explicit scores; use "
            "--attention-backend unfused, or leave it out"
        )
    if config.parallel.context_parallel_size > 1 and config.parallel.cp_comm_type == "p2p":
        return (
            f"attn_logit_softcapping={cap} needs the scores of whole rows, and with cp_comm_type=p2p a rank sees them "
            "block by block; use --cp-comm-type a2a"
        )
    return None


def _parameters_of_norms(config: Config) -> str | None:
    model = config.model
    if model.norm_parameters == "weight" and model.normalization == "RMSNorm":
        return (
            "norm_parameters=weight takes the bias from LayerNorm, and normalization=RMSNorm has none; leave "
            "--norm-parameters out"
        )
    if model.norm_parameters == "none" and model.apply_layernorm_1p:
        return (
            "norm_parameters=none leaves norms no weight that apply_layernorm_1p could store as w - 1; leave one of "
            "them out"
        )
    return None


def _norm_one_plus(config: Config) -> str | None:
    model = config.model
    if not model.qk_layernorm_1p:
        return None
    if not model.qk_layernorm:
        return "qk_layernorm_1p says how --qk-layernorm stores its weights; add --qk-layernorm, or leave it out"
    kinds = ("qk_layernorm_across_heads", "qk_layernorm_by_head")
    other = next((name for name in kinds if getattr(model, name)), None)
    if other is not None:
        return f"qk_layernorm_1p with {other} is not supported; leave one of them out"
    if model.norm_parameters == "none":
        return "norm_parameters=none leaves norms no weight that qk_layernorm_1p could store; leave one of them out"
    return None


def _norm_after_rope(config: Config) -> str | None:
    model = config.model
    if not model.qk_layernorm_after_rope:
        return None
    if not model.qk_layernorm:
        return "qk_layernorm_after_rope says where --qk-layernorm is; add --qk-layernorm, or leave it out"
    if model.position_embedding_type != "rope":
        return (
            f"qk_layernorm_after_rope needs position_embedding_type=rope, not {model.position_embedding_type}; add "
            "--position-embedding-type rope, or leave it out"
        )
    if model.qk_layernorm_across_heads:
        return (
            "qk_layernorm_after_rope normalises each head by itself, and qk_layernorm_across_heads all heads at once; "
            "leave one of them out"
        )
    return None


def _norm_by_head(config: Config) -> str | None:
    model = config.model
    if not model.qk_layernorm_by_head:
        return None
    if not model.qk_layernorm:
        return "qk_layernorm_by_head says how --qk-layernorm normalises; add --qk-layernorm, or leave it out"
    if model.qk_layernorm_across_heads:
        return (
            "qk_layernorm_by_head normalises each head and qk_layernorm_across_heads all at once; leave one of them out"
        )
    return None


def _l2_norm(config: Config) -> str | None:
    model = config.model
    if not model.qk_l2_norm:
        return None
    if model.qk_layernorm:
        return "qk_l2_norm and qk_layernorm are two norms of queries and keys; leave one of them out"
    if model.position_embedding_type == "rope":
        return None
    return (
        f"qk_l2_norm is of layers with RoPE, and position_embedding_type={model.position_embedding_type} has none; "
        "add --position-embedding-type rope, or leave it out"
    )


def _temperature(config: Config) -> str | None:
    model = config.model
    if model.attn_temperature_scale is None or model.position_embedding_type != "rope" or model.no_rope_freq:
        return None
    return (
        f"attn_temperature_scale={model.attn_temperature_scale} is of layers without RoPE, and all layers have it; add "
        "--no-rope-freq 4, or leave it out"
    )


def _position_offset(config: Config) -> str | None:
    offset, kind = config.model.position_offset, config.model.position_embedding_type
    if offset == 0 or kind == "learned_absolute":
        return None
    return (
        f"position_offset={offset} is about rows of a learned table, and position_embedding_type={kind} has none; "
        "leave --position-offset out"
    )


RULES = (
    ConfigRule(("model_type", "block", *_OWN), _gpt_alone),
    ConfigRule(("attn_logit_softcapping", "attention_backend", "cp_comm_type", "context_parallel_size"), _cap),
    ConfigRule(("norm_parameters", "normalization", "apply_layernorm_1p"), _parameters_of_norms),
    ConfigRule(("qk_layernorm_by_head", "qk_layernorm", "qk_layernorm_across_heads"), _norm_by_head),
    ConfigRule(
        (
            "qk_layernorm_1p",
            "qk_layernorm",
            "qk_layernorm_across_heads",
            "qk_layernorm_by_head",
            "norm_parameters",
        ),
        _norm_one_plus,
    ),
    ConfigRule(
        ("qk_layernorm_after_rope", "qk_layernorm", "qk_layernorm_across_heads", "position_embedding_type"),
        _norm_after_rope,
    ),
    ConfigRule(("qk_l2_norm", "qk_layernorm", "position_embedding_type"), _l2_norm),
    ConfigRule(("attn_temperature_scale", "position_embedding_type", "no_rope_freq"), _temperature),
    ConfigRule(("position_offset", "position_embedding_type"), _position_offset),
)
