"""OPT: a GPT-2 with ReLU, whose learned positions begin two rows later."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_activation, write_activation
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.llama import ROWS

_NAMES = DecoderNames(
    tokens="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layer="model.decoder.layers.{}",
    norms={"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"},
    out="self_attn.out_proj",
    fc1=("fc1",),
    fc2="fc2",
    final_norm="model.decoder.final_layer_norm",
)
_OFFSET = 2
_OPT = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "activation_function": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "init_std": 0.02,
    "initializer_range": 0.02,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "word_embed_proj_dim": None,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def _read_opt(config: ConfigJson) -> dict[str, Any]:
    hidden_size = config.whole("hidden_size")
    config.must_be("do_layer_norm_before", True, why="normalises after each sublayer, which is not supported")
    config.must_be("_remove_final_layer_norm", False, None, why="leaves out the final norm, which is not supported")
    config.must_be("word_embed_proj_dim", None, hidden_size, why="projects embeddings, which is not supported")
    return {
        "num_layers": config.whole("num_hidden_layers"),
        "hidden_size": hidden_size,
        "num_attention_heads": config.whole("num_attention_heads"),
        "ffn_hidden_size": config.whole("ffn_dim"),
        "max_position_embeddings": config.whole("max_position_embeddings"),
        "position_embedding_type": "learned_absolute",
        "position_offset": _OFFSET,
        "normalization": "LayerNorm",
        "norm_parameters": "all" if config.flag("layer_norm_elementwise_affine") else "none",
        "norm_epsilon": 1e-5,
        **read_activation(config, "activation_function", gated=False),
        "disable_bias_linear": not config.flag("enable_bias"),
        "attention_dropout": config.number("attention_dropout"),
        "hidden_dropout": config.number("dropout"),
    }


def _write_opt(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden_size,
        "word_embed_proj_dim": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "ffn_dim": model.ffn_size,
        "max_position_embeddings": seq_length,
        "layer_norm_elementwise_affine": model.norm_parameters == "all",
        "activation_function": write_activation(model),
        "enable_bias": model.linear_bias,
        "attention_dropout": model.attention_dropout,
        "dropout": model.hidden_dropout,
        "init_std": model.init_method_std,
    }


OPT = ModelFamily("OPTForCausalLM", ROWS, _OPT, {}, _read_opt, _write_opt, lambda _model: None, decoder(_NAMES))
