"""Command `megatronish judge`: answers of models to questions over HTTP, and what a judge model says of them."""

import json
import math
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro
from tqdm import tqdm

from megatronish.commands.exit_status import exit_status
from megatronish.config.arguments import read_arguments
from megatronish.core.errors import UserError, spelled
from megatronish.core.files import unwritten, write_durably
from megatronish.inference.judge_journal import Journal
from megatronish.inference.judge_questions import read_questions, shipped_questions
from megatronish.inference.judge_rounds import (
    Answers,
    AnswerSettings,
    Judgement,
    JudgementRound,
    JudgeSettings,
    Rounds,
    comparisons,
    gather_answers,
)
from megatronish.inference.judge_server import ChatServer, Endpoint, Patience, read_endpoint
from megatronish.inference.judge_table import (
    bias_of,
    duel_of,
    grades_of,
    numbers_of,
    pairwise_tables,
    single_tables,
)

OPENAI_HOST, OPENAI_KEY = "api.openai.com", "OPENAI_API_KEY"
MOST_PARALLEL = 256
MOST_REFUSED = 5  # refused requests that are named


@dataclass(frozen=True)
class JudgeArguments:
    """Answers of models to questions, over servers with OpenAI's interface, judged by another model.

    It resumes: answers and verdicts that are in the output folder are not asked for again.
    """

    judge: str
    """The model that judges: NAME=URL, or NAME=URL#MODEL."""
    output: Path
    """Folder of answers.jsonl, judgements.jsonl, and the results of the last command: table.md, results.json."""
    model: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A model that answers: NAME=URL, or NAME=URL#MODEL where its server calls it otherwise. Several are allowed."""
    questions: Path | None = None
    """JSON lines of questions, as MT-bench's question.jsonl. Derived: a few of our own, for a first try."""
    mode: Literal["single", "pairwise"] = "single"
    """single: each answer gets a grade from 1 to 10. pairwise: two answers are compared, in both orders."""
    baseline: str | None = None
    """Name of the model with which all others are compared. Derived: all pairs are compared."""
    limit: int | None = None
    """Questions to ask, the first ones; the others are left out."""
    parallel: int = 4
    """Requests at a time."""
    max_tokens: int = 1024
    """Tokens of an answer, at most."""
    temperature: float | None = None
    """Temperature of all answers. Derived: of each question its own, or that of its category, as in FastChat."""
    seed: int | None = 0
    """Seed that is sent with each question; None sends none, for servers that know no seeds."""
    judge_max_tokens: int = 2048
    """Tokens of a verdict with its reasons, at most."""
    judge_temperature: float | None = 0.0
    """Temperature of verdicts; None sends none, for models that know one temperature alone."""
    key_variable: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """NAME=VARIABLE: the environment variable with the key of this model, or judge, for its server. Several are
    allowed. Derived: OPENAI_API_KEY, for https://api.openai.com alone."""
    retries: int = 6
    """Times that a request is sent again after 429, 5xx, a timeout or a lost connection."""
    retry_seconds: float = 1.0
    """Wait before the second attempt; it doubles with each further one, up to a minute. Retry-After is obeyed."""
    timeout_seconds: float = 600.0
    """Seconds that a server may be silent."""
    skip_refused: bool = False
    """Leave out requests that a server refuses (a conversation that is too long, for example), and count them."""


