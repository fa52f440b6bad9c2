"""Apertus: a Llama with xIELU in place of a gated MLP, norms of queries and keys, and other names of its norms.

xIELU's constants are in a file, too, as buffers of each layer.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.hf.decoder import DecoderNames, decoder_tensors, read_decoder, write_decoder
from megatronish.formats.hf.family import CORRECT, ConfigJson, FamilyTensors, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS
from megatronish.formats.tensor_rule import TensorRule

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = DecoderNames(
    norms={"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}, fc1=("mlp.up_proj",)
)
_BASE = 12000000.0
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": _BASE,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_APERTUS = LLAMA_DEFAULTS | {
    "vocab_size": 131072,
    "intermediate_size": 14336,
    "hidden_act": "xielu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
}
_CONSTANTS = {"beta": 0.5, "eps": -1e-6}
_ROUNDING = 0.05  # of -1e-6 in fp16


def _read_apertus(config: ConfigJson) -> dict[str, Any]:
    config.must_be("qk_norm", True, None, why="leaves out norms of queries and keys, which this family has here")
    config.must_be("post_norm", False, None, why="has norms after sublayers, which this family does not have here")
    config.must_be("mlp_bias", False, None, why="is not there in this family")
    learns = config.values["hidden_act"] == "xielu"
    plain = ConfigJson(config.path, {**config.values, "hidden_act": "relu2"}, {}) if learns else config
    fields = read_decoder(_with_rope(plain), rope=_BASE, gated=False)
    return {
        **fields,
        **({"squared_relu": False, "xielu": True} if learns else {}),
        "norm_epsilon": config.number("rms_norm_eps"),
        "qk_layernorm": True,
        "add_attention_bias": config.flag("attention_bias"),
    }


def _with_rope(config: ConfigJson) -> ConfigJson:
    """The config with the RoPE that it means where it has none, which is a stretched one."""
    if config.values.get("rope_parameters") or config.values.get("rope_scaling"):
        return config
    for key in ("rope_scaling", "rope_theta"):
        if key in config.values:
            config.refuse(
                key,
                "without a scaling of RoPE is ignored by newer versions of transformers, and older ones read it",
                remedy=f"{CORRECT}, or say all of RoPE under rope_parameters",
            )
    return ConfigJson(config.path, {**config.values, "rope_parameters": _ROPE}, {})


def _write_apertus(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    keys = write_decoder(model, seq_length)
    rope = {"rope_type": "default", **(keys["rope_scaling"] or {}), "rope_theta": keys["rope_theta"]}
    return {
        **keys,
        "rope_parameters": rope,
        "head_dim": model.head_size,
        "hidden_act": "xielu" if model.xielu else keys["hidden_act"],
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.attention_bias,
    }


def _apertus_tensors(model: ModelConfig) -> Iterator[TensorRule]:
    yield from decoder_tensors(model, _NAMES)
    for n in range(model.num_layers if model.xielu else 0):
        ours, theirs = f"layers.{n}.mlp.xielu", f"model.layers.{n}.mlp.act_fn"
        yield TensorRule(f"{ours}.alpha_p", (f"{theirs}.alpha_p",))
        names = ("alpha_n", *_CONSTANTS)
        yield TensorRule(f"{ours}.alpha_n", tuple(f"{theirs}.{name}" for name in names), _alpha, _with_constants)


def _alpha(parts: "Sequence[Tensor]") -> "Tensor":
    """The number of alpha_n, beta and eps that is learned; UserError for other constants than these."""
    alpha, *constants = parts
    for (name, expected), constant in zip(_CONSTANTS.items(), constants, strict=True):
        if not constant.is_meta and abs(float(constant) - expected) > _ROUNDING * abs(expected):
            raise UserError(f"{name}={float(constant):g} of an xIELU is not {expected:g}; take another model")
    return alpha


def _with_constants(alpha: "Tensor") -> "Sequence[Tensor]":
    return alpha, *(alpha.new_full((), value) for value in _CONSTANTS.values())


APERTUS = ModelFamily(
    "ApertusForCausalLM",
    ROWS,
    _APERTUS,
    {},
    _read_apertus,
    _write_apertus,
    lambda _model: None,
    FamilyTensors("model", _apertus_tensors),
)
