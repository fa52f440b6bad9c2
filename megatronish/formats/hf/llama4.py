"""Llama 4, its text alone: layers with RoPE that see chunks, others that see everything, experts with one a token.

Chunks are blocks of the fixed pattern (specs/block_pattern.py). The experts of a layer are two tensors in the files,
gate_up_proj [E, D, 2 F] and down_proj [E, F, D]. The norm of queries and keys comes after RoPE there and before it
here, which is the same: RoPE leaves the length of a head as it is.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatronish.config.layer_pattern import canonical
from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import read_decoder, write_decoder
from megatronish.formats.hf.experts import gated_mlp_tensors, read_experts
from megatronish.formats.hf.family import CORRECT, ConfigJson, ExpertNames, FamilyTensors, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS, llama_tensors
from megatronish.formats.hf.smollm3 import rotated_layers
from megatronish.formats.hf.window import FULL
from megatronish.formats.tensor_rule import TensorRule

if TYPE_CHECKING:
    from torch import Tensor

_CHUNKED, _CHUNK, _BASE = "chunked_attention", 8192, 500000.0
_LLAMA4 = LLAMA_DEFAULTS | {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "moe_layers": None,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": _CHUNK,
    "layer_types": None,
    "attn_temperature_tuning": True,
    "floor_scale": _CHUNK,
    "attn_scale": 0.1,
}


# Keys


def _read_llama4(config: ConfigJson) -> dict[str, Any]:
    config.must_be(
        "num_experts_per_tok", 1, why="is not supported: weights of several experts are not normalised there"
    )
    config.must_be("router_jitter_noise", None, 0, why="adds noise to the router in training, which is not supported")
    rotated, scale = rotated_layers(config), config.number("attn_scale")
    is_tuned = config.flag("attn_temperature_tuning") and scale > 0 and not all(rotated)
    width = config.whole("intermediate_size")
    return {
        **read_decoder(config, rope=_BASE),
        "rotary_interleaved": True,
        "norm_epsilon": config.number("rms_norm_eps"),
        "add_attention_bias": config.flag("attention_bias"),
        "no_rope_freq": None if all(rotated) else canonical(tuple(not each for each in rotated)),
        "qk_l2_norm": config.flag("use_qk_norm") and any(rotated),
        "attn_temperature_scale": scale if is_tuned else None,
        "attn_temperature_floor": config.whole("floor_scale"),
        **_read_chunks(config, rotated),
        "ffn_hidden_size": config.whole("intermediate_size_mlp"),
        **read_experts(config, number="num_local_experts", width="intermediate_size"),
        **_read_expert_layers(config),
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "moe_shared_expert_intermediate_size": width,
    }


def _read_chunks(config: ConfigJson, rotated: tuple[bool, ...]) -> dict[str, Any]:
    """Pattern of the layers in which a token sees its own chunk: those with RoPE, if layer_types does not say it."""
    kinds = config.values["layer_types"]
    if kinds is None:
        kinds = [_CHUNKED if each else FULL for each in rotated]
    if not isinstance(kinds, list) or len(kinds) != len(rotated) or any(kind not in (_CHUNKED, FULL) for kind in kinds):
        config.refuse("layer_types", f"must be a list of {_CHUNKED} and {FULL} for the layers", remedy=CORRECT)
    marks = tuple(kind == _CHUNKED for kind in kinds)
    if not any(marks):
        return {"attention_pattern": "none"}
    return {
        "attention_pattern": "fixed",
        "attention_block_size": config.whole("attention_chunk_size"),
        "attention_local_blocks": 1,
        "attention_global_blocks": 0,
        "window_attn_skip_freq": None if all(marks) else canonical(marks),
    }


def _read_expert_layers(config: ConfigJson) -> dict[str, Any]:
    """Which layers have experts: those of moe_layers, or every interleave_moe_layer_step-th."""
    number, named = config.whole("num_hidden_layers"), config.values["moe_layers"]
    if named is None:
        step = config.whole("interleave_moe_layer_step")
        named = [*range(step - 1, number, step)]
    if not isinstance(named, list) or not all(type(layer) is int and 0 <= layer < number for layer in named):
        config.refuse("moe_layers", f"must be a list of layers from 0 to {number - 1}", remedy=CORRECT)
    if not named:
        key = "interleave_moe_layer_step" if config.values["moe_layers"] is None else "moe_layers"
        config.refuse(key, "leaves no layer with experts, which this family has")
    marks = tuple(layer in named for layer in range(number))
    return {"moe_layer_freq": "1" if all(marks) else canonical(marks)}


def _write_llama4(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    chunked = model.windowed_layers
    return {
        **write_decoder(model, seq_length),
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.attention_bias,
        "intermediate_size": model.expert_ffn_size,
        "intermediate_size_mlp": model.ffn_size,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_layers": [layer for layer, has_experts in enumerate(model.expert_layers) if has_experts],
        "interleave_moe_layer_step": 1,
        "use_qk_norm": model.qk_l2_norm,
        "no_rope_layers": [int(each) for each in model.rotated_layers],
        "attention_chunk_size": model.attention_block_size if any(chunked) else _CHUNK,
        "layer_types": [_CHUNKED if each else FULL for each in chunked],
        "attn_temperature_tuning": model.attn_temperature_scale is not None,
        "floor_scale": model.attn_temperature_floor,
        "attn_scale": model.attn_temperature_scale or _LLAMA4["attn_scale"],
    }


# Tensors


def _tensors(model: ModelConfig) -> Iterator[TensorRule]:
    """Rules of all tensors, embedding first."""
    yield from llama_tensors(model, _expert_tensors, dense="feed_forward")


def _expert_tensors(model: ModelConfig, ours: str, theirs: str) -> Iterator[TensorRule]:
    """Rules of router, experts and shared expert of a layer."""
    part = f"{theirs}.feed_forward"
    yield TensorRule(f"{ours}.mlp.router.weight", (f"{part}.router.weight",))
    yield TensorRule(
        f"{ours}.mlp.experts.gate_up.weight", (f"{part}.experts.gate_up_proj",), _halves, _columns, by_row=True
    )
    yield TensorRule(f"{ours}.mlp.experts.down.weight", (f"{part}.experts.down_proj",), _turned, _columns, by_row=True)
    shared = model.moe_shared_expert_intermediate_size
    assert shared is not None
    yield from gated_mlp_tensors(f"{ours}.mlp.shared", f"{part}.shared_expert", shared, bias=False)


def _turned(parts: "Sequence[Tensor]") -> "Tensor":
    """[E, in, out] -> [E, out, in]."""
    return parts[0].transpose(1, 2)


def _halves(parts: "Sequence[Tensor]") -> "Tensor":
    """[E, D, 2 F] -> [E, 2, F, D]."""
    return _turned(parts).unflatten(1, (2, -1))


def _columns(stack: "Tensor") -> "Sequence[Tensor]":
    """[E, ..., in] -> [E, in, out], the dims between as one."""
    return (stack.flatten(1, -2).transpose(1, 2),)


def _lacks(model: ModelConfig) -> str | None:
    return None if model.moe_shared_expert_intermediate_size is not None else "no shared expert"


LLAMA4 = ModelFamily(
    "Llama4ForCausalLM",
    ROWS,
    _LLAMA4,
    {"num_experts": "num_local_experts"},
    _read_llama4,
    _write_llama4,
    _lacks,
    FamilyTensors("model", _tensors, ExpertNames("feed_forward")),
)
