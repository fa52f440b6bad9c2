"""Qwen3: a Qwen2 without biases, with a norm of the queries and keys of each head."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.family import ConfigJson, ModelFamily, first_true
from megatronish.formats.hf.llama import LLAMA_TENSORS, ROWS, not_llama_block, read_descendant
from megatronish.formats.hf.qwen2 import QWEN2
from megatronish.formats.hf.window import qwen_window

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
