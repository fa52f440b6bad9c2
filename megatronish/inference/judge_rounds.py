"""Rounds of a judged comparison: the answers of every model, and the judge's verdicts about them.

Requests run in threads. The main thread alone writes what arrives, so an interrupted command has all of it on the disk,
and the next one asks for the rest.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, NamedTuple

from megatronish.inference.judge_journal import Journal
from megatronish.inference.judge_questions import Question, anonymous, ask_again, judge_messages, read_verdict
from megatronish.inference.judge_server import AbandonedError, ChatAnswer, ChatServer, RemoteChat, RequestRefusedError

Emit = Callable[[Any], None]
Task = Callable[[Emit], None]
Progress = Callable[[int], object]
Verdict = float | Literal["A", "B", "C"] | str | None


@dataclass(frozen=True)
class AnswerSettings:
    """How answers are sampled. Without a temperature, each question has that of its category."""

    max_tokens: int
    temperature: float | None
    seed: int | None


@dataclass(frozen=True)
class JudgeSettings:
    """How verdicts are sampled. A temperature of None is not sent, for models that know one alone."""

    max_tokens: int
    temperature: float | None


@dataclass(frozen=True)
class Rounds:
    """What all requests share. With `skip_refused` a request that a server refuses is counted and left out."""

    questions: Sequence[Question]
    parallel: int
    ended: threading.Event
    skip_refused: bool


class Judgement(NamedTuple):
    """A verdict about a turn, counted from 0: of one model, or of two in the order in which the judge saw them."""

    question: Question
    turn: int
    names: tuple[str, ...]
    verdict: Verdict


class Answers:
    """The answers of all models, turn after turn."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, int | str], list[str]] = {}
        self.refused: list[str] = []
        self.cut: dict[str, int] = {}

    def add(self, name: str, question: Question, answer: ChatAnswer) -> None:
        """Append the answer to the next turn of a question."""
        self._texts.setdefault((name, question.identity), []).append(answer.text)
        self.cut[name] = self.cut.get(name, 0) + answer.is_cut

    def of(self, name: str, question: Question) -> list[str]:
        """Answers of a model to the turns of a question; fewer than turns where one was refused."""
        return self._texts.get((name, question.identity), [])


class _Recorded(NamedTuple):
    """An answer, or a verdict, that a thread hands to the main thread."""

    digest: str
    record: dict[str, Any]


class _Refused(NamedTuple):
    """A request that was refused: the sentence, and the requests that it leaves without an answer."""

    sentence: str
    num_requests: int


def gather_answers(
    servers: Mapping[str, ChatServer], rounds: Rounds, sampling: AnswerSettings, journal: Journal, on_progress: Progress
) -> Answers:
    """The answers of every model to every turn, from the journal or else from its server."""
    answers = Answers()
    tasks: list[Task] = []
    for question in rounds.questions:
        for name, server in servers.items():
            known = _known_answers(server, question, sampling, journal)
            for answer in known:
                answers.add(name, question, answer)
            on_progress(len(known))
            if len(known) < len(question.turns):
                tasks.append(_conversation(name, server, question, sampling, known))
    by_identity = {question.identity: question for question in rounds.questions}

    def keep(found: _Recorded | _Refused) -> None:
        if isinstance(found, _Refused):
            _skip(found, rounds, answers.refused)
            on_progress(found.num_requests)
            return
        record = journal.add(*found)
        answers.add(record["model"], by_identity[record["question_id"]], _answer_of(record))
        on_progress(1)

    run_all(tasks, keep, parallel=rounds.parallel, ended=rounds.ended)
    return answers


def _request(question: Question, said: Sequence[str], sampling: AnswerSettings) -> RemoteChat:
    """Request for the turn after those that have an answer in `said`."""
    messages = []
    for asked, answer in zip(question.turns, said, strict=False):
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": question.turns[len(said)]})
    temperature = question.temperature if sampling.temperature is None else sampling.temperature
    return RemoteChat(tuple(messages), sampling.max_tokens, temperature, sampling.seed)


