"""Rules on checkpoints and on the recording of steps."""

from megatronish.config.config import Config
from megatronish.config.rules.rule import MESH, ConfigRule
from megatronish.core.names import OBJECTIVE_NAMES


def _profile(config: Config) -> str | None:
    log, steps = config.log, config.training.train_iters
    first, end = log.profile_step_start, log.profile_step_end
    if not (log.profile_schedule or log.profile):
        return None
    if end <= first:
        return f"profile_step_end={end} must be greater than profile_step_start={first}; use {first + 1} for one step"
    if steps is not None and first > steps:
        return f"profile_step_start={first} is after the last step, train_iters={steps}; use an earlier one"
    return None


def _profile_ranks(config: Config) -> str | None:
    log, size = config.log, config.layout.world_size
    wrong = [rank for rank in log.profile_ranks or () if not 0 <= rank < size]
    if wrong and (log.profile or log.record_memory_history):
        return f"profile_ranks={wrong[0]} is no rank of this run; use numbers from 0 to {size - 1}"
    return None


ALL_STAGES = "all-stages"
"""Value of --rank for one rank of each pipeline stage."""


def _dry_run(config: Config) -> str | None:
    log = config.log
    if log.dry_run:
        return None
    given = {"world_size": log.world_size, "rank": log.rank}
    named = [f"{name}={value}" for name, value in given.items() if value is not None]
    return f"{' and '.join(named)} plan a run that is not started; add --dry-run, or leave it out" if named else None


def _dry_run_report(config: Config) -> str | None:
    if config.log.dry_run_report is None or config.log.rank is not None:
        return None
    return f"dry_run_report={config.log.dry_run_report} is of single ranks; add --rank all-stages, or leave it out"


def _rank(config: Config) -> str | None:
    rank, size = config.log.rank, config.layout.world_size
    if rank is None or rank == ALL_STAGES or (rank.isascii() and rank.isdecimal() and int(rank) < size):
        return None
    more = "" if config.log.world_size else ", or say with --world-size how many ranks there are"
    return f"rank={rank} is no rank of {size}; use a number from 0 to {size - 1}, or {ALL_STAGES}{more}"


def _dry_objective(config: Config) -> str | None:
    kind = OBJECTIVE_NAMES[config.training.objective].learns_from if config.log.rank is not None else "text"
    if kind == "text":
        return None
    return (
        f"rank={config.log.rank} is stepped on made-up texts, and objective={config.training.objective} learns from "
        f"{kind}; leave --rank out, or choose an objective of texts"
    )


def _starting_point(config: Config) -> str | None:
    keep = config.checkpoint
    if keep.load is not None or keep.load_hf is not None:
        return None
    if keep.finetune:
        return (
            "finetune takes its weights from a checkpoint, and none is given; add --load DIR, or leave --finetune out"
        )
    return None


def _from_a_store(config: Config) -> str | None:
    load = config.checkpoint.load
    is_frozen = config.adapter.is_used or config.reference == "model"
    if load is None or "://" not in load or not (is_frozen or config.checkpoint.moe_use_upcycling):
        return None
    return (
        f"load={load} is on object storage, from which a run resumes or takes weights with --finetune; adapters, a "
        "reference and --moe-use-upcycling read a model from a disk: copy that checkpoint to one"
    )


def _arguments(config: Config) -> str | None:
    if not config.checkpoint.use_checkpoint_args or config.checkpoint.load is not None:
        return None
    return (
        "use_checkpoint_args takes the model's settings from a checkpoint, and none is given; add --load DIR, "
        "or leave --use-checkpoint-args out"
    )


def _kept_steps(config: Config) -> str | None:
    every, interval = config.checkpoint.keep_every, config.checkpoint.save_interval
    if every is None:
        return None
    if interval is None:
        return f"keep_every={every} keeps none of the steps in between without a save_interval; add --save-interval"
    if every % interval:
        return (
            f"keep_every={every} must be divisible by save_interval={interval}, or steps that it would keep are not "
            f"saved; use --keep-every {max(1, round(every / interval)) * interval}"
        )
    return None


def _local_folder(config: Config) -> str | None:
    local = config.checkpoint.local_save
    if local == "":
        return "local_save is empty; name a folder, or leave --local-save out"
    if local is None or "://" not in local:
        return None
    return f"local_save={local} is a URL, and copies lie on the disk or in the memory of each host; name a folder"


def _memory_of_a_process(config: Config) -> str | None:
    places = {"save": config.checkpoint.save, "run_dir": config.run_url}
    name = next((name for name, place in places.items() if place is not None and place.startswith("memory://")), None)
    if name is None:
        return None
    return f"{name}={places[name]} is in the memory of one process and ends with it; name a folder or a store"


def _copies(config: Config) -> str | None:
    if config.checkpoint.local_save is None or config.checkpoint.save_replicated_interval is not None:
        return None
    return "local_save names a folder for copies, and none are made; add --save-replicated-interval, or leave it out"


RECORD_RULES = (
    ConfigRule(("profile_schedule", "profile", "profile_step_start", "profile_step_end", "train_iters"), _profile),
    ConfigRule(("dry_run", "world_size", "rank"), _dry_run),
    ConfigRule(("rank", "dry_run_report"), _dry_run_report),
    ConfigRule((*MESH, "world_size", "rank"), _rank),
    ConfigRule(("rank", "objective"), _dry_objective),
    ConfigRule((*MESH, "profile", "record_memory_history", "profile_ranks"), _profile_ranks),
)

CHECKPOINT_RULES = (
    ConfigRule(("finetune", "load", "load_hf"), _starting_point),
    ConfigRule(("use_checkpoint_args", "load"), _arguments),
    ConfigRule(("load", "moe_use_upcycling", "adapter_type", "objective", "reference"), _from_a_store),
    ConfigRule(("keep_every", "save_interval"), _kept_steps),
    ConfigRule(("local_save", "save_replicated_interval"), _copies),
    ConfigRule(("local_save",), _local_folder),
    ConfigRule(("save", "run_dir"), _memory_of_a_process),
)
