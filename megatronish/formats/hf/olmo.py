"""OLMo 1 to 3, and OLMoE.

OLMo 1: a Llama whose LayerNorms learn nothing, with clipped queries, keys and values.
"""

from dataclasses import replace
from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, write_decoder
from megatronish.formats.hf.experts import not_experts_alone, read_choice, read_experts, write_choice
from megatronish.formats.hf.family import ConfigJson, ExpertNames, ModelFamily, first_true
from megatronish.formats.hf.llama import (
    LLAMA_DEFAULTS,
    ROWS,
    llama_tensors_with,
    not_llama_block,
    read_descendant,
    without_biases,
    write_llama,
)
from megatronish.formats.hf.rope import split_rope, write_both_ropes
from megatronish.formats.hf.window import read_layer_types, write_layer_types

_OLMO = {key: value for key, value in LLAMA_DEFAULTS.items() if key not in ("head_dim", "rms_norm_eps")} | {
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
    "eos_token_id": 50279,
    "clip_qkv": None,
}


def _clip(config: ConfigJson) -> float | None:
    """Bound of queries, keys and values; None without one."""
    if config.values.get("clip_qkv") == 0:
        config.refuse("clip_qkv", "makes all queries, keys and values zero", remedy="set it to null")
    return None if config.values.get("clip_qkv") is None else config.number("clip_qkv")


def _read_olmo(config: ConfigJson) -> dict[str, Any]:
    return {
        **read_decoder(config),
        "normalization": "LayerNorm",
        "norm_parameters": "none",
        "norm_epsilon": 1e-5,
        "add_attention_bias": config.flag("attention_bias"),
        "clip_qkv": _clip(config),
    }


def _write_olmo(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **write_decoder(model, seq_length),
        "attention_bias": model.attention_bias,
        "clip_qkv": model.clip_qkv,
    }


OLMO = ModelFamily(
    "OlmoForCausalLM", ROWS, _OLMO, {}, _read_olmo, _write_olmo, lambda _model: None, decoder(DecoderNames())
)


# OLMo 2: a Llama whose norms are after attention and MLP, with a norm over all heads of queries and keys.

OUTPUT_NORMS = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_OLMO2_DEFAULTS = {key: value for key, value in LLAMA_DEFAULTS.items() if key != "head_dim"} | {
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}


def _read_olmo2(config: ConfigJson, base: float = 10000.0) -> dict[str, Any]:
    """Fields of OLMo 2 and 3; `base` is that of RoPE where no key says it."""
    return {
        **read_decoder(config, rope=base),
        "norm_epsilon": config.number("rms_norm_eps"),
        "add_attention_bias": config.flag("attention_bias"),
        "norm_placement": "output",
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
    }


def _write_olmo2(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    """Keys of OLMo 2 and 3."""
    return {
        **write_decoder(model, seq_length),
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.attention_bias,
    }


OLMO2 = ModelFamily(
    "Olmo2ForCausalLM",
    ROWS,
    _OLMO2_DEFAULTS,
    {},
    _read_olmo2,
    _write_olmo2,
    lambda _model: None,
    decoder(DecoderNames(norms=OUTPUT_NORMS)),
)


# OLMo 3: an OLMo 2 with windows in three of four layers, in which RoPE is not stretched.

_OLMO3 = _OLMO2_DEFAULTS | {"sliding_window": 4096}


def _read_olmo3(config: ConfigJson) -> dict[str, Any]:
    plain, local = split_rope(config)
    fields = _read_olmo2(plain, 500000.0) | read_layer_types(plain, every=4)
    base = fields["rotary_base"] if local is None else local
    is_other = base != fields["rotary_base"] or fields.get("rope_scaling_type", "none") != "none"
    return fields | ({"window_rotary_base": base} if is_other and fields["window_size"] is not None else {})


def _write_olmo3(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return _write_olmo2(model, seq_length) | write_layer_types(model) | write_both_ropes(model)


OLMO3 = ModelFamily(
    "Olmo3ForCausalLM",
    ROWS,
    _OLMO3,
    {},
    _read_olmo3,
    _write_olmo3,
    lambda _model: None,
    decoder(DecoderNames(norms=OUTPUT_NORMS)),
)


# OLMoE: experts in every layer, a norm over all heads at once, queries to values clipped.

_OLMOE = LLAMA_DEFAULTS | {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
    "num_experts_per_tok": 8,
    "num_experts": 64,
}


def _read_olmoe(config: ConfigJson) -> dict[str, Any]:
    config.must_be("attention_bias", False, None, why="is not supported together with a norm of queries and keys")
    config.must_be("sliding_window", None, why="is not supported in this family")
    model = read_descendant(config)
    if model["kv_channels"] * model["num_attention_heads"] != model["hidden_size"]:
        config.refuse("head_dim", f"must be hidden_size={model['hidden_size']} over num_attention_heads in this family")
    return {
        **model,
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "clip_qkv": _clip(config),
        **read_experts(config, number="num_experts", width="intermediate_size"),
        **read_choice(config),
    }


def _write_olmoe(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    keys = without_biases(write_llama(model, seq_length))
    del keys["head_dim"]
    return {
        **keys,
        "attention_bias": False,
        "clip_qkv": model.clip_qkv,
        "intermediate_size": model.expert_ffn_size,
        "num_experts": model.num_experts,
        **write_choice(model),
    }


def _not_olmoe(model: ModelConfig) -> str | None:
    as_llama = replace(model, qk_layernorm_across_heads=False, clip_qkv=None)
    return (
        not_llama_block(as_llama)
        or not_experts_alone(model)
        or first_true(
            {
                "biases of linear layers": model.qkv_bias or model.mlp_bias,
                "no qk_layernorm_across_heads": not model.qk_layernorm_across_heads,
                f"window_size={model.window_size}": any(model.windowed_layers),
                f"kv_channels={model.head_size}": model.head_size * model.num_attention_heads != model.hidden_size,
            }
        )
    )


OLMOE = ModelFamily(
    "OlmoeForCausalLM",
    ROWS,
    _OLMOE,
    {"num_local_experts": "num_experts"},
    _read_olmoe,
    _write_olmoe,
    _not_olmoe,
    llama_tensors_with(ExpertNames()),
)
