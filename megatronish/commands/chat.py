"""Chat behind `megatronish chat`: the main rank reads what is typed and prints answers token by token."""

import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

from megatronish.commands.inference_flags import ChatArguments
from megatronish.commands.model_loading import NONE, OpenedModel, open_model, sampling_of
from megatronish.core.errors import UserError
from megatronish.data.chat.conversation import Message
from megatronish.inference.chat import ChatPrompts
from megatronish.inference.generate import Sampling
from megatronish.inference.session import Continuation, Session
from megatronish.inference.text_stream import TextStream
from megatronish.launch.local import launch
from megatronish.launch.place import Place
from megatronish.parallel.mesh import leave

COMMANDS = f"/reset forgets the chat, /adapter NAME (or {NONE}) changes the adapter, /quit ends"


@dataclass(frozen=True)
class ChatTask:
    """Checked input of every rank: the model, its chats, and how to sample."""

    arguments: ChatArguments
    model: OpenedModel
    prompts: ChatPrompts
    sampling: Sampling


class StopButton:
    """Ctrl-C: while an answer is written it stops the answer, at other times it is a KeyboardInterrupt."""

    def __init__(self) -> None:
        self.is_pressed = False
        self._is_answering = False

    def __call__(self, _signum: int, _frame: FrameType | None) -> None:
        """Handler of SIGINT, called between two operations of the main thread."""
        if not self._is_answering:
            raise KeyboardInterrupt
        self.is_pressed = True

    @contextlib.contextmanager
    def for_chat(self) -> Iterator[None]:
        """Context in which it handles Ctrl-C."""
        before = signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def for_answer(self) -> Iterator[None]:
        """Context of an answer, which it may stop."""
        self.is_pressed, self._is_answering = False, True
        try:
            yield
        finally:
            self._is_answering = False


@dataclass
class Chat:
    """Chat on the main rank. `messages` are those that the model still sees; `adapter` is the one that is applied."""

    task: ChatTask
    session: Session
    messages: list[Message] = field(default_factory=list)
    adapter: str | None = None
    button: StopButton = field(default_factory=StopButton)

    def __post_init__(self) -> None:
        self.adapter = self.task.model.adapter(None)
        self.reset()

    def reset(self) -> None:
        """Forget all messages except that of --system."""
        system = self.task.arguments.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def run(self) -> None:
        """Read lines and answer them until the input ends, or /quit."""
        _say(f"{self.task.arguments.load}{self._applied()}; {COMMANDS}")
        with self.button.for_chat():
            while (line := self._read()) is not None:
                if line.startswith("/"):
                    if line == "/quit":
                        return
                    self._obey(line)
                elif line:
                    with self.button.for_answer():
                        self.answer(line)

    def _read(self) -> str | None:
        """A line without the spaces around it; None at the end of the input."""
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            _say("\n/quit, or the end of the input (Ctrl-D), ends the chat")
            return ""

    def _obey(self, line: str) -> None:
        word, _, name = line.partition(" ")
        if word == "/reset":
            self.reset()
            _say("the chat begins again")
        elif word == "/adapter" and name:
            try:
                self.adapter = self.task.model.adapter(name.strip())
                _say(f"{self.task.arguments.load}{self._applied()}")
            except UserError as error:
                _say(str(error))
        else:
            _say(f"{line} is no command; {COMMANDS}")

    def _applied(self) -> str:
        if not self.task.model.found.adapters:
            return ""
        return f" with the adapter {self.adapter}" if self.adapter else " without an adapter"

    def answer(self, line: str) -> None:
        """Answer a message, and print the answer as it is written. What has no answer is no part of the chat."""
        said: list[Message] = [*self.messages, {"role": "user", "content": line}]
        num_tokens = self.task.arguments.num_tokens
        try:
            prompt = self.task.prompts.fitted(said, num_tokens=num_tokens)
        except ValueError as error:
            _say(str(error))
            return
        if dropped := len(said) - len(prompt.messages):
            seen = self.task.prompts.seq_length
            _say(f"the oldest {dropped} messages were dropped: the model sees {seen} tokens with its answer")
        most = min(num_tokens, self.task.prompts.seq_length - len(prompt.tokens))
        stream = self._write(Continuation([prompt.tokens], most, self.task.prompts.stops, self.task.sampling))
        if self.button.is_pressed:
            _say("stopped")
        elif len(stream.tokens) == most:
            _say(f"the answer was cut at {most} tokens")
        if stream.text:
            self.messages = [*prompt.messages, {"role": "assistant", "content": stream.text}]

    def _write(self, order: Continuation) -> TextStream:
        stream = TextStream(self.task.model.tokenizer.decode)
        order = order._replace(adapter=self.adapter)
        for _, token in self.session.generate(order, ends=lambda _number: self.button.is_pressed):
            print(f"{stream.finish()}\n" if token is None else stream.add(token), end="", flush=True)
        return stream


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def prepare(arguments: ChatArguments) -> ChatTask:
    """The chat of these arguments; every user error is raised here, before any rank starts."""
    if arguments.num_tokens < 1:
        raise UserError(f"--num-tokens {arguments.num_tokens} must be at least 1; for example 512")
    sampling, model = sampling_of(arguments), open_model(arguments, waits=True)
    prompts = ChatPrompts.of(
        model.found,
        model.tokenizer,
        template=arguments.chat_template,
        variables=arguments.chat_template_kwargs,
        seq_length=model.seq_length,
    )
    return ChatTask(arguments, model, prompts, sampling)


def talk(task: ChatTask, place: Place) -> int:
    """Chat on one rank, and its exit status."""
    session = task.model.load(place)
    if session.mesh.is_main:
        if multiprocessing.parent_process() is not None:
            # A process of multiprocessing gets an empty file as sys.stdin; descriptor 0 is what the launcher has.
            sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        Chat(task, session).run()
        session.close()
    else:
        session.follow()
    leave()
    return 0


def run(arguments: ChatArguments, _place: Place | None = None) -> int:
    """The chat on all ranks, and the exit status."""
    task = prepare(arguments)
    return launch(partial(talk, task), world_size=task.model.config.layout.world_size, interactive=True)
