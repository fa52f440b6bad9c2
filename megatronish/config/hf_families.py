"""Which families of Hugging Face's models are known, and how does each spell the fields of ours?

Each reads its keys into fields of ModelConfig, writes them back, and says which field of a model it has no words for.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatronish.config.hf_json import MEND, ConfigJson
from megatronish.config.hf_rope import read_rope, write_rope
from megatronish.config.model import ModelConfig


class ModelFamily(NamedTuple):
    """A model_type: how it is read, how it is written, and which field of a model keeps it from being one.

    `aliases` are other names of its keys, which transformers reads too.
    """

    architecture: str
    seq_length: str
    defaults: dict[str, Any]
    aliases: dict[str, str]
    read: Callable[[ConfigJson], dict[str, Any]]
    write: Callable[[ModelConfig, int], dict[str, Any]]
    cannot_say: Callable[[ModelConfig], str | None]


_SOME = "gives some layers a window and others none, which is not there"
WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

# GPT-2

_GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh", "gelu": "exact", "relu2": "relu2"}


def _read_gpt2(config: ConfigJson) -> dict[str, Any]:
    config.must_be("scale_attn_weights", True, why="leaves attention unscaled, which is not there")
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        config.must_be(key, False, None, why="is not there")
    kind = config.values["activation_function"]
    if not isinstance(kind, str) or kind not in _GELU:
        config.refuse("activation_function", f"is not there; {', '.join(_GELU)} are")
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
    return _first(
        {
            f"position_embedding_type={model.position_embedding_type}": model.position_embedding_type
            != "learned_absolute",
            f"normalization={model.normalization}": model.normalization != "LayerNorm",
            "swiglu": model.swiglu,
            "disable_bias_linear": not model.linear_bias,
            "qk_layernorm": model.qk_layernorm,
            f"window_size={model.window_size}": model.window_size is not None,
            f"num_query_groups={model.num_kv_heads}": model.num_kv_heads != model.num_attention_heads,
            f"kv_channels={model.head_size}": model.head_size * model.num_attention_heads != model.hidden_size,
            "apply_layernorm_1p": model.apply_layernorm_1p,
        }
    )


# Llama and its descendants


def _read_llama(config: ConfigJson) -> dict[str, Any]:
    config.must_be("hidden_act", "silu", "swish", why="is not there; silu is")
    heads, hidden_size = config.whole("num_attention_heads"), config.whole("hidden_size")
    kv_heads = config.whole("num_key_value_heads", null=heads)
    has_bias = config.flag("attention_bias")
    if has_bias != config.flag("mlp_bias"):
        key, other = ("attention_bias", "mlp_bias") if has_bias else ("mlp_bias", "attention_bias")
        config.refuse(key, f"without {other} is not there: both, or neither")
    return {
        "num_layers": config.whole("num_hidden_layers"),
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "ffn_hidden_size": config.whole("intermediate_size"),
        "kv_channels": config.whole("head_dim", null=max(1, hidden_size // heads)),
        "group_query_attention": kv_heads != heads,
        "num_query_groups": kv_heads,
        "max_position_embeddings": config.whole("max_position_embeddings"),
        "position_embedding_type": "rope",
        **read_rope(config),
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("rms_norm_eps"),
        "swiglu": True,
        "disable_bias_linear": not has_bias,
        "attention_dropout": config.number("attention_dropout"),
        "hidden_dropout": 0.0,
    }


def _write_llama(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": seq_length,
        "rms_norm_eps": model.norm_epsilon,
        **write_rope(model),
        "attention_dropout": model.attention_dropout,
        "attention_bias": model.linear_bias,
        "mlp_bias": model.linear_bias,
    }


def _not_llama(model: ModelConfig) -> str | None:
    return _not_its_block(model) or _first(
        {
            "add_qkv_bias": model.qkv_bias and not model.linear_bias,
            f"window_size={model.window_size}": model.window_size is not None,
            "qk_layernorm": model.qk_layernorm,
        }
    )


def _not_its_block(model: ModelConfig) -> str | None:
    """What keeps a model from being any of Llama's descendants."""
    return _first(
        {
            f"position_embedding_type={model.position_embedding_type}": model.position_embedding_type != "rope",
            f"rotary_percent={model.rotary_percent}": model.rotary_percent != 1,
            "rotary_interleaved": model.rotary_interleaved,
            f"normalization={model.normalization}": model.normalization != "RMSNorm",
            "an MLP without swiglu": not model.swiglu,
            "apply_layernorm_1p": model.apply_layernorm_1p,
        }
    )


