"""Preprocessing on many machines: `megatronish preprocess plan`, `run`, `status` and `merge`; without a verb, on one.

A plan cuts the inputs into tasks. Any scheduler runs the tasks, in any order and more than once: what a task writes
depends on the plan alone (data/tasks.py). The exit status of `status` is 1 while a task is missing.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tqdm import tqdm

from megatronish.commands import preprocess
from megatronish.commands.bad_lines import BadLines
from megatronish.commands.exit_status import exit_status
from megatronish.commands.preprocess import (
    PreprocessProgress,
    TokenizingArguments,
    ended_by_signals,
    plugged_tokenizer,
    read_tokenizing,
    tell_files,
    tokenizer_settings,
)
from megatronish.commands.preprocess_ray import TaskOutcome, run_on_ray
from megatronish.config.arguments import PluginNames, read_arguments
from megatronish.config.marks import at_least, at_most
from megatronish.config.plugins import import_plugins
from megatronish.config.sections.data import DataConfig
from megatronish.core.errors import RunError, UserError
from megatronish.core.files import refuse_input_as_output
from megatronish.data.cleaning import Cleaning
from megatronish.data.inputs import input_files
from megatronish.data.preprocess import check_settings
from megatronish.data.shards import join_with_bar, write_manifest
from megatronish.data.tasks import (
    MAX_TASKS,
    PLAN,
    Plan,
    TaskRecord,
    TaskRun,
    make_plan,
    ranges,
    read_plan,
    record_of,
    removed_of,
    run_task,
    shards_of,
    sign_of,
    tokenizer_digest,
    whole_result,
)

TASK_VARIABLES = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")
"""Variables that number the jobs of an array: of Slurm, and of an indexed job of Kubernetes."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "vocab.txt"),
    "tokenizer.model",
)
NOT_IN_PLAN = ("input", "output_prefix", "tasks")
MANY_UNTIL = 20
"""Tasks of which status prints a line each."""


@dataclass(frozen=True, kw_only=True)
class TaskPlanArguments(TokenizingArguments):
    """Cut the inputs into tasks of about equal bytes, and write PREFIX.plan.json."""

    tasks: Annotated[int, at_least(1), at_most(MAX_TASKS)]
    """Number of tasks, which the result does not depend on."""


@dataclass(frozen=True)
class RunArguments:
    """Write the shards of tasks of a plan. A task that is whole is left as it is."""

    plan: Path
    """PREFIX.plan.json of preprocess plan."""
    plugin: PluginNames = ()
    """The plug-ins of the plan, again: they are code, which a plan alone does not run."""
    task: str | None = None
    """I for task I, from 0 on; I::N for tasks I, I + N, ... Derived: SLURM_ARRAY_TASK_ID, JOB_COMPLETION_INDEX."""
    workers: int = 1
    """Processes that tokenize, of each task."""
    engine: Literal["local", "ray"] = "local"
    """Where tasks run: here, one after another, or on a cluster of Ray, that of RAY_ADDRESS."""
    log_interval: Annotated[int, at_least(1), at_most(2**63 - 1)] = 100_000
    """Documents between lines of progress where there is no terminal for a bar."""


@dataclass(frozen=True)
class StatusArguments:
    """Print which tasks of a plan are whole, and where the others were last. Status 1 while one is missing."""

    plan: Path
    """PREFIX.plan.json of preprocess plan."""
    check: bool = False
    """Read every byte of the shards, too, and compare the sums."""


@dataclass(frozen=True)
class JoinArguments:
    """Join the shards of a plan whose tasks are all whole into PREFIX_KEY_document.bin/.idx."""

    plan: Path
    """PREFIX.plan.json of preprocess plan."""
    manifest: bool = False
    """Write PREFIX_KEY_document.shards.json instead, which --data-path takes, and leave the tokens where they are."""
    show_removed: bool = False
    """Show ten documents of each reason for which cleaning left documents out."""


def main(argv: Sequence[str], *, program: str = "megatronish preprocess") -> int:
    """Run the command, or one of its verbs; the exit status."""
    verb = argv[0] if argv else ""
    if verb not in VERBS:
        return preprocess.main(argv, program=program)
    return exit_status(lambda: VERBS[verb](argv[1:], f"{program} {verb}"), prefix="error: ")


