"""Qwen2-MoE: experts in some layers or all, and a gated expert that every token passes."""

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
