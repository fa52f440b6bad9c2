"""OLMo 3: an OLMo 2 with windows in three of four layers."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import ROWS
from megatronish.formats.hf.olmo2 import OLMO2_DEFAULTS, OUTPUT_NORMS, read_olmo2, write_olmo2
from megatronish.formats.hf.window import FULL, SLIDING, layers_that_slide, read_layer_types, write_layer_types

_OLMO3 = OLMO2_DEFAULTS | {"sliding_window": 4096}


def _read_olmo3(config: ConfigJson) -> dict[str, Any]:
    rope = config.values.get("rope_parameters")
    if isinstance(rope, dict) and rope and not any(isinstance(value, dict) for value in rope.values()):
        config.refuse("rope_parameters", "must have an object for each kind of layer, or its base is not read")
    fields = read_olmo2(config, 500000.0) | read_layer_types(config, every=4)
    slides = layers_that_slide(config)
    if fields.get("rope_scaling_type", "none") != "none" and (slides is None or any(slides)):
        config.refuse("rope_scaling", "stretches RoPE in the layers without a window alone, which is not supported")
    return fields


def _write_olmo3(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    """Keys with RoPE twice: transformers 5 takes `rope_theta` for layers without a window alone."""
    keys = write_olmo2(model, seq_length)
    rope = {"rope_type": "default", **(keys["rope_scaling"] or {}), "rope_theta": keys["rope_theta"]}
    return keys | write_layer_types(model) | {"rope_parameters": {FULL: rope, SLIDING: rope}}


OLMO3 = ModelFamily(
    "Olmo3ForCausalLM",
    ROWS,
    _OLMO3,
    {},
    _read_olmo3,
    _write_olmo3,
    lambda _model: None,
    decoder(DecoderNames(norms=OUTPUT_NORMS)),
)
