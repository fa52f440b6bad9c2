"""Reader of the model's config for --use-checkpoint-args: state.json of a checkpoint alone, no tensors, no torch."""

from pathlib import Path
from typing import cast

from megatronish.checkpoint.checksums import DamagedError
from megatronish.checkpoint.folder import find_checkpoint, read_state
from megatronish.checkpoint.remote import Location
from megatronish.config.model_source import Start, start_of_state
from megatronish.core.errors import UserError


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
