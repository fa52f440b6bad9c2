"""Granite, and Granite with experts.

Granite: a Llama with factors of the embedding, the scores, what a sublayer adds, and the logits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, whole_if_equal
from megatronish.formats.hf.experts import is_normalised, not_experts_alone, read_experts
from megatronish.formats.hf.family import ConfigJson, ExpertNames, FamilyTensors, ModelFamily, first_true
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS, llama_tensors, read_llama, write_llama
from megatronish.formats.tensor_rule import TensorRule, same_tensors

if TYPE_CHECKING:
    from torch import Tensor

_FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_GRANITE_DEFAULTS = {key: value for key, value in LLAMA_DEFAULTS.items() if key != "head_dim"} | dict.fromkeys(
    _FACTORS, 1.0
)


def _read_granite(config: ConfigJson) -> dict[str, Any]:
    """Fields of a Granite, with experts or without."""
    for key in _FACTORS:
        if config.number(key) == 0:
            config.refuse(key, "leaves nothing of what it multiplies, or divides by zero", remedy="correct that line")
    return {
        **read_llama(config),
        "embedding_multiplier": config.number("embedding_multiplier"),
        "residual_multiplier": config.number("residual_multiplier"),
        "softmax_scale": config.number("attention_multiplier"),
        "logits_multiplier": 1 / config.number("logits_scaling"),
    }


def _write_granite(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    """Keys of a Granite, with experts or without."""
    keys = write_llama(model, seq_length)
    del keys["head_dim"]
    scale = model.softmax_scale
    return {
        **keys,
        "embedding_multiplier": model.embedding_multiplier,
        "residual_multiplier": model.residual_multiplier,
        "attention_multiplier": model.head_size**-0.5 if scale is None else scale,
        "logits_scaling": float(whole_if_equal(1 / model.logits_multiplier)),
    }


GRANITE = ModelFamily(
    "GraniteForCausalLM",
    ROWS,
    _GRANITE_DEFAULTS,
    {},
    _read_granite,
    _write_granite,
    lambda _model: None,
    decoder(DecoderNames()),
)


# Granite with experts (Granite 3 1B-A400M and 3B-A800M): packed ones in every layer; and with shared ones, too.
#
# The experts of a layer are two tensors in the files, `input_linear` [E, 2 F, D], gates before up-projections, and
# `output_linear` [E, D, F]; those that every token passes are two layers of these names.

_SHARED = "shared_intermediate_size"
_PUBLISHED = {
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
    "router.weight": "router.layer.weight",
}
"""Tensors of a layer's experts as transformers 5 keeps them in memory, and as they are published."""
_GRANITEMOE = _GRANITE_DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2}


# Keys


def _read_granitemoe(config: ConfigJson) -> dict[str, Any]:
    config.must_be("mlp_bias", False, None, why="is not supported: experts have no biases")
    return _read_granite(config) | read_experts(config, number="num_local_experts", width="intermediate_size")


def _read_granitemoeshared(config: ConfigJson) -> dict[str, Any]:
    width = config.whole(_SHARED, null=0, least=0)
    return _read_granitemoe(config) | {"moe_shared_expert_intermediate_size": width or None}


def _write_granitemoe(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    keys = _write_granite(model, seq_length)
    del keys["mlp_bias"]
    return {
        **keys,
        "intermediate_size": model.expert_ffn_size,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
    }


def _write_granitemoeshared(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {**_write_granitemoe(model, seq_length), _SHARED: model.moe_shared_expert_intermediate_size or 0}


def _lacks(model: ModelConfig) -> str | None:
    weights = {"moe_router_pre_softmax without moe_router_norm_topk_prob": not is_normalised(model)}
    return not_experts_alone(replace(model, moe_shared_expert_intermediate_size=None)) or first_true(weights)


# Tensors


def _tensors(model: ModelConfig) -> Iterator[TensorRule]:
    """Rules of all tensors, embedding first."""
    yield from llama_tensors(model, _expert_tensors)


def _expert_tensors(model: ModelConfig, ours: str, theirs: str) -> Iterator[TensorRule]:
    """Rules of router and experts of a layer."""
    part, shared = f"{theirs}.block_sparse_moe", f"{theirs}.shared_mlp"
    yield TensorRule(f"{ours}.mlp.router.weight", (f"{part}.router.layer.weight",))
    yield TensorRule(
        f"{ours}.mlp.experts.gate_up.weight", (f"{part}.input_linear.weight",), _halves, _whole, by_row=True
    )
    yield TensorRule(f"{ours}.mlp.experts.down.weight", (f"{part}.output_linear.weight",), by_row=True)
    if model.moe_shared_expert_intermediate_size is not None:
        yield from same_tensors(f"{ours}.mlp.shared.fc1", f"{shared}.input_linear", bias=False)
        yield from same_tensors(f"{ours}.mlp.shared.fc2", f"{shared}.output_linear", bias=False)


def _halves(parts: "Sequence[Tensor]") -> "Tensor":
    """[E, 2 F, D] -> [E, 2, F, D]."""
    return parts[0].unflatten(1, (2, -1))


def _whole(stack: "Tensor") -> "Sequence[Tensor]":
    """[E, 2, F, D] -> [E, 2 F, D]."""
    return (stack.flatten(1, 2),)


def _published(name: str) -> str:
    """Name of a tensor in the files of its family."""
    before, middle, last = name.partition(".block_sparse_moe.")
    return f"{before}{middle}{_PUBLISHED.get(last, last)}"


_TENSORS = FamilyTensors("model", _tensors, ExpertNames("block_sparse_moe"), new_name=_published)
_family = partial(ModelFamily, cannot_describe=_lacks, tensors=_TENSORS)
_ALIASES = {"num_experts": "num_local_experts"}

GRANITEMOE = _family("GraniteMoeForCausalLM", ROWS, _GRANITEMOE, _ALIASES, _read_granitemoe, _write_granitemoe)
GRANITEMOESHARED = _family(
    "GraniteMoeSharedForCausalLM",
    ROWS,
    _GRANITEMOE | {_SHARED: 0},
    _ALIASES,
    _read_granitemoeshared,
    _write_granitemoeshared,
)
