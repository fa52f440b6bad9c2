"""GLM-4, and GLM-4.5 with its experts.

GLM-4: norms around each sublayer, RoPE of neighbouring pairs on a part of each head, biases on qkv.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, write_decoder
from megatronish.formats.hf.deepseek import DEEPSEEK_V3, NAMES, further_tensors
from megatronish.formats.hf.experts import (
    expert_tensors,
    read_experts,
    read_first_dense,
    read_groups,
    read_sigmoids,
    write_first_dense,
    write_sigmoids,
)
from megatronish.formats.hf.family import ConfigJson, ModelFamily, first_true
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS, llama_layer_tensors, llama_tensors
from megatronish.formats.tensor_rule import TensorRule

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


# GLM-4.5: grouped queries with biases, RoPE on a part of each head, first layers dense, then experts as
# DeepSeek-V3's.
#
# Queries and keys may have a norm. Its layer of multi-token prediction is in the files as DeepSeek's is.

_TURNED, _BEST = 0.5, 2  # the part of a head that RoPE turns by default; scores that add up to a group's
_GLM4_MOE = LLAMA_DEFAULTS | {
    "vocab_size": 151552,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}


def _read_glm4_moe(config: ConfigJson) -> dict[str, Any]:
    factor = config.number("routed_scaling_factor")
    return {
        **read_decoder(config, turned=_TURNED),
        "norm_epsilon": config.number("rms_norm_eps"),
        "add_qkv_bias": config.flag("attention_bias"),
        "qk_layernorm": config.flag("use_qk_norm"),
        **read_experts(config, number="n_routed_experts", width="moe_intermediate_size"),
        **read_first_dense(config),
        **read_sigmoids(config),
        **read_groups(config, best=_BEST),
        "moe_router_topk_scaling_factor": None if factor == 1 else factor,
        "moe_shared_expert_intermediate_size": config.whole("moe_intermediate_size") * config.whole("n_shared_experts"),
        "mtp_num_layers": config.whole("num_nextn_predict_layers", null=0, least=0) or None,
    }


def _write_glm4_moe(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **write_decoder(model, seq_length, turned=True),
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.qkv_bias,
        "use_qk_norm": model.qk_layernorm,
        "moe_intermediate_size": model.expert_ffn_size,
        "n_routed_experts": model.num_experts,
        "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // model.expert_ffn_size,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        **write_sigmoids(model),
        **write_first_dense(model),
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "num_nextn_predict_layers": model.num_depths,
    }


def _lacks(model: ModelConfig) -> str | None:
    return first_true({"no shared expert": model.moe_shared_expert_intermediate_size is None})


def _tensors(model: ModelConfig) -> Iterator[TensorRule]:
    """Rules of all tensors, those of layers of multi-token prediction last."""
    experts = partial(expert_tensors, names=NAMES)
    yield from llama_tensors(model, experts)
    for n in range(model.num_layers, model.num_all_layers):
        yield from llama_layer_tensors(model, n, experts if model.expert_layers[-1] else None)
        yield from further_tensors(n)


GLM4_MOE = ModelFamily(
    "Glm4MoeForCausalLM",
    ROWS,
    _GLM4_MOE,
    {
        "num_local_experts": "n_routed_experts",
        "num_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    _read_glm4_moe,
    _write_glm4_moe,
    _lacks,
    DEEPSEEK_V3.tensors._replace(rules=_tensors),
)
