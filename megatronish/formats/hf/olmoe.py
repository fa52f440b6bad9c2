"""OLMoE: experts in every layer, a norm over all heads at once, queries to values clipped."""

from dataclasses import replace
from typing import Any

from megatronish.config.sections.model import ModelConfig
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
    clip = config.values.get("clip_qkv")
    if clip == 0:
        config.refuse("clip_qkv", "makes all queries, keys and values zero", remedy="set it to null")
    return {
        **model,
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "clip_qkv": None if clip is None else config.number("clip_qkv"),
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
