"""Granite: a Llama with factors of the embedding, the scores, what a sublayer adds, and the logits."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, whole_if_equal
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS, read_llama, write_llama

_FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
GRANITE_DEFAULTS = {key: value for key, value in LLAMA_DEFAULTS.items() if key != "head_dim"} | dict.fromkeys(
    _FACTORS, 1.0
)


def read_granite(config: ConfigJson) -> dict[str, Any]:
    """Fields of a Granite, with experts or without."""
    for key in _FACTORS:
        if config.number(key) == 0:
            config.refuse(key, "leaves nothing of what it multiplies, or divides by zero", remedy="correct that line")
    return {
        **read_llama(config),
        "embedding_multiplier": config.number("embedding_multiplier"),
        "residual_multiplier": config.number("residual_multiplier"),
        "softmax_scale": config.number("attention_multiplier"),
        "logits_multiplier": 1 / config.number("logits_scaling"),
    }


def write_granite(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    """Keys of a Granite, with experts or without."""
    keys = write_llama(model, seq_length)
    del keys["head_dim"]
    scale = model.softmax_scale
    return {
        **keys,
        "embedding_multiplier": model.embedding_multiplier,
        "residual_multiplier": model.residual_multiplier,
        "attention_multiplier": model.head_size**-0.5 if scale is None else scale,
        "logits_scaling": float(whole_if_equal(1 / model.logits_multiplier)),
    }


GRANITE = ModelFamily(
    "GraniteForCausalLM",
    ROWS,
    GRANITE_DEFAULTS,
    {},
    read_granite,
    write_granite,
    lambda _model: None,
    decoder(DecoderNames()),
)
