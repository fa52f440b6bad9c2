"""BERT: keys of its config.json, and its tensors, whose queries, keys and values are matrices of their own.

`BertForPreTraining` has the pooler and the head that tells whether two sentences are in order, `BertForMaskedLM` has
neither. Files of before 2019 call the weight and bias of a norm gamma and beta.
"""

from collections.abc import Iterator
from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.family import ConfigJson, FamilyTensors, ModelFamily, first_true, not_gpt_block
from megatronish.formats.tensor_rule import TensorRule, concatenated_tensors, same_tensors

MASKED, BOTH = "BertForMaskedLM", "BertForPreTraining"
_GELU = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
_SENTENCE_HEAD = ("bert.pooler.", "cls.seq_relationship.")


def _read_bert(config: ConfigJson) -> dict[str, Any]:
    config.must_be("position_embedding_type", "absolute", None, why="is not supported")
    for key in ("is_decoder", "add_cross_attention"):
        config.must_be(key, False, None, why="is not supported")
    config.must_be("tie_word_embeddings", True, why="is not supported: the decoder has two biases then")
    architectures = config.values.get("architectures") or [MASKED]
    if not isinstance(architectures, list) or architectures[0] not in (MASKED, BOTH):
        config.refuse("architectures", f"is not supported; {MASKED} and {BOTH} are")
    kind = config.values["hidden_act"]
    if not isinstance(kind, str) or kind not in _GELU:
        config.refuse("hidden_act", f"is not supported; {', '.join(_GELU)} are")
    return {
        "model_type": "bert",
        "bert_no_binary_head": architectures[0] == MASKED,
        "num_token_types": config.whole("type_vocab_size"),
        "num_layers": config.whole("num_hidden_layers"),
        "hidden_size": config.whole("hidden_size"),
        "num_attention_heads": config.whole("num_attention_heads"),
        "ffn_hidden_size": config.whole("intermediate_size"),
        "max_position_embeddings": config.whole("max_position_embeddings"),
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": config.number("layer_norm_eps"),
        "openai_gelu": _GELU[kind] == "tanh",
        "attention_dropout": config.number("attention_probs_dropout_prob"),
        "hidden_dropout": config.number("hidden_dropout_prob"),
    }


def _write_bert(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    return {
        "architectures": [BOTH if model.has_binary_head else MASKED],
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_size,
        "hidden_act": "gelu_new" if model.openai_gelu else "gelu",
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "max_position_embeddings": seq_length,
        "type_vocab_size": model.num_token_types,
        "layer_norm_eps": model.norm_epsilon,
    }


def _not_bert(model: ModelConfig) -> str | None:
    positions = model.position_embedding_type
    own = {
        f"position_embedding_type={positions}": positions != "learned_absolute",
        "swiglu": model.swiglu,
        "squared_relu": model.squared_relu,
        "untie_embeddings_and_output_weights": not model.tied,
    }
    return first_true(own) or not_gpt_block(model)


_BERT = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}


def bert_tensors(model: ModelConfig) -> Iterator[TensorRule]:
    """Rules of BERT's tensors, embedding first."""
    embeddings, layers, head = "bert.embeddings", "bert.encoder.layer", "cls.predictions"
    yield TensorRule("embedding.tokens.weight", (f"{embeddings}.word_embeddings.weight",))
    yield TensorRule("embedding.positions.weight", (f"{embeddings}.position_embeddings.weight",))
    yield TensorRule("embedding.types.weight", (f"{embeddings}.token_type_embeddings.weight",))
    yield from same_tensors("embedding.norm", f"{embeddings}.LayerNorm", bias=True)
    for n in range(model.num_layers):
        ours, theirs = f"layers.{n}", f"{layers}.{n}"
        names = [f"{theirs}.attention.self.{name}" for name in ("query", "key", "value")]
        yield from concatenated_tensors(f"{ours}.attention.qkv", names, [model.hidden_size] * 3, bias=True)
        yield from same_tensors(f"{ours}.attention.out", f"{theirs}.attention.output.dense", bias=True)
        yield from same_tensors(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm", bias=True)
        yield from same_tensors(f"{ours}.mlp.fc1", f"{theirs}.intermediate.dense", bias=True)
        yield from same_tensors(f"{ours}.mlp.fc2", f"{theirs}.output.dense", bias=True)
        yield from same_tensors(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm", bias=True)
    yield from same_tensors("transform.dense", f"{head}.transform.dense", bias=True)
    yield from same_tensors("transform.norm", f"{head}.transform.LayerNorm", bias=True)
    yield TensorRule("head.bias", (f"{head}.bias",))
    if model.has_binary_head:
        yield from same_tensors("sentence.pooler", "bert.pooler.dense", bias=True)
        yield from same_tensors("sentence.classifier", "cls.seq_relationship", bias=True)


def _new_name(name: str) -> str:
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _left_out(model: ModelConfig, name: str) -> str | None:
    if name.endswith("embeddings.position_ids"):
        return "a buffer that follows from config.json"
    if not model.has_binary_head and name.startswith(_SENTENCE_HEAD):
        return f"a part of the binary head, which {MASKED} has not; set architectures to {BOTH} to keep it"
    return None


BERT = ModelFamily(
    MASKED,
    "max_position_embeddings",
    _BERT,
    {},
    _read_bert,
    _write_bert,
    _not_bert,
    FamilyTensors(
        "bert",
        bert_tensors,
        head="cls.predictions.decoder.weight",
        copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
        new_name=_new_name,
        left_out=_left_out,
    ),
    model_type="bert",
)
