"""Mistral: a Llama without biases, with a window in every layer or in none."""

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
