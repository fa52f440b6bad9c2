"""What is the config of this run? The TOML file, flags over it, what follows from both, and all complaints at once."""

import contextlib
import io
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from megatronish.config.check import problems as broken_rules
from megatronish.config.config import Config
from megatronish.config.fields import FIELDS, read_fields, with_fields
from megatronish.config.files import missing_files
from megatronish.config.optimizer import OptimizerConfig
from megatronish.config.parallel import ParallelConfig
from megatronish.config.rules.rule import MESH
from megatronish.config.settings import Setting, Settings, read_command_line, read_file
from megatronish.config.settle import LOSS_SCALE_RULE, merge, settle
from megatronish.config.starting import (
    ReadCheckpoint,
    Start,
    contradictions,
    of_another_format,
    start_of_hf,
    stretched,
    tokenizer_named_by,
)
from megatronish.config.training import TrainingConfig
from megatronish.errors import UserError

PROGRAM = "pretrain_gpt.py"
DESCRIPTION = (
    "Pretrains a GPT. --config FILE.toml reads sections [model], [parallel], [training], [optimizer], [data], "
    "[checkpoint] and [log]; the flags below override it. Names and meanings are Megatron-LM's where it has the flag."
)
MOCK_VOCAB_SIZE = 4096


class ConfigError(UserError):
    """All that the user has to mend, a sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{count} in the configuration:", *(f"  {problem}" for problem in self.problems)]))


class ReadConfig(NamedTuple):
    """The config as it counts, and what the user may want to know about it."""

    config: Config
    notes: list[str]


def read_config(
    argv: Sequence[str], *, world_size: int | None = None, read_checkpoint: ReadCheckpoint | None = None
) -> ReadConfig:
    """The config of a command line; `world_size` is the launcher's (torchrun, SLURM), None on a plain start.

    `read_checkpoint` is asked for the model of a checkpoint where --use-checkpoint-args wants it.

    Prints and exits 0 on --help. ConfigError with every problem of file, flags, rules and files together.
    """
    line = read_command_line(argv)
    if line.wants_help:
        tyro.cli(tyro.conf.OmitArgPrefixes[Config], args=["--help"], prog=PROGRAM, description=DESCRIPTION)
    path = Path(line.config_file) if line.config_file is not None else None
    file = _read_file(path)
    if isinstance(file, str):
        raise ConfigError([file, *line.flags.problems])

    merged = merge(file=file.settings, typed=line.flags.settings)
    values, misfits = _values(merged.settings)
    settled = settle({name: merged.settings[name] for name in values}, values)
    told = {name: values[name] for name in settled.settings}
    if told.get("tokenizer_model") is not None and "tokenizer_type" not in told:
        told |= tokenizer_named_by(Path(told["tokenizer_model"]))
    start = _start(told, read_checkpoint)
    if isinstance(start, str):
        raise ConfigError([start, *file.problems, *line.flags.problems, *merged.problems, *misfits.values()])
    config = with_fields(Config(), **({} if start is None else start.fields(told)) | told)
    unsound = {*misfits, *file.unsound}
    config, derived_notes, derived_problems = _derive(config, path=path, world_size=world_size, unsound=unsound)
    problems = [
        *file.problems,
        *line.flags.problems,
        *merged.problems,
        *misfits.values(),
        *settled.problems,
        *([] if start is None else contradictions(start, settled.settings, told)),
        *derived_problems,
        *broken_rules(config, invalid=unsound),
        *missing_files(config.data),
    ]
    if problems:
        raise ConfigError(problems)
    idle = [f"{name} (by {winner})" for name, winner in settled.idle.items()]
    idle_line = [f"idle in {path}: {', '.join(idle)}"] if idle else []
    notes = [*idle_line, *file.notes, *line.flags.notes, *derived_notes]
    return ReadConfig(config, notes if start is None else [*notes, *stretched(start, config.training.seq_length)])


def _read_file(path: Path | None) -> Settings | str:
    """The file's settings, or why it cannot be read."""
    if path is None:
        return Settings([], [], [], set())
    try:
        return read_file(path)
    except FileNotFoundError:
        others = ", ".join(str(other) for other in sorted(path.parent.glob("*.toml")))
        return f"--config {path} does not exist; {f'there are {others}' if others else 'correct the path'}"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return f"--config {path} is not TOML: {error}; mend that line"
    except OSError as error:
        return f"--config {path} cannot be read: {error.strerror}; name a readable TOML file"


