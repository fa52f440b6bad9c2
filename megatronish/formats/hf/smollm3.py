"""SmolLM3: a Llama in which every fourth layer has no RoPE."""

from typing import Any

from megatronish.config.layer_pattern import canonical
from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder
from megatronish.formats.hf.family import CORRECT, ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS, read_llama, write_llama
from megatronish.formats.hf.window import all_layers_slide

_SMOLLM3 = LLAMA_DEFAULTS | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "eos_token_id": 128001,
}


def rotated_layers(config: ConfigJson) -> tuple[bool, ...]:
    """Whether each layer has RoPE: in no_rope_layers 1 says that it has."""
    num_layers, marks = config.whole("num_hidden_layers"), config.values["no_rope_layers"]
    if marks is None or marks == []:
        every = config.whole("no_rope_layer_interval")
        return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    if not isinstance(marks, list) or len(marks) != num_layers or any(mark not in (0, 1) for mark in marks):
        config.refuse("no_rope_layers", f"must be a list of 0 and 1 for the {num_layers} layers", remedy=CORRECT)
    return tuple(map(bool, marks))


def _read_smollm3(config: ConfigJson) -> dict[str, Any]:
    config.must_be("use_sliding_window", None, False, why="is not supported in this family")
    if all_layers_slide(config):
        config.refuse("layer_types", "gives layers a window, which this family does not have here")
    rotated = rotated_layers(config)
    pattern = None if all(rotated) else canonical(tuple(not each for each in rotated))
    return {**read_llama(config), "no_rope_freq": pattern}


def _write_smollm3(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    keys = write_llama(model, seq_length)
    del keys["head_dim"]
    return {**keys, "no_rope_layers": [int(each) for each in model.rotated_layers], "use_sliding_window": False}


SMOLLM3 = ModelFamily(
    "SmolLM3ForCausalLM",
    ROWS,
    _SMOLLM3,
    {},
    _read_smollm3,
    _write_smollm3,
    lambda _model: None,
    decoder(DecoderNames()),
)
