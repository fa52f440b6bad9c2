"""Phi-1 and Phi-2: attention and MLP side by side, RoPE on a part of each head, biases, also on the output layer."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import (
    DecoderNames,
    decoder,
    read_decoder,
    write_activation,
    write_decoder,
)
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS

_NAMES = DecoderNames(
    out="self_attn.dense",
    qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    fc1=("mlp.fc1",),
    fc2="mlp.fc2",
    final_norm="model.final_layernorm",
)
_PHI = {key: value for key, value in LLAMA_DEFAULTS.items() if key not in ("head_dim", "rms_norm_eps")} | {
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
    "qk_layernorm": False,
    "resid_pdrop": 0.0,
}


def _read_phi(config: ConfigJson) -> dict[str, Any]:
    return {
        **read_decoder(config, turned=0.5, gated=False),
        "normalization": "LayerNorm",
        "norm_epsilon": config.number("layer_norm_eps"),
        "norm_placement": "parallel",
        "disable_bias_linear": False,
        "add_output_bias": True,
        "qk_layernorm": config.flag("qk_layernorm"),
        "hidden_dropout": config.number("resid_pdrop"),
    }


def _write_phi(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **write_decoder(model, seq_length, turned=True),
        "hidden_act": write_activation(model, tanh="gelu_new"),
        "layer_norm_eps": model.norm_epsilon,
        "qk_layernorm": model.qk_layernorm,
        "resid_pdrop": model.hidden_dropout,
    }


PHI = ModelFamily("PhiForCausalLM", ROWS, _PHI, {}, _read_phi, _write_phi, lambda _model: None, decoder(_NAMES))