def _values(settings: Mapping[str, Setting]) -> tuple[dict[str, Any], dict[str, str]]:
    """({field: value}, {field: complaint}). tyro stops at its first bad value, so then they are read one by one."""
    together = _parse(list(settings.values()))
    if together is not None:
        return together, {}
    values: dict[str, Any] = {}
    misfits = {}
    for name, setting in settings.items():
        alone = _parse([setting])
        if alone is None:
            misfits[name] = f"{setting.spelled}: {name} must be {FIELDS[name].wants}"
        else:
            values |= alone
    return values, misfits


def _parse(settings: Sequence[Setting]) -> dict[str, Any] | None:
    """{field: value}, or None if any of them does not fit its field."""
    values: dict[str, Any] = {}
    arguments = []
    for setting in settings:
        field = FIELDS[setting.field]
        if field.type is bool:
            if setting.values not in (("true",), ("false",)):
                return None
            values[setting.field] = setting.values == ("true",)
        else:
            first, *others = setting.values or ("",)
            arguments += [f"{field.flag}={first}", *others] if setting.values else [field.flag]
    try:
        with contextlib.redirect_stderr(
            io.StringIO()
        ):  # a value of the wrong type is printed in spite of console_outputs
            config = tyro.cli(tyro.conf.OmitArgPrefixes[Config], args=arguments, prog=PROGRAM, console_outputs=False)
    except SystemExit:
        return None
    read = read_fields(config)
    if not all(FIELDS[setting.field].allows(read[setting.field]) for setting in settings):
        return None
    return {setting.field: read[setting.field] for setting in settings} | values


def _start(told: Mapping[str, Any], read_checkpoint: ReadCheckpoint | None) -> Start | str | None:
    """The model that the run starts from if that says which one it is, or why it cannot be read."""
    try:
        if told.get("load_hf") is not None:
            return start_of_hf(Path(told["load_hf"]))
        if told.get("load") is not None and (misplaced := of_another_format(Path(told["load"]))):
            return misplaced
        if told.get("use_checkpoint_args") and told.get("load") is not None:
            assert read_checkpoint is not None, "whoever reads flags of a user says how a checkpoint is read"
            return read_checkpoint(Path(told["load"]), told.get("ckpt_step"))
    except UserError as error:
        return str(error)
    return None


class _Derived(NamedTuple):
    config: Config
    notes: list[str]
    problems: list[str]


