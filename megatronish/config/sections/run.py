"""Sections [checkpoint], [log] and [resilience] of a config: saving, loading, records, hangs, restarts."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from megatronish.config.marks import ADDS_UP, NamedIn, at_least, at_most, greater_than
from megatronish.core.names import HOOK_NAMES


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving of checkpoints, and the model to start from."""

    save: str | None = None
    """Folder of checkpoints, or a URL of object storage (s3://bucket/run). Derived: RUN_DIR/checkpoints."""
    load: str | None = None
    """Checkpoints to start from: a run folder, its checkpoints folder, one step's folder, or a URL. Derived: --save."""
    load_hf: str | None = None
    """Folder of a Hugging Face model to start from: its config.json, weights and tokenizer."""
    use_checkpoint_args: bool = False
    """Take [model], vocabulary, sequence length and tokenizer from --load's checkpoint."""
    save_interval: Annotated[int | None, at_least(1), at_most(2**63 - 1)] = None
    """Steps between checkpoints; one is always written at the end."""
    async_save: bool = False
    """Write checkpoints in the background of training, which waits only while its tensors are copied to host memory."""
    save_replicated_interval: Annotated[int | None, at_least(1), at_most(2**63 - 1)] = None
    """Lose at most so many steps with a host: copies of the state in this and another host's memory."""
    local_save: str | None = None
    """Folder on each host for those copies. Derived: in /dev/shm if it has room, else in the temporary directory."""
    keep_last: Annotated[int | None, at_least(1), at_most(2**63 - 1)] = None
    """Remove all except so many of the newest checkpoints. Derived: 1 with --keep-every, else all stay."""
    keep_every: Annotated[
        int | None, tyro.conf.arg(aliases=["--save-retain-interval"]), at_least(1), at_most(2**63 - 1)
    ] = None
    """Of older checkpoints keep those whose step is a multiple of this."""
    ckpt_step: Annotated[int | None, at_least(0), at_most(2**63 - 1)] = None
    """Load this step instead of the newest."""
    finetune: bool = False
    """Take weights alone from --load: step, optimizer and data order start from the beginning."""
    moe_use_upcycling: bool = False
    """Start a model with experts from a dense one, of --load or --load-hf: each expert is a copy of its MLP."""
    no_load_optim: tyro.conf.FlagCreatePairsOff[bool] = False
    """Do not load the optimizer's state."""
    no_save_optim: tyro.conf.FlagCreatePairsOff[bool] = False
    """Do not save the optimizer's state."""
    use_checkpoint_opt_param_scheduler: bool = False
    """A resumed run takes its learning-rate and weight-decay schedule from its checkpoint."""
    exit_on_missing_checkpoint: bool = False
    """It is an error if --load holds no checkpoint."""


