"""Tiny models of the Hugging Face families with experts, made without transformers, in both forms of their weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY, LENGTH, D, F, DENSE, SHARED, E, HEADS = 101, 16, 24, 12, 20, 16, 4, 4

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "eos_token_id": 100,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": _COMMON
    | {"architectures": ["MixtralForCausalLM"], "num_local_experts": E, "intermediate_size": F, "sliding_window": None},
    "qwen2_moe": _COMMON
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": E,
        "intermediate_size": DENSE,
        "moe_intermediate_size": F,
        "shared_expert_intermediate_size": SHARED,
        "decoder_sparse_step": 2,
        "norm_topk_prob": False,
    },
    "qwen3_moe": _COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_local_experts": E,
        "head_dim": 8,
        "intermediate_size": DENSE,
        "moe_intermediate_size": F,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "olmoe": _COMMON
    | {
        "architectures": ["OlmoeForCausalLM"],
        "num_experts": E,
        "num_key_value_heads": 2,
        "intermediate_size": F,
        "clip_qkv": 1.5,
        "norm_topk_prob": False,
    },
}
_LATENT: dict[str, Any] = _COMMON | {
    "num_key_value_heads": HEADS,
    "intermediate_size": DENSE,
    "moe_intermediate_size": F,
    "n_routed_experts": E,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32, "beta_slow": 1}
CONFIGS |= {
    "deepseek_v3": _LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    },
    "kimi_k2": _LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": None,
        "n_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v2": _LATENT
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
    },
}
LATENT = ("deepseek_v3", "kimi_k2", "deepseek_v2")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
_FACTORS = {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.7, "logits_scaling": 3.0}
CONFIGS |= {
    "glm4_moe": _COMMON
    | {
        "num_nextn_predict_layers": 0,
        "architectures": ["Glm4MoeForCausalLM"],
        "head_dim": 8,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "intermediate_size": DENSE,
        "moe_intermediate_size": F,
        "n_routed_experts": E,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    "minimax_m2": _COMMON
    | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": 8,
        "rotary_dim": 4,
        "intermediate_size": F,
        "num_local_experts": E,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "attn_type_list": [1, 1],
    },
    "granitemoe": _COMMON
    | {
        "architectures": ["GraniteMoeForCausalLM"],
        "intermediate_size": F,
        "num_local_experts": E,
        **_FACTORS,
    },
    "granitemoeshared": _COMMON
    | {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "intermediate_size": F,
        "num_local_experts": E,
        "shared_intermediate_size": SHARED,
        **_FACTORS,
    },
    "phimoe": _COMMON
    | {
        "architectures": ["PhimoeForCausalLM"],
        "intermediate_size": F,
        "num_local_experts": E,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.3,
        "sliding_window": 5,
        # Outgrown by the tests' texts, from where on transformers keeps the short factors.
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 8,
            **{key: [1.0, 1.5, 4.0] for key in ("short_factor", "long_factor")},
            **{"short_mscale": 1.1, "long_mscale": 1.3},
        },
    },
    "llama4_text": _COMMON
    | {
        "architectures": ["Llama4ForCausalLM"],
        "head_dim": 8,
        "intermediate_size": F,
        "intermediate_size_mlp": DENSE,
        "num_local_experts": E,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [0, 1],
        "attention_chunk_size": 5,
        "floor_scale": 4,
        "attn_scale": 0.5,
        "rope_scaling": {"rope_type": "llama3", "factor": 4.0, **_LLAMA3},
    },
}
CONFIGS["gpt_oss"] = _COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 8,
    "intermediate_size": F,
    "num_local_experts": E,
    "experts_per_token": 2,
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "swiglu_limit": 0.4,
    "rope_scaling": _YARN | {"rope_type": "yarn", "beta_fast": 2.0, "truncate": False},
}
GRANITE = ("granitemoe", "granitemoeshared")
for _name, _config in CONFIGS.items():
    _config["model_type"] = _name
WITH_EXPERTS = {"mixtral": (0, 1), "qwen2_moe": (1,), "qwen3_moe": (1,), "olmoe": (0, 1)}
WITH_EXPERTS |= dict.fromkeys((*LATENT, "glm4_moe", "llama4_text"), (1,)) | dict.fromkeys(
    (*GRANITE, "minimax_m2", "phimoe", "gpt_oss"), (0, 1)
)
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
AS_MIXTRAL = ("mixtral", "minimax_m2", "phimoe")


def tensors_of_family(name: str) -> dict[str, Tensor]:
    """Weights under the published names, as after some training: norms near 1, matrices far from their first size."""
    config = CONFIGS[name]
    size = config.get("head_dim", D // HEADS)
    queries, keys = HEADS * size, config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCABULARY, D)}
    for n in range(2):
        layer = f"model.layers.{n}"
        rows = {"q": queries, "k": keys, "v": keys}
        shapes[f"{layer}.input_layernorm"] = shapes[f"{layer}.post_attention_layernorm"] = (D,)
        if name in LATENT:
            shapes |= {f"{layer}.self_attn.{each}": shape for each, shape in _latent_shapes(config).items()}
        else:
            shapes |= {f"{layer}.self_attn.{each}_proj": (number, D) for each, number in rows.items()}
            shapes[f"{layer}.self_attn.o_proj"] = (D, queries)
        if name in ("qwen3_moe", "olmoe", "glm4_moe", "minimax_m2"):
            across = name in ("olmoe", "minimax_m2")
            shapes[f"{layer}.self_attn.q_norm"] = (queries if across else size,)
            shapes[f"{layer}.self_attn.k_norm"] = (keys if across else size,)
        shapes |= _mlp_shapes(name, layer, has_experts=n in WITH_EXPERTS[name])
    shapes |= {"model.norm": (D,), "lm_head": (VOCABULARY, D)}
    if name == "gpt_oss":
        shapes |= {f"model.layers.{n}.self_attn.sinks": (HEADS,) for n in range(2)}
    whole = [key for key, shape in shapes.items() if (".experts." in key and len(shape) == 3) or key.endswith(".sinks")]
    named = {key if key in whole else f"{key}.weight": shape for key, shape in shapes.items()}
    if name in ("qwen2_moe", "glm4_moe"):
        named |= {
            key.replace("weight", "bias"): shape[:1]
            for key, shape in named.items()
            if key[-13] in "qkv" and "_proj" in key and "self_attn" in key
        }
    if name == "gpt_oss":
        biased = [key for key in named if "_proj.weight" in key or "router" in key]
        named |= {key.replace("weight", "bias"): named[key][:1] for key in biased}
        named |= {f"{key}_bias": (E, shape[-1]) for key, shape in named.items() if ".experts." in key}
    if name == "phimoe":
        biased = [key for key in named if "norm" in key or "self_attn" in key or key == "lm_head.weight"]
        named |= {key.replace("weight", "bias"): named[key][:1] for key in biased}
    if name in ("deepseek_v3", "kimi_k2", "glm4_moe", "minimax_m2"):
        part = "block_sparse_moe" if name == "minimax_m2" else "mlp.gate"
        named |= {f"model.layers.{n}.{part}.e_score_correction_bias": (E,) for n in WITH_EXPERTS[name]}
    return _drawn(named)


def _latent_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer of latent attention."""
    low, rank, turned = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    queries: dict[str, tuple[int, ...]] = {"q_proj": (HEADS * (plain + turned), D)}
    if low is not None:
        queries = {"q_a_proj": (low, D), "q_a_layernorm": (low,), "q_b_proj": (HEADS * (plain + turned), low)}
    return queries | {
        "kv_a_proj_with_mqa": (rank + turned, D),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (HEADS * (plain + value), rank),
        "o_proj": (D, HEADS * value),
    }


