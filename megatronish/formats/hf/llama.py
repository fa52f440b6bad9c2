"""Llama: keys of its config.json, and its tensors; its descendants (Mistral, Qwen, OLMoE) share most of both.

Queries, keys and values are three tensors there and one here, gate and up-projection two there and one here.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import norm_tensors, read_decoder, write_decoder
from megatronish.formats.hf.experts import expert_tensors, gated_mlp_tensors
from megatronish.formats.hf.family import HEAD, ConfigJson, ExpertNames, FamilyTensors, ModelFamily, first_true
from megatronish.formats.tensor_rule import TensorRule, concatenated_tensors, same_tensors

ROWS = "max_position_embeddings"  # the key of the longest sequence

LLAMA_DEFAULTS = {
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


def read_llama(config: ConfigJson) -> dict[str, Any]:
    """Fields of ModelConfig that Llama and its descendants have in common, from their keys."""
    config.must_be("hidden_act", "silu", "swish", why="is not supported; silu is")
    biases = {"add_attention_bias": config.flag("attention_bias"), "add_mlp_bias": config.flag("mlp_bias")}
    has_all = all(biases.values())
    return {
        **read_decoder(config),
        "norm_epsilon": config.number("rms_norm_eps"),
        "disable_bias_linear": not has_all,
        **({} if has_all or not any(biases.values()) else biases),
    }


def read_descendant(config: ConfigJson) -> dict[str, Any]:
    """Fields of a descendant of Llama whose linear layers have no such biases."""
    for key in ("attention_bias", "mlp_bias"):
        config.must_be(key, False, None, why="is not there in this family")
    return read_llama(config)


def write_llama(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    """Keys of config.json that Llama and its descendants have in common."""
    return {
        **write_decoder(model, seq_length),
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.attention_bias,
        "mlp_bias": model.mlp_bias,
    }


def _not_llama(model: ModelConfig) -> str | None:
    return not_llama_block(model) or first_true(
        {
            "add_qkv_bias": model.qkv_bias and not model.attention_bias,
            f"window_size={model.window_size}": model.window_size is not None,
            "qk_layernorm": model.qk_layernorm,
        }
    )


def not_llama_block(model: ModelConfig) -> str | None:
    """Field of a model that Llama and its descendants do not have."""
    return first_true(
        {
            f"block={model.block}": model.block != "transformer",
            f"position_embedding_type={model.position_embedding_type}": model.position_embedding_type != "rope",
            f"rotary_percent={model.rotary_percent}": model.rotary_percent != 1
            and model.rope_scaling != "proportional",
            "embed_layernorm": model.embed_layernorm,
            "rotary_interleaved": model.rotary_interleaved,
            f"normalization={model.normalization}": model.normalization != "RMSNorm",
            "an MLP without swiglu": not model.swiglu,
            "apply_layernorm_1p": model.apply_layernorm_1p,
            "qk_layernorm_across_heads": model.qk_layernorm_across_heads,
            f"clip_qkv={model.clip_qkv}": model.clip_qkv is not None,
        }
    )


def without_biases(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys without those of the biases, which only Llama itself has."""
    return {key: value for key, value in keys.items() if key not in ("attention_bias", "mlp_bias")}


def llama_tensors(
    model: ModelConfig,
    experts: Callable[[ModelConfig, str, str], Iterator[TensorRule]] | None = None,
    *,
    dense: str = "mlp",
) -> Iterator[TensorRule]:
    """Rules of the tensors of Llama and its descendants, embedding first.

    `experts` are those of a layer with experts, `dense` is the name of an MLP.
    """
    yield TensorRule("embedding.tokens.weight", ("model.embed_tokens.weight",))
    for n, has_experts in enumerate(model.expert_layers):
        yield from llama_layer_tensors(model, n, experts if has_experts else None, dense=dense)
    yield from norm_tensors(model, "final_norm", "model.norm")
    if not model.tied:
        yield TensorRule("head.weight", (HEAD,))
    if model.add_output_bias:
        yield TensorRule("head.bias", ("lm_head.bias",))


def llama_layer_tensors(
    model: ModelConfig,
    n: int,
    experts: Callable[[ModelConfig, str, str], Iterator[TensorRule]] | None,
    *,
    dense: str = "mlp",
) -> Iterator[TensorRule]:
    """Rules of layer number n: an MLP of the name `dense`, or experts."""
    queries, keys = (heads * model.head_size for heads in (model.num_attention_heads, model.num_kv_heads))
    ours, theirs, attention = f"layers.{n}", f"model.layers.{n}", f"model.layers.{n}.self_attn"
    yield from norm_tensors(model, f"{ours}.attention_norm", f"{theirs}.input_layernorm")
    names = [f"{attention}.{name}_proj" for name in "qkv"]
    yield from concatenated_tensors(f"{ours}.attention.qkv", names, (queries, keys, keys), bias=model.qkv_bias)
    if model.qk_layernorm:
        yield from same_tensors(f"{ours}.attention.q_norm", f"{attention}.q_norm", bias=False)
        yield from same_tensors(f"{ours}.attention.k_norm", f"{attention}.k_norm", bias=False)
    yield from same_tensors(f"{ours}.attention.out", f"{attention}.o_proj", bias=model.attention_bias)
    yield from norm_tensors(model, f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm")
    if experts is None:
        yield from gated_mlp_tensors(f"{ours}.mlp", f"{theirs}.{dense}", model.ffn_size, bias=model.mlp_bias)
    else:
        yield from experts(model, ours, theirs)


LLAMA_TENSORS = FamilyTensors("model", llama_tensors)
LLAMA = ModelFamily("LlamaForCausalLM", ROWS, LLAMA_DEFAULTS, {}, read_llama, write_llama, _not_llama, LLAMA_TENSORS)


def llama_tensors_with(experts: ExpertNames) -> FamilyTensors:
    """Tensors of a descendant of Llama with experts of these names."""
    return FamilyTensors("model", partial(llama_tensors, experts=partial(expert_tensors, names=experts)), experts)
