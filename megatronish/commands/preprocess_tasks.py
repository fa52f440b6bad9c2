"""Preprocessing on many machines: `megatronish preprocess plan`, `run`, `status`, `merge`; without a verb, on one.

A plan that leaves duplicates out has the verbs `sign` and `match`, before `run`.

`megatronish preprocess cache` builds the sample indices of a run ahead.

A plan cuts the inputs into tasks. Any scheduler runs the tasks, in any order and more than once: what a task writes
depends on the plan alone (data/tasks.py). The exit status of `status` is 1 while a task is missing.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tqdm import tqdm

from megatronish.commands import preprocess
from megatronish.commands.bad_lines import BadLines
from megatronish.commands.configuration import read_config
from megatronish.commands.exit_status import exit_status
from megatronish.commands.preprocess import (
    PreprocessProgress,
    TokenizingArguments,
    cleaning_lines,
    ended_by_signals,
    plugged_tokenizer,
    read_tokenizing,
    tell_files,
    tell_references,
    tokenizer_settings,
    writing_tokenizer,
)
from megatronish.commands.preprocess_ray import TaskOutcome, run_on_ray
from megatronish.config.arguments import PluginNames, read_arguments
from megatronish.config.marks import at_least, at_most
from megatronish.config.plugins import import_plugins
from megatronish.config.sections.data import MANIFEST, DataConfig, parse_blend, split_part
from megatronish.core.errors import RunError, UserError
from megatronish.core.files import refuse_input_as_output
from megatronish.data.cleaning import Cleaning
from megatronish.data.inputs import input_files
from megatronish.data.phases import DuplicateSearch, PhaseRecord
from megatronish.data.preprocess import Summary, check_settings, output_name, refuse_no_name
from megatronish.data.shards import join_with_bar, write_manifest
from megatronish.data.tasks import (
    MAX_TASKS,
    PLAN,
    Phase,
    Plan,
    TaskRecord,
    TaskRun,
    copied_of,
    make_plan,
    ranges,
    read_plan,
    record_of,
    removed_of,
    run_task,
    shards_by_key,
    sign_of,
    tokenizer_digest,
    whole_result,
)
from megatronish.data.token_files import TokenFiles

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
class SignArguments(RunArguments):
    """Write the keys of the documents of tasks, by which duplicates are found. What is whole is left as it is."""


@dataclass(frozen=True)
class MatchArguments(RunArguments):
    """Find the documents that have equal keys, in tasks that have a range of keys each, after all of sign."""


ARGUMENTS_OF_PHASES: dict[Phase, type[RunArguments]] = {
    "sign": SignArguments,
    "match": MatchArguments,
    "run": RunArguments,
}


@dataclass(frozen=True)
class StatusArguments:
    """Print which tasks of a plan are whole, and where the others were last. Status 1 while one is missing."""

    plan: Path
    """PREFIX.plan.json of preprocess plan."""
    check: bool = False
    """Read every byte of the shards, too, and compare the sums."""
    show_removed: bool = False
    """Show ten documents of each reason for which cleaning left documents out, or added copies."""


@dataclass(frozen=True)
class JoinArguments:
    """Join the shards of a plan whose tasks are all whole into PREFIX_KEY_document.bin/.idx."""

    plan: Path
    """PREFIX.plan.json of preprocess plan."""
    manifest: bool = False
    """Write PREFIX_KEY_document.shards.json instead, which --data-path takes, and leave the tokens where they are."""
    show_removed: bool = False
    """Show ten documents of each reason for which cleaning left documents out, or added copies."""


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
    refuse_no_name(prefix)
    # A folder of inputs may hold PREFIX, too, by another name: what this command writes there is no text.
    ends = (PLAN, ".shards/", ".signatures/")
    manifests = (
        f"{output_name('', key, split_sentences=arguments.split_sentences)}{MANIFEST}" for key in arguments.json_keys
    )
    own = tuple(os.path.realpath(prefix) + end for end in (*ends, *manifests))
    files = [path for path in input_files(arguments.input) if not os.path.realpath(str(path)).startswith(own)]
    tell_files(files)
    check_settings(json_keys=arguments.json_keys, workers=1, max_bad_fraction=arguments.max_bad_fraction)
    cleaning = Cleaning.of(vars(arguments))
    cleaning.weights.refuse_unused([str(path) for path in files])
    tell_references(cleaning)
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
    phases = DuplicateSearch(plan).phases
    if (same := plan.cleaning.deduplication).kind == "minhash":
        print(f"documents are alike from about {same.likeness:.0%} of common runs of {same.ngram} words on")
    for phase in phases:
        print(
            f"first all of: megatronish preprocess {phase} --plan {plan.path} --task 0, and so on to {len(sizes) - 1}"
        )
    then = "then run them" if phases else "run them"
    print(f"{then}: megatronish preprocess run --plan {plan.path}{plugins} --task 0, and so on to {len(sizes) - 1}")
    return 0


def run_phase(phase: Phase, argv: Sequence[str], program: str) -> int:
    """Do the tasks of a phase that are not whole."""
    arguments = read_arguments(ARGUMENTS_OF_PHASES[phase], argv, program=program)
    plan = read_plan(arguments.plan)
    numbers = task_numbers(arguments.task, num_tasks=len(plan.tasks), environment=os.environ)
    settings = _tokenizing(plan)
    # A plan may have been changed by hand: its settings are checked as flags are.
    check_settings(json_keys=settings.json_keys, workers=arguments.workers, max_bad_fraction=settings.max_bad_fraction)
    work = PhaseWork(plan, phase, settings, arguments)
    work.refuse_too_early(numbers)
    if not numbers:  # an array of more jobs than tasks
        print(f"{plan.path} has {len(plan.tasks):,} tasks, and --task names none of them", flush=True)
    if phase == "run":
        # A plan is data that others send: it never makes this machine run code that the command does not name.
        _refuse_other_plugins(plan, settings.plugin, arguments.plugin)
    if arguments.engine == "ray":
        with ended_by_signals("a task that was not whole is not, and those that were stay"):
            remote = partial(run_in_process_of_ray, arguments.plan.absolute(), phase, arguments)
            return run_on_ray(plan, phase, numbers, remote, workers=arguments.workers)
    import_plugins(arguments.plugin)
    status = 0
    with ended_by_signals("a task that was not whole is not, and those that were stay"):
        for number in numbers:
            name = f"task {number} of {len(plan.tasks)}"
            if (counts := work.whole(number)) is not None:
                print(f"{name}: is whole | {counts}", flush=True)
                continue
            try:
                print(f"{name}: {work.do(number)}", flush=True)
            except (UserError, RunError) as error:
                if len(numbers) == 1:
                    raise
                # The others are not kept waiting by one file; a failure of the machine is worth another try.
                print(f"error: {name}: {error}", file=sys.stderr, flush=True)
                status = 1 if status == 1 or isinstance(error, RunError) else 2
    return status


def run_in_process_of_ray(path: Path, phase: Phase, arguments: RunArguments, number: int) -> TaskOutcome:
    """Do a task on a node of Ray."""
    plan = read_plan(path)
    try:
        # One line of the driver tells the progress of all nodes; a bar of each would overwrite it.
        quiet = replace(arguments, log_interval=2**63 - 1)
        work = PhaseWork(plan, phase, _tokenizing(plan), quiet)
        if (counts := work.whole(number)) is not None:
            return TaskOutcome(number, f"is whole | {counts}")
        import_plugins(arguments.plugin)
        return TaskOutcome(number, work.do(number))
    except (UserError, RunError, OSError) as error:
        return TaskOutcome(number, "", str(error), is_of_machine=not isinstance(error, UserError))


class PhaseWork:
    """The work of a phase on the tasks of a plan, with a line about each task."""

    def __init__(self, plan: Plan, phase: Phase, settings: TokenizingArguments, arguments: RunArguments) -> None:
        self._plan, self._phase, self._settings, self._arguments = plan, phase, settings, arguments
        self._search = DuplicateSearch(plan)

    def refuse_too_early(self, numbers: Sequence[int]) -> None:
        """UserError if the plan has no such phase, or one that comes before these tasks is not whole."""
        if self._phase == "run":
            if any(record_of(self._plan, number) is None for number in numbers):
                self._search.refuse_not_ready()
        elif self._phase not in self._search.phases:
            raise UserError(
                f"{self._plan.path} was made without --deduplicate and has no {self._phase}; run its tasks: "
                f"megatronish preprocess run --plan {self._plan.path}"
            )
        elif self._phase == "match":
            self._search.refuse_missing("sign")

    def whole(self, number: int) -> str | None:
        """The counts of a task that is whole, None for any other."""
        if self._phase == "run":
            # Every byte is read here: a task that a rerun skips is never looked at again before the merge.
            record = record_of(self._plan, number, sums=True)
            return None if record is None else _counts(record)
        if self._phase == "match" and not self._search.has_groups:
            return None
        phase_record = self._search.record(self._phase, number, sums=True)
        return None if phase_record is None else _rows(self._phase, phase_record)

    def do(self, number: int) -> str:
        """Do a task; its counts."""
        if self._phase == "match":
            return _rows(self._phase, self._search.match(number))
        arguments = self._arguments
        num_bytes = sum(piece.num_bytes for piece in self._plan.tasks[number])
        progress = PreprocessProgress(num_bytes=num_bytes, log_interval=arguments.log_interval)
        try:
            if self._phase == "sign":

                def hear(documents: int, num_bytes: int) -> None:
                    progress.advance(Summary(documents), num_bytes)

                return _rows(self._phase, self._search.sign(number, workers=arguments.workers, on_signed=hear))
            return _counts(run_task(self._plan, number, self._task_run(number, progress)))
        finally:
            progress.close()

    def _task_run(self, number: int, progress: PreprocessProgress) -> TaskRun:
        return TaskRun(
            tokenizer=partial(writing_tokenizer, self._settings.plugin, tokenizer_settings(self._settings)),
            digest=self._digest,
            workers=self._arguments.workers,
            on_bad_line=BadLines(partial(tqdm.write, file=sys.stderr)).tell,
            on_progress=progress.advance,
            duplicates=self._search.of_task(number) if self._search.phases else None,
        )

    @cached_property
    def _digest(self) -> str:
        return _digest_of(self._settings)


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
    for line in cleaning_lines(removed_of(whole), copied_of(whole), examples=arguments.show_removed):
        print(line)
    # What is missing is printed as Slurm's --array takes it, so that it can be pasted.
    missing = [number for number, record in enumerate(records) if record is None]
    if not missing:
        print(f"join them: megatronish preprocess merge --plan {plan.path}, or with --manifest without a copy")
        return 0
    phase = _print_phases(plan, check=arguments.check)
    if phase != "run":
        missing = DuplicateSearch(plan).missing(phase, sums=arguments.check) or [0]
    _print_signs(plan, phase, missing)
    print(
        f"missing: --array={ranges(missing)}" if phase == "run" else f"missing, of {phase}: --array={ranges(missing)}"
    )
    return 1


def _print_phases(plan: Plan, *, check: bool) -> Phase:
    """Print what is whole of the phases before `run`; the first of all phases that is not whole."""
    search, unfinished = DuplicateSearch(plan), list[Phase]()
    for phase in search.phases:
        count = len(plan.tasks) - len(search.missing(phase, sums=check))
        unjoined = phase == "match" and count == len(plan.tasks) and not search.has_groups
        print(f"{phase}: {count:,} of {len(plan.tasks):,} tasks are whole{', and not joined to groups' * unjoined}")
        unfinished += [phase] * (count < len(plan.tasks) or unjoined)
    return (*unfinished, "run")[0]


def _print_signs(plan: Plan, phase: Phase, missing: Sequence[int]) -> None:
    """Print where tasks that are not whole were last."""
    signs = {number: sign for number in missing if (sign := sign_of(plan, number, phase)) is not None}
    for number, sign in list(signs.items())[:MANY_UNTIL]:
        job = f", job {sign.job}" if sign.job else ""
        end = f"failed: {sign.failure}" if sign.failure else f"last heard of {_ago(time.time() - sign.heard)} ago"
        print(f"task {number}: on {sign.host}, process {sign.pid}{job}, {sign.documents:,} documents, {end}")
    if len(signs) > MANY_UNTIL:
        print(f"... and {len(signs) - MANY_UNTIL:,} more that have begun")
    if never := [number for number in missing if number not in signs]:
        print(f"never begun: {ranges(never)}")


def join_tasks(argv: Sequence[str], program: str) -> int:
    """Join the shards of each key, or write a manifest of them."""
    arguments = read_arguments(JoinArguments, argv, program=program)
    plan = read_plan(arguments.plan)
    records = whole_result(plan)
    removed, copied = removed_of(records), copied_of(records)
    for name, shards in zip(plan.names(plan.prefix), shards_by_key(plan, records), strict=True):
        if arguments.manifest:
            notes = {"removed": asdict(removed), "copied": asdict(copied)}
            written = str(write_manifest(shards, name, notes=notes))
        else:
            written = name
            join_with_bar(shards, name)
        documents, tokens = sum(each.documents for each in shards), sum(each.tokens for each in shards)
        print(f"{written}: {len(shards):,} shards | {documents:,} documents | {tokens:,} tokens")
    for line in cleaning_lines(removed, copied, examples=arguments.show_removed):
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
    # A folder may hold gigabytes of weights: of it only files that a tokenizer reads are part of its hash.
    files = list[Path]()
    for name in (settings.tokenizer_model, settings.vocab_file, settings.merge_file, *plugins):
        path = Path(name or "")
        files += [path / each for each in TOKENIZER_FILES] if name and path.is_dir() else [path]
    return [path for path in files if path.is_file()]


def _rows(phase: Phase, record: PhaseRecord) -> str:
    return f"{record.rows:,} {'documents signed' if phase == 'sign' else 'links to earlier documents'}"


def _counts(record: TaskRecord) -> str:
    return f"{record.documents:,} documents | {record.tokens:,} tokens | {record.bad_lines:,} bad lines"


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


# Sample indices built ahead of a run, with the flags or the --config of the run.


def build_cache(argv: Sequence[str], program: str) -> int:
    """Build the indices of all samples that a run reads, and say where they are and how large; the exit status."""
    config = read_config(argv, program=program).config
    if config.data.mock_data:
        raise UserError(
            "mock_data reads no files and has no indices to build; leave it out, and name the data of the run with "
            "--data-path or --train-data-path"
        )
    # Late: it imports torch, and the other verbs need not wait for that.
    from megatronish.train.setup import build_indices_of_run

    import_plugins(config.plugins.plugin)
    # What was there is told apart from what is built now: none built means that a run starts at once.
    before = {path for folder in cache_folders(config.data) for path in _files(folder)}
    samples = build_indices_of_run(config)
    print(
        f"for {samples.training:,} samples of the training data, and {samples.evaluation:,} of each other data set",
        flush=True,
    )
    for folder in cache_folders(config.data):
        files = _files(folder)
        built = sum(path not in before for path in files)
        num_bytes = sum(path.stat().st_size for path in files)
        print(f"{folder}: {len(files):,} files, {num_bytes:,} bytes; {built:,} built now", flush=True)
    return 0


def cache_folders(data: DataConfig) -> list[Path]:
    """The folders that indices of these data are kept in, each once."""
    values = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    prefixes = [split_part(path)[0] for value in values for _, path in parse_blend(value)]
    files = TokenFiles(data.data_store_cache_path)
    return list(dict.fromkeys(files.index_folder(prefix, cache_path=data.data_cache_path) for prefix in prefixes))


def _files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.epoch"), *folder.glob("*.rows")])


VERBS: dict[str, Callable[[Sequence[str], str], int]] = {
    "plan": plan_tasks,
    "sign": partial(run_phase, "sign"),
    "match": partial(run_phase, "match"),
    "run": partial(run_phase, "run"),
    "status": print_status,
    "merge": join_tasks,
    "cache": build_cache,
}
"""Words that may come first; without one, `preprocess` does all of the work by itself."""
