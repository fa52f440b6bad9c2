"""OLMo 2: a Llama whose norms are after attention and MLP, with a norm over all heads of queries and keys."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_decoder, write_decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import LLAMA_DEFAULTS, ROWS

OUTPUT_NORMS = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
OLMO2_DEFAULTS = {key: value for key, value in LLAMA_DEFAULTS.items() if key != "head_dim"} | {
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}


def read_olmo2(config: ConfigJson, base: float = 10000.0) -> dict[str, Any]:
    """Fields of OLMo 2 and 3; `base` is that of RoPE where no key says it."""
    return {
        **read_decoder(config, rope=base),
        "norm_epsilon": config.number("rms_norm_eps"),
        "add_attention_bias": config.flag("attention_bias"),
        "norm_placement": "output",
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
    }


def write_olmo2(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    """Keys of OLMo 2 and 3."""
    return {
        **write_decoder(model, seq_length),
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.attention_bias,
    }


OLMO2 = ModelFamily(
    "Olmo2ForCausalLM",
    ROWS,
    OLMO2_DEFAULTS,
    {},
    read_olmo2,
    write_olmo2,
    lambda _model: None,
    decoder(DecoderNames(norms=OUTPUT_NORMS)),
)