def _known_answers(
    server: ChatServer, question: Question, sampling: AnswerSettings, journal: Journal
) -> list[ChatAnswer]:
    """The answers of the first turns that the journal has."""
    known: list[ChatAnswer] = []
    while len(known) < len(question.turns):
        request = _request(question, [each.text for each in known], sampling)
        record = journal.find(_digest(request, server, question))
        if record is None:
            break
        known.append(_answer_of(record))
    return known


def _digest(request: RemoteChat, server: ChatServer, question: Question) -> str:
    """Digest of a request for an answer: two questions may begin alike, and two names may have one model."""
    return request.digest(server.endpoint, server.endpoint.name, question.identity)


def _answer_of(record: Mapping[str, Any]) -> ChatAnswer:
    return ChatAnswer(record["answer"], record["cut"])


def _conversation(
    name: str, server: ChatServer, question: Question, sampling: AnswerSettings, known: Sequence[ChatAnswer]
) -> Task:
    """Task that asks the turns of a question that have no answer yet, each after the one before."""

    def ask(emit: Emit) -> None:
        said = [each.text for each in known]
        while len(said) < len(question.turns):
            request = _request(question, said, sampling)
            try:
                answer = server.answer(request)
            except RequestRefusedError as error:
                where = f"question {question.identity}, turn {len(said) + 1}"
                emit(_Refused(f"{error} ({where})", len(question.turns) - len(said)))
                return
            record = {
                "model": name,
                "question_id": question.identity,
                "category": question.category,
                "turn": len(said) + 1,
                "temperature": request.temperature,
                "answer": answer.text,
                "cut": answer.is_cut,
            }
            emit(_Recorded(_digest(request, server, question), record))
            said.append(answer.text)

    return ask


def comparisons(names: Sequence[str], mode: str, baseline: str | None) -> list[tuple[str, ...]]:
    """What a judge sees in one prompt: each model; or, by pairs, each other model and the baseline, in both orders."""
    if mode == "single":
        return [(name,) for name in names]
    pairs = combinations(names, 2) if baseline is None else ((each, baseline) for each in names if each != baseline)
    return [order for first, second in pairs for order in ((first, second), (second, first))]


class JudgementRound:
    """Verdicts about the answers. `hidden`: names that the judge does not see; `refused`: what it did not answer."""

    def __init__(
        self, judge: ChatServer, rounds: Rounds, settings: JudgeSettings, answers: Answers, hidden: Sequence[str]
    ) -> None:
        self._judge, self._rounds, self._settings, self._answers = judge, rounds, settings, answers
        self._hidden = hidden
        self.refused: list[str] = []

    def judged(self, names: Sequence[str]) -> Iterable[tuple[Question, int]]:
        """Question and turn of each verdict about these models: those that all of them have answered."""
        for question in self._rounds.questions:
            for turn in range(min(len(self._answers.of(name, question)) for name in names)):
                yield question, turn

    def gather(self, compared: Sequence[tuple[str, ...]], journal: Journal, on_progress: Progress) -> list[Judgement]:
        """The verdicts in the order of what is compared, from the journal or else from the judge."""
        tasks: list[Task] = []
        judgements = [
            Judgement(question, turn, names, None) for names in compared for question, turn in self.judged(names)
        ]
        missing: dict[str, list[int]] = {}  # places in `judgements`
        for place, judgement in enumerate(judgements):
            request = self._request(judgement)
            digest = request.digest(self._judge.endpoint)
            record = journal.find(digest)
            if record is not None:
                judgements[place] = judgement._replace(verdict=record["verdict"])
                on_progress(1)
                continue
            # Two models may have said the same: one verdict is for both.
            if digest not in missing:
                tasks.append(self._judging(request, judgement))
            missing.setdefault(digest, []).append(place)

        def keep(reply: _Recorded | _Refused) -> None:
            if isinstance(reply, _Refused):
                _skip(reply, self._rounds, self.refused)
                on_progress(reply.num_requests)
                return
            verdict = journal.add(*reply)["verdict"]
            places = missing.pop(reply.digest)
            for place in places:
                judgements[place] = judgements[place]._replace(verdict=verdict)
            on_progress(len(places))

        run_all(tasks, keep, parallel=self._rounds.parallel, ended=self._rounds.ended)
        refused = {place for places in missing.values() for place in places}
        return [judgement for place, judgement in enumerate(judgements) if place not in refused]

    def _request(self, judgement: Judgement) -> RemoteChat:
        question, turn, names, _ = judgement
        answers = [[anonymous(text, self._hidden) for text in self._answers.of(name, question)] for name in names]
        messages = judge_messages(question, answers, turn=turn)
        return RemoteChat(messages, self._settings.max_tokens, self._settings.temperature)

    def _judging(self, request: RemoteChat, judgement: Judgement) -> Task:
        """Task that asks for a verdict, and once more if the first one cannot be read."""
        count = len(judgement.names)

        def judge(emit: Emit) -> None:
            try:
                said = self._judge.answer(request).text
                verdict, again = read_verdict(said, num_answers=count), None
                if verdict is None:
                    messages = ask_again(request.messages, said, num_answers=count)
                    asked = RemoteChat(messages, request.max_tokens, request.temperature)
                    again = self._judge.answer(asked).text
                    verdict = read_verdict(again, num_answers=count)
            except RequestRefusedError as error:
                where = f"{' and '.join(judgement.names)}, question {judgement.question.identity}"
                emit(_Refused(f"{error} ({where}, turn {judgement.turn + 1})", 1))
                return
            record: dict[str, Any] = {
                "judge": self._judge.endpoint.name,
                "models": judgement.names,
                "question_id": judgement.question.identity,
                "category": judgement.question.category,
                "turn": judgement.turn + 1,
                "verdict": verdict,
                "said": said,
            }
            record |= {} if again is None else {"said_again": again}
            emit(_Recorded(request.digest(self._judge.endpoint), record))

        return judge


