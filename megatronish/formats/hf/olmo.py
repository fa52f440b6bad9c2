"""OLMo 1: a Llama whose LayerNorms learn nothing, with clipped queries, keys and values."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, write_decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS

_OLMO = {key: value for key, value in LLAMA_DEFAULTS.items() if key not in ("head_dim", "rms_norm_eps")} | {
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
    "eos_token_id": 50279,
    "clip_qkv": None,
}


def _read_olmo(config: ConfigJson) -> dict[str, Any]:
    if config.values["clip_qkv"] == 0:
        config.refuse("clip_qkv", "makes all queries, keys and values zero", remedy="set it to null")
    return {
        **read_decoder(config),
        "normalization": "LayerNorm",
        "norm_parameters": "none",
        "norm_epsilon": 1e-5,
        "add_attention_bias": config.flag("attention_bias"),
        "clip_qkv": None if config.values["clip_qkv"] is None else config.number("clip_qkv"),
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
