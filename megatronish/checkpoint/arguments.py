"""What does --use-checkpoint-args take from a checkpoint? Its state.json alone: neither tensors nor torch."""

from pathlib import Path

from megatronish.checkpoint.checksums import DamagedError
from megatronish.checkpoint.folder import find_checkpoint, read_state
from megatronish.config.starting import Start, start_of_state
from megatronish.errors import UserError


def read_arguments(load: Path, step: int | None) -> Start:
    """The model of --load's checkpoint; UserError if it holds none, or none of this version."""
    folder = find_checkpoint(load, step=step) if load.is_dir() else None
    if folder is None:
        raise UserError(f"--load {load} holds no checkpoint; correct the path, or leave --use-checkpoint-args out")
    try:
        return start_of_state(read_state(folder), folder)
    except KeyError as error:
        raise DamagedError(folder, f"state.json lacks {error.args[0]}") from error
    except TypeError as error:
        raise DamagedError(folder, f"its config is not one of this version ({error})") from error
