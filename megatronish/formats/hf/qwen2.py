"""Qwen2: a Llama with biases on queries, keys and values, and a window in some layers."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.family import ConfigJson, ModelFamily, first_true
from megatronish.formats.hf.llama import (
    LLAMA_DEFAULTS,
    LLAMA_TENSORS,
    ROWS,
    not_llama_block,
    read_descendant,
    without_biases,
    write_llama,
)
from megatronish.formats.hf.window import qwen_window, write_qwen_window

QWEN2_DEFAULTS = LLAMA_DEFAULTS | {
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


QWEN2 = ModelFamily("Qwen2ForCausalLM", ROWS, QWEN2_DEFAULTS, {}, _read_qwen2, _write_qwen2, _not_qwen2, LLAMA_TENSORS)