@dataclass(frozen=True)
class Comparison:
    """Checked input of the command: the servers of all models and of the judge, and the questions."""

    arguments: JudgeArguments
    servers: dict[str, ChatServer]
    judge: ChatServer
    rounds: Rounds

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models."""
        return tuple(self.servers)

    @property
    def compared(self) -> list[tuple[str, ...]]:
        """What the judge sees in a prompt: names of one model, or of two in their order."""
        return comparisons(self.models, self.arguments.mode, self.arguments.baseline)


def main(argv: Sequence[str], *, program: str = "megatronish judge") -> int:
    """Run the command; the exit status."""
    return exit_status(lambda: run(read_arguments(JudgeArguments, argv, program=program)))


def run(arguments: JudgeArguments) -> int:
    """Answers, verdicts and tables; the exit status."""
    task = prepare(arguments)
    folder = arguments.output
    needed = ("model", "question_id", "answer", "cut")
    try:
        with (
            closing(Journal(folder / "answers.jsonl", needed=needed)) as answered,
            closing(Journal(folder / "judgements.jsonl", needed=("verdict",))) as judged,
        ):
            for server in (*task.servers.values(), task.judge):
                server.check()
            answers = ask(task, answered)
            judgements, refused = judge(task, answers, judged)
            tell(task, answers, judgements, refused)
            for journal in (answered, judged):
                tell_of_other_lines(journal)
    finally:
        task.rounds.ended.set()
    return 0


def prepare(arguments: JudgeArguments) -> Comparison:
    """The comparison of these arguments; UserError for what is wrong in them. The output folder is made."""
    check_numbers(arguments)
    endpoints = [read_endpoint("--model", given) for given in arguments.model]
    judge = read_endpoint("--judge", arguments.judge)
    names = [each.name for each in endpoints]
    if not names:
        raise UserError("--model is not given; name each model with its server: --model NAME=URL")
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise UserError(
            f"--model {twice} is given twice; give each its own name, and its server's name for it behind the URL: "
            f"--model other=URL#{twice}"
        )
    if arguments.mode == "single" and arguments.baseline is not None:
        raise UserError(f"--baseline {arguments.baseline} is for --mode pairwise; choose that mode, or leave it out")
    if arguments.mode == "pairwise" and len(names) < 2:
        raise UserError("--mode pairwise compares two models or more; name another --model, or choose --mode single")
    if arguments.baseline is not None and arguments.baseline not in names:
        raise UserError(f"--baseline {arguments.baseline} is none of the models; choose one of {', '.join(names)}")
    *keyed, keyed_judge = with_keys([*endpoints, judge], arguments.key_variable)
    questions = read_questions(arguments.questions or shipped_questions(), limit=arguments.limit)
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritten(f"--output {arguments.output}", arguments.output, error) from error
    ended = threading.Event()
    patience = Patience(arguments.retries, arguments.retry_seconds, arguments.timeout_seconds, ended)
    servers = {each.name: ChatServer(each, patience) for each in keyed}
    rounds = Rounds(questions, arguments.parallel, ended, arguments.skip_refused)
    return Comparison(arguments, servers, ChatServer(keyed_judge, patience), rounds)


def check_numbers(arguments: JudgeArguments) -> None:
    """UserError for numbers that are out of range."""
    bounds = {"limit": 1, "parallel": 1, "max_tokens": 1, "judge_max_tokens": 1, "retries": 0, "retry_seconds": 0,
              "temperature": 0, "judge_temperature": 0}  # fmt: skip
    for name, lowest in bounds.items():
        value = getattr(arguments, name)
        if value is not None and not (math.isfinite(value) and value >= lowest):
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least {lowest}; or leave it out")
    if arguments.parallel > MOST_PARALLEL:
        raise UserError(f"--parallel {arguments.parallel} must be at most {MOST_PARALLEL}; servers answer no faster")
    if not 0 < arguments.timeout_seconds < threading.TIMEOUT_MAX:
        raise UserError(f"--timeout-seconds {arguments.timeout_seconds:g} must be above 0; or leave it out")


def with_keys(endpoints: Sequence[Endpoint], given: Sequence[str]) -> list[Endpoint]:
    """The endpoints with their keys from the environment. UserError for a variable that has none."""
    variables = {}
    for each in given:
        name, equals, variable = each.partition("=")
        if not equals or name not in {endpoint.name for endpoint in endpoints}:
            raise UserError(
                f"--key-variable must be NAME=VARIABLE, with NAME one of {', '.join(each.name for each in endpoints)}"
            )
        variables[name] = variable
    keyed_endpoints = []
    for endpoint in endpoints:
        variable = variables.get(endpoint.name, "")
        # Without being asked to, no key is sent to a host that it may not be for.
        if not variable and endpoint.url.startswith(f"https://{OPENAI_HOST}/") and os.environ.get(OPENAI_KEY):
            variable = OPENAI_KEY
        keyed_endpoints.append(replace(endpoint, key=key_of(endpoint, variable)) if variable else endpoint)
    return keyed_endpoints


def key_of(endpoint: Endpoint, variable: str) -> str:
    """The key in a variable of the environment. UserError, without the key, if it has none that can be sent."""
    # Who gives the key instead of the variable's name has it not repeated.
    name = variable if re.fullmatch(r"[A-Z_][A-Z0-9_]*", variable) else "VARIABLE"
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(
            f"--key-variable {endpoint.name}={name}: the environment has no such variable, or it is empty; set it "
            "to the key, which does not belong into a command line"
        )
    if not re.fullmatch(r"[!-~]+", key):
        raise UserError(f"--key-variable {endpoint.name}={name}: its value has spaces or other letters than a key has")
    return key


def ask(task: Comparison, journal: Journal) -> Answers:
    """The answers of all models, with a progress bar."""
    sampling = AnswerSettings(task.arguments.max_tokens, task.arguments.temperature, task.arguments.seed)
    total = len(task.models) * sum(len(question.turns) for question in task.rounds.questions)
    with tqdm(total=total, unit=" answers", disable=None) as bar:
        return gather_answers(task.servers, task.rounds, sampling, journal, bar.update)


def judge(task: Comparison, answers: Answers, journal: Journal) -> tuple[list[Judgement], list[str]]:
    """The verdicts of the judge, with a progress bar, and the requests that it has refused."""
    settings = JudgeSettings(task.arguments.judge_max_tokens, task.arguments.judge_temperature)
    hidden = {name for each in task.servers.values() for name in (each.endpoint.name, each.endpoint.model)}
    judgement_round = JudgementRound(task.judge, task.rounds, settings, answers, sorted(hidden))
    total = sum(len(list(judgement_round.judged(names))) for names in task.compared)
    with tqdm(total=total, unit=" verdicts", disable=None) as bar:
        return judgement_round.gather(task.compared, journal, bar.update), judgement_round.refused


class JudgedResults(NamedTuple):
    """What the verdicts say: tables and notes to read, and the same as numbers. `num_unreadable` counts verdicts."""

    tables: list[str]
    notes: list[str]
    numbers: dict[str, Any]
    num_unreadable: int


def single_findings(task: Comparison, judgements: Sequence[Judgement]) -> JudgedResults:
    """Grades of all models."""
    grades = [grades_of(name, judgements) for name in task.models]
    note = "95 %: the average, plus or minus 1.96 standard errors over questions"
    unreadable = sum(each.num_unreadable for each in grades)
    return JudgedResults(single_tables(grades), [note], {"results": numbers_of(grades)}, unreadable)


def pairwise_findings(task: Comparison, judgements: Sequence[Judgement]) -> JudgedResults:
    """Wins of all pairs, and the bias of the judge for a place."""
    names = [(first, second) for first, second in task.compared[::2]]
    duels, bias = [duel_of(*both, judgements) for both in names], bias_of(names, judgements)
    share = "" if bias.share is None else f" ({bias.share:.1%})"
    notes = [
        "a win needs both orders, a tie is half a win; 95 %: Wilson's interval, a question as one observation",
        f"the verdict changes with the order in {bias.changed} of {bias.num_pairs} pairs{share}: the first place won "
        f"both times in {bias.first_place}, the second in {bias.second_place}",
    ]
    numbers = {"results": numbers_of(duels), "position_bias": {**vars(bias), "share": bias.share}}
    return JudgedResults(pairwise_tables(duels), notes, numbers, sum(each.num_unreadable for each in duels))


def tell(task: Comparison, answers: Answers, judgements: Sequence[Judgement], refused: Sequence[str]) -> None:
    """Print the tables and what is to be known of them, and write both into the output folder."""
    arguments, questions = task.arguments, task.rounds.questions
    findings = (single_findings if arguments.mode == "single" else pairwise_findings)(task, judgements)
    num_turns = sum(len(question.turns) for question in questions)
    head = f"{len(questions)} questions, {num_turns} turns, judged by {task.judge.endpoint.name} ({arguments.mode})"
    skipped = [*answers.refused, *refused]
    notes = [*findings.notes, *remarks(task, answers.cut, findings.num_unreadable, skipped)]
    page = "\n\n".join([head, *findings.tables, "\n".join(f"- {note}" for note in notes)]) + "\n"
    numbers = {
        "mode": arguments.mode,
        "judge": task.judge.endpoint.model,
        "models": {name: server.endpoint.model for name, server in task.servers.items()},
        "num_questions": len(questions),
        "num_turns": num_turns,
        **findings.numbers,
        "refused": skipped,
        "answers_cut": answers.cut,
    }
    print(spelled(page), end="", flush=True)
    for path, text in (
        (arguments.output / "table.md", page),
        (arguments.output / "results.json", json.dumps(numbers, indent=1, ensure_ascii=False) + "\n"),
    ):
        try:
            write_durably(path, text)
        except OSError as error:
            raise unwritten(f"--output {path}", path, error) from error


def remarks(task: Comparison, cut: Mapping[str, int], num_unreadable: int, refused: Sequence[str]) -> Iterator[str]:
    """Sentences about what is missing in the tables, or may mislead in them."""
    if num_unreadable:
        what = "verdicts" if task.arguments.mode == "single" else "pairs"
        yield f"{num_unreadable} {what} could not be read, even when asked again, and are not counted"
    if refused:
        more = f"; and {len(refused) - MOST_REFUSED} more" if len(refused) > MOST_REFUSED else ""
        yield f"{len(refused)} requests were refused: {'; '.join(refused[:MOST_REFUSED])}{more}"
    for name, count in cut.items():
        if count:
            yield f"{count} answers of {name} were cut at --max-tokens {task.arguments.max_tokens}"
    judge = task.judge.endpoint
    for name, server in task.servers.items():
        if (server.endpoint.url, server.endpoint.model) == (judge.url, judge.model):
            yield f"the judge is {name} itself: a judge prefers answers of its own"


def tell_of_other_lines(journal: Journal) -> None:
    """Message about lines of a journal that have no part in the tables."""
    if journal.num_unreadable:
        print(f"{journal.path}: {journal.num_unreadable} lines cannot be read and are not counted", file=sys.stderr)
    if journal.num_others:
        print(
            f"{journal.path}: {journal.num_others} lines of other questions, models or settings stay in it and are not "
            "counted",
            file=sys.stderr,
        )
