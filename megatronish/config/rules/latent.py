"""Rules on multi-head latent attention: which options of attention it does not go with, and what it needs."""

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS
from megatronish.config.rules.rule import ConfigRule

_OF_GPT = {"model_type": "gpt", "block": "transformer"}
_OF_HEADS: dict[str, str] = {
    "rotary_percent": "RoPE turns a part of its own; use --qk-pos-emb-head-dim",
    "group_query_attention": "each head has a key and a value of its own, from one latent; leave it out",
    "softmax_type": "sinks of latent attention are not there yet; leave it out",
    "clip_qkv": "latents are not clipped; leave it out",
    "attn_logit_softcapping": "soft caps of latent attention are not there yet; leave it out",
    "add_qkv_bias": "projections to and from latents have no biases; leave it out",
    "add_attention_bias": "projections to and from latents have no biases; leave it out",
    "qk_layernorm_across_heads": "--qk-layernorm normalises latents, which have no heads; leave it out",
    "qk_layernorm_by_head": "--qk-layernorm normalises latents, which have no heads; leave it out",
    "qk_layernorm_after_rope": "--qk-layernorm normalises latents, which RoPE does not turn; leave it out",
    "qk_l2_norm": "--qk-layernorm normalises latents; leave it out",
    "attn_temperature_scale": "queries of latent attention have no temperature; leave it out",
    "qk_layernorm_1p": "weights of the latents' norms are stored as --apply-layernorm-1p says; leave it out",
}
"""Options of attention by heads, each with the reason and the remedy."""


def _gpt_alone(config: Config) -> str | None:
    if not config.model.multi_latent_attention:
        return None
    for name, needed in _OF_GPT.items():
        value = getattr(config.model, name)
        if value != needed:
            return f"multi_latent_attention is of the layers of a GPT, and {name}={value} has others; leave it out"
    return None


def _with_rope(config: Config) -> str | None:
    model = config.model
    if not model.multi_latent_attention or model.position_embedding_type == "rope":
        return None
    return (
        f"multi_latent_attention turns a part of each head by RoPE, and position_embedding_type="
        f"{model.position_embedding_type} has none; add --position-embedding-type rope"
    )


def _even_part(config: Config) -> str | None:
    model = config.model
    if not model.multi_latent_attention or model.qk_pos_emb_head_dim % 2 == 0:
        return None
    return f"qk_pos_emb_head_dim={model.qk_pos_emb_head_dim} must be even, as RoPE turns pairs; use 64, for example"


def _values(config: Config) -> str | None:
    model = config.model
    if not model.multi_latent_attention or model.v_head_dim <= model.qk_head_dim + model.qk_pos_emb_head_dim:
        return None
    return (
        f"v_head_dim={model.v_head_dim} must be at most qk_head_dim={model.qk_head_dim} plus "
        f"qk_pos_emb_head_dim={model.qk_pos_emb_head_dim}, to which values are filled up; use a smaller --v-head-dim"
    )


def _stretched(config: Config) -> str | None:
    model = config.model
    if not model.multi_latent_attention or model.rope_scaling_type in ("none", "yarn"):
        return None
    return (
        f"rope_scaling_type={model.rope_scaling_type} is not for multi_latent_attention, whose RoPE YaRN stretches; "
        "use --rope-scaling-type yarn with --rope-scaling-factor, and leave Megatron's --use-rope-scaling out"
    )


def _without(name: str, reason: str) -> ConfigRule:
    """Rule on an option of attention that latent attention has not."""

    def complaint(config: Config) -> str | None:
        value = getattr(config.model, name)
        if not config.model.multi_latent_attention or value == FIELDS[name].default:
            return None
        return f"{name}={value} is not for multi_latent_attention: {reason}"

    return ConfigRule(("multi_latent_attention", name), complaint)


def _query_groups(config: Config) -> str | None:
    model = config.model
    groups = model.num_query_groups
    if not model.multi_latent_attention or groups in (None, model.num_attention_heads):
        return None
    return (
        f"num_query_groups={groups} is not for multi_latent_attention: each head has a key and a value of its own, "
        "from one latent; leave it out"
    )


def _grows(name: str) -> ConfigRule:
    """Rule on a factor of a stretched RoPE."""

    def complaint(config: Config) -> str | None:
        model, value = config.model, getattr(config.model, name)
        is_used = model.multi_latent_attention and model.rope_scaling_type == "yarn"
        if value == FIELDS[name].default or is_used:
            return None
        return (
            f"{name}={value} needs multi_latent_attention with rope_scaling_type=yarn; add --multi-latent-attention "
            "and --rope-scaling-type yarn, or leave it out"
        )

    return ConfigRule((name, "multi_latent_attention", "rope_scaling_type"), complaint)


RULES = (
    ConfigRule(("multi_latent_attention", "model_type", "block"), _gpt_alone),
    ConfigRule(("multi_latent_attention", "position_embedding_type"), _with_rope),
    ConfigRule(("multi_latent_attention", "qk_pos_emb_head_dim"), _even_part),
    ConfigRule(("multi_latent_attention", "v_head_dim", "qk_head_dim", "qk_pos_emb_head_dim"), _values),
    ConfigRule(("multi_latent_attention", "num_query_groups", "num_attention_heads"), _query_groups),
    ConfigRule(("multi_latent_attention", "rope_scaling_type"), _stretched),
    *(_without(name, reason) for name, reason in _OF_HEADS.items()),
    *(_grows(name) for name in ("rope_mscale", "rope_mscale_all_dim")),
)