def _skip(found: _Refused, rounds: Rounds, refused: list[str]) -> None:
    """Count a refusal; RequestRefusedError if refusals are not to be left out."""
    if not rounds.skip_refused:
        raise RequestRefusedError(
            f"{found.sentence}; correct its cause, or leave such requests out with --skip-refused"
        )
    refused.append(found.sentence)


_END = object()


def _next(left: deque[Task]) -> Task | None:
    """Take the first task that is left; another thread may have taken the last one since it was counted."""
    try:
        return left.popleft()
    except IndexError:
        return None


def run_all(tasks: Sequence[Task], keep: Callable[[Any], None], *, parallel: int, ended: threading.Event) -> None:
    """Run the tasks in threads, and call `keep` here with all that they emit; a thread continues when it has been kept.

    So a kill loses what is being asked, and nothing that waits for the disk. After the first error no task begins; what
    the running ones emit is kept, and then the error is raised. Ctrl-C keeps what has arrived and waits for nothing:
    threads that wait for a server end with the process.
    """
    left = deque(tasks)
    arrived: queue.SimpleQueue[tuple[Any, threading.Event]] = queue.SimpleQueue()

    def emit(found: Any) -> None:
        is_kept = threading.Event()
        arrived.put((found, is_kept))
        is_kept.wait()

    def work() -> None:
        try:
            while not ended.is_set() and (task := _next(left)) is not None:
                task(emit)
        except AbandonedError:
            pass
        except BaseException as error:
            emit(error)
        finally:
            emit(_END)

    running, failure = min(parallel, len(tasks)), None
    for _ in range(running):
        threading.Thread(target=work, daemon=True).start()
    try:
        while running:
            item, is_kept = arrived.get()
            if item is _END:
                running -= 1
            try:
                if isinstance(item, BaseException):
                    raise item
                if item is not _END:
                    keep(item)
            except Exception as error:
                failure = failure or error
                ended.set()
            is_kept.set()
    except KeyboardInterrupt:
        ended.set()
        while not arrived.empty():
            item, _ = arrived.get()
            if isinstance(item, _Recorded):
                keep(item)
        raise
    if failure is not None:
        raise failure
