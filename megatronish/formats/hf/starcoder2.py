"""StarCoder2: LayerNorm, biases and a GELU MLP together with RoPE, grouped queries and a window."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, write_decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS

_NAMES = DecoderNames(fc1=("mlp.c_fc",), fc2="mlp.c_proj")
_STARCODER2 = {key: value for key, value in LLAMA_DEFAULTS.items() if key not in ("head_dim", "rms_norm_eps")} | {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "initializer_range": 0.018042,
    "norm_epsilon": 1e-5,
    "sliding_window": None,
    "residual_dropout": 0.0,
    "use_bias": True,
    "tie_word_embeddings": True,
    "eos_token_id": 50256,
}


def _read_starcoder2(config: ConfigJson) -> dict[str, Any]:
    return {
        **read_decoder(config, gated=False),
        "normalization": "LayerNorm",
        "norm_epsilon": config.number("norm_epsilon"),
        "disable_bias_linear": not config.flag("use_bias"),
        "window_size": None if config.values["sliding_window"] is None else config.whole("sliding_window"),
        "hidden_dropout": config.number("residual_dropout"),
    }


def _write_starcoder2(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **write_decoder(model, seq_length),
        "norm_epsilon": model.norm_epsilon,
        "use_bias": model.linear_bias,
        "sliding_window": model.window_size,
        "residual_dropout": model.hidden_dropout,
    }


STARCODER2 = ModelFamily(
    "Starcoder2ForCausalLM",
    ROWS,
    _STARCODER2,
    {},
    _read_starcoder2,
    _write_starcoder2,
    lambda _model: None,
    decoder(_NAMES),
)
