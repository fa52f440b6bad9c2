"""Command `megatronish evaluate`: with --tasks the lm-evaluation-harness on the main rank, the model on all ranks."""

import difflib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatronish.commands import perplexity
from megatronish.commands.inference_flags import EvaluateArguments
from megatronish.commands.model_loading import A_WEEK, OpenedModel, refuse_encoder, tokenizer_of
from megatronish.commands.perplexity import check, sections, unwritable
from megatronish.config.plugins import PluginsConfig, import_plugins
from megatronish.config.sections.data import ChatConfig
from megatronish.core.errors import UserError, without_passwords
from megatronish.core.files import refuse_input_as_output
from megatronish.data.chat.setup import ChatSetup
from megatronish.inference.load import find_trained
from megatronish.inference.session import Session
from megatronish.launch.local import launch
from megatronish.launch.place import Place
from megatronish.parallel.mesh import leave

UNREACHABLE = {
    *(
        "ConnectionError",
        "ConnectTimeout",
        "ReadTimeout",
        "ConnectError",
        "ConnectionTimeout",
        "ProxyError",
        "SSLError",
    ),
    *("MaxRetryError", "NameResolutionError", "LocalEntryNotFoundError", "OfflineModeIsEnabled", "HfHubHTTPError"),
    *("DatasetNotFoundError", "ClientConnectorError", "gaierror"),
}
"""Errors of the libraries that download data, by name: which of them are installed, the harness decides."""


@dataclass(frozen=True)
class TasksToScore:
    """Checked input of every rank: the model and the names of the tasks. `output` is the file for the results."""

    arguments: EvaluateArguments
    model: OpenedModel
    chats: ChatSetup
    names: tuple[str, ...]
    output: Path | None


def prepare(arguments: EvaluateArguments, place: Place | None) -> TasksToScore:
    """The tasks of these arguments; every user error is raised here, before any rank starts."""
    check(arguments)
    refuse_other_flags(arguments)
    import_plugins(arguments.plugin)
    adapters = {} if arguments.adapter is None else {"adapter": arguments.adapter}
    saved_model = find_trained(
        arguments.load, step=arguments.ckpt_step, tokenizer=arguments.tokenizer_model, adapters=adapters
    )
    refuse_encoder(saved_model)
    refuse_input_as_output("--output", arguments.output, [saved_model.checkpoint, *saved_model.adapters.values()])
    names = known_tasks(arguments)
    parallel, training = sections(arguments, saved_model, place)
    config = saved_model.config(replace(parallel, distributed_timeout_minutes=A_WEEK), training)
    config = replace(config, plugins=PluginsConfig(arguments.plugin))
    tokenizer = tokenizer_of(saved_model)
    asked = ChatConfig(chat_template=arguments.chat_template, chat_template_kwargs=arguments.chat_template_kwargs)
    chats = ChatSetup.of(asked, saved_model.description.data, tokenizer)
    _ = chats.controls  # what has none is refused here
    if arguments.apply_chat_template:
        chats.template()
    output, run = arguments.output, arguments.load
    if output is None and (run / "checkpoints").is_dir():
        output = run / "tasks.json"
    return TasksToScore(arguments, OpenedModel(saved_model, config, tokenizer), chats, names, output)


def refuse_other_flags(arguments: EvaluateArguments) -> None:
    """UserError for flags that belong to perplexity alone, and for layouts that generate no text."""
    if arguments.data_path is not None:
        raise UserError(f"--data-path {arguments.data_path} and --tasks are two evaluations; run them one by one")
    for flag, is_given in (
        ("--context-parallel-size", arguments.context_parallel_size != 1),
        ("--sequence-parallel", arguments.sequence_parallel),
        ("--zero-stage", arguments.zero_stage != 0),
        ("--stride", arguments.stride is not None),
        ("--per-document", arguments.per_document),
        ("--data-store-cache-path", arguments.data_store_cache_path is not None),
    ):
        if is_given:
            raise UserError(f"{flag} is for perplexity (--data-path); leave it out: tasks run over tp, pp and dp")
    if arguments.limit is not None and arguments.limit < 1:
        raise UserError(f"--limit {arguments.limit} must be at least 1; or leave it out")
    if arguments.num_fewshot is not None and arguments.num_fewshot < 0:
        raise UserError(f"--num-fewshot {arguments.num_fewshot} must not be negative; use 0 or more")
    if arguments.include_path is not None and not arguments.include_path.is_dir():
        raise UserError(f"--include-path {arguments.include_path} is no folder; name one with task files (.yaml)")


