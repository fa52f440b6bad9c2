"""T5: keys of its config.json, and its tensors, whose queries, keys and values are matrices of their own.

The first T5 has one table for words and output layer, and makes hidden states smaller before the latter. T5 1.1 and
FLAN-T5 have an output layer of their own (tie_word_embeddings=false). What transformers 5 saves of them says
tie_word_embeddings=true in any case, and scale_decoder_outputs=false: then the weights are tied if no lm_head is there.
"""

from collections.abc import Iterator
from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.family import ConfigJson, FamilyTensors, ModelFamily, first_true
from megatronish.formats.tensor_rule import TensorRule, concatenated_tensors, same_tensors

ARCHITECTURE = "T5ForConditionalGeneration"
_MLPS = {"relu": {"relu": True}, "gated-gelu": {"geglu": True}}
_CROSS_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def _read_t5(config: ConfigJson) -> dict[str, Any]:
    config.must_be("is_encoder_decoder", True, None, why="is not supported")
    config.must_be("is_decoder", False, None, why="is not supported")
    kind = config.values["feed_forward_proj"]
    if not isinstance(kind, str) or kind not in _MLPS:
        config.refuse("feed_forward_proj", f"is not supported; {', '.join(_MLPS)} are")
    encoder = config.whole("num_layers")
    decoder = config.whole("num_decoder_layers", null=encoder)
    is_tied, scales = config.flag("tie_word_embeddings"), config.values.get("scale_decoder_outputs")
    return {
        "model_type": "t5",
        "num_layers": encoder + decoder,
        "encoder_num_layers": encoder,
        "decoder_num_layers": decoder,
        "hidden_size": config.whole("d_model"),
        "num_attention_heads": config.whole("num_heads"),
        "kv_channels": config.whole("d_kv"),
        "ffn_hidden_size": config.whole("d_ff"),
        "position_embedding_type": "relative",
        "relative_attention_num_buckets": config.whole("relative_attention_num_buckets"),
        "relative_attention_max_distance": config.whole("relative_attention_max_distance"),
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("layer_norm_epsilon"),
        "disable_bias_linear": True,
        "unscaled_logits": is_tied and scales is not None and not config.flag("scale_decoder_outputs"),
        "attention_dropout": config.number("dropout_rate"),
        "hidden_dropout": config.number("dropout_rate"),
        **_MLPS[kind],
    }


def _write_t5(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        "d_model": model.hidden_size,
        "d_kv": model.head_size,
        "d_ff": model.ffn_size,
        "num_heads": model.num_attention_heads,
        "num_layers": model.encoder_num_layers,
        "num_decoder_layers": model.decoder_num_layers,
        "feed_forward_proj": "relu" if model.relu else "gated-gelu",
        "dropout_rate": model.hidden_dropout,
        "layer_norm_epsilon": model.norm_epsilon,
        "relative_attention_num_buckets": model.relative_attention_num_buckets,
        "relative_attention_max_distance": model.relative_attention_max_distance,
        "scale_decoder_outputs": model.tied and not model.unscaled_logits,
        "is_encoder_decoder": True,
        "n_positions": seq_length,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    }


def _not_t5(model: ModelConfig) -> str | None:
    return first_true(
        {
            f"normalization={model.normalization}": model.normalization != "RMSNorm",
            "apply_layernorm_1p": model.apply_layernorm_1p,
            "linear layers with biases": model.linear_bias
            or model.add_qkv_bias
            or model.attention_bias
            or model.mlp_bias,
            f"an MLP with {model.activation}": model.activation not in ("relu", "geglu"),
            f"num_query_groups={model.num_kv_heads}": model.num_kv_heads != model.num_attention_heads,
        }
    )


_T5 = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "initializer_range": 0.02,
    "feed_forward_proj": "relu",
    "n_positions": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def t5_tensors(model: ModelConfig) -> Iterator[TensorRule]:
    """Rules of T5's tensors, embedding first."""
    assert model.encoder_num_layers is not None
    yield TensorRule("embedding.tokens.weight", ("shared.weight",))
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    for side in ("encoder", "decoder"):
        yield TensorRule(f"{side}_bias.weight", (f"{side}.{bias}",))
    for n in range(model.num_layers):
        is_decoder = n >= model.encoder_num_layers
        number = n - model.encoder_num_layers if is_decoder else n
        yield from _layer(model, f"layers.{n}", f"{'decoder' if is_decoder else 'encoder'}.block.{number}", is_decoder)
    last = model.encoder_num_layers - 1
    yield from same_tensors(f"layers.{last}.final_norm", "encoder.final_layer_norm", bias=False)
    yield from same_tensors("final_norm", "decoder.final_layer_norm", bias=False)
    if not model.tied:
        yield TensorRule("head.weight", ("lm_head.weight",))


def _layer(model: ModelConfig, ours: str, theirs: str, is_decoder: bool) -> Iterator[TensorRule]:
    """Rules of a layer: self-attention, of a decoder cross attention, and the MLP, each with a norm."""
    size, attention = model.num_attention_heads * model.head_size, f"{theirs}.layer.0.SelfAttention"
    names = [f"{attention}.{name}" for name in "qkv"]
    yield from concatenated_tensors(f"{ours}.attention.qkv", names, [size] * 3, bias=False)
    yield from same_tensors(f"{ours}.attention.out", f"{attention}.o", bias=False)
    yield from same_tensors(f"{ours}.attention_norm", f"{theirs}.layer.0.layer_norm", bias=False)
    if is_decoder:
        cross = f"{theirs}.layer.1.EncDecAttention"
        yield from same_tensors(f"{ours}.cross_attention.q", f"{cross}.q", bias=False)
        names = [f"{cross}.{name}" for name in "kv"]
        yield from concatenated_tensors(f"{ours}.cross_attention.kv", names, [size] * 2, bias=False)
        yield from same_tensors(f"{ours}.cross_attention.out", f"{cross}.o", bias=False)
        yield from same_tensors(f"{ours}.cross_attention_norm", f"{theirs}.layer.1.layer_norm", bias=False)
    last = f"{theirs}.layer.{1 + is_decoder}"
    up = ["wi_0", "wi_1"] if model.is_gated else ["wi"]
    names = [f"{last}.DenseReluDense.{name}" for name in up]
    yield from concatenated_tensors(f"{ours}.mlp.fc1", names, [model.ffn_size] * len(up), bias=False)
    yield from same_tensors(f"{ours}.mlp.fc2", f"{last}.DenseReluDense.wo", bias=False)
    yield from same_tensors(f"{ours}.mlp_norm", f"{last}.layer_norm", bias=False)


T5 = ModelFamily(
    ARCHITECTURE,
    "n_positions",
    _T5,
    {},
    _read_t5,
    _write_t5,
    _not_t5,
    FamilyTensors(
        "",
        t5_tensors,
        copies={f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")},
        left_out=lambda _model, name: "a table that cross attention has never read" if name == _CROSS_BIAS else None,
    ),
    model_type="t5",
)