@dataclass(frozen=True)
class LogConfig:
    """Run folder, log, TensorBoard and recordings."""

    run_dir: str | None = None
    """Folder of everything the run leaves, or a URL of object storage. Derived: runs/<name of the config>."""
    dry_run: bool = False
    """Print the first lines of the run and end. With --rank, also what that rank holds, sends and waits for."""
    world_size: Annotated[int | None, at_least(1), at_most(10_000_000)] = None
    """With --dry-run, ranks of the run that is planned."""
    rank: str | None = None
    """With --dry-run, a rank whose engine is built and takes a step without a GPU; all-stages: one rank of each."""
    dry_run_report: str | None = None
    """JSON file of what --rank found."""
    preflight: bool = False
    """Compare the ranks of the run (versions, config, data, clocks, disks, memory, links) and end: 1 if not well."""
    forecast_device: str | None = None
    """Device that forecast.json expects step times of: one of megatronish plan, or its TOML file. Derived: the GPU."""
    log_interval: Annotated[int, at_least(1), at_most(2**63 - 1)] = 1
    """Steps between lines of the log."""
    tensorboard_dir: str | None = None
    """Derived: RUN_DIR/tensorboard."""
    tensorboard_log_interval: Annotated[int, at_least(1), at_most(2**63 - 1)] = 1
    """Steps between TensorBoard points."""
    tensorboard_queue_size: Annotated[int, at_least(1), at_most(2**63 - 1)] = 1000
    """TensorBoard points that are written together."""
    wandb_project: str | None = None
    """Project of W&B (Weights & Biases) to log to as well; pip install 'megatronish[wandb]'."""
    wandb_exp_name: str | None = None
    """Name of the W&B run. Derived: name of the run folder."""
    wandb_save_dir: str | None = None
    """Folder of W&B's files. Derived: RUN_DIR, where they are in wandb/."""
    wandb_entity: str | None = None
    """Team or user of the W&B project. Derived: W&B's default."""
    mlflow_experiment: str | None = None
    """Experiment of MLflow to log to as well; pip install 'megatronish[mlflow]'."""
    mlflow_run_name: str | None = None
    """Name of the MLflow run. Derived: name of the run folder."""
    mlflow_tracking_uri: str | None = None
    """Server, database or folder of MLflow's runs. Derived: MLFLOW_TRACKING_URI, else MLflow's default."""
    profile_schedule: bool = False
    """Record what each stage did when, as a picture and a Chrome trace in RUN_DIR/schedule."""
    profile: bool = False
    """Show where these steps went, by torch's profiler, into RUN_DIR/profile; under nsys, open its capture window."""
    use_pytorch_profiler: bool = False
    """Use torch's profiler under nsys, too."""
    pytorch_profiler_collect_shapes: bool = False
    """Shapes of the operators' inputs in that trace."""
    pytorch_profiler_collect_callstack: bool = False
    """Lines of Python that called the operators in that trace; recording is slower."""
    profile_ranks: tuple[int, ...] | None = None
    """Ranks that --profile and --record-memory-history record. Derived: 0."""
    profile_step_start: Annotated[int, at_least(1), at_most(2**63 - 1)] = 10
    """First step to be recorded."""
    profile_step_end: Annotated[int, at_least(1), at_most(2**63 - 1)] = 12
    """First step not to be recorded any more."""
    record_memory_history: bool = False
    """Record every allocation on the GPU; a snapshot is written at the end, and when the run fails."""
    memory_snapshot_path: str | None = None
    """File of that snapshot. Derived: RUN_DIR/profile/rank_N_memory.pickle."""
    log_params_norm: bool = False
    """Log the norm of all parameters."""
    log_max_attention_logit: bool = False
    """Log the largest logit of attention; with --qk-clip it is logged in any case."""
    log_num_zeros_in_grad: bool = False
    """Log how many gradient elements are zero."""
    peak_tflops_per_device: Annotated[float | None, greater_than(0)] = None
    """Peak of one device in TFLOP/s at the run's precision, for MFU; known for common GPUs."""
    log_world_size_to_tensorboard: bool = False
    """Log the number of ranks, which a resume may change."""
    log_format: Literal["auto", "compact", "full"] = "auto"
    """Lines of the console. auto: compact on a terminal, else Megatron-LM's line, which a rank's log always has."""
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


@dataclass(frozen=True)
class ResilienceConfig:
    """What a run does about ranks that hang or fail."""

    watch: bool = True
    """Watch the ranks: a run that hangs says which rank hangs, and where, and ends with status 1."""
    hang_seconds: Annotated[float | None, greater_than(0), at_most(31_536_000)] = None
    """A rank that makes no progress for so long hangs. Derived: 20 times the median step, at least 30."""
    hang_seconds_start: Annotated[float | None, greater_than(0), at_most(31_536_000)] = None
    """The same before the first steps. Derived: --hang-seconds, or 0.9 --distributed-timeout-minutes without it."""
    hang_seconds_evaluation: Annotated[float | None, greater_than(0), at_most(31_536_000)] = None
    """The same in evaluation. Derived like --hang-seconds-start."""
    hang_seconds_save: Annotated[float | None, greater_than(0), at_most(31_536_000)] = None
    """The same while a checkpoint is saved, and at the end. Derived like --hang-seconds-start."""
    max_restarts: Annotated[int, at_least(0), at_most(1_000_000)] = 0
    """A plain start begins again so many times after a failure, from the newest checkpoint."""
    check_replicas_interval: Annotated[int, at_least(0), at_most(2**63 - 1)] = 100
    """Steps between comparisons of the parameters that ranks hold alike, by a hash; also before each save. 0: never."""
    check_memory: bool = True
    """Refuse a start that expects to take more memory than its machines and devices have."""
    skip_loss_spikes: Annotated[float | None, greater_than(1)] = None
    """Leave out steps whose gradient norm is above this many times the median of the last 100."""
    straggler_interval: Annotated[int, at_least(0), at_most(2**63 - 1)] = 16
    """Steps between comparisons of the ranks' own times of a step; a rank that is slow twice is named. 0: never."""
    straggler_ratio: Annotated[float, greater_than(1)] = 1.3
    """A rank is slow whose own time is above this many times that of its peers."""
