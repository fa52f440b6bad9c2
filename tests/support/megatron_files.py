"""Helpers for tests of Megatron-LM's files: random models, saved, read again, and changed as torch saved them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.megatron import read as megatron
from megatronish.formats.weights import Description, LazyTensor, Model, from_ours, to_ours

VOCAB_SIZE = 30


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


def change_args(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: vars(content["args"]).update(values)


def without(*names: str) -> Callable[[dict[str, Any]], object]:
    return lambda content: [vars(content["args"]).pop(name) for name in names]
