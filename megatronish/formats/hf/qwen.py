"""Qwen 2 and 3, with experts and without.

Qwen2: a Llama with biases on queries, keys and values, and a window in some layers.
"""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.experts import read_choice, read_experts, read_layers, write_choice, write_layers
from megatronish.formats.hf.family import ConfigJson, ExpertNames, ModelFamily, first_true
from megatronish.formats.hf.llama import (
    LLAMA_DEFAULTS,
    LLAMA_TENSORS,
    ROWS,
    llama_tensors_with,
    not_llama_block,
    read_descendant,
    without_biases,
    write_llama,
)
from megatronish.formats.hf.window import all_layers_slide, qwen_window, write_qwen_window

_QWEN2 = LLAMA_DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "eos_token_id": None,
}


def _read_qwen2(config: ConfigJson) -> dict[str, Any]:
    return read_descendant(config) | {"add_qkv_bias": True} | qwen_window(config)


def _write_qwen2(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return without_biases(write_llama(model, seq_length)) | write_qwen_window(model)


def _not_qwen2(model: ModelConfig) -> str | None:
    return not_llama_block(model) or first_true(
        {
            "no bias on queries, keys and values": not model.qkv_bias,
            "biases of all linear layers": model.attention_bias or model.mlp_bias,
            "qk_layernorm": model.qk_layernorm,
        }
    )


QWEN2 = ModelFamily("Qwen2ForCausalLM", ROWS, _QWEN2, {}, _read_qwen2, _write_qwen2, _not_qwen2, LLAMA_TENSORS)


# Qwen3: a Qwen2 without biases, with a norm of the queries and keys of each head.

_QWEN3 = QWEN2.defaults | {"head_dim": 128}


def _read_qwen3(config: ConfigJson) -> dict[str, Any]:
    config.must_be("attention_bias", False, None, why="is not supported together with a norm of queries and keys")
    return read_descendant(config) | {"qk_layernorm": True} | qwen_window(config)


def _write_qwen3(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return QWEN2.write(model, seq_length) | {"attention_bias": False}


def _not_qwen3(model: ModelConfig) -> str | None:
    biases = {"biases of linear layers": model.qkv_bias or model.mlp_bias, "no qk_layernorm": not model.qk_layernorm}
    return not_llama_block(model) or first_true(biases)


QWEN3 = ModelFamily("Qwen3ForCausalLM", ROWS, _QWEN3, {}, _read_qwen3, _write_qwen3, _not_qwen3, LLAMA_TENSORS)


# Qwen2-MoE: experts in some layers or all, and a gated expert that every token passes.

_SHARED = "shared_expert_intermediate_size"
_QWEN2_MOE = LLAMA_DEFAULTS | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    _SHARED: 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "qkv_bias": True,
}


def _read_qwen2_moe(config: ConfigJson) -> dict[str, Any]:
    if config.flag("use_sliding_window") or all_layers_slide(config):
        config.refuse("use_sliding_window", "is not supported in this family")
    return {
        **read_descendant(config),
        "add_qkv_bias": config.flag("qkv_bias"),
        **read_experts(config, number="num_experts", width="moe_intermediate_size"),
        **read_choice(config),
        **read_layers(config),
        "moe_shared_expert_intermediate_size": config.whole(_SHARED),
        "moe_shared_expert_gate": True,
    }


def _write_qwen2_moe(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **without_biases(write_llama(model, seq_length)),
        "qkv_bias": model.qkv_bias,
        "use_sliding_window": False,
        "num_experts": model.num_experts,
        "moe_intermediate_size": model.expert_ffn_size,
        _SHARED: model.moe_shared_expert_intermediate_size,
        **write_choice(model),
        **write_layers(model),
    }


def _not_qwen2_moe(model: ModelConfig) -> str | None:
    return not_llama_block(model) or first_true(
        {
            "biases of all linear layers": model.attention_bias or model.mlp_bias,
            "qk_layernorm": model.qk_layernorm,
            f"window_size={model.window_size}": any(model.windowed_layers),
            "no shared expert": model.moe_shared_expert_intermediate_size is None,
            "a shared expert without moe_shared_expert_gate": not model.moe_shared_expert_gate,
        }
    )


QWEN2_MOE = ModelFamily(
    "Qwen2MoeForCausalLM",
    ROWS,
    _QWEN2_MOE,
    {"num_local_experts": "num_experts"},
    _read_qwen2_moe,
    _write_qwen2_moe,
    _not_qwen2_moe,
    llama_tensors_with(ExpertNames()),
)


# Qwen3-MoE: a Qwen3 with experts in some layers or all, and none that every token passes.

_QWEN3_MOE = LLAMA_DEFAULTS | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
}


def _read_qwen3_moe(config: ConfigJson) -> dict[str, Any]:
    config.must_be("attention_bias", False, None, why="is not supported together with a norm of queries and keys")
    slides = config.flag("use_sliding_window") and config.values["sliding_window"] is not None
    if all_layers_slide(config) not in (None, slides):
        config.refuse("layer_types", "says other than use_sliding_window and sliding_window")
    return {
        **read_descendant(config),
        "qk_layernorm": True,
        "window_size": config.whole("sliding_window") if slides else None,
        **read_experts(config, number="num_experts", width="moe_intermediate_size"),
        **read_choice(config),
        **read_layers(config),
    }


def _write_qwen3_moe(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    slides = any(model.windowed_layers)
    return {
        **without_biases(write_llama(model, seq_length)),
        "attention_bias": False,
        "use_sliding_window": slides,
        "sliding_window": model.window_size if slides else None,
        "num_experts": model.num_experts,
        "moe_intermediate_size": model.expert_ffn_size,
        **write_choice(model),
        **write_layers(model),
    }


def _not_qwen3_moe(model: ModelConfig) -> str | None:
    shared = model.moe_shared_expert_intermediate_size
    return not_llama_block(model) or first_true(
        {
            "biases of linear layers": model.qkv_bias or model.mlp_bias,
            "no qk_layernorm": not model.qk_layernorm,
            f"window_attn_skip_freq={model.window_attn_skip_freq}": len(set(model.windowed_layers)) > 1,
            f"moe_shared_expert_intermediate_size={shared}": shared is not None,
        }
    )


QWEN3_MOE = ModelFamily(
    "Qwen3MoeForCausalLM",
    ROWS,
    _QWEN3_MOE,
    {"num_local_experts": "num_experts"},
    _read_qwen3_moe,
    _write_qwen3_moe,
    _not_qwen3_moe,
    llama_tensors_with(ExpertNames()),
)
