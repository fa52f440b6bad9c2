"""Nemotron: LayerNorm stored as w - 1, squared ReLU, RoPE on a part of each head."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, write_decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS

_NAMES = DecoderNames(fc1=("mlp.up_proj",))
_NEMOTRON = {key: value for key, value in LLAMA_DEFAULTS.items() if key != "rms_norm_eps"} | {
    "vocab_size": 256000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 48,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "initializer_range": 0.0134,
    "norm_eps": 1e-5,
    "eos_token_id": 3,
}


def _read_nemotron(config: ConfigJson) -> dict[str, Any]:
    return {
        **read_decoder(config, turned=0.5, gated=False),
        "normalization": "LayerNorm",
        "apply_layernorm_1p": True,
        "norm_epsilon": config.number("norm_eps"),
        "add_attention_bias": config.flag("attention_bias"),
        "add_mlp_bias": config.flag("mlp_bias"),
    }


def _write_nemotron(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **write_decoder(model, seq_length, turned=True),
        "head_dim": model.head_size,
        "norm_eps": model.norm_epsilon,
        "attention_bias": model.attention_bias,
        "mlp_bias": model.mlp_bias,
    }


NEMOTRON = ModelFamily(
    "NemotronForCausalLM",
    ROWS,
    _NEMOTRON,
    {},
    _read_nemotron,
    _write_nemotron,
    lambda _model: None,
    decoder(_NAMES),
)
