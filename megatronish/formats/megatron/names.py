"""Tensors of Megatron-LM checkpoints: their names, their rules to ours, and how they are cut into ranks.

    latest_checkpointed_iteration.txt              a number, or `release`
    iter_0000100/ or release/
        mp_rank_TT/model_optim_rng.pt              of tensor rank TT, without pipeline
        mp_rank_TT_PPP/model_optim_rng.pt          of tensor rank TT and stage PPP
        mp_rank_TT_PPP_EEE/model_optim_rng.pt      of expert rank EEE, too, where experts are cut (grid.py)

Layers of multi-token prediction are mtp.layers.D there, D from 0 on; here they have the numbers after the others.

The names here are those of megatron-core's layers on Transformer Engine, Megatron-LM's default, with global layer
numbers: the norms before attention and MLP belong to the linear layers that follow them. Megatron-core's own layers
("local") and models older than megatron-core have other names for the same tensors; `canonical_name` translates them.

Rows of queries, keys and values are grouped by key/value head: the queries that share it, its key, its value. Gated
MLPs have the gate's rows before the up-projection's, on each rank.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.megatron import latent
from megatronish.formats.megatron.experts import SEQUENTIAL, expert_rules, expert_sharding
from megatronish.formats.megatron.our_arguments import check_counterpart
from megatronish.formats.tensor_rule import TensorRule
from megatronish.formats.weights import Description, is_bias
from megatronish.parallel.sharding import Cut, Piece, Sharding

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
FILE = "model_optim_rng.pt"

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
PREDICTED = re.compile(r"mtp\.layers\.(\d{1,9})\.(?:transformer_layer\.)?(.+)")
OF_PREDICTION = ("enorm.", "hnorm.", "eh_proj.", "final_layernorm.")
"""What a layer of multi-token prediction has around its transformer layer."""
BEFORE_CORE = "language_model."
BERT_HEAD = "lm_head.dense."  # in all versions; a T5 has an lm_head without it
CROSS_ATTENTION = ("cross_attention.", "inter_attention.")  # of decoders that read an encoder, since and before core
PREDICTION = "of multi-token prediction, of which its arguments say nothing"
NO_WEIGHTS = ("_extra_state", "inv_freq")  # states of Transformer Engine and buffers of old rotary embeddings

# Our modules and theirs; {} is weight or bias.
IN_A_LAYER = {
    "attention_norm": "self_attention.linear_qkv.layer_norm_{}",
    "attention.qkv": "self_attention.linear_qkv.{}",
    "attention.q_norm": "self_attention.q_layernorm.{}",
    "attention.k_norm": "self_attention.k_layernorm.{}",
    "attention": "self_attention.core_attention.softmax_offset",
    "attention.out": "self_attention.linear_proj.{}",
    "mlp_norm": "mlp.linear_fc1.layer_norm_{}",
    "mlp.fc1": "mlp.linear_fc1.{}",
    "mlp.fc2": "mlp.linear_fc2.{}",
    "embedding_norm": "enorm.{}",
    "hidden_norm": "hnorm.{}",
    "projection": "eh_proj.{}",
    "final_norm": "final_layernorm.{}",
} | latent.NAMES
AROUND_LAYERS = {
    "embedding.tokens": "embedding.word_embeddings.{}",
    "embedding.positions": "embedding.position_embeddings.{}",
    "final_norm": "decoder.final_layernorm.{}",
    "head": "output_layer.{}",
}
# Beginnings of names in other implementations, as patterns, and their replacements.
RENAMED_IN_A_LAYER = (
    {
        r"(input_layernorm|input_norm)\.": "self_attention.linear_qkv.layer_norm_",
        r"(pre_mlp_layernorm|post_attention_layernorm|post_attention_norm)\.": "mlp.linear_fc1.layer_norm_",
        r"(self_)?attention\.query_key_value\.": "self_attention.linear_qkv.",
        r"(self_)?attention\.dense\.": "self_attention.linear_proj.",
        r"(self_)?attention\.([qk])_(layer)?norm\.": r"self_attention.\2_layernorm.",
        r"mlp\.dense_h_to_4h\.": "mlp.linear_fc1.",
        r"mlp\.dense_4h_to_h\.": "mlp.linear_fc2.",
    }
    | SEQUENTIAL
    | latent.FUSED_NORMS
)
RENAMED = {
    r"language_model\.(encoder|transformer)\.layers\.": "decoder.layers.",
    r"language_model\.(encoder|transformer)\.(final_layernorm|final_norm)\.": "decoder.final_layernorm.",
    r"language_model\.(?=embedding\.|output_layer\.)": "",
    r"word_embeddings_for_head\.": "output_layer.",
}
LOCAL = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def canonical_name(name: str) -> str:
    """Name of a tensor in megatron-core on Transformer Engine, from its name in any implementation.

    The layer number stays as it is.
    """
    name = _renamed(name, RENAMED)
    if match := LAYER.fullmatch(name):
        return f"decoder.layers.{match[1]}.{_renamed(match[2], RENAMED_IN_A_LAYER)}"
    if match := PREDICTED.fullmatch(name):
        return f"mtp.layers.{match[1]}.{_renamed(match[2], RENAMED_IN_A_LAYER)}"
    return name


def numbered(name: str, model: ModelConfig) -> str:
    """A canonical name in which layers of multi-token prediction have the numbers after those of the model's others.

    Without such layers it stays as it is.
    """
    match = PREDICTED.fullmatch(name)
    if match is None or int(match[1]) >= model.num_depths:
        return name
    return f"decoder.layers.{model.num_layers + int(match[1])}.{match[2]}"


def name_of_layer(layer: int, rest: str, model: ModelConfig) -> str:
    """Name in a file of a tensor of a layer, whose number counts all layers: inverse of `numbered`."""
    if layer < model.num_layers:
        return f"decoder.layers.{layer}.{rest}"
    inner = "" if rest.startswith(OF_PREDICTION) else "transformer_layer."
    return f"mtp.layers.{layer - model.num_layers}.{inner}{rest}"


def has_experts(layer: int, model: ModelConfig) -> bool:
    """Whether a layer has experts; those of multi-token prediction are as the last of the others."""
    return model.expert_layers[min(layer, model.num_layers - 1)]


def _renamed(name: str, table: Mapping[str, str]) -> str:
    for pattern, replacement in table.items():
        if re.match(pattern, name):
            return re.sub(pattern, replacement, name, count=1)
    return name


def local_name(name: str) -> str:
    """Name of a tensor in megatron-core's own layers, from its name on Transformer Engine."""
    for theirs, other in LOCAL.items():
        name = name.replace(theirs, other)
    return name


