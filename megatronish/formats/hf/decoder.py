"""Decoders of Hugging Face: what their families have in common. Llama shares their keys, and GPT-2 nothing.

A family of these says which keys it has (`read`, `write`) and how its tensors are called (`DecoderNames`). Which norms
and biases there are follows from the model. What a family cannot describe follows, too: a model is one of the family if
its keys, written and read again, mean the same (config.py).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.family import ConfigJson, FamilyTensors
from megatronish.formats.hf.rope import BASE, read_rope, write_rope
from megatronish.formats.tensor_rule import TensorRule, concatenated_tensors, same_tensors

TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_PLAIN: dict[str, dict[str, bool]] = {
    "gelu": {},
    **{name: {"openai_gelu": True} for name in TANH},
    "relu": {"relu": True},
    "relu2": {"squared_relu": True},
}
_GATED: dict[str, dict[str, bool]] = {
    "silu": {"swiglu": True},
    "swish": {"swiglu": True},
    **{name: {"geglu": True} for name in TANH},
}
_NAMES = {"gelu": "gelu", "relu": "relu", "squared_relu": "relu2", "swiglu": "silu"}

LLAMA_NORMS = MappingProxyType({"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})


class DecoderNames(NamedTuple):
    """Names of a family's tensors; those of a layer follow its own, `layer` with its number.

    `norms` are those of our norms. `qkv` and `fc1` are several layers that are one here, or one. `join` and `split`
    are of a fused qkv whose rows are in another order.
    """

    base: str = "model"
    tokens: str = "model.embed_tokens"
    layer: str = "model.layers.{}"
    norms: Mapping[str, str] = LLAMA_NORMS
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    fc1: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    fc2: str = "mlp.down_proj"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    positions: str = ""


def norm_tensors(model: ModelConfig, ours: str, theirs: str) -> Iterator[TensorRule]:
    """Rules of a norm of the residual stream: what it learns."""
    if model.norm_parameters != "none":
        has_bias = model.normalization == "LayerNorm" and model.norm_parameters == "all"
        yield from same_tensors(ours, theirs, bias=has_bias)


def norms_of(model: ModelConfig) -> tuple[str, ...]:
    """Norms of a layer, under our names."""
    return {
        "output": ("attention_output_norm", "mlp_output_norm"),
        "sandwich": ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm"),
        "parallel": ("attention_norm",),
    }.get(model.placement, ("attention_norm", "mlp_norm"))


def decoder_tensors(
    model: ModelConfig,
    names: DecoderNames,
    *,
    qkv: Callable[[ModelConfig, str, str], Iterator[TensorRule]] | None = None,
    qk_norms: Callable[[ModelConfig, str, str], Iterator[TensorRule]] | None = None,
) -> Iterator[TensorRule]:
    """Rules of all tensors, embedding first; `qkv` and `qk_norms` are those of a layer, where they are not usual."""
    yield TensorRule("embedding.tokens.weight", (f"{names.tokens}.weight",))
    if model.position_embedding_type == "learned_absolute":
        yield TensorRule("embedding.positions.weight", (f"{names.positions}.weight",))
    for n in range(model.num_layers):
        ours, theirs = f"layers.{n}", names.layer.format(n)
        for norm in norms_of(model):
            yield from norm_tensors(model, f"{ours}.{norm}", f"{theirs}.{names.norms[norm]}")
        yield from (qkv or partial(_qkv, names=names))(model, f"{ours}.attention.qkv", theirs)
        if model.qk_layernorm:
            yield from (qk_norms or partial(_qk_norms, names=names))(model, f"{ours}.attention", theirs)
        yield from same_tensors(f"{ours}.attention.out", f"{theirs}.{names.out}", bias=model.attention_bias)
        fc1 = [f"{theirs}.{name}" for name in names.fc1[: 1 if len(names.fc1) == 1 else 1 + model.is_gated]]
        yield from _rows(f"{ours}.mlp.fc1", fc1, (model.ffn_size,) * 2, bias=model.mlp_bias)
        yield from same_tensors(f"{ours}.mlp.fc2", f"{theirs}.{names.fc2}", bias=model.mlp_bias)
    yield from norm_tensors(model, "final_norm", names.final_norm)
    if not model.tied:
        yield TensorRule("head.weight", (f"{names.head}.weight",))
    if model.add_output_bias:
        yield TensorRule("head.bias", (f"{names.head}.bias",))


def decoder(names: DecoderNames, **others: Any) -> FamilyTensors:
    """Tensors of a family."""
    return FamilyTensors(names.base, partial(decoder_tensors, names=names, **others), head=f"{names.head}.weight")


def _rows(ours: str, theirs: list[str], sizes: tuple[int, ...], *, bias: bool) -> Iterator[TensorRule]:
    if len(theirs) == 1:
        return same_tensors(ours, theirs[0], bias=bias)
    return concatenated_tensors(ours, theirs, sizes, bias=bias)


def _qkv(model: ModelConfig, ours: str, theirs: str, *, names: DecoderNames) -> Iterator[TensorRule]:
    sizes = tuple(heads * model.head_size for heads in (model.num_attention_heads, *[model.num_kv_heads] * 2))
    return _rows(ours, [f"{theirs}.{name}" for name in names.qkv], sizes, bias=model.qkv_bias)


def _qk_norms(model: ModelConfig, ours: str, theirs: str, *, names: DecoderNames) -> Iterator[TensorRule]:
    has_bias = model.normalization == "LayerNorm" and model.norm_parameters == "all" and not model.qk_layernorm_by_head
    for name, their_name in zip("qk", names.qk_norms, strict=True):
        yield from same_tensors(f"{ours}.{name}_norm", f"{theirs}.{their_name}", bias=has_bias)


# Keys


def read_decoder(
    config: ConfigJson,
    *,
    rope: float = BASE,
    turned: float | None = None,
    activation: str = "hidden_act",
    gated: bool = True,
) -> dict[str, Any]:
    """Sizes, heads, RoPE and dropout, from the usual keys, of a model without biases.

    `rope` is the base that an absent key means, `turned` the part of a head that RoPE turns where no key says it, in a
    family that has such a key. `activation` is the key of that; `gated`: the MLP has a gate.
    """
    heads, hidden_size = config.whole("num_attention_heads"), config.whole("hidden_size")
    if "head_dim" not in config.values and hidden_size % heads:
        config.refuse("num_attention_heads", f"must divide hidden_size={hidden_size}", remedy="correct config.json")
    kv_heads = config.whole("num_key_value_heads", null=heads)
    return {
        "num_layers": config.whole("num_hidden_layers"),
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "ffn_hidden_size": config.whole("intermediate_size"),
        "kv_channels": config.whole("head_dim", null=max(1, hidden_size // heads)),
        "group_query_attention": kv_heads != heads,
        "num_query_groups": kv_heads,
        "max_position_embeddings": config.whole("max_position_embeddings"),
        "position_embedding_type": "rope",
        **read_rope(config, base=rope, turned=turned),
        "normalization": "RMSNorm",
        "disable_bias_linear": True,
        **read_activation(config, activation, gated=gated),
        "attention_dropout": config.number("attention_dropout"),
        "hidden_dropout": 0.0,
    }


def write_decoder(model: ModelConfig, seq_length: int, *, turned: bool = False) -> dict[str, Any]:
    """Keys of sizes, heads, RoPE and dropout; `turned`: the family has a key of the part of a head that RoPE turns."""
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "hidden_act": write_activation(model),
        "max_position_embeddings": seq_length,
        **write_rope(model, turned=turned),
        "attention_dropout": model.attention_dropout,
    }


def read_activation(config: ConfigJson, key: str, *, gated: bool) -> dict[str, Any]:
    """Fields of the activation of an MLP, with a gate or without."""
    known, kind = _GATED if gated else _PLAIN, config.values.get(key)
    if not isinstance(kind, str) or kind not in known:
        config.refuse(key, f"is not supported; {', '.join(known)} are")
    return {**dict.fromkeys(("swiglu", "geglu", "relu", "squared_relu", "openai_gelu"), False), **known[kind]}


def write_activation(model: ModelConfig, *, tanh: str = "gelu_pytorch_tanh") -> str:
    """Name of the activation of an MLP; `tanh` is that of GELU in its tanh form."""
    return _NAMES.get(model.activation, tanh)


def equal(first: float, second: float) -> bool:
    """Whether two numbers are the same except for rounding."""
    return abs(first - second) <= 1e-9 * abs(second)


def whole_if_equal(number: float) -> float:
    """The whole number that it is except for rounding, or itself."""
    return round(number) if equal(number, round(number)) else number
