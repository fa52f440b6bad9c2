"""Falcon: four kinds of layers in one family, all with one fused projection of queries, keys and values.

    7B          attention and MLP side by side on one norm, one key/value head (`multi_query`)
    40B, 180B   side by side, on two norms, groups of queries (`new_decoder_architecture`)
    11B         the same on one norm (`num_ln_in_parallel_attn` 1)
    others      one after the other (`parallel_attn` false), with or without `multi_query` and `bias`

Those with ALiBi (RW) are refused: their biases are products of numbers rounded to bf16, which no slope makes.
"""

from collections.abc import Iterator
from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder_tensors, read_activation, write_activation
from megatronish.formats.hf.family import ConfigJson, FamilyTensors, ModelFamily, first_true
from megatronish.formats.hf.fused_rows import rules_by_head
from megatronish.formats.hf.llama import ROWS
from megatronish.formats.hf.rope import read_rope, write_rope
from megatronish.formats.tensor_rule import TensorRule

_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_TWO_NORMS = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}
_NAMES = DecoderNames(
    base="transformer",
    tokens="transformer.word_embeddings",
    layer="transformer.h.{}",
    out="self_attention.dense",
    fc1=("mlp.dense_h_to_4h",),
    fc2="mlp.dense_4h_to_h",
    final_norm="transformer.ln_f",
)
_FALCON = {
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "num_kv_heads": None,
    "ffn_hidden_size": None,
    "activation": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "alibi": False,
    "bias": False,
    "multi_query": True,
    "parallel_attn": True,
    "new_decoder_architecture": False,
    "num_ln_in_parallel_attn": None,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "tie_word_embeddings": True,
    "eos_token_id": 11,
}


def _read_falcon(config: ConfigJson) -> dict[str, Any]:
    config.must_be("apply_residual_connection_post_layernorm", False, None, why="is not there")
    if config.flag("alibi"):
        config.refuse("alibi", "adds distances that are rounded to bf16, also in fp32, and ALiBi here is exact")
    heads, hidden_size = config.whole("num_attention_heads"), config.whole("hidden_size")
    if hidden_size % heads:
        config.refuse("num_attention_heads", f"must divide hidden_size={hidden_size}", remedy="correct config.json")
    kv_heads = _kv_heads(config, heads)
    return {
        "num_layers": config.whole("num_hidden_layers"),
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "ffn_hidden_size": config.whole("ffn_hidden_size", null=4 * hidden_size),
        "group_query_attention": kv_heads != heads,
        "num_query_groups": kv_heads,
        "max_position_embeddings": config.whole(ROWS),
        "position_embedding_type": "rope",
        **read_rope(config),
        "normalization": "LayerNorm",
        "norm_epsilon": config.number("layer_norm_epsilon"),
        "norm_placement": _placement(config),
        "disable_bias_linear": not config.flag("bias"),
        **read_activation(config, "activation", gated=False),
        "attention_dropout": config.number("attention_dropout"),
        "hidden_dropout": config.number("hidden_dropout"),
    }


def _kv_heads(config: ConfigJson, heads: int) -> int:
    """Key/value heads: the number that is given counts in the newer architecture alone."""
    given = config.whole("num_kv_heads", null=heads)
    if config.flag("new_decoder_architecture"):
        if heads % given:
            config.refuse("num_kv_heads", f"must divide num_attention_heads={heads}", remedy="correct config.json")
        return given
    if config.flag("multi_query"):
        return 1
    if given != heads:
        config.refuse("num_kv_heads", f"must be num_attention_heads={heads} without new_decoder_architecture")
    return heads


def _placement(config: ConfigJson) -> str:
    """Where the norms of a layer are. What transformers builds and cannot run is refused."""
    is_new, norms = config.flag("new_decoder_architecture"), config.values["num_ln_in_parallel_attn"]
    if not config.flag("parallel_attn"):
        if is_new:
            config.refuse("parallel_attn", "has no meaning with new_decoder_architecture=true")
        return "pre"
    config.must_be("num_ln_in_parallel_attn", None, 1, 2, why="is not supported; 1 and 2 are")
    if norms == 2 and not is_new:
        config.refuse("num_ln_in_parallel_attn", "has no meaning with new_decoder_architecture=false")
    return "parallel_norms" if is_new and norms != 1 else "parallel"


def _write_falcon(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    heads, placement = model.num_attention_heads, model.norm_placement
    is_new = placement == "parallel_norms" or (placement == "parallel" and model.num_kv_heads not in (1, heads))
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": heads,
        "num_kv_heads": model.num_kv_heads if is_new else heads,
        "ffn_hidden_size": model.ffn_size,
        "activation": write_activation(model),
        ROWS: seq_length,
        **write_rope(model),
        "layer_norm_epsilon": model.norm_epsilon,
        "alibi": False,
        "bias": model.linear_bias,
        "multi_query": model.num_kv_heads == 1,
        "parallel_attn": placement != "pre",
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": (2 if placement == "parallel_norms" else 1) if is_new else None,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
    }


def _not_falcon(model: ModelConfig) -> str | None:
    positions = model.position_embedding_type
    return first_true({f"position_embedding_type={positions}": positions != "rope"})


def _falcon_tensors(model: ModelConfig) -> Iterator[TensorRule]:
    norms = _TWO_NORMS if model.norm_placement == "parallel_norms" else _NORMS
    return decoder_tensors(model, _NAMES._replace(norms=norms), qkv=_qkv)


def _qkv(model: ModelConfig, ours: str, theirs: str) -> Iterator[TensorRule]:
    return rules_by_head(model, ours, f"{theirs}.self_attention.query_key_value")


FALCON = ModelFamily(
    "FalconForCausalLM",
    ROWS,
    _FALCON,
    {"n_embed": "hidden_size"},
    _read_falcon,
    _write_falcon,
    _not_falcon,
    FamilyTensors("transformer", _falcon_tensors),
)
