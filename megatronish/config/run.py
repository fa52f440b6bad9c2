"""Sections [checkpoint] and [log] of a config: saving, loading, and what a run prints and records."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from megatronish.config.marks import ADDS_UP, NamedIn, at_least, at_most, greater_than
from megatronish.config.names import HOOK_NAMES


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving of checkpoints, and the model to start from."""

    save: str | None = None
    """Folder of checkpoints. Derived: RUN_DIR/checkpoints."""
    load: str | None = None
    """Checkpoints to start from: a run folder, its checkpoints folder or one step's folder. Derived: --save."""
    load_hf: str | None = None
    """Folder of a Hugging Face model to start from: its config.json, weights and tokenizer."""
    use_checkpoint_args: bool = False
    """Take [model], vocabulary, sequence length and tokenizer from --load's checkpoint."""
    save_interval: Annotated[int | None, at_least(1), at_most(2**63 - 1)] = None
    """Steps between checkpoints; one is always written at the end."""
    async_save: bool = False
    """Write checkpoints beside training, which waits only while its tensors are copied to host memory."""
    keep_last: Annotated[int | None, at_least(1), at_most(2**63 - 1)] = None
    """Remove all but so many of the newest checkpoints. Derived: 1 with --keep-every, else all stay."""
    keep_every: Annotated[
        int | None, tyro.conf.arg(aliases=["--save-retain-interval"]), at_least(1), at_most(2**63 - 1)
    ] = None
    """Of older checkpoints keep those whose step is a multiple of this."""
    ckpt_step: Annotated[int | None, at_least(0), at_most(2**63 - 1)] = None
    """Load this step instead of the newest."""
    finetune: bool = False
    """Take weights alone from --load: step, optimizer and data order start anew."""
    no_load_optim: tyro.conf.FlagCreatePairsOff[bool] = False
    """Do not load the optimizer's state."""
    no_save_optim: tyro.conf.FlagCreatePairsOff[bool] = False
    """Do not save the optimizer's state."""
    exit_on_missing_checkpoint: bool = False
    """It is an error if --load holds no checkpoint."""


@dataclass(frozen=True)
class LogConfig:
    """Run folder, log, TensorBoard and recordings."""

    run_dir: str | None = None
    """Folder of everything the run leaves. Derived: runs/<name of the config>."""
    dry_run: bool = False
    """Print the first lines of the run and end."""
    log_interval: Annotated[int, at_least(1), at_most(2**63 - 1)] = 1
    """Steps between lines of the log."""
    tensorboard_dir: str | None = None
    """Derived: RUN_DIR/tensorboard."""
    tensorboard_log_interval: Annotated[int, at_least(1), at_most(2**63 - 1)] = 1
    """Steps between TensorBoard points."""
    profile_schedule: bool = False
    """Record what each stage did when, as a picture and a Chrome trace in RUN_DIR/schedule."""
    profile_step_start: Annotated[int, at_least(1), at_most(2**63 - 1)] = 10
    """First step to be recorded."""
    profile_step_end: Annotated[int, at_least(1), at_most(2**63 - 1)] = 12
    """First step not to be recorded any more."""
    log_params_norm: bool = False
    """Log the norm of all parameters."""
    log_num_zeros_in_grad: bool = False
    """Log how many gradient elements are zero."""
    peak_tflops_per_device: Annotated[float | None, greater_than(0)] = None
    """Peak of one device in TFLOP/s at the run's precision, for MFU; known for common GPUs."""
    progress_bar: Literal["auto", "on", "off"] = "auto"
    """auto: on a terminal."""
    hook: Annotated[tuple[str, ...], NamedIn(HOOK_NAMES), ADDS_UP] = ()
    """Hooks of plug-ins, in their order: called at each step after evaluation and before saving."""
    hook_args: tuple[str, ...] = ()
    """Options of these hooks: option=value ..., for each hook that has the option."""
    sample_prompt: str | None = None
    """After training, print what the model writes after this text."""
    sample_tokens: Annotated[int, at_least(1), at_most(2**31 - 1)] = 200
    """Tokens of that sample."""