def plan_tasks(argv: Sequence[str], program: str) -> int:
    """Write a plan, and report what is in it."""
    arguments = read_tokenizing(TaskPlanArguments, argv, program=program)
    import_plugins(arguments.plugin)
    prefix = arguments.output_prefix
    own = (f"{prefix}{PLAN}", f"{prefix}.shards/")
    # A folder of inputs may hold PREFIX, too: what this command writes there is no text.
    files = [path for path in input_files(arguments.input) if not str(path).startswith(own)]
    tell_files(files)
    check_settings(json_keys=arguments.json_keys, workers=1, max_bad_fraction=arguments.max_bad_fraction)
    Cleaning.of(vars(arguments))
    settings = {name: value for name, value in asdict(arguments).items() if name not in NOT_IN_PLAN}
    for name in Plan(Path(arguments.output_prefix), settings, "", (), ()).names(arguments.output_prefix):
        for suffix in (".bin", ".idx"):
            refuse_input_as_output("--output-prefix", Path(name + suffix), files)
    plan = make_plan(
        arguments.output_prefix,
        files,
        num_tasks=arguments.tasks,
        settings=settings,
        tokenizer=_digest_of(arguments),
    )
    sizes = [sum(piece.num_bytes for piece in pieces) for pieces in plan.tasks]
    print(
        f"{plan.path}: {len(sizes):,} tasks | {len(files):,} files | {sum(sizes):,} bytes | {min(sizes):,} to "
        f"{max(sizes):,} bytes a task"
    )
    plugins = "".join(f" --plugin {name}" for name in arguments.plugin)
    print(f"run them: megatronish preprocess run --plan {plan.path}{plugins} --task 0, and so on to {len(sizes) - 1}")
    return 0


def run_tasks(argv: Sequence[str], program: str) -> int:
    """Write the shards of the tasks that are not whole."""
    arguments = read_arguments(RunArguments, argv, program=program)
    plan = read_plan(arguments.plan)
    numbers = task_numbers(arguments.task, num_tasks=len(plan.tasks), environment=os.environ)
    settings = _tokenizing(plan)
    check_settings(json_keys=settings.json_keys, workers=arguments.workers, max_bad_fraction=settings.max_bad_fraction)
    _refuse_other_plugins(plan, settings.plugin, arguments.plugin)
    if arguments.engine == "ray":
        with ended_by_signals("a task that was not whole is not, and those that were stay"):
            work = partial(run_in_process_of_ray, arguments.plan.absolute(), arguments)
            return run_on_ray(plan, numbers, work, workers=arguments.workers)
    import_plugins(settings.plugin)
    digest, status = None, 0
    with ended_by_signals("a task that was not whole is not, and those that were stay"):
        for number in numbers:
            name = f"task {number} of {len(plan.tasks)}"
            if (record := record_of(plan, number, sums=True)) is not None:
                print(f"{name}: is whole | {_counts(record)}", flush=True)
                continue
            digest = digest or _digest_of(settings)
            try:
                print(f"{name}: {_counts(_run(plan, number, settings, digest, arguments))}", flush=True)
            except (UserError, RunError) as error:
                if len(numbers) == 1:
                    raise
                # The others are not kept waiting by one file; a failure of the machine is worth another try.
                print(f"error: {name}: {error}", file=sys.stderr, flush=True)
                status = 1 if status == 1 or isinstance(error, RunError) else 2
    return status


def run_in_process_of_ray(path: Path, arguments: RunArguments, number: int) -> TaskOutcome:
    """Write the shard of a task on a node of Ray."""
    plan = read_plan(path)
    if (record := record_of(plan, number, sums=True)) is not None:
        return TaskOutcome(number, f"is whole | {_counts(record)}")
    try:
        settings = _tokenizing(plan)
        import_plugins(settings.plugin)
        quiet = replace(arguments, log_interval=2**63 - 1)
        return TaskOutcome(number, _counts(_run(plan, number, settings, _digest_of(settings), quiet)))
    except (UserError, RunError, OSError) as error:
        return TaskOutcome(number, "", str(error), is_of_machine=not isinstance(error, UserError))


def _refuse_other_plugins(plan: Plan, planned: Sequence[str], given: Sequence[str]) -> None:
    """UserError unless the command names the plug-ins that the plan was made with."""
    if tuple(planned) == tuple(given):
        return
    if not planned:
        raise UserError(f"--plugin {given[0]}: {plan.path} was made without plug-ins; leave it out, or plan again")
    words = " ".join(f"--plugin {name}" for name in planned)
    raise UserError(
        f"{plan.path} was made with plug-ins, which run code on this machine, and a plan alone runs none; add {words} "
        "if you trust them"
    )


def _run(plan: Plan, number: int, settings: TokenizingArguments, digest: str, arguments: RunArguments) -> TaskRecord:
    num_bytes = sum(piece.num_bytes for piece in plan.tasks[number])
    progress = PreprocessProgress(num_bytes=num_bytes, log_interval=arguments.log_interval)
    try:
        run = TaskRun(
            tokenizer=partial(plugged_tokenizer, settings.plugin, tokenizer_settings(settings)),
            digest=digest,
            workers=arguments.workers,
            on_bad_line=BadLines(partial(tqdm.write, file=sys.stderr)).tell,
            on_progress=progress.advance,
        )
        return run_task(plan, number, run)
    finally:
        progress.close()