def refuse_encoder(folder: Path, names: Collection[str]) -> None:
    """UserError for a BERT or a T5, which are known by names of tensors: `args` are the same for all models."""
    if any(part in name for name in names for part in CROSS_ATTENTION):
        raise UserError(
            f"{folder} holds a T5 of Megatron-LM, whose decoder has cross attention; its tensors are not read here; "
            "convert one of Hugging Face (--from hf), or train one with pretrain_t5.py"
        )
    if any(name.startswith(BERT_HEAD) for name in names):
        raise UserError(
            f"{folder} holds a BERT of Megatron-LM, which normalises before a sublayer and once after the last; BERT "
            "here is the published one, which normalises after each; convert one of Hugging Face (--from hf), or train "
            "one with pretrain_bert.py"
        )


def megatron_name(name: str) -> str:
    """Megatron-LM's name of our parameter, outside of expert layers."""
    module, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", module):
        return f"decoder.layers.{match[1]}." + IN_A_LAYER[match[2]].format(kind)
    return AROUND_LAYERS[module].format(kind)


def rules(description: Description, *, of_moments: bool = False) -> list[TensorRule]:
    """Rules for all tensors of a model; UserError for one that Megatron-LM cannot have.

    `of_moments`: for Adam's, which only parameters have, and which a number added to a weight does not change.
    """
    check_counterpart(description.model)
    tensor_rules: list[TensorRule] = []
    for name, sharding in description.shardings().items():
        if of_moments and is_bias(name):
            continue
        tensor_rules += _of_experts(name, sharding) or [_rule(name, description.model, is_shifted=not of_moments)]
    return tensor_rules


