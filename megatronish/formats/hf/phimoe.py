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
from megatronish.formats.hf.rope import MSCALES

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
