"""Llama's and Mistral's keys of config.json: read into fields of ModelConfig, and written from them."""

from typing import Any

from megatronish.config.model import ModelConfig
from megatronish.formats.hf.config_json import ConfigJson
from megatronish.formats.hf.family import ModelFamily, first_true
from megatronish.formats.hf.rope import read_rope, write_rope
from megatronish.formats.hf.window import all_layers_slide

ROWS = "max_position_embeddings"  # the key of the longest sequence

LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "eos_token_id": 2,
}
_MISTRAL = LLAMA_DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def read_llama(config: ConfigJson) -> dict[str, Any]:
    """Fields of ModelConfig that Llama and its descendants have in common, from their keys."""
    config.must_be("hidden_act", "silu", "swish", why="is not supported; silu is")
    heads, hidden_size = config.whole("num_attention_heads"), config.whole("hidden_size")
    kv_heads = config.whole("num_key_value_heads", null=heads)
    has_bias = config.flag("attention_bias")
    if has_bias != config.flag("mlp_bias"):
        key, other = ("attention_bias", "mlp_bias") if has_bias else ("mlp_bias", "attention_bias")
        config.refuse(key, f"without {other} is not supported: both, or neither")
    return {
        "num_layers": config.whole("num_hidden_layers"),
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "ffn_hidden_size": config.whole("intermediate_size"),
        "kv_channels": config.whole("head_dim", null=max(1, hidden_size // heads)),
        "group_query_attention": kv_heads != heads,
        "num_query_groups": kv_heads,
        "max_position_embeddings": config.whole("max_position_embeddings"),
        "position_embedding_type": "rope",
        **read_rope(config),
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("rms_norm_eps"),
        "swiglu": True,
        "disable_bias_linear": not has_bias,
        "attention_dropout": config.number("attention_dropout"),
        "hidden_dropout": 0.0,
    }


def write_llama(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    """Keys of config.json that Llama and its descendants have in common."""
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": seq_length,
        "rms_norm_eps": model.norm_epsilon,
        **write_rope(model),
        "attention_dropout": model.attention_dropout,
        "attention_bias": model.linear_bias,
        "mlp_bias": model.linear_bias,
    }


def _not_llama(model: ModelConfig) -> str | None:
    return not_llama_block(model) or first_true(
        {
            "add_qkv_bias": model.qkv_bias and not model.linear_bias,
            f"window_size={model.window_size}": model.window_size is not None,
            "qk_layernorm": model.qk_layernorm,
        }
    )


def not_llama_block(model: ModelConfig) -> str | None:
    """Field of a model that Llama and its descendants do not have."""
    return first_true(
        {
            f"block={model.block}": model.block != "transformer",
            f"position_embedding_type={model.position_embedding_type}": model.position_embedding_type != "rope",
            f"rotary_percent={model.rotary_percent}": model.rotary_percent != 1,
            "embed_layernorm": model.embed_layernorm,
            "rotary_interleaved": model.rotary_interleaved,
            f"normalization={model.normalization}": model.normalization != "RMSNorm",
            "an MLP without swiglu": not model.swiglu,
            "apply_layernorm_1p": model.apply_layernorm_1p,
            "qk_layernorm_across_heads": model.qk_layernorm_across_heads,
            f"clip_qkv={model.clip_qkv}": model.clip_qkv is not None,
        }
    )


def _read_mistral(config: ConfigJson) -> dict[str, Any]:
    slides = all_layers_slide(config)
    if slides is None:
        slides = config.values["sliding_window"] is not None
    return read_llama(config) | {"window_size": config.whole("sliding_window") if slides else None}


def _write_mistral(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return without_biases(write_llama(model, seq_length)) | {"sliding_window": model.window_size}


def _not_mistral(model: ModelConfig) -> str | None:
    return not_llama_block(model) or first_true(
        {
            "biases of linear layers": model.qkv_bias,
            "qk_layernorm": model.qk_layernorm,
            f"window_attn_skip_freq={model.window_attn_skip_freq}": len(set(model.windowed_layers)) > 1,
        }
    )


def without_biases(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys without those of the biases, which only Llama itself has."""
    return {key: value for key, value in keys.items() if key not in ("attention_bias", "mlp_bias")}


LLAMA = ModelFamily("LlamaForCausalLM", ROWS, LLAMA_DEFAULTS, {}, read_llama, write_llama, _not_llama)
MISTRAL = ModelFamily("MistralForCausalLM", ROWS, _MISTRAL, {}, _read_mistral, _write_mistral, _not_mistral)