def _read_mistral(config: ConfigJson) -> dict[str, Any]:
    slides = _slides(config)
    if slides is None:
        slides = config.values["sliding_window"] is not None
    return _read_llama(config) | {"window_size": config.whole("sliding_window") if slides else None}


def _write_mistral(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return _without_biases(_write_llama(model, seq_length)) | {"sliding_window": model.window_size}


def _not_mistral(model: ModelConfig) -> str | None:
    biases = {"biases of linear layers": model.qkv_bias, "qk_layernorm": model.qk_layernorm}
    return _not_its_block(model) or _first(biases)


def _read_qwen2(config: ConfigJson) -> dict[str, Any]:
    return _read_llama(config) | {"add_qkv_bias": True, "window_size": _window_of_qwen(config)}


def _write_qwen2(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    slides = {"use_sliding_window": model.window_size is not None, "sliding_window": model.window_size}
    return _without_biases(_write_llama(model, seq_length)) | slides | {"max_window_layers": 0}


def _not_qwen2(model: ModelConfig) -> str | None:
    return _not_its_block(model) or _first(
        {
            "no bias on queries, keys and values": not model.qkv_bias,
            "biases of all linear layers": model.linear_bias,
            "qk_layernorm": model.qk_layernorm,
        }
    )


def _read_qwen3(config: ConfigJson) -> dict[str, Any]:
    config.must_be("attention_bias", False, None, why="is not there beside a norm of queries and keys")
    return _read_llama(config) | {"qk_layernorm": True, "window_size": _window_of_qwen(config)}


def _write_qwen3(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return _write_qwen2(model, seq_length) | {"attention_bias": False}


def _not_qwen3(model: ModelConfig) -> str | None:
    biases = {"biases of linear layers": model.qkv_bias, "no qk_layernorm": not model.qk_layernorm}
    return _not_its_block(model) or _first(biases)


def _window_of_qwen(config: ConfigJson) -> int | None:
    """Layers from max_window_layers on have a window, or those that layer_types names."""
    slides = _slides(config)
    if not config.flag("use_sliding_window") or config.values["sliding_window"] is None:
        if slides:
            config.refuse("layer_types", "gives layers a window, which use_sliding_window and sliding_window do not")
        return None
    if slides is None:
        first = config.whole("max_window_layers", least=0)
        if 0 < first < config.whole("num_hidden_layers"):
            config.refuse("max_window_layers", _SOME)
        slides = first == 0
    return config.whole("sliding_window") if slides else None


def _slides(config: ConfigJson) -> bool | None:
    """Whether layer_types gives every layer a window or none; None where it says nothing."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        return None
    num_layers = config.whole("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        config.refuse("layer_types", f"must be a list with a kind for each of the {num_layers} layers", remedy=MEND)
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            config.refuse("layer_types", f"has {kind!r}; full_attention and sliding_attention are known here")
    if kinds.count(kinds[0]) < num_layers:
        config.refuse("layer_types", _SOME)
    return bool(kinds[0] == "sliding_attention")


def _without_biases(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in ("attention_bias", "mlp_bias")}


_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "eos_token_id": 2,
}
_QWEN2 = _LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "eos_token_id": None,
}
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
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_ROWS = "max_position_embeddings"
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}

# In the order in which one is looked for that can say what a model is.
FAMILIES = {
    "gpt2": ModelFamily("GPT2LMHeadModel", "n_positions", _GPT2, _GPT2_ALIASES, _read_gpt2, _write_gpt2, _not_gpt2),
    "llama": ModelFamily("LlamaForCausalLM", _ROWS, _LLAMA, {}, _read_llama, _write_llama, _not_llama),
    "mistral": ModelFamily("MistralForCausalLM", _ROWS, _MISTRAL, {}, _read_mistral, _write_mistral, _not_mistral),
    "qwen2": ModelFamily("Qwen2ForCausalLM", _ROWS, _QWEN2, {}, _read_qwen2, _write_qwen2, _not_qwen2),
    "qwen3": ModelFamily(
        "Qwen3ForCausalLM", _ROWS, _QWEN2 | {"head_dim": 128}, {}, _read_qwen3, _write_qwen3, _not_qwen3
    ),
}


def _first(reasons: Mapping[str, bool]) -> str | None:
    return next((reason for reason, holds in reasons.items() if holds), None)
