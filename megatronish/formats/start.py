"""Reader of the model that a run starts from: a Hugging Face folder, or a checkpoint. Needs no torch."""

from pathlib import Path
from typing import Literal, cast

from megatronish.checkpoint.checksums import DamagedError
from megatronish.checkpoint.folder import find_checkpoint, read_state
from megatronish.config.model_source import Start, start_of_state
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.run import CheckpointConfig
from megatronish.core.errors import UserError
from megatronish.core.remote import Location, location
from megatronish.formats.hf.config import read_hf_config
from megatronish.formats.hf.family import CONFIG

FormatName = Literal["hf", "megatronish", "megatron", "megatron-dist"]
"""Formats of weights that are read; megatron-dist is the torch_dist of Megatron-LM."""

_MEGATRON = ("latest_checkpointed_iteration.txt", "common.pt")
"""Files of Megatron-LM's folders, as formats/megatron/ names them, which needs torch."""


def read_start(checkpoint: CheckpointConfig) -> Start | None:
    """Model to start from, with its config; None for a run that describes its model itself.

    UserError if the model cannot be read, or --load is a model of another format.
    """
    if checkpoint.load_hf is not None:
        return start_of_hf(Path(checkpoint.load_hf))
    if checkpoint.load is None:
        return None
    load = location(checkpoint.load)
    if isinstance(load, Path) and (complaint := of_another_format(load)):
        raise UserError(complaint)
    return read_arguments(load, checkpoint.ckpt_step) if checkpoint.use_checkpoint_args else None


def start_of_hf(folder: Path) -> Start:
    """Model of a Hugging Face folder; UserError if the folder holds none, or none of a known family."""
    config = read_hf_config(folder)
    return Start(f"--load-hf {folder}", ModelConfig(**config.model), config.vocab_size, config.seq_length, config.data)


def of_another_format(load: Path) -> str | None:
    """Complaint about a --load in another format, with the remedy; None for what may be a checkpoint, or is missing."""
    if (load / "checkpoints").is_dir() or any(load.glob("step_*")) or (load / "state.json").is_file():
        return None
    if (load / CONFIG).is_file():
        return f"--load {load} holds no checkpoint; it holds a Hugging Face model: use --load-hf {load}"
    if any((load / name).is_file() for name in _MEGATRON):
        return (
            f"--load {load} holds no checkpoint; it holds Megatron-LM's: convert it with megatronish convert "
            "--from megatron"
        )
    return None


def read_arguments(load: Location, step: int | None) -> Start:
    """Model of the checkpoint in `load`; UserError without a checkpoint, DamagedError for an unreadable config."""
    folder = find_checkpoint(load, step=step) if load.is_dir() else None
    if folder is None:
        raise UserError(f"--load {load} holds no checkpoint; correct the path, or leave --use-checkpoint-args out")
    try:
        return start_of_state(read_state(folder), cast(Path, folder))  # whose names alone are asked
    except KeyError as error:
        raise DamagedError(folder, f"state.json lacks {error.args[0]}") from error
    except TypeError as error:
        raise DamagedError(folder, f"its config is not one of this version ({error})") from error
