"""Helium: a Llama whose RoPE turns neighbouring pairs."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, write_decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS

_HELIUM = LLAMA_DEFAULTS | {
    "vocab_size": 48000,
    "hidden_size": 2560,
    "intermediate_size": 7040,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
}


def _read_helium(config: ConfigJson) -> dict[str, Any]:
    fields = read_decoder(config, rope=100000.0)
    if fields["kv_channels"] * fields["num_attention_heads"] != fields["hidden_size"]:
        config.refuse("head_dim", f"must be hidden_size={fields['hidden_size']} over num_attention_heads")
    return {
        **fields,
        "rotary_interleaved": True,
        "norm_epsilon": config.number("rms_norm_eps"),
        "add_qkv_bias": config.flag("attention_bias"),
        "add_mlp_bias": config.flag("mlp_bias"),
    }


def _write_helium(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **write_decoder(model, seq_length),
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
    }


HELIUM = ModelFamily(
    "HeliumForCausalLM",
    ROWS,
    _HELIUM,
    {},
    _read_helium,
    _write_helium,
    lambda _model: None,
    decoder(DecoderNames()),
)
