"""Our own checkpoints as a format of conversions: read tensor by tensor, and written as a run writes them.

A conversion writes a checkpoint of step 0 that has weights alone, in the precision of the source; where the source has
the state of a training, it writes one of its iteration, from which a run continues. Tokenizer files are in a folder
inside the step's folder, and the config names them relative to it, so the folder can be moved.
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
from megatronish.checkpoint.save import ISLAND, MOMENTUM
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
from megatronish.config.dump import resolved, section_of
from megatronish.config.model_source import refuse_unknown_block
from megatronish.config.plugins import PluginsConfig
from megatronish.config.portable import TOKENIZER, with_copies
from megatronish.config.sections.data import DataConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.core.errors import UserError
from megatronish.core.files import new_folder
from megatronish.formats import tokenizer_files
from megatronish.formats.tensor_rule import TensorRule
from megatronish.formats.weights import MOMENTS, Description, LazyTensor, Model, Training, is_bias
from megatronish.parallel.sharding import Piece

PREFIX = "model."
OPTIMIZER = "optimizer."
LOAD = ".router.load"  # a state of routers: layers/router.py
STEP = 0
BEGAN_ELSEWHERE = "began_elsewhere"
"""Key in state.json: a training of another framework, of which it is not known what data and flags it had."""


def read(load: Path, *, step: int | None = None) -> Model:
    """Model of a run folder, its checkpoints folder or one step's folder; UserError if it holds no checkpoint."""
    folder = find_checkpoint(load, step=step) if load.is_dir() else None
    if folder is None:
        raise UserError(f"{load} holds no checkpoint; name a run folder, its checkpoints folder or one step's folder")
    refuse_adapters_alone(read_state(folder), folder)
    left_out = {name: why for name in stored_tensors(CheckpointReader(folder)) if (why := _no_weight(name))}
    return Model(dataclasses.replace(description_of(folder), left_out=left_out), tensors_in(folder))


def refuse_adapters_alone(state: Mapping[str, Any], folder: Path) -> None:
    """UserError for a checkpoint of a run with adapters, where a whole model is asked for."""
    if (base := state.get("base")) is not None:
        raise UserError(
            f"{folder} holds the adapters of {base.get('source')} alone; name that model, and add --adapter with this "
            "folder"
        )


def tensors_in(folder: Path) -> dict[str, LazyTensor]:
    """Lazy weights of one step's folder, by their names without `PREFIX`."""
    reader = CheckpointReader(folder)
    return {
        name.removeprefix(PREFIX): _lazy(reader, name, stored)
        for name, stored in stored_tensors(reader).items()
        if _no_weight(name) is None
    }


def _no_weight(name: str) -> str | None:
    """Reason why a tensor of a checkpoint is no weight of the model; None for weights."""
    if name.startswith((ISLAND, MOMENTUM)):
        return "state of islands: the model is that of their last outer step"
    if not name.startswith(PREFIX):
        return "state of the optimizer, which starts from the beginning"
    if name.endswith(LOAD):
        return "choices of experts in the last step, which a run counts again"
    return None


def _lazy(reader: CheckpointReader, name: str, stored: StoredTensor) -> LazyTensor:
    """Lazy tensor of a checkpoint; a stack of matrices (experts) is also read in parts."""
    read = partial(_read_rows, reader, name, stored)
    part = read if len(stored.shape) > 2 else None
    return LazyTensor(stored.shape, stored.dtype, partial(read, 0, stored.shape[0] if stored.shape else 0), part)


