"""Mistral and Mixtral.

Mistral: a Llama without biases, with a window in every layer or in none.
"""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.experts import is_normalised, not_experts_alone, read_experts
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
from megatronish.formats.hf.window import all_layers_slide

_MISTRAL = LLAMA_DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def _read_mistral(config: ConfigJson) -> dict[str, Any]:
    slides = all_layers_slide(config)
    if slides is None:
        slides = config.values["sliding_window"] is not None
    return read_descendant(config) | {"window_size": config.whole("sliding_window") if slides else None}


def _write_mistral(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return without_biases(write_llama(model, seq_length)) | {"sliding_window": model.window_size}


def _not_mistral(model: ModelConfig) -> str | None:
    return not_llama_block(model) or first_true(
        {
            "biases of linear layers": model.qkv_bias or model.mlp_bias,
            "qk_layernorm": model.qk_layernorm,
            f"window_attn_skip_freq={model.window_attn_skip_freq}": len(set(model.windowed_layers)) > 1,
        }
    )


MISTRAL = ModelFamily(
    "MistralForCausalLM", ROWS, _MISTRAL, {}, _read_mistral, _write_mistral, _not_mistral, LLAMA_TENSORS
)


# Mixtral: a Mistral whose MLPs are experts, all of them alike.

_NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
_MIXTRAL = LLAMA_DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}


def _read_mixtral(config: ConfigJson) -> dict[str, Any]:
    config.must_be(
        "router_jitter_noise", None, 0, 0.0, why="adds noise to the router in training, which is not supported"
    )
    return MISTRAL.read(config) | read_experts(config, number="num_local_experts", width="intermediate_size")


def _write_mixtral(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    is_derived = model.head_size == model.hidden_size // model.num_attention_heads
    return MISTRAL.write(model, seq_length) | {
        "head_dim": None if is_derived else model.head_size,
        "intermediate_size": model.expert_ffn_size,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
    }


def _not_mixtral(model: ModelConfig) -> str | None:
    weights = {"moe_router_pre_softmax without moe_router_norm_topk_prob": not is_normalised(model)}
    return MISTRAL.cannot_describe(model) or not_experts_alone(model) or first_true(weights)


MIXTRAL = ModelFamily(
    "MixtralForCausalLM",
    ROWS,
    _MIXTRAL,
    {"num_experts": "num_local_experts"},
    _read_mixtral,
    _write_mixtral,
    _not_mixtral,
    llama_tensors_with(_NAMES),
)
