"""MiniMax-M2: experts in every layer, chosen as DeepSeek-V3's without groups, and a norm over all heads at once.

RoPE turns `rotary_dim` features of a head. The published weights are in fp8, and without the modules of multi-token
prediction that their config.json counts. Its `norm_topk_prob` is always true.
"""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import read_decoder, write_decoder
from megatronish.formats.hf.deepseek import DEEPSEEK_V3
from megatronish.formats.hf.experts import not_experts_alone, read_experts
from megatronish.formats.hf.family import ConfigJson, ExpertNames, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS, llama_tensors_with
from megatronish.formats.hf.rope import PARTIAL

_NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2", bias="e_score_correction_bias")
_BASE = 5000000.0
_MINIMAX_M2 = LLAMA_DEFAULTS | {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "eos_token_id": 200020,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
}
_AS_PUBLISHED = {
    "use_qk_norm": (True, None),
    "qk_norm_type": ("per_layer", None),
    "scoring_func": ("sigmoid", None),
    "use_routing_bias": (True, None),
    "shared_intermediate_size": (0, None),
    "sliding_window": (None,),
    "router_jitter_noise": (0, None),
    "attention_bias": (False, None),
}
"""Keys that transformers does not read, and the code that came with the model does, or that change its training."""


def _read_minimax_m2(config: ConfigJson) -> dict[str, Any]:
    for key, values in _AS_PUBLISHED.items():
        config.must_be(key, *values, why="is not supported in this family")
    kinds = config.values.get("attn_type_list") or []
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        config.refuse("attn_type_list", "has layers with another attention than softmax's, which are not supported")
    if config.whole("num_experts_per_tok") == 1:
        config.refuse("num_experts_per_tok", "gives the one expert a weight of 1, and so its router no gradient")
    return {
        **read_decoder(config, rope=_BASE, turned=_turned(config)),
        "norm_epsilon": config.number("rms_norm_eps"),
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        **read_experts(config, number="num_local_experts", width="intermediate_size"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }


def _turned(config: ConfigJson) -> float:
    """Part of a head that RoPE turns where no other key says it."""
    if config.values.get("rotary_dim") is None:
        return 1.0
    part = config.whole("rotary_dim", least=2) / config.whole("head_dim")
    if config.number(PARTIAL, null=part) != part:
        config.refuse("rotary_dim", f"contradicts {PARTIAL} of a head of {config.values['head_dim']}")
    return part


def _write_minimax_m2(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **write_decoder(model, seq_length),
        "rotary_dim": None if model.rotary_percent == 1 else model.rotary_size,
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_epsilon,
        "intermediate_size": model.expert_ffn_size,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    }


MINIMAX_M2 = ModelFamily(
    "MiniMaxM2ForCausalLM",
    ROWS,
    _MINIMAX_M2,
    {"num_experts": "num_local_experts"},
    _read_minimax_m2,
    _write_minimax_m2,
    not_experts_alone,
    llama_tensors_with(_NAMES)._replace(left_out=DEEPSEEK_V3.tensors.left_out),
)
