"""Arcee: a Llama whose MLP has no gate and squares its ReLU."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, write_decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS

_ARCEE = LLAMA_DEFAULTS | {
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 128001,
}


def _read_arcee(config: ConfigJson) -> dict[str, Any]:
    return {
        **read_decoder(config, gated=False),
        "norm_epsilon": config.number("rms_norm_eps"),
        "add_attention_bias": config.flag("attention_bias"),
        "add_mlp_bias": config.flag("mlp_bias"),
    }


def _write_arcee(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **write_decoder(model, seq_length),
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.attention_bias,
        "mlp_bias": model.mlp_bias,
    }


ARCEE = ModelFamily(
    "ArceeForCausalLM",
    ROWS,
    _ARCEE,
    {},
    _read_arcee,
    _write_arcee,
    lambda _model: None,
    decoder(DecoderNames(fc1=("mlp.up_proj",))),
)
