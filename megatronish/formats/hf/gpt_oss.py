"""gpt-oss (20B, 120B): experts with biases in every layer, sinks, a window in every second layer, a stretched RoPE.

The experts of a layer are four tensors: `gate_up_proj` [E, D, 2 F], in which the gate of a feature stands before its
up-projection, `down_proj` [E, F, D], and the bias of each. As published the first and the third are in 4 bits
(quantised.py).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import read_decoder, write_decoder
from megatronish.formats.hf.experts import is_normalised, not_experts_alone, read_experts
from megatronish.formats.hf.family import CORRECT, ConfigJson, ExpertNames, FamilyTensors, ModelFamily, first_true
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS, llama_tensors
from megatronish.formats.hf.rope import ORIGINAL
from megatronish.formats.hf.window import read_layer_types, write_layer_types
from megatronish.formats.tensor_rule import TensorRule

if TYPE_CHECKING:
    from torch import Tensor

_ALPHA, _OFFSET = 1.702, 1.0  # of the gate, and of the up-projection
_BASE = 150000.0
_STRETCHED = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    ORIGINAL: 4096,
}
"""RoPE where config.json says nothing of it."""
_GPT_OSS = LLAMA_DEFAULTS | {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": _ALPHA,
    "swiglu_limit": 7.0,
}
_SAME_AS = {"experts_per_token": "num_experts_per_tok", "initial_context_length": ORIGINAL}
"""Keys of the published files that say again what another one says."""


# Keys


def _read_gpt_oss(config: ConfigJson) -> dict[str, Any]:
    ropes = [config.values.get(key) for key in ("rope_scaling", "rope_parameters")]
    if not any(ropes):
        theta = config.number("rope_theta", null=_BASE)
        config = ConfigJson(config.path, {**config.values, "rope_scaling": _STRETCHED, "rope_theta": theta}, {})
    config.must_be("hidden_act", "silu", "swish", why="is not supported; silu is")
    config.must_be("swiglu_alpha", _ALPHA, why=f"is not supported: gates are multiplied by {_ALPHA} in a sigmoid")
    fields = {
        **read_decoder(config, rope=_BASE),
        "norm_epsilon": config.number("rms_norm_eps"),
        **dict.fromkeys(("swiglu", "geglu"), False),
        "quick_geglu": True,
        "glu_linear_offset": _OFFSET,
        "activation_func_clamp_value": config.number("swiglu_limit"),
        "softmax_type": "learnable",
        "add_attention_bias": config.flag("attention_bias"),
        **read_layer_types(config, every=2),
        **read_experts(config, number="num_local_experts", width="intermediate_size"),
        "moe_add_bias_linear": True,
    }
    again = {"experts_per_token": fields["moe_router_topk"]}
    if fields.get("rope_scaling_type", "none") != "none":
        again["initial_context_length"] = fields.get("rope_original_max_positions")
    for key, other in again.items():
        if other is not None and config.values.get(key) not in (None, other):
            config.refuse(key, f"contradicts {_SAME_AS[key]}={other}", remedy=CORRECT)
    return fields


def _write_gpt_oss(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    keys = write_decoder(model, seq_length)
    return {
        **keys,
        # Without a RoPE that is said to be plain transformers stretches it.
        "rope_scaling": keys["rope_scaling"] or {"rope_type": "default"},
        "hidden_act": "silu",
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.attention_bias,
        **write_layer_types(model),
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": model.activation_func_clamp_value,
        "intermediate_size": model.expert_ffn_size,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
    }


def _lacks(model: ModelConfig) -> str | None:
    return not_experts_alone(model) or first_true(
        {
            "no activation_func_clamp_value": model.activation_func_clamp_value is None,
            "moe_router_pre_softmax without moe_router_norm_topk_prob": not is_normalised(model),
        }
    )


# Tensors


def _tensors(model: ModelConfig) -> Iterator[TensorRule]:
    """Rules of all tensors, embedding first."""
    yield from llama_tensors(model, _layer_tensors)


def _layer_tensors(_model: ModelConfig, ours: str, theirs: str) -> Iterator[TensorRule]:
    """Rules of the sinks, the router and the experts of a layer."""
    yield TensorRule(f"{ours}.attention.sinks", (f"{theirs}.self_attn.sinks",))
    yield TensorRule(f"{ours}.mlp.router.weight", (f"{theirs}.mlp.router.weight",))
    yield TensorRule(f"{ours}.mlp.router.logit_bias", (f"{theirs}.mlp.router.bias",))
    rule, our_experts, experts = partial(TensorRule, by_row=True), f"{ours}.mlp.experts", f"{theirs}.mlp.experts"
    yield rule(f"{our_experts}.gate_up.weight", (f"{experts}.gate_up_proj",), _apart, _in_turn)
    yield rule(f"{our_experts}.gate_up.bias", (f"{experts}.gate_up_proj_bias",), _pairs_apart, _pairs)
    yield rule(f"{our_experts}.down.weight", (f"{experts}.down_proj",), _turned, _turned_back)
    yield rule(f"{our_experts}.down.bias", (f"{experts}.down_proj_bias",))


def _pairs_apart(parts: "Sequence[Tensor]") -> "Tensor":
    """[E, 2 F, ...], gate and up-projection of each feature -> [E, 2, F, ...]."""
    return parts[0].unflatten(1, (-1, 2)).transpose(1, 2)


def _pairs(stack: "Tensor") -> "Sequence[Tensor]":
    """[E, 2, F, ...] -> [E, 2 F, ...]."""
    return (stack.transpose(1, 2).flatten(1, 2),)


def _apart(parts: "Sequence[Tensor]") -> "Tensor":
    """[E, D, 2 F] -> [E, 2, F, D]."""
    return _pairs_apart((parts[0].transpose(1, 2),))


def _in_turn(stack: "Tensor") -> "Sequence[Tensor]":
    """[E, 2, F, D] -> [E, D, 2 F]."""
    return (_pairs(stack)[0].transpose(1, 2),)


def _turned(parts: "Sequence[Tensor]") -> "Tensor":
    """[E, F, D] -> [E, D, F]."""
    return parts[0].transpose(1, 2)


def _turned_back(stack: "Tensor") -> "Sequence[Tensor]":
    """[E, D, F] -> [E, F, D]."""
    return (stack.transpose(1, 2),)


GPT_OSS = ModelFamily(
    "GptOssForCausalLM",
    ROWS,
    _GPT_OSS,
    {"num_experts": "num_local_experts"},
    _read_gpt_oss,
    _write_gpt_oss,
    _lacks,
    FamilyTensors("model", _tensors, ExpertNames(is_packed=True, says_turned=True)),
)