def _derive(config: Config, *, path: Path | None, world_size: int | None, unsound: Collection[str]) -> _Derived:
    """Fill in what follows from the rest: data-parallel size, run folder, the stand-ins of made-up data."""
    notes, problems = [], []
    sizes = {name: getattr(config.parallel, name) for name in MESH}
    if not set(MESH) & set(unsound) and all(size is None or size >= 1 for size in sizes.values()):
        problem = _world_size_problem(config.parallel, world_size)
        problems += [problem] if problem else []
        model = config.parallel.model_parallel_size
        derived = 1 if world_size is None else max(1, world_size // model)
        config = with_fields(config, data_parallel_size=config.parallel.data_parallel_size or derived)
    if config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size == 1:
        config = with_fields(config, sequence_parallel=False)
        notes.append(
            "sequence_parallel is off: it shares norms and dropout over tensor_model_parallel_size, which is 1"
        )
    notes += _idle_loss_scale(config.training)
    config = with_fields(config, pipeline_schedule=config.parallel.schedule)
    parallel = config.parallel
    if parallel.context_parallel_size == 1 and parallel.cp_comm_type != "p2p":
        notes.append(f"cp_comm_type={parallel.cp_comm_type} is idle: context_parallel_size is 1")
    if parallel.pipeline_model_parallel_size == 1 and parallel.pipeline_split != "even":
        notes.append(f"pipeline_split={parallel.pipeline_split} is idle: pipeline_model_parallel_size is 1")
    if parallel.device == "cpu" and config.recompute.offload_saved_activations:
        notes.append("offload_saved_activations gains nothing: the device's memory is the CPU's")
    notes += _idle_sharing(config.parallel) + _idle_optimizer(config.optimizer)
    if config.data.mock_data:
        stand_ins = {"tokenizer_type": "null", "tokenizer_model": None, "vocab_file": None, "merge_file": None}
        config = with_fields(config, **stand_ins, vocab_size=config.data.vocab_size or MOCK_VOCAB_SIZE)
        notes.append(
            f"mock_data needs no file and no tokenizer: the vocabulary is {config.data.vocab_size} made-up tokens"
        )
    if config.log.run_dir is None:
        config = with_fields(config, run_dir=f"runs/{path.stem if path else 'pretrain_gpt'}")
    return _Derived(config, notes, problems)


def _idle_loss_scale(training: TrainingConfig) -> list[str]:
    """What is said of a loss scale that nothing needs."""
    names = ("loss_scale", *LOSS_SCALE_RULE)
    told = [f"{name}={value}" for name in names if (value := getattr(training, name)) != FIELDS[name].default]
    if training.fp16 or not told:
        return []
    return [f"{', '.join(told)}: idle, as {training.precision} needs no loss scale; --fp16 would use it"]


def _idle_sharing(parallel: ParallelConfig) -> list[str]:
    """What is said of settings that the stage of ZeRO does not ask."""
    notes = []
    if parallel.zero == 3 and not (parallel.overlap_grad_reduce and parallel.overlap_param_gather):
        notes.append(
            "overlap_grad_reduce and overlap_param_gather are idle: with zero_stage=3 fully_shard overlaps both"
        )
    if parallel.optimizer_cpu_offload and parallel.param_cpu_offload:
        notes.append("optimizer_cpu_offload is idle: param_cpu_offload takes masters and states along")
    return notes


def _idle_optimizer(optimizer: OptimizerConfig) -> list[str]:
    """What is said of settings that belong to another optimizer."""
    used = {"adam": ("adam_",), "sgd": ("sgd_",), "muon": ("muon_", "adam_")}[optimizer.optimizer]
    told = [
        f"{name}={getattr(optimizer, name)}"
        for name in vars(optimizer)
        if name.startswith(("adam_", "sgd_", "muon_"))
        and not name.startswith(used)
        and getattr(optimizer, name) != FIELDS[name].default
    ]
    return [f"{', '.join(told)}: idle with optimizer={optimizer.optimizer}"] if told else []


def _world_size_problem(parallel: ParallelConfig, world_size: int | None) -> str | None:
    """What is wrong between the processes a launcher started and the mesh that was asked for."""
    model, dp = parallel.model_parallel_size, parallel.data_parallel_size
    if world_size is None or world_size == model * (dp or 0):
        return None
    sizes = (
        f"tp {parallel.tensor_model_parallel_size} x pp {parallel.pipeline_model_parallel_size} "
        f"x cp {parallel.context_parallel_size}"
    )
    if world_size % model:
        return (
            f"world size {world_size} must be divisible by {sizes} = {model}; start {model} processes or a multiple of "
            "that, or change --tp and --pp"
        )
    if dp is None:
        return None
    return (
        f"world size {world_size} must be dp {dp} x {sizes} = {dp * model}; start {dp * model} processes, "
        f"or use --dp {world_size // model}"
    )
