"""Hunyuan's dense models: a Llama whose queries and keys are normalised after RoPE, with a base stretched by alpha."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS, read_llama, write_llama
from megatronish.formats.hf.rope import without_alpha

_NAMES = DecoderNames(qk_norms=("self_attn.query_layernorm", "self_attn.key_layernorm"))
_HUNYUAN = LLAMA_DEFAULTS | {"vocab_size": 290943, "rms_norm_eps": 1e-5}


def _read_hunyuan(config: ConfigJson) -> dict[str, Any]:
    config.must_be("mlp_bias", False, None, why="is not there in this family")
    config.must_be("use_qk_norm", True, None, why="leaves out norms of queries and keys, which this family has here")
    config.must_be("use_cla", False, None, why="shares keys and values between layers, which is not supported")
    norms = {"qk_layernorm": True, "qk_layernorm_after_rope": True}
    return read_llama(without_alpha(config)) | norms


def _write_hunyuan(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {key: value for key, value in write_llama(model, seq_length).items() if key != "mlp_bias"}


HUNYUAN = ModelFamily(
    "HunYuanDenseV1ForCausalLM",
    ROWS,
    _HUNYUAN,
    {},
    _read_hunyuan,
    _write_hunyuan,
    lambda _model: None,
    decoder(_NAMES),
)