def _mlp_shapes(name: str, layer: str, *, has_experts: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of an MLP, or of router and experts."""

    def mlp(prefix: str, size: int) -> dict[str, tuple[int, ...]]:
        up, down = (size, D), (D, size)
        return {f"{prefix}.{key}": shape for key, shape in (("gate_proj", up), ("up_proj", up), ("down_proj", down))}

    shapes: dict[str, tuple[int, ...]]
    if not has_experts:
        return mlp(f"{layer}.{'feed_forward' if name == 'llama4_text' else 'mlp'}", DENSE)
    if name == "llama4_text":
        part = f"{layer}.feed_forward"
        shapes = {f"{part}.router": (E, D), f"{part}.experts.gate_up_proj": (E, D, 2 * F)}
        return shapes | {f"{part}.experts.down_proj": (E, F, D)} | mlp(f"{part}.shared_expert", F)
    if name == "gpt_oss":
        shapes = {"router": (E, D), "experts.gate_up_proj": (E, D, 2 * F), "experts.down_proj": (E, F, D)}
        return {f"{layer}.mlp.{key}": shape for key, shape in shapes.items()}
    if name in GRANITE:
        shapes = {"block_sparse_moe.router.layer": (E, D)}
        shapes |= {"block_sparse_moe.input_linear": (E, 2 * F, D), "block_sparse_moe.output_linear": (E, D, F)}
        if name == "granitemoeshared":
            shapes |= {"shared_mlp.input_linear": (2 * SHARED, D), "shared_mlp.output_linear": (D, SHARED)}
        return {f"{layer}.{key}": shape for key, shape in shapes.items()}
    part = f"{layer}.block_sparse_moe" if name in AS_MIXTRAL else f"{layer}.mlp"
    shapes = {f"{part}.gate": (E, D)}
    for e in range(E):
        shapes |= mlp(f"{part}.experts.{e}", F)
    if name in AS_MIXTRAL:
        shapes = {
            f"{key.rpartition('.')[0]}.{MIXTRAL.get(key.rpartition('.')[2], 'gate')}": s for key, s in shapes.items()
        }
    if "n_shared_experts" in CONFIGS[name]:
        shapes |= mlp(f"{part}.shared_experts", F * CONFIGS[name]["n_shared_experts"])
    if name == "qwen2_moe":
        shapes |= mlp(f"{part}.shared_expert", SHARED) | {f"{part}.shared_expert_gate": (1, D)}
    return shapes


def _drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator) * 0.1 + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def packed(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights as transformers 5 keeps them in memory."""
    if name in ("llama4_text", "gpt_oss"):
        return tensors
    if name in GRANITE:
        memory = {
            "input_linear.weight": "experts.gate_up_proj",
            "output_linear.weight": "experts.down_proj",
            "router.layer.weight": "router.weight",
        }
        parts = {key: key.partition("block_sparse_moe.")[2] for key in tensors}
        return {key.removesuffix(part) + memory.get(part, part): tensors[key] for key, part in parts.items()}
    found = {key: tensor for key, tensor in tensors.items() if ".experts." not in key}
    for n in WITH_EXPERTS[name]:
        as_mixtral = name in AS_MIXTRAL
        here, there = f"model.layers.{n}.mlp", f"model.layers.{n}.{'block_sparse_moe' if as_mixtral else 'mlp'}"
        kinds = {key: MIXTRAL[key] if as_mixtral else key for key in MIXTRAL}
        of = {key: [tensors[f"{there}.experts.{e}.{kind}.weight"] for e in range(E)] for key, kind in kinds.items()}
        pairs = zip(of["gate_proj"], of["up_proj"], strict=True)
        found[f"{here}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        found[f"{here}.experts.down_proj"] = torch.stack(of["down_proj"])
        router = "router" if name == "phimoe" else "gate"
        found[f"{here}.{router}.weight"] = found.pop(f"{there}.gate.weight")
        if name == "minimax_m2":
            found[f"{here}.e_score_correction_bias"] = found.pop(f"{there}.e_score_correction_bias")
    return found


def write_family(folder: Path, name: str, *, is_packed: bool = False, **config: Any) -> Path:
    """A folder with such a model; `config` are other keys of its config.json."""
    folder.mkdir(parents=True)
    tensors = tensors_of_family(name)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | config))
    save_file(packed(name, tensors) if is_packed else tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
