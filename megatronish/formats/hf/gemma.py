"""Gemma 1 to 3.

Gemma: a Llama with a scaled embedding, an MLP gated by GELU, and norm weights that are stored as w - 1.
"""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, whole_if_equal, write_decoder
from megatronish.formats.hf.family import CORRECT, ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS
from megatronish.formats.hf.rope import split_rope, write_both_ropes
from megatronish.formats.hf.window import read_layer_types, write_layer_types

_GEMMA_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def _read_any_gemma(config: ConfigJson, activation: str) -> dict[str, Any]:
    """Fields that all Gemmas have in common; `activation` is the key of that."""
    config.must_be("use_bidirectional_attention", None, False, why="is not supported: a token sees those before it")
    fields = read_decoder(config, activation=activation)
    return fields | {
        "norm_epsilon": config.number("rms_norm_eps"),
        "apply_layernorm_1p": True,
        "embedding_multiplier": fields["hidden_size"] ** 0.5,
        "add_attention_bias": config.flag("attention_bias"),
    }


def _write_any_gemma(model: ModelConfig, seq_length: int, activation: str) -> dict[str, Any]:
    """Keys that all Gemmas have in common."""
    keys = write_decoder(model, seq_length)
    return {activation: keys.pop("hidden_act"), **keys} | {
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.attention_bias,
    }


def _read_gemma(config: ConfigJson) -> dict[str, Any]:
    # Old files say gelu and mean its tanh form, as transformers takes it too.
    if config.values["hidden_act"] == "gelu":
        config = ConfigJson(config.path, {**config.values, "hidden_act": "gelu_pytorch_tanh"}, {})
    return _read_any_gemma(config, "hidden_act")


def _write_gemma(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return _write_any_gemma(model, seq_length, "hidden_act")


GEMMA = ModelFamily(
    "GemmaForCausalLM",
    ROWS,
    _GEMMA_DEFAULTS,
    {},
    _read_gemma,
    _write_gemma,
    lambda _model: None,
    decoder(DecoderNames()),
)


# Gemma 2: a Gemma with norms around each sublayer, soft caps, a scale of scores, and windows in every other layer.

_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_SANDWICH = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_GEMMA2 = {key: value for key, value in _GEMMA_DEFAULTS.items() if key != "hidden_act"} | {
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


def _read_like_gemma2(config: ConfigJson) -> dict[str, Any]:
    """Fields of a Gemma 2 or 3, those of its windows left out."""
    if config.number("query_pre_attn_scalar") <= 0:
        config.refuse("query_pre_attn_scalar", "must be above 0", remedy=CORRECT)
    caps = {key: None if config.values.get(key) is None else config.number(key) for key in _CAPS}
    return {
        **_read_any_gemma(config, "hidden_activation"),
        **caps,
        "norm_placement": "sandwich",
        "softmax_scale": config.number("query_pre_attn_scalar") ** -0.5,
    }


def _write_like_gemma2(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    """Keys of a Gemma 2 or 3."""
    return {
        **_write_any_gemma(model, seq_length, "hidden_activation"),
        **{key: getattr(model, key) for key in _CAPS},
        "query_pre_attn_scalar": _scalar(model),
        **write_layer_types(model),
    }


def _read_gemma2(config: ConfigJson) -> dict[str, Any]:
    return _read_like_gemma2(config) | read_layer_types(config, every=2)


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
    _write_like_gemma2,
    _not_gemma2,
    decoder(DecoderNames(norms=_SANDWICH)),
)


# Gemma 3 (text): a Gemma 2 without soft caps, with norms of queries and keys, and with another RoPE in windows.

_LOCAL_BASE = 10000.0
_GEMMA3 = GEMMA2.defaults | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": _LOCAL_BASE,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}


def _read_gemma3(config: ConfigJson) -> dict[str, Any]:
    plain, local = split_rope(config)
    base = config.number("rope_local_base_freq", null=_LOCAL_BASE) if local is None else local
    window = read_layer_types(plain, every_key="sliding_window_pattern")
    # Without windows no layer reads the other base.
    rope = {} if window["window_size"] is None else {"window_rotary_base": base}
    return {**_read_like_gemma2(plain), **window, **rope, "qk_layernorm": True, "qk_layernorm_1p": True}


def _write_gemma3(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    base = model.rotary_base if model.window_rotary_base is None else model.window_rotary_base
    return {**_write_like_gemma2(model, seq_length), **write_both_ropes(model), "rope_local_base_freq": base}


GEMMA3 = ModelFamily(
    "Gemma3ForCausalLM",
    ROWS,
    _GEMMA3,
    {},
    _read_gemma3,
    _write_gemma3,
    GEMMA2.cannot_describe,
    decoder(DecoderNames(norms=_SANDWICH)),
)
