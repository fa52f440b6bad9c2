"""How do our own checkpoints take part in conversions: read tensor by tensor, and written as a run's would be?

A conversion writes a checkpoint of step 0 that holds weights alone, in the precision they came in; tokenizer files lie
in a folder of its own, and its config names them relative to the step's folder, which can so be moved.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from megatronish.checkpoint.checksums import DamagedError
from megatronish.checkpoint.folder import (
    LATEST,
    find_checkpoint,
    partial_name_of,
    publish,
    read_state,
)
from megatronish.checkpoint.storage import CheckpointReader
from megatronish.checkpoint.tensors import (
    ALONE,
    GlobalTensor,
    StoredTensor,
    UnreadTensor,
    read_tensors,
    stored_tensors,
    write_tensors,
)
from megatronish.config.config import Config
from megatronish.config.data import DataConfig
from megatronish.config.dump import resolved
from megatronish.config.model import ModelConfig
from megatronish.config.starting import TOKENIZER, located
from megatronish.config.training import TrainingConfig
from megatronish.errors import UserError
from megatronish.files import new_folder
from megatronish.formats import tokenizer_files
from megatronish.formats.weights import Description, LazyTensor, Model, TensorRule
from megatronish.sharding import Piece

PREFIX = "model."
STEP = 0


def read(load: Path, *, step: int | None = None) -> Model:
    """A run folder, its checkpoints folder or one step's folder; UserError if it holds no checkpoint."""
    folder = find_checkpoint(load, step=step) if load.is_dir() else None
    if folder is None:
        raise UserError(f"{load} holds no checkpoint; name a run folder, its checkpoints folder or one step's folder")
    reader = CheckpointReader(folder)
    tensors = {
        name.removeprefix(PREFIX): LazyTensor(*stored, partial(_read_tensor, reader, name, stored))
        for name, stored in stored_tensors(reader).items()
        if name.startswith(PREFIX)
    }
    return Model(description_of(folder), tensors)


def _read_tensor(reader: CheckpointReader, name: str, stored: StoredTensor) -> Tensor:
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    zeros = (0,) * tensor.dim()
    whole = GlobalTensor(tuple(tensor.shape), (Piece(zeros, zeros, tuple(tensor.shape)),), tensor, writes=False)
    read_tensors(reader, {name: whole})
    return tensor


def description_of(folder: Path) -> Description:
    """What the state of a step's folder says of its model; the tokenizer's files are named where they lie now."""
    state = read_state(folder)
    try:
        config = state["config"]
        data = data_of(config["data"], folder)
        return Description(
            model=ModelConfig(**config["model"]),
            vocab_size=state["vocab_size"],
            seq_length=config["training"]["seq_length"],
            data=data,
            eod=state["eod"],
            tokenizer_files=_files_of(data, folder),
            origin=state.get("origin", {}),
        )
    except KeyError as error:
        raise DamagedError(folder, f"state.json lacks {error.args[0]}") from error
    except TypeError as error:
        raise DamagedError(folder, f"its config is not one of this version ({error})") from error


def data_of(saved: Mapping[str, Any], folder: Path) -> DataConfig:
    """The data section of a checkpoint's config, with tokenizer files that lie in its folder found there."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    return DataConfig(**located(values, folder))


def _files_of(data: DataConfig, folder: Path) -> dict[str, Path]:
    """The files to carry along, under the names that everybody looks for: those in the folder, or those of the run."""
    if (folder / TOKENIZER).is_dir():
        return {path.name: path for path in sorted((folder / TOKENIZER).iterdir())}
    return tokenizer_files.files_of(data)


def rules(description: Description) -> list[TensorRule]:
    """Every parameter under its own name."""
    return [TensorRule(name, (name,)) for name in description.shardings()]


def write(save: Path, model: Model) -> None:
    """A checkpoint of step 0 in `save`, as a run keeps them; it must not exist, or be empty."""
    with new_folder(save, decisive=LATEST) as checkpoints:
        partial = checkpoints / partial_name_of(STEP)
        partial.mkdir()
        description = _with_tokenizer(partial, model.description)
        write_tensors(partial, _one_by_one(model.tensors), over=ALONE)
        publish(partial, step=STEP, state=_state(description))


def _with_tokenizer(partial: Path, description: Description) -> Description:
    """Copy the tokenizer's files, and name them in the config as `data_of` expects it."""
    files = description.tokenizer_files
    if files:
        tokenizer_files.copy(files, partial / TOKENIZER)
    known = not files and description.data != DataConfig()
    fields = {} if known else tokenizer_files.fields_of(files, folder=PurePosixPath(TOKENIZER))
    data = dataclasses.replace(description.data, vocab_size=description.vocab_size, **fields)
    return dataclasses.replace(description, data=data)


def _state(description: Description) -> dict[str, Any]:
    """What a run keeps beside its tensors, of a run that has not begun."""
    config = Config(
        model=description.model,
        data=description.data,
        training=TrainingConfig(seq_length=description.seq_length),
    )
    return {
        "config": resolved(config),
        "vocab_size": description.vocab_size,
        "data": None,
        "eod": description.eod,
        "consumed_samples": 0,
        "optimizer_steps": 0,
        "has_optimizer": False,
        "weights_only": True,
        "origin": dict(description.origin),
    }


def _one_by_one(tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    return {PREFIX + name: UnreadTensor(tensor.shape, tensor.dtype, tensor.read) for name, tensor in tensors.items()}
