"""StableLM: LayerNorm, RoPE on a part of each head; perhaps attention and MLP side by side, or norms of each head."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, write_decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS
from megatronish.formats.tensor_rule import TensorRule, concatenate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


_STABLELM = {key: value for key, value in LLAMA_DEFAULTS.items() if key not in ("head_dim", "rms_norm_eps")} | {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "use_parallel_residual": False,
    "hidden_dropout": 0.0,
    "eos_token_id": 0,
}


def _read_stablelm(config: ConfigJson) -> dict[str, Any]:
    has_norm = config.flag("qk_layernorm")
    return {
        **read_decoder(config, turned=0.25),
        "normalization": "LayerNorm",
        "norm_epsilon": config.number("layer_norm_eps"),
        "norm_placement": "parallel" if config.flag("use_parallel_residual") else "pre",
        "add_qkv_bias": config.flag("use_qkv_bias"),
        "qk_layernorm": has_norm,
        "qk_layernorm_by_head": has_norm,
        "hidden_dropout": config.number("hidden_dropout"),
    }


def _write_stablelm(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        **write_decoder(model, seq_length, turned=True),
        "layer_norm_eps": model.norm_epsilon,
        "use_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "use_parallel_residual": model.norm_placement == "parallel",
        "hidden_dropout": model.hidden_dropout,
    }


def _qk_norms(model: ModelConfig, ours: str, theirs: str) -> Iterator[TensorRule]:
    """A tensor for each head there, and one here."""
    for name, heads in (("q", model.num_attention_heads), ("k", model.num_kv_heads)):
        norms = (f"{theirs}.self_attn.{name}_layernorm.norms.{head}.weight" for head in range(heads))
        yield TensorRule(f"{ours}.{name}_norm.weight", tuple(norms), concatenate, partial(_by_head, heads=heads))


def _by_head(whole: "Tensor", *, heads: int) -> "Sequence[Tensor]":
    return whole.chunk(heads)


STABLELM = ModelFamily(
    "StableLmForCausalLM",
    ROWS,
    _STABLELM,
    {},
    _read_stablelm,
    _write_stablelm,
    lambda _model: None,
    decoder(DecoderNames(), qk_norms=_qk_norms),
)
