"""Configuration of a run from a command line: config, the model it starts from, and a plan that can run."""

from collections.abc import Sequence

from megatronish.config import read
from megatronish.config.check import refuse_unrunnable_plans
from megatronish.config.hub import fetch_weights
from megatronish.estimate.costs.parameters import refuse_cut_blocks
from megatronish.estimate.disk_room import refuse_offload_folder
from megatronish.estimate.planner.forecast import refuse_unknown_device
from megatronish.formats.start import read_start
from megatronish.specs.adapter_targets import refuse_wrong_targets


def read_config(
    argv: Sequence[str], *, world_size: int | None = None, program: str = "megatronish pretrain"
) -> read.ReadConfig:
    """Config and notes of the flags `argv`; `world_size` is the launcher's (torchrun, SLURM), None on a plain start.

    Prints and exits 0 on --help. UserError with every problem of file, flags, rules and files together.
    """
    config_and_notes = read.read_config(argv, world_size=world_size, read_start=read_start, program=program)
    refuse_unrunnable_plans(config_and_notes.config)
    refuse_wrong_targets(config_and_notes.config.model, config_and_notes.config.adapter)
    refuse_cut_blocks(config_and_notes.config)
    refuse_unknown_device(config_and_notes.config)
    if not config_and_notes.config.log.dry_run:
        refuse_offload_folder(config_and_notes.config)
        fetch_weights(config_and_notes.config.checkpoint.load_hf)
    return config_and_notes
