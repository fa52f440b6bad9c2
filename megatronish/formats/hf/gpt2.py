"""GPT-2: keys of its config.json, and its tensors, whose linear weights are transposed."""

from collections.abc import Iterator
from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.family import HEAD, ConfigJson, FamilyTensors, ModelFamily, first_true, not_gpt_block
from megatronish.formats.tensor_rule import TensorRule, same_tensors, transposed_tensors

_GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh", "gelu": "exact", "relu2": "relu2"}


def _read_gpt2(config: ConfigJson) -> dict[str, Any]:
    config.must_be("scale_attn_weights", True, why="leaves attention unscaled, which is not supported")
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        config.must_be(key, False, None, why="is not supported")
    kind = config.values["activation_function"]
    if not isinstance(kind, str) or kind not in _GELU:
        config.refuse("activation_function", f"is not supported; {', '.join(_GELU)} are")
    hidden_size = config.whole("n_embd")
    return {
        "num_layers": config.whole("n_layer"),
        "hidden_size": hidden_size,
        "num_attention_heads": config.whole("n_head"),
        "ffn_hidden_size": config.whole("n_inner", null=4 * hidden_size),
        "max_position_embeddings": config.whole("n_positions"),
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": config.number("layer_norm_epsilon"),
        "swiglu": False,
        "openai_gelu": _GELU[kind] == "tanh",
        "squared_relu": _GELU[kind] == "relu2",
        "disable_bias_linear": False,
        "attention_dropout": config.number("attn_pdrop"),
        "hidden_dropout": config.number("resid_pdrop"),
    }


def _write_gpt2(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        "n_positions": seq_length,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_size,
        "activation_function": "gelu_new" if model.openai_gelu else "relu2" if model.squared_relu else "gelu",
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "layer_norm_epsilon": model.norm_epsilon,
    }


def _not_gpt2(model: ModelConfig) -> str | None:
    positions = model.position_embedding_type
    own = {
        f"position_embedding_type={positions}": positions != "learned_absolute",
        "embed_layernorm": model.embed_layernorm,
        "swiglu": model.swiglu,
    }
    return first_true(own) or not_gpt_block(model)


_GPT2 = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    "eos_token_id": 50256,
}
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def gpt2_tensors(model: ModelConfig) -> Iterator[TensorRule]:
    """Rules of GPT-2's tensors, embedding first."""
    yield TensorRule("embedding.tokens.weight", ("transformer.wte.weight",))
    yield TensorRule("embedding.positions.weight", ("transformer.wpe.weight",))
    for n in range(model.num_layers):
        ours, theirs = f"layers.{n}", f"transformer.h.{n}"
        yield from same_tensors(f"{ours}.attention_norm", f"{theirs}.ln_1", bias=True)
        yield from transposed_tensors(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn")
        yield from transposed_tensors(f"{ours}.attention.out", f"{theirs}.attn.c_proj")
        yield from same_tensors(f"{ours}.mlp_norm", f"{theirs}.ln_2", bias=True)
        yield from transposed_tensors(f"{ours}.mlp.fc1", f"{theirs}.mlp.c_fc")
        yield from transposed_tensors(f"{ours}.mlp.fc2", f"{theirs}.mlp.c_proj")
    yield from same_tensors("final_norm", "transformer.ln_f", bias=True)
    if not model.tied:
        yield TensorRule("head.weight", (HEAD,))


GPT2 = ModelFamily(
    "GPT2LMHeadModel",
    "n_positions",
    _GPT2,
    _GPT2_ALIASES,
    _read_gpt2,
    _write_gpt2,
    _not_gpt2,
    FamilyTensors("transformer", gpt2_tensors),
)
