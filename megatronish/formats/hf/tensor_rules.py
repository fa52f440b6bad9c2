"""Tensors of each Hugging Face family: rules between the names and shapes of transformers and ours.

GPT-2 keeps its linear weights transposed, and queries, keys and values in one tensor. BLOOM keeps these in one tensor
too, head by head: a head's query, key and value. Llama and its descendants (Mistral, Qwen, OLMoE) keep them in three.
Gate and up-projection are two tensors there and one here. RoPE turns the two halves of a head in all families, as here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatronish.config.model import ModelConfig
from megatronish.formats.hf.tensor_experts import MIXTRAL_NAMES, ExpertNames, expert_tensors
from megatronish.formats.weights import TensorRule

HEAD = "lm_head.weight"


# GPT-2


def gpt2_tensors(model: ModelConfig) -> Iterator[TensorRule]:
    """Rules of GPT-2's tensors, embedding first."""
    yield TensorRule("embedding.tokens.weight", ("transformer.wte.weight",))
    yield TensorRule("embedding.positions.weight", ("transformer.wpe.weight",))
    for n in range(model.num_layers):
        ours, theirs = f"layers.{n}", f"transformer.h.{n}"
        yield from same_tensors(f"{ours}.attention_norm", f"{theirs}.ln_1", bias=True)
        yield from _transposed(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn")
        yield from _transposed(f"{ours}.attention.out", f"{theirs}.attn.c_proj")
        yield from same_tensors(f"{ours}.mlp_norm", f"{theirs}.ln_2", bias=True)
        yield from _transposed(f"{ours}.mlp.fc1", f"{theirs}.mlp.c_fc")
        yield from _transposed(f"{ours}.mlp.fc2", f"{theirs}.mlp.c_proj")
    yield from same_tensors("final_norm", "transformer.ln_f", bias=True)
    if not model.tied:
        yield TensorRule("head.weight", (HEAD,))


def _transposed(ours: str, theirs: str) -> Iterator[TensorRule]:
    """Rules of a linear layer whose weight is [in, out] there and [out, in] here."""
    yield TensorRule(f"{ours}.weight", (f"{theirs}.weight",), lambda parts: parts[0].t(), lambda whole: (whole.t(),))
    yield TensorRule(f"{ours}.bias", (f"{theirs}.bias",))


# BLOOM


def bloom_tensors(model: ModelConfig) -> Iterator[TensorRule]:
    """Rules of BLOOM's tensors, embedding first."""
    yield TensorRule("embedding.tokens.weight", ("transformer.word_embeddings.weight",))
    yield from same_tensors("embedding.norm", "transformer.word_embeddings_layernorm", bias=True)
    for n in range(model.num_layers):
        ours, theirs = f"layers.{n}", f"transformer.h.{n}"
        yield from same_tensors(f"{ours}.attention_norm", f"{theirs}.input_layernorm", bias=True)
        for kind in ("weight", "bias"):
            yield TensorRule(
                f"{ours}.attention.qkv.{kind}",
                (f"{theirs}.self_attention.query_key_value.{kind}",),
                partial(_sections_of_heads, heads=model.num_attention_heads),
                partial(_heads_of_sections, heads=model.num_attention_heads),
            )
        yield from same_tensors(f"{ours}.attention.out", f"{theirs}.self_attention.dense", bias=True)
        yield from same_tensors(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", bias=True)
        yield from same_tensors(f"{ours}.mlp.fc1", f"{theirs}.mlp.dense_h_to_4h", bias=True)
        yield from same_tensors(f"{ours}.mlp.fc2", f"{theirs}.mlp.dense_4h_to_h", bias=True)
    yield from same_tensors("final_norm", "transformer.ln_f", bias=True)
    if not model.tied:
        yield TensorRule("head.weight", (HEAD,))


def _sections_of_heads(parts: Sequence[Tensor], *, heads: int) -> Tensor:
    """Rows [N, 3, H] of each head's query, key and value -> rows [3, N, H] of all queries, all keys, all values."""
    return parts[0].unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def _heads_of_sections(whole: Tensor, *, heads: int) -> tuple[Tensor]:
    """Rows of all queries, all keys, all values -> each head's query, key and value."""
    return (whole.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2),)


# Llama, Mistral, Qwen2, Qwen3, and their descendants with experts


def llama_tensors(model: ModelConfig, experts: ExpertNames | None = None) -> Iterator[TensorRule]:
    """Rules of the tensors of Llama and its descendants, embedding first; `experts` are the names of theirs."""
    queries, keys = (heads * model.head_size for heads in (model.num_attention_heads, model.num_kv_heads))
    yield TensorRule("embedding.tokens.weight", ("model.embed_tokens.weight",))
    for n in range(model.num_layers):
        ours, theirs = f"layers.{n}", f"model.layers.{n}"
        attention = f"{theirs}.self_attn"
        yield from same_tensors(f"{ours}.attention_norm", f"{theirs}.input_layernorm", bias=False)
        yield from stacked_tensors(
            f"{ours}.attention.qkv",
            [f"{attention}.{name}_proj" for name in "qkv"],
            (queries, keys, keys),
            bias=model.qkv_bias,
        )
        if model.qk_layernorm:
            yield from same_tensors(f"{ours}.attention.q_norm", f"{attention}.q_norm", bias=False)
            yield from same_tensors(f"{ours}.attention.k_norm", f"{attention}.k_norm", bias=False)
        yield from same_tensors(f"{ours}.attention.out", f"{attention}.o_proj", bias=model.linear_bias)
        yield from same_tensors(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", bias=False)
        if experts is None or not model.expert_layers[n]:
            yield from _mlp(f"{ours}.mlp", f"{theirs}.mlp", model.ffn_size, bias=model.linear_bias)
            continue
        yield from expert_tensors(model, experts, ours=ours, theirs=theirs)
        if (shared := model.moe_shared_expert_intermediate_size) is not None:
            yield from _mlp(f"{ours}.mlp.shared", f"{theirs}.mlp.shared_expert", shared, bias=False)
            yield TensorRule(f"{ours}.mlp.shared_gate.weight", (f"{theirs}.mlp.shared_expert_gate.weight",))
    yield from same_tensors("final_norm", "model.norm", bias=False)
    if not model.tied:
        yield TensorRule("head.weight", (HEAD,))


def _mlp(ours: str, theirs: str, size: int, *, bias: bool) -> Iterator[TensorRule]:
    """Rules of a gated MLP."""
    yield from stacked_tensors(f"{ours}.fc1", [f"{theirs}.gate_proj", f"{theirs}.up_proj"], (size, size), bias=bias)
    yield from same_tensors(f"{ours}.fc2", f"{theirs}.down_proj", bias=bias)


def same_tensors(ours: str, theirs: str, *, bias: bool) -> Iterator[TensorRule]:
    """Rules of a weight, and of its bias, that are the same tensors here and there."""
    for kind in ("weight", "bias")[: 1 + bias]:
        yield TensorRule(f"{ours}.{kind}", (f"{theirs}.{kind}",))


def stacked_tensors(ours: str, theirs: Sequence[str], sizes: Sequence[int], *, bias: bool) -> Iterator[TensorRule]:
    """Rules of one tensor here whose rows are several tensors there, one below the other."""
    for kind in ("weight", "bias")[: 1 + bias]:
        yield TensorRule(
            f"{ours}.{kind}",
            tuple(f"{name}.{kind}" for name in theirs),
            lambda parts: torch.cat(tuple(parts)),
            partial(torch.split, split_size_or_sections=list(sizes)),
        )


class FamilyTensors(NamedTuple):
    """Tensors of a family: the prefix of all except the head in transformers, and the rules, embedding first.

    `experts` are the names of single experts, where a family has them: packed ones are read under these.
    """

    base: str
    rules: Callable[[ModelConfig], Iterable[TensorRule]]
    experts: ExpertNames | None = None


def _with_experts(names: ExpertNames) -> FamilyTensors:
    return FamilyTensors("model", partial(llama_tensors, experts=names), names)


_LLAMA_TENSORS = FamilyTensors("model", llama_tensors)
_MOE_TENSORS = _with_experts(ExpertNames())

FAMILY_TENSORS: dict[str, FamilyTensors] = {
    "gpt2": FamilyTensors("transformer", gpt2_tensors),
    "bloom": FamilyTensors("transformer", bloom_tensors),
    "llama": _LLAMA_TENSORS,
    "mistral": _LLAMA_TENSORS,
    "qwen2": _LLAMA_TENSORS,
    "qwen3": _LLAMA_TENSORS,
    "mixtral": _with_experts(MIXTRAL_NAMES),
    "qwen2_moe": _MOE_TENSORS,
    "qwen3_moe": _MOE_TENSORS,
    "olmoe": _MOE_TENSORS,
}
"""Tensors of the families, by `model_type`, as in `FAMILIES` of families.py."""
