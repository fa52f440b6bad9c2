"""Phi 1 to 4, and PhiMoE.

Phi-1 and Phi-2: attention and MLP side by side, RoPE on a part of each head, biases, also on the output layer.
"""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import (
    DecoderNames,
    decoder,
    equal,
    read_decoder,
    write_activation,
    write_decoder,
)
from megatronish.formats.hf.experts import not_experts_alone, read_experts
from megatronish.formats.hf.family import ConfigJson, ExpertNames, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS, llama_tensors_with
from megatronish.formats.hf.rope import LONGROPE, MSCALES, ORIGINAL

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


# Phi-3 and Phi-4: a Llama with fused weights, and a window; those of 128k have LongRoPE.

_PHI3_NAMES = DecoderNames(qkv=("self_attn.qkv_proj",), fc1=("mlp.gate_up_proj",))
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


PHI3 = ModelFamily(
    "Phi3ForCausalLM", ROWS, _PHI3, {}, _read_phi3, _write_phi3, lambda _model: None, decoder(_PHI3_NAMES)
)


# PhiMoE (Phi-3.5-MoE): experts that SparseMixer chooses, LayerNorm, biases on attention and on the output layer.
#
# Training there chooses experts at random and multiplies their inputs by noise (`input_jitter_noise`). A run here
# computes what evaluation does (layers/router.py), and the key comes back with the config.json that it came with.

_CHOSEN, _BASE = 2, 1000000.0
_PHIMOE = LLAMA_DEFAULTS | {
    "vocab_size": 32064,
    "intermediate_size": 6400,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_experts_per_tok": _CHOSEN,
    "num_local_experts": 16,
    "router_jitter_noise": 0.01,
    "attention_bias": False,
    "lm_head_bias": False,
}


def _read_phimoe(config: ConfigJson) -> dict[str, Any]:
    config.must_be("num_experts_per_tok", _CHOSEN, why="is not supported: SparseMixer chooses two experts there")
    window = config.values["sliding_window"]
    return {
        **read_decoder(config, rope=_BASE),
        **_read_growths(config),
        "normalization": "LayerNorm",
        "norm_epsilon": config.number("rms_norm_eps"),
        "add_attention_bias": config.flag("attention_bias"),
        "add_output_bias": config.flag("lm_head_bias"),
        "window_size": None if window is None else config.whole("sliding_window"),
        **read_experts(config, number="num_local_experts", width="intermediate_size"),
        "moe_router_score_function": "sparsemixer",
        "moe_sparsemixer_eps": config.number("router_jitter_noise"),
    }


def _read_growths(config: ConfigJson) -> dict[str, Any]:
    """Factors of cos and sin of LongRoPE, the one RoPE that is stretched in this family; none of a plain one."""
    given = ((key, config.values.get(key)) for key in ("rope_scaling", "rope_parameters"))
    for key, values in given:
        if not isinstance(values, dict) or not values:
            continue
        kind = values.get("rope_type", values.get("type", "default"))
        if kind == "default":
            return {}
        if kind != "longrope":
            config.refuse(key, "stretches RoPE, which this family does by LongRoPE alone")
        rope = ConfigJson(config.path, values, {})
        return {field: rope.number(name) for name, field in MSCALES.items()}
    return {}


def _write_phimoe(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    keys = write_decoder(model, seq_length)
    if model.rope_scaling == "longrope":
        keys["rope_scaling"] |= dict(zip(MSCALES, model.rotary_growths, strict=True))
    return {
        **keys,
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.attention_bias,
        "lm_head_bias": model.add_output_bias,
        "sliding_window": model.window_size if any(model.windowed_layers) else None,
        "intermediate_size": model.expert_ffn_size,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "router_jitter_noise": model.moe_sparsemixer_eps,
        "input_jitter_noise": 0.0,
    }


PHIMOE = ModelFamily(
    "PhimoeForCausalLM",
    ROWS,
    _PHIMOE,
    {},
    _read_phimoe,
    _write_phimoe,
    not_experts_alone,
    llama_tensors_with(ExpertNames("block_sparse_moe", "w1", "w3", "w2")),
)
