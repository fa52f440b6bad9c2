"""Tests of conversion against transformers: equal logits, in both directions. Run by `make test-peers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import logits_of, to_hf, to_ours

from megatronish.config.sections.model import ModelConfig
from megatronish.core.layout import ExpertLayout, Layout
from megatronish.formats import native
from megatronish.formats.convert import convert
from megatronish.formats.weights import Description, LazyTensor, Model
from megatronish.inference.load import load_model
from megatronish.model.batch import MicroBatch
from megatronish.parallel.mesh import Mesh

pytestmark = pytest.mark.peers("transformers")
peer: Any = pytest.importorskip(
    "random_models",
    reason="transformers is not installed here; `make test-peers` runs this in an environment that has it",
    exc_type=ImportError,
)
CASES = (
    *(
        "gpt2",
        "gpt2-untied",
        "llama",
        "llama-biases",
        "llama-attention-biases",
        "llama-mlp-biases",
        "llama3",
        "llama-linear",
        "llama-yarn",
    ),
    *(
        "mistral",
        "mistral-whole",
        "qwen2",
        "qwen2-window",
        "qwen2-some",
        "qwen3",
        "qwen3-some",
        *peer.newer_configs(),
        "bloom",
        "bloom-untied",
    ),
)


def test_every_case_is_tested() -> None:
    assert tuple(peer.configs()) == CASES


@pytest.mark.parametrize("name", CASES)
def test_logits_are_equal_in_both_directions(tmp_path: Path, name: str) -> None:
    model, tokens = peer.random_model(name), peer.tokens()
    expected = peer.logits_of(model, tokens)
    model.save_pretrained(tmp_path / "theirs")
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    for tp in (1, 2):
        torch.testing.assert_close(logits_of(tmp_path / "ours", tokens, tp=tp), expected, rtol=1e-5, atol=1e-5)
    to_hf(tmp_path / "ours", tmp_path / "back")
    torch.testing.assert_close(peer.logits_of(peer.load(tmp_path / "back"), tokens), expected, rtol=0, atol=0)
    assert (tmp_path / "back" / "config.json").read_text() == (tmp_path / "theirs" / "config.json").read_text()


def our_gradients(folder: Path, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean loss of predicting each next token, and gradients by our names."""
    mesh = Mesh.start(Layout(), rank=0, init_method="", experts=ExpertLayout(1, 1))
    trained = load_model(folder, mesh=mesh)
    model, labels = trained.model.requires_grad_(), tokens[:, 1:].contiguous()
    positions = torch.arange(labels.shape[1]).expand_as(labels)
    mask = torch.ones_like(labels, dtype=torch.bool)
    batch = MicroBatch(tokens[:, :-1].contiguous(), labels, mask, positions, torch.arange(len(labels)))
    loss = model(None, batch, step=None).mean()
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_and_the_gradients_of_a_step_are_equal(tmp_path: Path, name: str) -> None:
    """Those of transformers come through the same rules as its weights."""
    theirs, tokens = peer.random_model(name), peer.tokens()
    theirs.save_pretrained(tmp_path / "theirs")
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    loss, found = our_gradients(tmp_path / "ours", tokens)
    expected = theirs(tokens, labels=tokens, use_cache=False).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    for parameter in theirs.parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.data.copy_(grad)
    theirs.save_pretrained(tmp_path / "gradients")
    to_ours(tmp_path / "gradients", tmp_path / "their_gradients")
    tensors = native.read(tmp_path / "their_gradients").tensors
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        exact = tensor.read()
        mine = found[key][tuple(slice(size) for size in exact.shape)]
        # A key's bias has no gradient except for rounding: all probabilities of a query stay as they are.
        limit = 1e-5 * float(exact.abs().max()) + 1e-7
        assert float((mine - exact).abs().max()) <= limit, key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_keeps_every_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = peer.random_model(name).to(dtype)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="3KB")
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    back = peer.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    found, expected = back.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == dtype
        assert torch.equal(found[key], tensor), key


LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
GPT2: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
BLOOM: dict[str, Any] = GPT2 | {"position_embedding_type": "alibi", "embed_layernorm": True, "openai_gelu": True}
FALCON: dict[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key not in ("swiglu", "untie_embeddings_and_output_weights")},
    "normalization": "LayerNorm",
    "norm_placement": "parallel",
}
MPT: dict[str, Any] = GPT2 | {
    "position_embedding_type": "alibi",
    "norm_parameters": "weight",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
BORN_HERE = {
    "gpt2 with exact gelu": ("gpt2", GPT2),
    "gpt2 with tanh gelu": ("gpt2", GPT2 | {"openai_gelu": True, "norm_epsilon": 1e-3}),
    "gpt2 with squared relu": ("gpt2", GPT2 | {"squared_relu": True, "ffn_hidden_size": 24}),
    "bloom": ("bloom", BLOOM),
    "bloom with six heads": ("bloom", BLOOM | {"hidden_size": 24, "num_attention_heads": 6}),
    "llama": ("llama", LLAMA | {"rotary_base": 100.0, "kv_channels": 6}),
    "llama with biases of attention": ("llama", LLAMA | {"add_attention_bias": True}),
    "llama with biases of the MLP": ("llama", LLAMA | {"add_mlp_bias": True}),
    "llama with biases": ("llama", LLAMA | {"disable_bias_linear": False}),
    "llama 3": (
        "llama",
        LLAMA | {"rope_scaling_type": "llama3", "rope_original_max_positions": 8, "rotary_base": 50.0},
    ),
    "llama with yarn": (
        "llama",
        LLAMA | {"rope_scaling_type": "yarn", "rope_original_max_positions": 8, "rotary_base": 50.0},
    ),
    "mistral": ("mistral", LLAMA | {"window_size": 5}),
    "qwen2": ("qwen2", LLAMA | {"add_qkv_bias": True, "untie_embeddings_and_output_weights": False}),
    "qwen2 with a window": ("qwen2", LLAMA | {"add_qkv_bias": True, "window_size": 4}),
    "qwen3": ("qwen3", LLAMA | {"qk_layernorm": True, "kv_channels": 8}),
    "qwen3 with windows in some layers": (
        "qwen3",
        LLAMA | {"qk_layernorm": True, "window_size": 4, "window_attn_skip_freq": "2"},
    ),
    "falcon": ("falcon", FALCON | {"num_query_groups": 1}),
    "falcon with groups": ("falcon", FALCON | {"norm_placement": "parallel_norms"}),
    "falcon with groups on one norm, and biases": ("falcon", FALCON | {"disable_bias_linear": False}),
    "falcon, stretched": ("falcon", FALCON | {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0}),
    "mpt": ("mpt", MPT | {"hidden_size": 24, "num_attention_heads": 6}),
    "mpt, clipped": ("mpt", MPT | {"clip_qkv": 0.5, "softmax_scale": 0.7}),
    "qwen3 with a window": ("qwen3", LLAMA | {"qk_layernorm": True, "window_size": 4}),
}


@pytest.mark.parametrize("name", BORN_HERE)
def test_a_model_born_here_computes_the_same_there(tmp_path: Path, name: str) -> None:
    model_type, fields = BORN_HERE[name]
    write_random(tmp_path / "ours", Description(ModelConfig(**fields), vocab_size=peer.VOCABULARY, seq_length=64))
    to_hf(tmp_path / "ours", tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["model_type"] == model_type
    tokens = peer.tokens()
    theirs = peer.logits_of(peer.load(tmp_path / "theirs"), tokens)
    for tp in (1, 2):
        torch.testing.assert_close(logits_of(tmp_path / "ours", tokens, tp=tp), theirs, rtol=1e-5, atol=1e-5)
    to_ours(tmp_path / "theirs", tmp_path / "again")
    first, again = (native.read(tmp_path / folder) for folder in ("ours", "again"))
    for key, tensor in first.tensors.items():
        assert torch.equal(again.tensors[key].read(), tensor.read()), key


def test_a_type_that_is_asked_for_is_the_type_of_the_weights(tmp_path: Path) -> None:
    peer.random_model("llama").save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "half", source="hf", target="hf", dtype=torch.bfloat16)
    assert (
        peer.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16
    )


def write_random(save: Path, description: Description) -> None:
    """A checkpoint with weights that make every path count."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, sharding in description.shardings().items():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        tensor = torch.normal(mean, 0.3, sharding.shape, generator=generator)
        tensors[name] = LazyTensor(sharding.shape, torch.float32, tensor.clone)
    native.write(save, Model(description, tensors))
