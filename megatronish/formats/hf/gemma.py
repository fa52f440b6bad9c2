"""Gemma: a Llama with a scaled embedding, an MLP gated by GELU, and norm weights that are stored as w - 1."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, write_decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS

GEMMA_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def read_any_gemma(config: ConfigJson, activation: str) -> dict[str, Any]:
    """Fields that all Gemmas have in common; `activation` is the key of that."""
    config.must_be("use_bidirectional_attention", None, False, why="is not supported: a token sees those before it")
    fields = read_decoder(config, activation=activation)
    return fields | {
        "norm_epsilon": config.number("rms_norm_eps"),
        "apply_layernorm_1p": True,
        "embedding_multiplier": fields["hidden_size"] ** 0.5,
        "add_attention_bias": config.flag("attention_bias"),
    }


def write_any_gemma(model: ModelConfig, seq_length: int, activation: str) -> dict[str, Any]:
    """Keys that all Gemmas have in common."""
    keys = write_decoder(model, seq_length)
    return {activation: keys.pop("hidden_act"), **keys} | {
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.attention_bias,
    }


def _read_gemma(config: ConfigJson) -> dict[str, Any]:
    # Old files say gelu and mean its tanh form, as transformers takes it too.
    if config.values["hidden_act"] == "gelu":
        config = ConfigJson(config.path, {**config.values, "hidden_act": "gelu_pytorch_tanh"}, {})
    return read_any_gemma(config, "hidden_act")


def _write_gemma(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return write_any_gemma(model, seq_length, "hidden_act")


GEMMA = ModelFamily(
    "GemmaForCausalLM",
    ROWS,
    GEMMA_DEFAULTS,
    {},
    _read_gemma,
    _write_gemma,
    lambda _model: None,
    decoder(DecoderNames()),
)
