"""GLM-4: norms around each sublayer, RoPE of neighbouring pairs on a part of each head, biases on qkv."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, write_decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS

_NAMES = DecoderNames(
    norms={
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_mlp_layernorm",
    },
    fc1=("mlp.gate_up_proj",),
)
_GLM4 = LLAMA_DEFAULTS | {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 0.00000015625,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}


def _read_glm4(config: ConfigJson) -> dict[str, Any]:
    return {
        **read_decoder(config, turned=0.5),
        "rotary_interleaved": True,
        "norm_epsilon": config.number("rms_norm_eps"),
        "norm_placement": "sandwich",
        "add_qkv_bias": config.flag("attention_bias"),
    }


def _write_glm4(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **write_decoder(model, seq_length, turned=True),
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.qkv_bias,
    }


GLM4 = ModelFamily("Glm4ForCausalLM", ROWS, _GLM4, {}, _read_glm4, _write_glm4, lambda _model: None, decoder(_NAMES))
