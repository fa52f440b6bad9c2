"""Configuration of a run from a command line: config, the model it starts from, and a plan that can run."""

from collections.abc import Sequence

from megatronish.config import read
from megatronish.config.check import refuse_unrunnable_plans
from megatronish.config.hub import fetch_weights
from megatronish.estimate.costs.parameters import refuse_cut_blocks
from megatronish.estimate.planner.disk_room import refuse_offload_folder
from megatronish.estimate.planner.forecast import refuse_unknown_device
from megatronish.formats.start import read_start
from megatronish.specs.adapter_targets import refuse_wrong_targets


def read_config(
    argv: Sequence[str], *, world_size: int | None = None, program: str = "megatronish pretrain"
) -> read.ReadConfig:
    """Config and notes of the flags `argv`; `world_size` is the launcher's (torchrun, SLURM), None on a plain start.

    Prints and exits 0 on --help. UserError with every problem of file, flags, rules and files together.
    """
    found = read.read_config(argv, world_size=world_size, read_start=read_start, program=program)
    refuse_unrunnable_plans(found.config)
    refuse_wrong_targets(found.config.model, found.config.adapter)
    refuse_cut_blocks(found.config)
    refuse_unknown_device(found.config)
    if not found.config.log.dry_run:
        refuse_offload_folder(found.config)
        fetch_weights(found.config.checkpoint.load_hf)
    return found
