"""MPT: ALiBi, LayerNorms that learn a weight alone, no biases, an MLP of four times the hidden size, tied.

The settings of its attention are an object, `attn_config`. transformers passes over some of its keys, and of others of
the model, which the models' own code reads: where the two would compute something else, a model is refused.
"""

from types import MappingProxyType
from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder
from megatronish.formats.hf.family import CORRECT, ConfigJson, ModelFamily, first_true

_NAMES = DecoderNames(
    base="transformer",
    tokens="transformer.wte",
    layer="transformer.blocks.{}",
    norms=MappingProxyType({"attention_norm": "norm_1", "mlp_norm": "norm_2"}),
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    fc1=("ffn.up_proj",),
    fc2="ffn.down_proj",
    final_norm="transformer.norm_f",
)
_RATIO = 4  # of the MLP to the hidden size: transformers has no other
_BIAS_MAX = 8  # of ALiBi, by the same
_MPT = {
    "vocab_size": 50368,
    "d_model": 2048,
    "n_heads": 16,
    "n_layers": 24,
    "expansion_ratio": _RATIO,
    "max_seq_len": 2048,
    "attn_config": None,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "resid_pdrop": 0.0,
    "logit_scale": None,
    "no_bias": True,
    "embedding_fraction": 1.0,
    "norm_type": "low_precision_layernorm",
    "tie_word_embeddings": True,
    "eos_token_id": None,
}
_ATTENTION = {
    "attn_type": "multihead_attention",
    "attn_pdrop": 0,
    "clip_qkv": None,
    "softmax_scale": None,
    "prefix_lm": False,
    "qk_ln": False,
    "attn_uses_sequence_id": False,
    "alibi": True,
    "alibi_bias_max": _BIAS_MAX,
    "rope": False,
    "sliding_window_size": -1,
}
_ALIASES = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
_PASSED_OVER = "is passed over by transformers, and not by the models' own code"


def _read_mpt(config: ConfigJson) -> dict[str, Any]:
    config.must_be("expansion_ratio", _RATIO, why=f"is not supported; transformers has {_RATIO}")
    config.must_be("logit_scale", None, why=_PASSED_OVER)
    config.must_be("embedding_fraction", 1, why=_PASSED_OVER)
    config.must_be("no_bias", True, why="is not supported: transformers has no biases")
    config.must_be("norm_type", "low_precision_layernorm", "layernorm", why="is not supported; LayerNorm is")
    hidden_size, heads = config.whole("d_model"), config.whole("n_heads")
    if hidden_size % heads:
        config.refuse("n_heads", f"must divide d_model={hidden_size}", remedy="correct config.json")
    return {
        "num_layers": config.whole("n_layers"),
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "ffn_hidden_size": _RATIO * hidden_size,
        "max_position_embeddings": config.whole("max_seq_len"),
        "position_embedding_type": "alibi",
        "normalization": "LayerNorm",
        "norm_parameters": "weight",
        "norm_epsilon": config.number("layer_norm_epsilon"),
        "disable_bias_linear": True,
        **_read_attention(config),
        "hidden_dropout": config.number("resid_pdrop"),
    }


def _read_attention(config: ConfigJson) -> dict[str, Any]:
    """Fields of the object that has the keys of attention."""
    given = config.values["attn_config"]
    if not isinstance(given, dict | None):
        config.refuse("attn_config", "must be an object", remedy=CORRECT)
    attention = ConfigJson(config.path, given or {}, _ATTENTION)
    attention.must_be("attn_type", "multihead_attention", why="is not supported: transformers has no other")
    for key in ("prefix_lm", "qk_ln", "attn_uses_sequence_id", "rope"):
        attention.must_be(key, False, why=_PASSED_OVER)
    attention.must_be("alibi", True, why="is not supported: transformers has ALiBi in every MPT")
    attention.must_be("alibi_bias_max", _BIAS_MAX, why=f"is not supported: transformers computes with {_BIAS_MAX}")
    attention.must_be("sliding_window_size", -1, None, why=_PASSED_OVER)
    scale, clip = attention.values["softmax_scale"], attention.values["clip_qkv"]
    if scale == 0:
        attention.refuse("softmax_scale", "makes all scores zero", remedy="set it to null")
    return {
        "attention_dropout": attention.number("attn_pdrop"),
        "clip_qkv": attention.number("clip_qkv") if clip else None,
        "softmax_scale": None if scale is None else attention.number("softmax_scale"),
    }


def _write_mpt(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    dropout = model.attention_dropout
    return {
        "d_model": model.hidden_size,
        "n_heads": model.num_attention_heads,
        "n_layers": model.num_layers,
        "expansion_ratio": _RATIO,
        "max_seq_len": seq_length,
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": _BIAS_MAX,
            "attn_pdrop": int(dropout) if dropout in (0, 1) else 0,  # transformers reads no fraction there
            "clip_qkv": model.clip_qkv,
            "softmax_scale": None if model.score_factor is None else model.softmax_scale,
        },
        "layer_norm_epsilon": model.norm_epsilon,
        "resid_pdrop": model.hidden_dropout,
        "no_bias": True,
    }


def _not_mpt(model: ModelConfig) -> str | None:
    return first_true(
        {
            f"position_embedding_type={model.position_embedding_type}": model.position_embedding_type != "alibi",
            f"num_query_groups={model.num_kv_heads}": model.num_kv_heads != model.num_attention_heads,
            f"the activation {model.activation}": model.activation != "gelu",
        }
    )


MPT = ModelFamily("MptForCausalLM", "max_seq_len", _MPT, _ALIASES, _read_mpt, _write_mpt, _not_mpt, decoder(_NAMES))
