"""Cohere: Command R, R7B and A.

Command R: attention and MLP side by side on one LayerNorm without bias, scaled logits.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, write_decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS
from megatronish.formats.hf.window import read_layer_types, rope_where_it_slides, write_layer_types
from megatronish.formats.tensor_rule import TensorRule

if TYPE_CHECKING:
    from torch import Tensor

_COHERE_DEFAULTS = {key: value for key, value in LLAMA_DEFAULTS.items() if key not in ("head_dim", "rms_norm_eps")} | {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 255001,
}
_COHERE = _COHERE_DEFAULTS | {"use_qk_norm": False}


def _read_any_cohere(config: ConfigJson, base: float) -> dict[str, Any]:
    """Fields of Cohere 1 and 2; `base` is that of RoPE where no key says it."""
    if config.number("logit_scale") == 0:
        config.refuse("logit_scale", "makes all logits zero", remedy="correct that line")
    return {
        **read_decoder(config, rope=base),
        "rotary_interleaved": True,
        "normalization": "LayerNorm",
        "norm_parameters": "weight",
        "norm_epsilon": config.number("layer_norm_eps"),
        "norm_placement": "parallel",
        "logits_multiplier": config.number("logit_scale"),
        "add_attention_bias": config.flag("attention_bias"),
    }


def _write_any_cohere(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    """Keys of Cohere 1 and 2."""
    return {
        **write_decoder(model, seq_length),
        "layer_norm_eps": model.norm_epsilon,
        "logit_scale": model.logits_multiplier,
        "attention_bias": model.attention_bias,
    }


def _read_cohere(config: ConfigJson) -> dict[str, Any]:
    has_norm = config.flag("use_qk_norm")
    return _read_any_cohere(config, 500000.0) | {"qk_layernorm": has_norm, "qk_layernorm_by_head": has_norm}


def _write_cohere(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return _write_any_cohere(model, seq_length) | {"use_qk_norm": model.qk_layernorm}


def _qk_norms(model: ModelConfig, ours: str, theirs: str) -> Iterator[TensorRule]:
    """[n, H] there and [n H] here."""
    for name in "qk":
        yield TensorRule(
            f"{ours}.{name}_norm.weight",
            (f"{theirs}.self_attn.{name}_norm.weight",),
            lambda parts: parts[0].flatten(),
            partial(_by_head, size=model.head_size),
        )


def _by_head(whole: "Tensor", *, size: int) -> "tuple[Tensor]":
    return (whole.unflatten(0, (-1, size)),)


COHERE = ModelFamily(
    "CohereForCausalLM",
    ROWS,
    _COHERE,
    {},
    _read_cohere,
    _write_cohere,
    lambda _model: None,
    decoder(DecoderNames(), qk_norms=_qk_norms),
)


# Cohere 2 (Command R7B, A): a Cohere with windows in three of four layers, and RoPE in those alone.

_COHERE2 = _COHERE_DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4}


def _read_cohere2(config: ConfigJson) -> dict[str, Any]:
    fields = _read_any_cohere(config, 10000.0)
    fields |= read_layer_types(config, every_key="sliding_window_pattern")
    if fields["window_size"] is None:
        config.refuse("layer_types", "leaves no layer with a window, and so none with RoPE")
    return fields | rope_where_it_slides(fields)


def _write_cohere2(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return _write_any_cohere(model, seq_length) | write_layer_types(model)


COHERE2 = ModelFamily(
    "Cohere2ForCausalLM",
    ROWS,
    _COHERE2,
    {},
    _read_cohere2,
    _write_cohere2,
    lambda _model: None,
    decoder(DecoderNames()),
)
