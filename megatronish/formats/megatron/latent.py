"""Latent attention in Megatron-LM: its arguments, in both directions, and its names of tensors.

    self_attention.linear_q_down_proj, linear_q_up_proj; or linear_q_proj
    self_attention.linear_kv_down_proj, linear_kv_up_proj
    self_attention.q_layernorm, kv_layernorm                    of the latents; on Transformer Engine they belong to the
                                                                ways up: linear_q_up_proj.layer_norm_weight
    input_layernorm, in every implementation; megatron-core's own layers have pre_mlp_layernorm, too

Rows are those of ours. There RoPE turns neighbouring pairs, whatever `rotary_interleaved` says, and writes them as two
halves, in queries and keys alike, so that scores are those of our `rotary_interleaved`. Without `rope_type` it is YaRN.
Transformer Engine has the ways down whole on every tensor rank; megatron-core's own layers cut them.
"""

import re
from collections.abc import Mapping
from typing import Any

from megatronish.config.config import Config
from megatronish.config.rules.latent import RULES
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.megatron.values import LARGEST, is_on, quote, value_of

NAMES = {
    "attention.q": "self_attention.linear_q_proj.{}",
    "attention.q_down": "self_attention.linear_q_down_proj.{}",
    "attention.q_up": "self_attention.linear_q_up_proj.{}",
    "attention.kv_down": "self_attention.linear_kv_down_proj.{}",
    "attention.kv_norm": "self_attention.kv_layernorm.{}",
    "attention.kv_up": "self_attention.linear_kv_up_proj.{}",
}
FUSED_NORMS = {r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_": r"self_attention.\1_layernorm."}
WAY_DOWN = re.compile(r".*\.self_attention\.linear_(q|kv)_down_proj\.weight")

# Arguments that have the name and the meaning of a field of ModelConfig.
SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
YARN = {
    "rotary_scaling_factor": ("rope_scaling_factor", 40.0),
    "original_max_position_embeddings": ("rope_original_max_positions", 4096),
    "beta_fast": ("rope_beta_fast", 32.0),
    "beta_slow": ("rope_beta_slow", 1.0),
    "mscale": ("rope_mscale", 1.0),
    "mscale_all_dim": ("rope_mscale_all_dim", 0.0),
}
"""Arguments of YaRN: the fields they are here, and the values that megatron-core has where nothing is said."""


def name_of_norms(rest: str, *, is_local: bool) -> str:
    """Name of a tensor of a layer with latent attention, after `decoder.layers.N.`, in an implementation."""
    rest = rest.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    if is_local:
        return rest.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return re.sub(r"self_attention\.(q|kv)_layernorm\.", r"self_attention.linear_\1_up_proj.layer_norm_", rest)


def latent_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig on latent attention; none of a model without it, whose arguments have idle values."""
    if not is_on(args, "multi_latent_attention"):
        return {}
    if absent := [name for name in SIZES[1:] if args.get(name) is None]:
        raise UserError(f"its arguments lack {', '.join(absent)}, so the sizes of its latents are not known")
    for name, wanted in (("rotary_interleaved", False), ("rotary_percent", 1)):
        if args.get(name, wanted) not in (None, wanted):
            raise UserError(f"its latent attention has {name} {quote(args[name])}, which our model does not have")
    kind = args.get("position_embedding_type", "rope")
    if kind not in ("rope", "none"):
        raise UserError(f"its latent attention has position_embedding_type {quote(kind)}, and rope is supported")
    sizes = {name: value_of(args, name) for name in SIZES if args.get(name) is not None}
    return sizes | {
        "multi_latent_attention": True,
        "kv_channels": None,
        "position_embedding_type": "rope",
        "rotary_interleaved": True,
        **_stretch(args),
    }


def _stretch(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the stretched RoPE."""
    kind = args.get("rope_type") or "yarn"
    fields: dict[str, Any] = {"rope_scaling_type": "yarn"}
    for name, (field, default) in YARN.items():
        value = args.get(name)
        fields[field] = value_of({field: default if value is None else value}, field)
    if kind == "yarn":
        return {"rope_scaling_type": "none"} if fields["rope_scaling_factor"] == 1 else fields
    if kind != "rope":
        raise UserError(f"its argument rope_type is {quote(kind)}; supported are rope and yarn")
    if fields["rope_scaling_factor"] > 1 and fields["rope_mscale_all_dim"]:
        raise UserError(
            "its arguments rotary_scaling_factor and mscale_all_dim change the scores of a RoPE that is not stretched "
            "(rope_type rope), which our model does not have"
        )
    return {"rope_scaling_type": "none"}


def check_latent(model: ModelConfig) -> None:
    """Check that the fields on latent attention are one model; UserError, with the rule, if not."""
    if not model.multi_latent_attention:
        return
    for rule in RULES:
        if complaint := rule.complaint(Config(model=model)):
            raise UserError(f"its arguments do not fit together: {complaint}")
    latents = (model.q_lora_rank or 0, model.kv_lora_rank + model.qk_pos_emb_head_dim)
    heads = model.num_attention_heads * (model.head_size + model.v_head_dim)
    if max(model.hidden_size, *latents) * max(heads, *latents) > LARGEST:
        raise UserError("its arguments, kv_lora_rank among them, ask for a tensor larger than any model has")


def latent_arguments(model: ModelConfig) -> dict[str, Any]:
    """Arguments on latent attention under which Megatron-LM builds this model."""
    if not model.multi_latent_attention:
        return {"multi_latent_attention": False}
    is_yarn = model.rope_scaling == "yarn"
    stretch = {name: getattr(model, field) for name, (field, _) in YARN.items()} if is_yarn else {}
    return {
        "multi_latent_attention": True,
        **{name: getattr(model, name) for name in SIZES},
        "kv_channels": model.v_head_dim,  # of which its own core makes the output's size
        "rotary_interleaved": False,
        "rotary_percent": 1.0,
        "rope_type": "yarn" if is_yarn else "rope",
        "rotary_scaling_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        **stretch,
    }


def latent_without_counterpart(model: ModelConfig) -> str | None:
    """What of a model with latent attention Megatron-LM cannot have; None for all that it can."""
    if not model.multi_latent_attention:
        return None
    if not model.rotary_interleaved:
        return "latent attention without rotary_interleaved"
    if model.latent_epsilon != model.norm_epsilon:
        return f"latent_norm_epsilon={model.latent_epsilon} (there it is norm_epsilon={model.norm_epsilon})"
    return None


def latent_flags(args: Mapping[str, Any]) -> list[str]:
    """Flags of latent attention, all of them: which of them --use-checkpoint-args takes depends on the version."""
    if not args["multi_latent_attention"]:
        return []
    names = (*SIZES, "rope_type", *(name for name in YARN if name in args))
    return ["--multi-latent-attention"] + [
        f"--{name.replace('_', '-')} {args[name]}" for name in names if args[name] is not None
    ]
