"""OLMo 3: an OLMo 2 with windows in three of four layers, in which RoPE is not stretched."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import ROWS
from megatronish.formats.hf.olmo2 import OLMO2_DEFAULTS, OUTPUT_NORMS, read_olmo2, write_olmo2
from megatronish.formats.hf.rope import split_rope, write_both_ropes
from megatronish.formats.hf.window import read_layer_types, write_layer_types

_OLMO3 = OLMO2_DEFAULTS | {"sliding_window": 4096}


def _read_olmo3(config: ConfigJson) -> dict[str, Any]:
    plain, local = split_rope(config)
    fields = read_olmo2(plain, 500000.0) | read_layer_types(plain, every=4)
    base = fields["rotary_base"] if local is None else local
    is_other = base != fields["rotary_base"] or fields.get("rope_scaling_type", "none") != "none"
    return fields | ({"window_rotary_base": base} if is_other and fields["window_size"] is not None else {})


def _write_olmo3(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return write_olmo2(model, seq_length) | write_layer_types(model) | write_both_ropes(model)


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
