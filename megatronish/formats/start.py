"""Reader of the model that a run starts from: a Hugging Face folder, or a checkpoint. Needs no torch."""

from pathlib import Path

from megatronish.checkpoint.arguments import read_arguments
from megatronish.checkpoint.remote import location
from megatronish.config.model_source import Start
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.run import CheckpointConfig
from megatronish.core.errors import UserError
from megatronish.formats.hf.config import read_hf_config
from megatronish.formats.hf.config_json import CONFIG

_MEGATRON = "latest_checkpointed_iteration.txt"  # LATEST of formats/megatron/names.py, which needs torch


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
    found = read_hf_config(folder)
    return Start(f"--load-hf {folder}", ModelConfig(**found.model), found.vocab_size, found.seq_length, found.data)


def of_another_format(load: Path) -> str | None:
    """Complaint about a --load in another format, with the remedy; None for what may be a checkpoint, or is missing."""
    if (load / "checkpoints").is_dir() or any(load.glob("step_*")) or (load / "state.json").is_file():
        return None
    if (load / CONFIG).is_file():
        return f"--load {load} holds no checkpoint; it holds a Hugging Face model: use --load-hf {load}"
    if (load / _MEGATRON).is_file():
        return (
            f"--load {load} holds no checkpoint; it holds Megatron-LM's: convert it with megatronish convert "
            "--from megatron"
        )
    return None
