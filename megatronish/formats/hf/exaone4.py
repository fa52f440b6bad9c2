"""EXAONE 4: norms after attention and MLP, a norm of each head's queries and keys, no RoPE where there is no window."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, write_decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS
from megatronish.formats.hf.olmo import OUTPUT_NORMS
from megatronish.formats.hf.window import layers_that_slide, read_layer_types, rope_where_it_slides, write_layer_types

_EXAONE4 = {key: value for key, value in LLAMA_DEFAULTS.items() if key != "head_dim"} | {
    "vocab_size": 102400,
    "intermediate_size": 16384,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def _read_exaone4(config: ConfigJson) -> dict[str, Any]:
    fields = {
        **read_decoder(config),
        "norm_epsilon": config.number("rms_norm_eps"),
        "norm_placement": "output",
        "qk_layernorm": True,
    }
    if config.values["sliding_window"] is None:
        if any(layers_that_slide(config) or ()):
            config.refuse("layer_types", "gives layers a window, and sliding_window is null")
        return fields
    fields |= read_layer_types(config, every_key="sliding_window_pattern")
    if fields["window_size"] is None:
        config.refuse("layer_types", "leaves no layer with a window, and so none with RoPE")
    return fields | rope_where_it_slides(fields)


def _write_exaone4(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **write_decoder(model, seq_length),
        "rms_norm_eps": model.norm_epsilon,
        **write_layer_types(model),
    }


EXAONE4 = ModelFamily(
    "Exaone4ForCausalLM",
    ROWS,
    _EXAONE4,
    {},
    _read_exaone4,
    _write_exaone4,
    lambda _model: None,
    decoder(DecoderNames(norms=OUTPUT_NORMS)),
)
