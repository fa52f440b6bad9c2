"""Cohere 2 (Command R7B, A): a Cohere with windows in three of four layers, and RoPE in those alone."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.cohere import COHERE_DEFAULTS, read_any_cohere, write_any_cohere
from megatronish.formats.hf.decoder import DecoderNames, decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import ROWS
from megatronish.formats.hf.window import read_layer_types, rope_where_it_slides, write_layer_types

_COHERE2 = COHERE_DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4}


def _read_cohere2(config: ConfigJson) -> dict[str, Any]:
    fields = read_any_cohere(config, 10000.0)
    fields |= read_layer_types(config, every_key="sliding_window_pattern")
    if fields["window_size"] is None:
        config.refuse("layer_types", "leaves no layer with a window, and so none with RoPE")
    return fields | rope_where_it_slides(fields)


def _write_cohere2(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return write_any_cohere(model, seq_length) | write_layer_types(model)


COHERE2 = ModelFamily(
    "Cohere2ForCausalLM",
    ROWS,
    _COHERE2,
    {},
    _read_cohere2,
    _write_cohere2,
    lambda _model: None,
    decoder(DecoderNames()),
)
