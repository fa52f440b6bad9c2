"""GPT-NeoX (Pythia): attention and MLP side by side, each on a norm of its own, RoPE on a part of each head."""

from collections.abc import Iterator
from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import (
    LLAMA_NORMS,
    DecoderNames,
    decoder,
    read_decoder,
    write_activation,
    write_decoder,
)
from megatronish.formats.hf.family import ConfigJson, FamilyTensors, ModelFamily
from megatronish.formats.hf.fused_rows import rules_by_head
from megatronish.formats.hf.llama import ROWS
from megatronish.formats.hf.rope import PARTIAL
from megatronish.formats.tensor_rule import TensorRule

_NAMES = DecoderNames(
    base="gpt_neox",
    tokens="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}",
    norms=LLAMA_NORMS,
    out="attention.dense",
    fc1=("mlp.dense_h_to_4h",),
    fc2="mlp.dense_4h_to_h",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
)
_GPT_NEOX = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
    "hidden_act": "gelu",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "attention_bias": True,
    "eos_token_id": 2,
}
_OLD_ROPE = {"rotary_pct": PARTIAL, "rotary_emb_base": "rope_theta"}


def _read_gpt_neox(config: ConfigJson) -> dict[str, Any]:
    of_attention = config.flag("attention_bias")
    # Two names of RoPE's keys are its own, and the usual ones are not read. Every head has keys and values of its own.
    own = {key: value for key, value in config.values.items() if key not in _OLD_ROPE.values()}
    names = {_OLD_ROPE.get(key, key): value for key, value in own.items()}
    usual = ConfigJson(config.path, names | {"num_key_value_heads": None}, {})
    return {
        **read_decoder(usual, turned=0.25, gated=False),
        "normalization": "LayerNorm",
        "norm_epsilon": config.number("layer_norm_eps"),
        "norm_placement": "parallel_norms" if config.flag("use_parallel_residual") else "pre",
        "disable_bias_linear": not of_attention,
        "add_mlp_bias": not of_attention,
        "hidden_dropout": config.number("hidden_dropout"),
    }


def _write_gpt_neox(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    keys = write_decoder(model, seq_length, turned=True)
    del keys["num_key_value_heads"]
    keys = {{new: old for old, new in _OLD_ROPE.items()}.get(key, key): value for key, value in keys.items()}
    return {
        **keys,
        "hidden_act": write_activation(model, tanh="gelu_new"),
        "layer_norm_eps": model.norm_epsilon,
        "use_parallel_residual": model.norm_placement == "parallel_norms",
        "attention_bias": model.attention_bias,
        "hidden_dropout": model.hidden_dropout,
    }


def _qkv(model: ModelConfig, ours: str, theirs: str) -> Iterator[TensorRule]:
    return rules_by_head(model, ours, f"{theirs}.attention.query_key_value")


def _published(name: str) -> str:
    return name.replace("lm_head.", "embed_out.") if name.startswith("lm_head.") else name


def _left_out(_model: ModelConfig, name: str) -> str | None:
    if name.endswith((".attention.bias", ".attention.masked_bias")):
        return "a buffer that follows from config.json"
    return None


_TENSORS: FamilyTensors = decoder(_NAMES, qkv=_qkv)._replace(new_name=_published, left_out=_left_out)
GPT_NEOX = ModelFamily(
    "GPTNeoXForCausalLM", ROWS, _GPT_NEOX, {}, _read_gpt_neox, _write_gpt_neox, lambda _model: None, _TENSORS
)
