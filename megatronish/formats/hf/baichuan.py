"""Baichuan (the first one): a Llama with fused queries, keys and values; the 13B model has ALiBi in place of RoPE.

transformers has no such family: a model brings code of its own, one for 7B and another for 13B. What tells them apart
is how they call the longest sequence: `model_max_length` has 13B alone.
"""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, write_activation
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS, read_llama
from megatronish.formats.hf.rope import BASE

_LENGTH = "model_max_length"
_BAICHUAN = LLAMA_DEFAULTS | {"vocab_size": 64000, ROWS: 4096}
_VOCABULARY_OF_2 = 125696


def _read_baichuan(config: ConfigJson) -> dict[str, Any]:
    if "z_loss_weight" in config.values or config.values["vocab_size"] == _VOCABULARY_OF_2:
        key = "z_loss_weight" if "z_loss_weight" in config.values else "vocab_size"
        config.refuse(key, "is of Baichuan 2, whose output layer has rows of length 1, which is not supported")
    config.must_be("rope_scaling", None, why="is not there in this family")
    config.must_be("rope_theta", None, BASE, why="is not there in this family, whose RoPE has a base of 10000")
    heads = config.whole("num_attention_heads")
    config.must_be("num_key_value_heads", None, heads, why="is not there in this family")
    has_alibi = _LENGTH in config.values
    return read_llama(config) | {"position_embedding_type": "alibi" if has_alibi else "rope"}


def _write_baichuan(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    has_alibi = model.position_embedding_type == "alibi"
    return {
        "architectures": ["BaichuanForCausalLM" if has_alibi else "BaiChuanForCausalLM"],
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "hidden_act": write_activation(model),
        _LENGTH if has_alibi else ROWS: seq_length,
        "rms_norm_eps": model.norm_epsilon,
    }


BAICHUAN = ModelFamily(
    "BaiChuanForCausalLM",
    ROWS,
    _BAICHUAN,
    {_LENGTH: ROWS},
    _read_baichuan,
    _write_baichuan,
    lambda _model: None,
    decoder(DecoderNames(qkv=("self_attn.W_pack",))),
)
