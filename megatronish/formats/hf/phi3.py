"""Phi-3 and Phi-4: a Llama with fused weights, and a window; those of 128k have LongRoPE."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, equal, read_decoder, write_decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS
from megatronish.formats.hf.rope import LONGROPE, ORIGINAL

_NAMES = DecoderNames(qkv=("self_attn.qkv_proj",), fc1=("mlp.gate_up_proj",))
_PHI3 = {key: value for key, value in LLAMA_DEFAULTS.items() if key != "head_dim"} | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    ORIGINAL: 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "resid_pdrop": 0.0,
    "eos_token_id": 32000,
}


def _read_phi3(config: ConfigJson) -> dict[str, Any]:
    fields = read_decoder(_with_new_name(config), turned=1.0)
    if fields.get("rope_scaling_type", "none") not in ("none", "longrope"):
        config.refuse("rope_scaling", "is not supported in this family, where transformers has LongRoPE alone")
    return {
        **fields,
        "norm_epsilon": config.number("rms_norm_eps"),
        "window_size": None if config.values["sliding_window"] is None else config.whole("sliding_window"),
        "hidden_dropout": config.number("resid_pdrop"),
    }


def _with_new_name(config: ConfigJson) -> ConfigJson:
    """The config in which LongRoPE has its name of today: old files say su or yarn, and have its factors."""
    scaling = config.values.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") in ("su", "yarn") and scaling.keys() >= LONGROPE.keys():
        values = {**config.values, "rope_scaling": {**scaling, "type": "longrope"}}
        return ConfigJson(config.path, values, {})
    return config


def _write_phi3(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    keys = write_decoder(model, seq_length, turned=True)
    original = seq_length
    if model.rope_scaling == "longrope":
        # Older versions of transformers want these three keys alone, and the two lengths outside of them.
        original, factor = model.rope_original_max_positions, model.rope_scaling_factor
        implied = {} if equal(factor * original, seq_length) else {"factor": factor}
        factors = {key: keys["rope_scaling"][key] for key in LONGROPE}
        keys["rope_scaling"] = {"type": "longrope", **factors, **implied}
    return {
        **keys,
        ORIGINAL: original,
        "rms_norm_eps": model.norm_epsilon,
        "sliding_window": model.window_size,
        "resid_pdrop": model.hidden_dropout,
    }


PHI3 = ModelFamily("Phi3ForCausalLM", ROWS, _PHI3, {}, _read_phi3, _write_phi3, lambda _model: None, decoder(_NAMES))
