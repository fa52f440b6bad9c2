"""DeepSeek-V2, DeepSeek-V3 and Kimi K2: latent attention, first layers dense, then experts with shared ones.

Kimi K2 is a DeepSeek-V3 under another `model_type`. A V2 scores experts by a softmax before the choice, and a group of
experts by its best; a V3 by sigmoids and a bias, and a group by its two best.

What training alone reads (`aux_loss_alpha`, `seq_aux`) and what says how others run the model (`ep_size`,
`pretraining_tp`) is not taken over, and comes back with the config.json.

Modules of multi-token prediction are further layers in the files of a V3, each with copies of the embedding and of the
output layer, which are one with the model's: they are compared when they are read, and written.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.experts import (
    expert_tensors,
    gated_mlp_tensors,
    read_experts,
    read_first_dense,
    read_groups,
    read_sigmoids,
    write_first_dense,
    write_sigmoids,
)
from megatronish.formats.hf.family import HEAD, ConfigJson, ExpertNames, FamilyTensors, ModelFamily, first_true
from megatronish.formats.hf.llama import ROWS, not_llama_block
from megatronish.formats.hf.rope import read_rope, write_rope
from megatronish.formats.tensor_rule import TensorRule, same_tensors

_LATENT_EPSILON = 1e-6  # of the norms of latents, whatever rms_norm_eps is
NAMES = ExpertNames(shared="shared_experts")
_BEST = {"deepseek_v2": 1, "deepseek_v3": 2}  # scores that add up to a group's
_COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}
_V3 = _COMMON | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "rope_interleave": True,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
}
_V2 = _COMMON | {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
}


# Keys


def _read_common(config: ConfigJson) -> dict[str, Any]:
    """Fields that both have: all except RoPE's pairs and the choice of experts."""
    config.must_be("hidden_act", "silu", "swish", why="is not supported; silu is")
    config.must_be("attention_bias", False, None, why="is not supported: projections to and from latents have none")
    config.must_be("mlp_bias", False, None, why="is not supported: experts have no biases")
    heads = config.whole("num_attention_heads")
    if config.whole("num_key_value_heads", null=heads) != heads:
        config.refuse("num_key_value_heads", f"must be num_attention_heads={heads}: latent attention has no groups")
    config.must_be("moe_layer_freq", 1, why="is not supported: after the first dense layers all have experts")
    width, shared = config.whole("moe_intermediate_size"), config.whole("n_shared_experts")
    factor = config.number("routed_scaling_factor")
    return {
        "num_layers": config.whole("num_hidden_layers"),
        "hidden_size": config.whole("hidden_size"),
        "num_attention_heads": heads,
        "ffn_hidden_size": config.whole("intermediate_size"),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": None if config.values.get("q_lora_rank") is None else config.whole("q_lora_rank"),
        "kv_lora_rank": config.whole("kv_lora_rank"),
        "qk_head_dim": config.whole("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": config.whole("qk_rope_head_dim", least=2),
        "v_head_dim": config.whole("v_head_dim"),
        "latent_norm_epsilon": _LATENT_EPSILON,
        "max_position_embeddings": config.whole("max_position_embeddings"),
        "position_embedding_type": "rope",
        **read_rope(config, latent=True),
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("rms_norm_eps"),
        "swiglu": True,
        "disable_bias_linear": True,
        "attention_dropout": config.number("attention_dropout"),
        "hidden_dropout": 0.0,
        **read_experts(config, number="n_routed_experts", width="moe_intermediate_size"),
        **read_first_dense(config),
        "moe_shared_expert_intermediate_size": width * shared,
        "moe_router_topk_scaling_factor": None if factor == 1 else factor,
    }


def _read_v3(config: ConfigJson) -> dict[str, Any]:
    config.must_be("scoring_func", "sigmoid", why="is not supported in this family; sigmoid is")
    config.must_be("topk_method", "noaux_tc", why="is not supported in this family; noaux_tc is")
    return {
        **_read_common(config),
        "rotary_interleaved": config.flag("rope_interleave"),
        **read_sigmoids(config),
        **read_groups(config, best=_BEST["deepseek_v3"]),
        "mtp_num_layers": config.whole("num_nextn_predict_layers", null=0, least=0) or None,
    }


def _read_v2(config: ConfigJson) -> dict[str, Any]:
    config.must_be("scoring_func", "softmax", why="is not supported in this family; softmax is")
    config.must_be("topk_method", "greedy", "group_limited_greedy", why="is not supported in this family")
    config.must_be("norm_topk_prob", False, None, why="is not supported: transformers does not read it")
    has_groups = config.values["topk_method"] == "group_limited_greedy"
    return {
        **_read_common(config),
        "rotary_interleaved": True,
        "moe_router_pre_softmax": True,
        **(read_groups(config, best=_BEST["deepseek_v2"]) if has_groups else {}),
    }


def _write_common(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "moe_intermediate_size": model.expert_ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_attention_heads,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": seq_length,
        "rms_norm_eps": model.norm_epsilon,
        **write_rope(model, latent=True),
        "attention_dropout": model.attention_dropout,
        "attention_bias": False,
        **write_first_dense(model),
        "moe_layer_freq": 1,
        "n_routed_experts": model.num_experts,
        "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // model.expert_ffn_size,
        "num_experts_per_tok": model.moe_router_topk,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
    }


def _write_v3(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **_write_common(model, seq_length),
        "rope_interleave": model.rotary_interleaved,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        **write_sigmoids(model),
        "num_nextn_predict_layers": model.num_depths,
    }


def _write_v2(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **_write_common(model, seq_length),
        "mlp_bias": False,
        "scoring_func": "softmax",
        "topk_method": "greedy" if model.moe_router_num_groups is None else "group_limited_greedy",
        "n_group": model.moe_router_num_groups,
        "topk_group": model.moe_router_group_topk,
        "norm_topk_prob": False,
    }


def _lacks(model: ModelConfig) -> str | None:
    """What neither has; the rest is compared when the keys are read again."""
    return first_true(
        {
            "attention without latents": not model.multi_latent_attention,
            "no shared expert": model.moe_shared_expert_intermediate_size is None,
            f"window_size={model.window_size}": any(model.windowed_layers),
        }
    ) or not_llama_block(ModelConfig(**{**vars(model), "rotary_interleaved": False}))


# Tensors


def _tensors(model: ModelConfig, *, num_further: int = 0) -> Iterator[TensorRule]:
    """Rules of all tensors, embedding first, with those of so many layers of multi-token prediction."""
    yield TensorRule("embedding.tokens.weight", (_WORDS,))
    for n, has_experts in enumerate(model.expert_layers):
        yield from _layer_tensors(model, n, has_experts=has_experts)
    for n in range(model.num_layers, model.num_layers + num_further):
        yield from _layer_tensors(model, n, has_experts=model.expert_layers[-1])
        yield from further_tensors(n)
    yield from same_tensors("final_norm", "model.norm", bias=False)
    if not model.tied:
        yield TensorRule("head.weight", (HEAD,))


def _layer_tensors(model: ModelConfig, n: int, *, has_experts: bool) -> Iterator[TensorRule]:
    """Rules of a layer."""
    ours, theirs = f"layers.{n}", f"model.layers.{n}"
    yield from same_tensors(f"{ours}.attention_norm", f"{theirs}.input_layernorm", bias=False)
    for name, their_name in _attention_names(model).items():
        yield from same_tensors(f"{ours}.attention.{name}", f"{theirs}.self_attn.{their_name}", bias=False)
    yield from same_tensors(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", bias=False)
    if not has_experts:
        yield from gated_mlp_tensors(f"{ours}.mlp", f"{theirs}.mlp", model.ffn_size, bias=False)
        return
    yield from expert_tensors(model, ours, theirs, names=NAMES)


_WORDS = "model.embed_tokens.weight"
_FURTHER = {
    "projection": "eh_proj",  # of [embedding ; hidden state], as here
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "final_norm": "shared_head.norm",
}
"""What a layer of multi-token prediction has besides a layer."""


def further_tensors(n: int) -> Iterator[TensorRule]:
    """Rules of what layer number n of multi-token prediction has besides a layer."""
    for ours, theirs in _FURTHER.items():
        yield from same_tensors(f"layers.{n}.{ours}", f"model.layers.{n}.{theirs}", bias=False)


def _v3_tensors(model: ModelConfig) -> Iterator[TensorRule]:
    return _tensors(model, num_further=model.num_depths)


def _further_copies(model: ModelConfig) -> dict[str, str]:
    """Embedding and output layer in each layer of multi-token prediction, with the model's own."""
    copies = {}
    for n in range(model.num_layers, model.num_all_layers):
        copies[f"model.layers.{n}.embed_tokens.weight"] = _WORDS
        copies[f"model.layers.{n}.shared_head.head.weight"] = _WORDS if model.tied else HEAD
    return copies


def _attention_names(model: ModelConfig) -> dict[str, str]:
    """Layers of latent attention, ours and theirs, all of the same rows."""
    queries = {"q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj"}
    return {
        **({"q": "q_proj"} if model.q_lora_rank is None else queries),
        "kv_down": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm",
        "kv_up": "kv_b_proj",
        "out": "o_proj",
    }


def _left_out(model: ModelConfig, name: str) -> str | None:
    """The reason why a tensor of a layer after the last is none of the model's."""
    number = name.removeprefix("model.layers.").partition(".")[0] if name.startswith("model.layers.") else ""
    if not number.isdecimal() or int(number) < model.num_all_layers:
        return None
    return "of multi-token prediction, which the model is read without"


_V2_TENSORS = FamilyTensors("model", _tensors, NAMES, left_out=_left_out)
_V3_TENSORS = _V2_TENSORS._replace(rules=_v3_tensors, written_copies=_further_copies)
_ALIASES = {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"}
_V3_ALIASES = _ALIASES | {"num_mtp_layers": "num_nextn_predict_layers"}
_family = partial(ModelFamily, cannot_describe=_lacks)

DEEPSEEK_V3 = _family("DeepseekV3ForCausalLM", ROWS, _V3, _V3_ALIASES, _read_v3, _write_v3, tensors=_V3_TENSORS)
KIMI_K2 = DEEPSEEK_V3
DEEPSEEK_V2 = _family("DeepseekV2ForCausalLM", ROWS, _V2, _ALIASES, _read_v2, _write_v2, tensors=_V2_TENSORS)
