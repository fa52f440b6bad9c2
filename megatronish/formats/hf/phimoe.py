"""PhiMoE (Phi-3.5-MoE): experts that SparseMixer chooses, LayerNorm, biases on attention and on the output layer.

Training there chooses experts at random and multiplies their inputs by noise (`input_jitter_noise`). A run here
computes what evaluation does (layers/router.py), and the key comes back with the config.json that it came with.
"""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import read_decoder, write_decoder
from megatronish.formats.hf.experts import not_experts_alone, read_experts
from megatronish.formats.hf.family import ConfigJson, ExpertNames, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS, llama_tensors_with

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
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.values.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
        if kind != "default":
            config.refuse(key, "stretches RoPE, which this family does by LongRoPE with factors of its own alone")
    window = config.values["sliding_window"]
    return {
        **read_decoder(config, rope=_BASE),
        "normalization": "LayerNorm",
        "norm_epsilon": config.number("rms_norm_eps"),
        "add_attention_bias": config.flag("attention_bias"),
        "add_output_bias": config.flag("lm_head_bias"),
        "window_size": None if window is None else config.whole("sliding_window"),
        **read_experts(config, number="num_local_experts", width="intermediate_size"),
        "moe_router_score_function": "sparsemixer",
        "moe_sparsemixer_eps": config.number("router_jitter_noise"),
    }


def _write_phimoe(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **write_decoder(model, seq_length),
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
