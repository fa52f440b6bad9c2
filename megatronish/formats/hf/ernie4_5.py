"""ERNIE 4.5, dense: a Llama whose RoPE turns neighbouring pairs, with biases on all linear layers or on none."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, write_decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS

_ERNIE = LLAMA_DEFAULTS | {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "use_bias": False,
    "tie_word_embeddings": True,
}


def _read_ernie(config: ConfigJson) -> dict[str, Any]:
    return {
        **read_decoder(config, rope=500000.0),
        "rotary_interleaved": True,
        "norm_epsilon": config.number("rms_norm_eps"),
        "disable_bias_linear": not config.flag("use_bias"),
    }


def _write_ernie(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **write_decoder(model, seq_length),
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_epsilon,
        "use_bias": model.linear_bias,
    }


ERNIE4_5 = ModelFamily(
    "Ernie4_5ForCausalLM",
    ROWS,
    _ERNIE,
    {},
    _read_ernie,
    _write_ernie,
    lambda _model: None,
    decoder(DecoderNames()),
)
