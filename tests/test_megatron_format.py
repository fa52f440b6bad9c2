"""Checkpoints of Megatron-LM: names, layouts, arguments, and files that nobody should trust."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatronish.checkpoint import megatron
from megatronish.checkpoint.weights import Description, LazyTensor, Model, from_ours, to_ours
from megatronish.config.model import ModelConfig
from megatronish.errors import UserError

GPT2 = ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=4, make_vocab_size_divisible_by=4)
LLAMA = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=8,
    group_query_attention=True,
    num_query_groups=4,
    ffn_hidden_size=24,
    position_embedding_type="rope",
    rope_scaling_type="llama3",
    rotary_base=500000.0,
    normalization="RMSNorm",
    norm_epsilon=1e-6,
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    make_vocab_size_divisible_by=4,
)
QWEN = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    kv_channels=6,
    ffn_hidden_size=8,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    add_qkv_bias=True,
    qk_layernorm=True,
    window_size=5,
    make_vocab_size_divisible_by=8,
)
NEMOTRON = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    squared_relu=True,
    apply_layernorm_1p=True,
    qk_layernorm=True,
    position_embedding_type="rope",
    rotary_percent=0.5,
    rope_scaling_type="linear",
    rope_scaling_factor=4.0,
    untie_embeddings_and_output_weights=True,
    make_vocab_size_divisible_by=4,
)
SHAPES = {"gpt2": GPT2, "llama": LLAMA, "qwen": QWEN, "nemotron": NEMOTRON}
VOCAB_SIZE = 30
LAYOUTS = [
    {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "transformer_impl": impl}
    for tp, pp, impl in (
        (1, 1, "local"),
        (1, 2, "transformer_engine"),
        (2, 1, "local"),
        (2, 4, "transformer_engine"),
        (4, 2, "local"),
    )
]


def describe(config: ModelConfig) -> Description:
    return Description(config, vocab_size=VOCAB_SIZE, seq_length=8)


def lazy(tensor: Tensor) -> LazyTensor:
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    # Between 1/2 and 2, where w - 1 is exact, as is needed for the bits of norms that store it.
    return {
        name: (0.5 + 1.5 * torch.rand(sharding.shape, generator=draw)).to(dtype)
        for name, sharding in describe(config).shardings().items()
    }


def save(folder: Path, config: ModelConfig, tensors: Mapping[str, Tensor], **layout: Any) -> None:
    description = describe(config)
    theirs = from_ours({name: lazy(tensor) for name, tensor in tensors.items()}, megatron.rules(description))
    assert not theirs.missing and not theirs.left_over
    megatron.write(folder, Model(description, theirs.tensors), **layout)


def load(folder: Path, **how: Any) -> tuple[Description, dict[str, Tensor]]:
    description, theirs = megatron.read(folder, **how)
    ours = to_ours(theirs, megatron.rules(description))
    assert not ours.missing and not ours.left_over
    assert all(tensor.read().shape == tensor.shape for tensor in ours.tensors.values())
    return description, {name: tensor.read() for name, tensor in ours.tensors.items()}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def rank_file(folder: Path, rank: str) -> Path:
    return folder / "release" / f"mp_rank_{rank}" / "model_optim_rng.pt"


def torch_load(folder: Path, rank: str) -> dict[str, Any]:
    return torch.load(rank_file(folder, rank), weights_only=False)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Save every rank's file again with torch, changed."""
    for path in folder.glob("release/*/*.pt"):
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)


# Layouts.


@pytest.mark.parametrize("name", SHAPES)
def test_every_layout_comes_back_and_becomes_every_other(tmp_path: Path, name: str) -> None:
    expected = random_model(SHAPES[name])
    for number, layout in enumerate(LAYOUTS):
        save(tmp_path / str(number), SHAPES[name], expected, **layout)
        assert_same(load(tmp_path / str(number))[1], expected)
    for here, there in itertools.permutations(range(len(LAYOUTS)), 2):
        megatron.write(tmp_path / f"{here}{there}", megatron.read(tmp_path / str(here)), **LAYOUTS[there])
        for path in (tmp_path / str(there)).rglob("*.pt"):
            again = tmp_path / f"{here}{there}" / path.relative_to(tmp_path / str(there))
            assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", SHAPES)
def test_the_arguments_describe_the_same_model(tmp_path: Path, name: str) -> None:
    config = SHAPES[name]
    save(tmp_path / "a", config, random_model(config), **LAYOUTS[2])
    description = load(tmp_path / "a")[0]
    assert (description.vocab_size, description.seq_length) == (VOCAB_SIZE, 8)
    derived = ("head_size", "num_kv_heads", "ffn_size", "linear_bias", "qkv_bias", "tied", "rope_scaling")
    given = set(config.__dataclass_fields__) - {
        *("kv_channels", "num_query_groups", "ffn_hidden_size", "max_position_embeddings"),
        *(() if config.rope_scaling == "llama3" else ("rope_scaling_factor",) * (config.rope_scaling == "none")),
    }
    for field in (*derived, *given):
        assert getattr(description.model, field) == getattr(config, field), field
