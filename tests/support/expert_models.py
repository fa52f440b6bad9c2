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
for _name, _config in CONFIGS.items():
    _config["model_type"] = _name
WITH_EXPERTS = {"mixtral": (0, 1), "qwen2_moe": (1,), "qwen3_moe": (1,), "olmoe": (0, 1)} | dict.fromkeys(LATENT, (1,))
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


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
        if name in ("qwen3_moe", "olmoe"):
            across = name == "olmoe"
            shapes[f"{layer}.self_attn.q_norm"] = (queries if across else size,)
            shapes[f"{layer}.self_attn.k_norm"] = (keys if across else size,)
        shapes |= _mlp_shapes(name, layer, has_experts=n in WITH_EXPERTS[name])
    shapes |= {"model.norm": (D,), "lm_head": (VOCABULARY, D)}
    named = {f"{key}.weight": shape for key, shape in shapes.items()}
    if name == "qwen2_moe":
        named |= {
            key.replace("weight", "bias"): shape[:1]
            for key, shape in named.items()
            if key[-13] in "qkv" and "_proj" in key and "self_attn" in key
        }
    if config.get("scoring_func") == "sigmoid":
        named |= {f"model.layers.{n}.mlp.gate.e_score_correction_bias": (E,) for n in WITH_EXPERTS[name]}
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

    if not has_experts:
        return mlp(f"{layer}.mlp", DENSE)
    part = f"{layer}.block_sparse_moe" if name == "mixtral" else f"{layer}.mlp"
    shapes: dict[str, tuple[int, ...]] = {f"{part}.gate": (E, D)}
    for e in range(E):
        shapes |= mlp(f"{part}.experts.{e}", F)
    if name == "mixtral":
        shapes = {
            f"{key.rpartition('.')[0]}.{MIXTRAL.get(key.rpartition('.')[2], 'gate')}": s for key, s in shapes.items()
        }
    if name in LATENT:
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
    found = {key: tensor for key, tensor in tensors.items() if ".experts." not in key}
    for n in WITH_EXPERTS[name]:
        here, there = f"model.layers.{n}.mlp", f"model.layers.{n}.{'block_sparse_moe' if name == 'mixtral' else 'mlp'}"
        kinds = {key: MIXTRAL[key] if name == "mixtral" else key for key in MIXTRAL}
        of = {key: [tensors[f"{there}.experts.{e}.{kind}.weight"] for e in range(E)] for key, kind in kinds.items()}
        pairs = zip(of["gate_proj"], of["up_proj"], strict=True)
        found[f"{here}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        found[f"{here}.experts.down_proj"] = torch.stack(of["down_proj"])
        found[f"{here}.gate.weight"] = found.pop(f"{there}.gate.weight")
    return found


def write_family(folder: Path, name: str, *, is_packed: bool = False, **config: Any) -> Path:
    """A folder with such a model; `config` are other keys of its config.json."""
    folder.mkdir(parents=True)
    tensors = tensors_of_family(name)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | config))
    save_file(packed(name, tensors) if is_packed else tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