def _of_experts(name: str, sharding: Sharding) -> list[TensorRule]:
    """Rules of a tensor of an expert layer; none where it is that of a dense layer."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return [] if match is None else list(expert_rules(match[2], int(match[1]), sharding.shape))


def _rule(name: str, model: ModelConfig, *, is_shifted: bool) -> TensorRule:
    theirs = (megatron_name(name),)
    if ".attention.qkv." in name:
        return TensorRule(name, theirs, partial(sections_of, model=model), partial(groups_of, model=model))
    one_plus = model.apply_layernorm_1p != model.qk_layernorm_1p and not model.multi_latent_attention
    if is_shifted and one_plus and name.endswith(("q_norm.weight", "k_norm.weight")):
        # One flag of theirs is of all norms: of heads, too.
        more = 1 if model.apply_layernorm_1p else -1
        return TensorRule(name, theirs, lambda parts: parts[0] + more, lambda whole: (whole - more,))
    return TensorRule(name, theirs)


def sections_of(parts: Sequence[Tensor], *, model: ModelConfig) -> Tensor:
    """Rows [(N + 2 K) H, ...] grouped by key/value head -> all queries, all keys, all values, in the same shape."""
    size, shared = model.head_size, model.num_attention_heads // model.num_kv_heads
    # [K, (N/K + 2) H, ...]: N/K queries, one key and one value, each of H rows, for each of the K heads.
    groups = parts[0].unflatten(0, (model.num_kv_heads, (shared + 2) * size))
    return torch.cat([part.flatten(0, 1) for part in groups.split((shared * size, size, size), dim=1)])


def groups_of(whole: Tensor, *, model: ModelConfig) -> tuple[Tensor]:
    """Inverse of `sections_of`: all queries, keys, values -> rows [(N + 2 K) H, ...] grouped by key/value head."""
    heads, groups, size = model.num_attention_heads, model.num_kv_heads, model.head_size
    sections = whole.split((heads * size, groups * size, groups * size))
    return (torch.cat([part.unflatten(0, (groups, -1)) for part in sections], dim=1).flatten(0, 1),)


def cuts(description: Description, *, padded_vocab_size: int, cuts_ways_down: bool = False) -> dict[str, Sharding]:
    """Shardings of their tensors, by their names: shapes without padding, and the cuts of tensor parallelism.

    `cuts_ways_down`: those to latents are cut, too, as in megatron-core's own layers.
    """
    shardings: dict[str, Sharding] = {}
    for name, sharding in description.shardings().items():
        if of_experts := _of_experts(name, sharding):
            shardings |= {theirs: expert_sharding(theirs, sharding) for rule in of_experts for theirs in rule.theirs}
            continue
        theirs = megatron_name(name)
        if theirs in (EMBEDDING, HEAD):
            sharding = dataclasses.replace(sharding, cuts=(Cut(0, "tp", (padded_vocab_size,)),))
        elif theirs.endswith(".eh_proj.weight"):  # ours is whole on every rank
            sharding = dataclasses.replace(sharding, cuts=(Cut(0, "tp"),))
        elif (".linear_qkv." in theirs and sharding.cuts) or (cuts_ways_down and latent.WAY_DOWN.fullmatch(theirs)):
            sharding = dataclasses.replace(sharding, cuts=(Cut(0, "tp"),))  # groups stay whole; its norm is not cut
        shardings[theirs] = sharding
    return shardings


def local_shape(cut: Sharding, tp_size: int) -> tuple[int, ...]:
    """Shape of a rank's part of a tensor, with its padding."""
    shape = list(cut.shape)
    for dim, _, sections in cut.cuts:
        shape[dim] = sum(sections or (shape[dim],)) // tp_size
    return tuple(shape)


def place(piece: Piece, whole: Tensor) -> Tensor:
    """View of a piece's place in the global tensor, [*piece.sizes]."""
    for dim, (start, size) in enumerate(zip(piece.global_offset, piece.sizes, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole
