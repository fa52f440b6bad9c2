"""BLOOM: keys of its config.json, and its tensors, which keep a head's query, key and value together.

transformers' own configuration has no sequence length, as ALiBi has no last position; BLOOM's config.json has one.
"""

from collections.abc import Iterator
from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.family import HEAD, ConfigJson, FamilyTensors, ModelFamily, first_true, not_gpt_block
from megatronish.formats.hf.fused_rows import rules_by_head
from megatronish.formats.tensor_rule import TensorRule, same_tensors


def _read_bloom(config: ConfigJson) -> dict[str, Any]:
    config.must_be("apply_residual_connection_post_layernorm", False, None, why="is not there")
    heads, hidden_size = config.whole("n_head"), config.whole("hidden_size")
    if hidden_size % heads:
        config.refuse("n_head", f"must divide hidden_size={hidden_size}", remedy="correct config.json")
    return {
        "num_layers": config.whole("n_layer"),
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "ffn_hidden_size": 4 * hidden_size,
        "max_position_embeddings": config.whole("seq_length"),
        "position_embedding_type": "alibi",
        "embed_layernorm": True,
        "normalization": "LayerNorm",
        "norm_epsilon": config.number("layer_norm_epsilon"),
        "openai_gelu": True,
        "attention_dropout": config.number("attention_dropout"),
        "hidden_dropout": config.number("hidden_dropout"),
    }


def _write_bloom(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "seq_length": seq_length,
        "layer_norm_epsilon": model.norm_epsilon,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
    }


def _not_bloom(model: ModelConfig) -> str | None:
    positions = model.position_embedding_type
    own = {
        f"position_embedding_type={positions}": positions != "alibi",
        "a model without embed_layernorm": not model.embed_layernorm,
        f"the activation {model.activation}": model.activation != "gelu_tanh",
        f"ffn_hidden_size={model.ffn_size}": model.ffn_size != 4 * model.hidden_size,
    }
    return first_true(own) or not_gpt_block(model)


_BLOOM = {
    "vocab_size": 250880,
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 8,
    "seq_length": 2048,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
_BLOOM_ALIASES = {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


def bloom_tensors(model: ModelConfig) -> Iterator[TensorRule]:
    """Rules of BLOOM's tensors, embedding first."""
    yield TensorRule("embedding.tokens.weight", ("transformer.word_embeddings.weight",))
    yield from same_tensors("embedding.norm", "transformer.word_embeddings_layernorm", bias=True)
    for n in range(model.num_layers):
        ours, theirs = f"layers.{n}", f"transformer.h.{n}"
        yield from same_tensors(f"{ours}.attention_norm", f"{theirs}.input_layernorm", bias=True)
        yield from rules_by_head(model, f"{ours}.attention.qkv", f"{theirs}.self_attention.query_key_value")
        yield from same_tensors(f"{ours}.attention.out", f"{theirs}.self_attention.dense", bias=True)
        yield from same_tensors(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", bias=True)
        yield from same_tensors(f"{ours}.mlp.fc1", f"{theirs}.mlp.dense_h_to_4h", bias=True)
        yield from same_tensors(f"{ours}.mlp.fc2", f"{theirs}.mlp.dense_4h_to_h", bias=True)
    yield from same_tensors("final_norm", "transformer.ln_f", bias=True)
    if not model.tied:
        yield TensorRule("head.weight", (HEAD,))


BLOOM = ModelFamily(
    "BloomForCausalLM",
    "seq_length",
    _BLOOM,
    _BLOOM_ALIASES,
    _read_bloom,
    _write_bloom,
    _not_bloom,
    FamilyTensors("transformer", bloom_tensors),
)
