"""Qwen3-MoE: a Qwen3 with experts in some layers or all, and none that every token passes."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.experts import read_choice, read_experts, read_layers, write_choice, write_layers
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
from megatronish.formats.hf.window import all_layers_slide

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
