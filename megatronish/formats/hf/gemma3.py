"""Gemma 3 (text): a Gemma 2 without soft caps, with norms of queries and keys, and with another RoPE in windows."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.gemma2 import GEMMA2, SANDWICH, read_like_gemma2, write_like_gemma2
from megatronish.formats.hf.llama import ROWS
from megatronish.formats.hf.rope import split_rope, write_both_ropes
from megatronish.formats.hf.window import read_layer_types

LOCAL_BASE = 10000.0
_GEMMA3 = GEMMA2.defaults | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": LOCAL_BASE,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}


def _read_gemma3(config: ConfigJson) -> dict[str, Any]:
    plain, local = split_rope(config)
    base = config.number("rope_local_base_freq", null=LOCAL_BASE) if local is None else local
    window = read_layer_types(plain, every_key="sliding_window_pattern")
    # Without windows no layer reads the other base.
    rope = {} if window["window_size"] is None else {"window_rotary_base": base}
    return {**read_like_gemma2(plain), **window, **rope, "qk_layernorm": True, "qk_layernorm_1p": True}


def _write_gemma3(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    base = model.rotary_base if model.window_rotary_base is None else model.window_rotary_base
    return {**write_like_gemma2(model, seq_length), **write_both_ropes(model), "rope_local_base_freq": base}


GEMMA3 = ModelFamily(
    "Gemma3ForCausalLM",
    ROWS,
    _GEMMA3,
    {},
    _read_gemma3,
    _write_gemma3,
    GEMMA2.cannot_describe,
    decoder(DecoderNames(norms=SANDWICH)),
)
