"""Tiny random models of families, as Hugging Face folders: a config.json is enough, our own formats do the rest."""

import json
from pathlib import Path
from typing import Any

import torch

from megatronish.formats import native
from megatronish.formats.convert import convert
from megatronish.formats.hf.tensors import describe
from megatronish.formats.weights import LazyTensor, Model


def write_family_model(folder: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """Write the model of this config.json, with random weights, into a folder that may have a tokenizer already."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    description = describe(folder)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, sharding in description.shardings().items():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        tensor = torch.normal(mean, 0.2, sharding.shape, generator=generator)
        tensors[name] = LazyTensor(sharding.shape, torch.float32, tensor.clone)
    native.write(folder.with_name(f"{folder.name}-ours"), Model(description, tensors))
    written = folder.with_name(f"{folder.name}-theirs")
    convert(folder.with_name(f"{folder.name}-ours"), written, source="megatronish", target="hf")
    for path in written.iterdir():
        if path.is_file():
            path.replace(folder / path.name)
    return folder