def task_numbers(given: str | None, *, num_tasks: int, environment: Mapping[str, str]) -> range:
    """The tasks that --task names, or a variable of the scheduler. UserError for none, or one that is not there."""
    what = f"--task {given}"
    if given is None:
        name = next((name for name in TASK_VARIABLES if name in environment), None)
        if name is None:
            raise UserError(
                f"--task is not given, and neither {' nor '.join(TASK_VARIABLES)} is set; add --task I, or --task I::N "
                "for every N-th task from I on"
            )
        given, what = environment[name], f"{name}={environment[name]}"
    match = re.fullmatch(r"(\d+)(?:::(\d+))?", given.strip())
    last = f"tasks are 0 to {num_tasks - 1}, in an array of Slurm --array=0-{num_tasks - 1}"
    if match is None:
        raise UserError(f"{what} must be I or I::N, such as 3 or 3::16; {last}")
    start, step = int(match[1]), int(match[2] or num_tasks)
    if step < 1 or (match[2] and start >= step):
        raise UserError(f"{what}: of every N-th task the first is 0 to N - 1; for example 0::4")
    if start >= num_tasks and not match[2]:
        raise UserError(f"{what} is not a task of the plan; {last}")
    return range(start, num_tasks, step)


def print_status(argv: Sequence[str], program: str) -> int:
    """Print what is whole and what is missing; 1 while a task is missing."""
    arguments = read_arguments(StatusArguments, argv, program=program)
    plan = read_plan(arguments.plan)
    records = [record_of(plan, number, sums=arguments.check) for number in range(len(plan.tasks))]
    whole = [record for record in records if record is not None]
    documents, tokens = sum(each.documents for each in whole), sum(each.tokens for each in whole)
    bad = sum(each.bad_lines for each in whole)
    print(
        f"{len(whole):,} of {len(records):,} tasks are whole | {documents:,} documents | {tokens:,} tokens | "
        f"{bad:,} bad lines"
    )
    missing = [number for number, record in enumerate(records) if record is None]
    if not missing:
        print(f"join them: megatronish preprocess merge --plan {plan.path}, or with --manifest without a copy")
        return 0
    signs = {number: sign for number in missing if (sign := sign_of(plan, number)) is not None}
    for number, sign in list(signs.items())[:MANY_UNTIL]:
        job = f", job {sign.job}" if sign.job else ""
        end = f"failed: {sign.failure}" if sign.failure else f"last heard of {_ago(time.time() - sign.heard)} ago"
        print(f"task {number}: on {sign.host}, process {sign.pid}{job}, {sign.documents:,} documents, {end}")
    if len(signs) > MANY_UNTIL:
        print(f"... and {len(signs) - MANY_UNTIL:,} more that have begun")
    if never := [number for number in missing if number not in signs]:
        print(f"never begun: {ranges(never)}")
    print(f"missing: --array={ranges(missing)}")
    return 1


def join_tasks(argv: Sequence[str], program: str) -> int:
    """Join the shards of each key, or write a manifest of them."""
    arguments = read_arguments(JoinArguments, argv, program=program)
    plan = read_plan(arguments.plan)
    records = whole_result(plan)
    by_key = zip(*(shards_of(plan, record) for record in records), strict=True)
    for name, shards in zip(plan.names(plan.prefix), by_key, strict=True):
        if arguments.manifest:
            written = str(write_manifest(shards, name))
        else:
            written = name
            join_with_bar(shards, name)
        documents, tokens = sum(each.documents for each in shards), sum(each.tokens for each in shards)
        print(f"{written}: {len(shards):,} shards | {documents:,} documents | {tokens:,} tokens")
    removed = removed_of(records)
    for line in removed.lines(examples=arguments.show_removed):
        print(line, file=sys.stderr)
    if bad := sum(record.bad_lines for record in records):
        lines = bad + sum(record.documents for record in records) + removed.total
        print(f"{bad:,} of {lines:,} lines were bad and were left out", file=sys.stderr)
    return 0


def _tokenizing(plan: Plan) -> TokenizingArguments:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plan.settings.items()
    }
    try:
        return TokenizingArguments(input=(), output_prefix=plan.prefix, **values)
    except TypeError as error:
        raise UserError(f"--plan {plan.path} is of another version of megatronish ({error}); plan again") from error


def _digest_of(arguments: TokenizingArguments) -> str:
    """The hash of the tokenizer, built here, and of its files."""
    settings = tokenizer_settings(arguments)
    tokenizer = plugged_tokenizer(arguments.plugin, settings)
    return tokenizer_digest(tokenizer, _files_of(settings, arguments.plugin))


def _files_of(settings: DataConfig, plugins: Sequence[str]) -> list[Path]:
    files = list[Path]()
    for name in (settings.tokenizer_model, settings.vocab_file, settings.merge_file, *plugins):
        path = Path(name or "")
        files += [path / each for each in TOKENIZER_FILES] if name and path.is_dir() else [path]
    return [path for path in files if path.is_file()]


def _counts(record: TaskRecord) -> str:
    return f"{record.documents:,} documents | {record.tokens:,} tokens | {record.bad_lines:,} bad lines"


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


VERBS: dict[str, Callable[[Sequence[str], str], int]] = {
    "plan": plan_tasks,
    "run": run_tasks,
    "status": print_status,
    "merge": join_tasks,
}
"""Words that may come first; without one, `preprocess` does all of the work by itself."""