def known_tasks(arguments: EvaluateArguments) -> tuple[str, ...]:
    """Names of --tasks; UserError for one that the harness does not know, and where the harness is not installed."""
    try:
        import lm_eval.tasks  # noqa: F401
    except ImportError as error:
        raise UserError("lm_eval is not installed; pip install 'megatronish[eval]'") from error
    names = tuple(name for name in (arguments.tasks or "").split(",") if name)
    known = task_manager(arguments, names).all_tasks
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else "name the folder of its .yaml file with --include-path"
            raise UserError(f"--tasks {name} is no task of the harness; {remedy}")
    if not names:
        raise UserError("--tasks names no task; for example --tasks hellaswag,arc_easy")
    return names


def task_manager(arguments: EvaluateArguments, names: tuple[str, ...]) -> Any:
    """The harness's list of tasks: those of --include-path alone, which are found at once, if they are all there."""
    from lm_eval.tasks import TaskManager

    path = arguments.include_path
    if path is not None:
        own = TaskManager(include_path=str(path), include_defaults=False)
        if set(names) <= set(own.all_tasks):
            return own
    return TaskManager(include_path=None if path is None else str(path))


def be_rank(task: TasksToScore, place: Place) -> int:
    """Tasks on one rank, and its exit status."""
    session = task.model.load(place, batch_size=task.arguments.micro_batch_size)
    if session.mesh.is_main:
        tell(task, results_of(task, session))
        session.close()
    else:
        session.follow()
    leave()
    return 0


def results_of(task: TasksToScore, session: Session) -> dict[str, Any]:
    """The harness's results, on the main rank."""
    from lm_eval.evaluator import simple_evaluate

    from megatronish.inference.harness import HarnessModel, HarnessTokens

    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # for its bootstrap: a rank must not fork
    os.environ["LOCAL_RANK"] = "0"  # with another one it keeps its results to itself
    arguments, model = task.arguments, task.model
    tokens = HarnessTokens(model.tokenizer, model.stops, task.chats, str(arguments.load).replace("/", "__"))
    with without_network(task.names):
        evaluation = simple_evaluate(
            model=HarnessModel(session, tokens),
            tasks=list(task.names),
            num_fewshot=arguments.num_fewshot,
            limit=arguments.limit,
            apply_chat_template=arguments.apply_chat_template,
            task_manager=task_manager(arguments, task.names),
            bootstrap_iters=1000,
            log_samples=arguments.log_samples,
        )
    assert evaluation is not None, "the main rank has the results"
    return dict(evaluation)


@contextmanager
def without_network(names: Sequence[str]) -> Iterator[None]:
    """UserError where the data of tasks cannot be downloaded, whatever their libraries raise for that."""
    try:
        yield
    except Exception as error:
        causes = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
            causes.append(cause)  # type: ignore[arg-type]
        if not any(isinstance(each, ConnectionError) or type(each).__name__ in UNREACHABLE for each in causes):
            raise
        line = (without_passwords(str(error)).splitlines() or [""])[0][:200]
        raise UserError(
            f"the data of --tasks {','.join(names)} cannot be downloaded ({type(error).__name__}: {line}); run it once "
            "on a machine with a network, copy its cache (HF_HOME) here, and set HF_HUB_OFFLINE=1; or name tasks with "
            "data of your own with --include-path"
        ) from error


def tell(task: TasksToScore, found: dict[str, Any]) -> None:
    """Print the results as a table, and write them to the output."""
    from lm_eval.utils import make_table

    print(make_table(found), flush=True)
    if task.output is None:
        return
    kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better", "samples")
    about = {"checkpoint": str(task.model.found.checkpoint), "step": task.model.found.step}
    about |= {"adapter": None if task.arguments.adapter is None else str(task.arguments.adapter)}
    text = json.dumps({**about, **{name: found[name] for name in kept if name in found}}, indent=1, default=str)
    try:
        task.output.write_text(f"{text}\n")
    except OSError as error:
        raise unwritable(task.output, error) from error
    print(f"wrote {task.output}", flush=True)


def run(arguments: EvaluateArguments, place: Place | None = None) -> int:
    """The tasks, or without any the perplexity of a text, on all ranks; and the exit status."""
    if arguments.tasks is None:
        return perplexity.run(arguments, place)
    task = prepare(arguments, place)
    return launch(partial(be_rank, task), world_size=task.model.config.layout.world_size)
