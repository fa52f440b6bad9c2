"""GPT-J: attention and MLP side by side on one norm, RoPE of neighbouring pairs, biases of MLP and output layer."""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder, read_activation, write_activation
from megatronish.formats.hf.family import ConfigJson, ModelFamily

_NAMES = DecoderNames(
    base="transformer",
    tokens="transformer.wte",
    layer="transformer.h.{}",
    norms={"attention_norm": "ln_1"},
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    out="attn.out_proj",
    fc1=("mlp.fc_in",),
    fc2="mlp.fc_out",
    final_norm="transformer.ln_f",
)
_GPTJ = {
    "vocab_size": 50400,
    "n_positions": 2048,
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "rotary_dim": 64,
    "n_inner": None,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "eos_token_id": 50256,
}
_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_BASE = 10000.0  # of RoPE, which has no key


def _read_gptj(config: ConfigJson) -> dict[str, Any]:
    hidden_size, heads = config.whole("n_embd"), config.whole("n_head")
    if hidden_size % heads:
        config.refuse("n_head", f"must divide n_embd={hidden_size}", remedy="correct config.json")
    turned, head = config.whole("rotary_dim", least=2), hidden_size // heads
    if turned > head:
        config.refuse("rotary_dim", f"must be at most the {head} of a head", remedy="correct that line")
    return {
        "num_layers": config.whole("n_layer"),
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "ffn_hidden_size": config.whole("n_inner", null=4 * hidden_size),
        "max_position_embeddings": config.whole("n_positions"),
        "position_embedding_type": "rope",
        "rotary_base": _BASE,
        "rotary_percent": turned / head,
        "rotary_interleaved": True,
        "normalization": "LayerNorm",
        "norm_epsilon": config.number("layer_norm_epsilon"),
        "norm_placement": "parallel",
        **read_activation(config, "activation_function", gated=False),
        "disable_bias_linear": True,
        "add_mlp_bias": True,
        "add_output_bias": True,
        "attention_dropout": config.number("attn_pdrop"),
        "hidden_dropout": config.number("resid_pdrop"),
    }


def _write_gptj(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        "n_positions": seq_length,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_size,
        "rotary_dim": round(model.rotary_percent * model.head_size),
        "activation_function": write_activation(model, tanh="gelu_new"),
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "layer_norm_epsilon": model.norm_epsilon,
    }


GPTJ = ModelFamily(
    "GPTJForCausalLM",
    "n_positions",
    _GPTJ,
    _ALIASES,
    _read_gptj,
    _write_gptj,
    lambda _model: None,
    decoder(_NAMES),
)
