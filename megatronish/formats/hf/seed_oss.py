"""Seed-OSS: a Llama with biases on queries, keys and values, and perhaps on the linear layer after attention."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, write_decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS

_SEED_OSS = LLAMA_DEFAULTS | {
    "vocab_size": 155136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.1,
    "residual_dropout": 0.1,
}


def _read_seed_oss(config: ConfigJson) -> dict[str, Any]:
    of_qkv, of_out = config.flag("attention_bias"), config.flag("attention_out_bias")
    if of_out and not of_qkv:
        config.refuse("attention_out_bias", "without biases of queries, keys and values is not supported")
    return {
        **read_decoder(config),
        "norm_epsilon": config.number("rms_norm_eps"),
        "add_qkv_bias": of_qkv,
        "add_attention_bias": of_out,
        "add_mlp_bias": config.flag("mlp_bias"),
        "hidden_dropout": config.number("residual_dropout"),
    }


def _write_seed_oss(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **write_decoder(model, seq_length),
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.qkv_bias,
        "attention_out_bias": model.attention_bias,
        "mlp_bias": model.mlp_bias,
        "residual_dropout": model.hidden_dropout,
    }


SEED_OSS = ModelFamily(
    "SeedOssForCausalLM",
    ROWS,
    _SEED_OSS,
    {},
    _read_seed_oss,
    _write_seed_oss,
    lambda _model: None,
    decoder(DecoderNames()),
)
