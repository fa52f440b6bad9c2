"""Gemma 2: a Gemma with norms around each sublayer, soft caps, a scale of scores, and windows in every other layer."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, whole_if_equal
from megatronish.formats.hf.family import CORRECT, ConfigJson, ModelFamily
from megatronish.formats.hf.gemma import GEMMA_DEFAULTS, read_any_gemma, write_any_gemma
from megatronish.formats.hf.llama import ROWS
from megatronish.formats.hf.window import read_layer_types, write_layer_types

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
SANDWICH = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_GEMMA2 = {key: value for key, value in GEMMA_DEFAULTS.items() if key != "hidden_act"} | {
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def read_like_gemma2(config: ConfigJson) -> dict[str, Any]:
    """Fields of a Gemma 2 or 3, those of its windows left out."""
    if config.number("query_pre_attn_scalar") <= 0:
        config.refuse("query_pre_attn_scalar", "must be above 0", remedy=CORRECT)
    caps = {key: None if config.values.get(key) is None else config.number(key) for key in CAPS}
    return {
        **read_any_gemma(config, "hidden_activation"),
        **caps,
        "norm_placement": "sandwich",
        "softmax_scale": config.number("query_pre_attn_scalar") ** -0.5,
    }


def write_like_gemma2(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    """Keys of a Gemma 2 or 3."""
    return {
        **write_any_gemma(model, seq_length, "hidden_activation"),
        **{key: getattr(model, key) for key in CAPS},
        "query_pre_attn_scalar": _scalar(model),
        **write_layer_types(model),
    }


def _read_gemma2(config: ConfigJson) -> dict[str, Any]:
    return read_like_gemma2(config) | read_layer_types(config, every=2)


def _scalar(model: ModelConfig) -> float:
    """What scores are divided by the root of: a whole number, if it is a Gemma 2."""
    return whole_if_equal((model.softmax_scale or model.head_size**-0.5) ** -2)


def _not_gemma2(model: ModelConfig) -> str | None:
    return None if isinstance(_scalar(model), int) else f"softmax_scale={model.softmax_scale}"


GEMMA2 = ModelFamily(
    "Gemma2ForCausalLM",
    ROWS,
    _GEMMA2,
    {},
    _read_gemma2,
    write_like_gemma2,
    _not_gemma2,
    decoder(DecoderNames(norms=SANDWICH)),
)