def _read_rows(reader: CheckpointReader, name: str, stored: StoredTensor, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of the first dim."""
    sizes = (stop - start, *stored.shape[1:]) if stored.shape else ()
    tensor = torch.empty(sizes, dtype=stored.dtype)
    zeros = (0,) * tensor.dim()
    piece = Piece((start, *zeros[1:]) if stored.shape else (), zeros, sizes)
    read_tensors(reader, {name: GlobalTensor(stored.shape, (piece,), tensor, writes=False)})
    return tensor


def description_of(folder: Path) -> Description:
    """Description of the model in a step's folder, from its state; tokenizer files are named where they lie now."""
    state = read_state(folder)
    try:
        config = with_copies(state, folder)
        refuse_unknown_block(config, folder)
        data = section_of(DataConfig, config["data"])
        return Description(
            model=section_of(ModelConfig, config["model"]),
            vocab_size=state["vocab_size"],
            seq_length=config["training"]["seq_length"],
            data=data,
            eod=state["eod"],
            tokenizer_files=_files_of(data, folder),
            origin=state.get("origin", {}),
            plugins=tuple(config.get("plugins", {}).get("plugin", ())),
        )
    except KeyError as error:
        raise DamagedError(folder, f"state.json lacks {error.args[0]}") from error
    except TypeError as error:
        raise DamagedError(folder, f"its config is not one of this version ({error})") from error


def _files_of(data: DataConfig, folder: Path) -> dict[str, Path]:
    """Tokenizer files by their standard names: those in the checkpoint, or else those that its config names."""
    if (folder / TOKENIZER).is_dir():
        kept = {path.name: path for path in sorted((folder / TOKENIZER).iterdir()) if path.is_file()}
        return tokenizer_files.in_folder(folder / TOKENIZER) | kept
    return tokenizer_files.files_of(data)


def rules(description: Description) -> list[TensorRule]:
    """Rules that keep every parameter under its own name."""
    return [TensorRule(name, (name,)) for name in description.shardings()]


def write(save: Path, model: Model, *, training: Training | None = None) -> None:
    """Write a checkpoint into the folder `save`, which must not exist or be empty: of step 0, or of a `training`."""
    step = STEP if training is None else training.iteration
    with new_folder(save, decisive=LATEST) as checkpoints:
        partial = checkpoints / partial_name_of(step)
        partial.mkdir()
        description = _with_tokenizer(partial, model.description)
        tensors = _one_by_one(PREFIX, model.tensors)
        if training is not None:
            tensors |= _one_by_one(PREFIX, training.masters)
            for moment, of_parameters in training.moments.items():
                tensors |= _one_by_one(f"{OPTIMIZER}{moment}.", of_parameters)
        write_tensors(partial, tensors, over=ALONE)
        publish(partial, step=step, state=_state(description) | _progress(training))


def read_training(load: Path, _description: Description, *, step: int | None = None) -> Training | None:
    """State of the training of a run of ours; None unless it has Adam's states of all parameters, and no islands."""
    folder = find_checkpoint(load, step=step)
    if folder is None:
        return None
    state, reader = read_state(folder), CheckpointReader(folder)
    stored = stored_tensors(reader)
    optimizer = state["config"].get("optimizer", {})
    if not state["has_optimizer"] or any(name.startswith((ISLAND, MOMENTUM)) for name in stored):
        return None
    parameters = {name for name in tensors_in(folder) if not is_bias(name)}
    keys = {moment: {name: f"{OPTIMIZER}{moment}.{name}" for name in parameters} for moment in MOMENTS}
    names = frozenset(key for of_names in keys.values() for key in of_names.values())
    if optimizer.get("optimizer", "adam") != "adam" or not names <= stored.keys():
        return None
    moments = {
        moment: {name: _lazy(reader, key, stored[key]) for name, key in of_names.items()}
        for moment, of_names in keys.items()
    }
    steps, samples = state["optimizer_steps"], state["consumed_samples"]
    scale = state.get("loss_scale", {})
    return Training(moments, {}, names, steps, state["step"], samples, optimizer, scale)


def _with_tokenizer(partial: Path, description: Description) -> Description:
    """Copy the tokenizer files into the checkpoint; returns the description whose config names them there."""
    files = description.tokenizer_files
    if files:
        tokenizer_files.copy(files, partial / TOKENIZER)
    known = not files and description.data != DataConfig()
    fields = {} if known else tokenizer_files.fields_of(files, folder=PurePosixPath(TOKENIZER))
    data = dataclasses.replace(description.data, vocab_size=description.vocab_size, **fields)
    return dataclasses.replace(description, data=data)


def _state(description: Description) -> dict[str, Any]:
    """Content of state.json for a run that has not begun."""
    config = Config(
        model=description.model,
        data=description.data,
        training=TrainingConfig(seq_length=description.seq_length),
        plugins=PluginsConfig(description.plugins),
    )
    return {
        "config": resolved(config),
        "vocab_size": description.vocab_size,
        "data": None,
        "eod": description.eod,
        "origin": dict(description.origin),
    }


def _progress(training: Training | None) -> dict[str, Any]:
    """The part of state.json that says how far the run has come, which none of ours has begun."""
    return {
        "consumed_samples": 0 if training is None else training.consumed_samples,
        "optimizer_steps": 0 if training is None else training.num_updates,
        "loss_scale": {} if training is None else dict(training.loss_scale),
        "has_optimizer": training is not None,
        "weights_only": training is None,
        BEGAN_ELSEWHERE: training is not None,
    }


def _one_by_one(prefix: str, tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    return {
        prefix + name: UnreadTensor(tensor.shape, tensor.dtype, tensor.read, tensor.part)
        for name, tensor in tensors.items()
    }
