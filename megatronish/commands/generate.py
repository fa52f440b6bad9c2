"""Generation behind `megatronish generate`: prompts and the model on all ranks, and the texts that are shown."""

import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from megatronish.commands.inference_flags import GenerateArguments
from megatronish.commands.model_loading import OpenedModel, open_model, sampling_of
from megatronish.core.errors import UserError
from megatronish.core.files import OF_WRITING, ordinary, refuse_input_as_output, unwritten
from megatronish.data.encoding import read_line
from megatronish.inference.generate import GeneratedToken, Sampling
from megatronish.inference.session import Continuation
from megatronish.inference.text_stream import TextStream
from megatronish.launch.local import launch
from megatronish.launch.place import Place
from megatronish.parallel.mesh import leave
from megatronish.tokenizer.tokenizer import Tokenizer, encode_prompt


@dataclass(frozen=True)
class Generation:
    """Checked input of every rank: the model, the prompts, their tokens, how to sample, and which adapter to apply."""

    arguments: GenerateArguments
    model: OpenedModel
    prompts: tuple[str, ...]
    tokens: tuple[list[int], ...]
    sampling: Sampling
    adapter: str | None

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model and its prompts."""
        return self.model.tokenizer

    def shown_of(self, number: int) -> Sequence[int]:
        """What a text is shown with in front of it: its prompt, unless the text is an answer to it."""
        return self.tokens[number] if self.model.special is None else ()


def check(arguments: GenerateArguments) -> None:
    """UserError for numbers out of range."""
    if arguments.num_tokens < 0:
        raise UserError(f"--num-tokens {arguments.num_tokens} must not be negative; use 0 or more")
    if arguments.batch_size < 1:
        raise UserError(f"--batch-size {arguments.batch_size} must be at least 1; use 1 for one prompt at a time")


def read_prompts(path: Path) -> tuple[str, ...]:
    """Prompts of a file, one per line; blank lines are skipped. UserError with the number of an invalid line."""
    try:
        lines = ordinary(path).read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"--prompts-file {path} cannot be read: {error.strerror}; check the path") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                prompts.append(read_line(line, ["text"])[0] if path.suffix == ".jsonl" else line.decode())
        except ValueError as error:
            raise UserError(f"--prompts-file {path}:{number} holds no prompt: {error}; correct the line") from error
    if not prompts:
        raise UserError(f"--prompts-file {path} holds no prompt; write one a line")
    return tuple(prompts)


def prepare(arguments: GenerateArguments) -> Generation:
    """The generation of these arguments; every user error is raised here, before any rank starts."""
    check(arguments)
    sampling, model = sampling_of(arguments), open_model(arguments)
    read = [arguments.prompts_file, arguments.tokenizer_model, model.found.checkpoint, *model.found.adapters.values()]
    refuse_input_as_output("--output", arguments.output, read)
    prompts = arguments.prompt + (read_prompts(arguments.prompts_file) if arguments.prompts_file else ()) or ("\n",)
    tokens = tuple(
        encode_prompt(model.tokenizer, prompt, add_special_tokens=arguments.add_special_tokens) for prompt in prompts
    )
    if model.special is not None:
        tokens = tuple([*each, model.special.end] for each in tokens)
    return Generation(arguments, model, prompts, tokens, sampling, model.adapter(arguments.use_adapter))


def write(task: Generation, place: Place) -> int:
    """Generation on one rank, and its exit status."""
    flags = task.arguments
    session = task.model.load(place, batch_size=flags.batch_size)
    if session.mesh.is_main:
        tell_of_long_texts(task)
        begun = time.perf_counter()
        start = None if task.model.special is None else task.model.special.start
        order = Continuation(task.tokens, flags.num_tokens, task.model.stops, task.sampling, task.adapter, start)
        count = show(task, session.generate(order))
        seconds = time.perf_counter() - begun
        print(f"{count:,} tokens in {seconds:.1f} s: {count / seconds:.1f} tokens/s", file=sys.stderr)
        session.close()
    else:
        session.follow()
    leave()
    return 0


def tell_of_long_texts(task: Generation) -> None:
    """Messages about texts longer than the model sees: prompts that are cut, tokens without a KV cache."""
    if task.model.special is not None:  # of any length
        return
    seen = task.model.seq_length
    cut = sum(len(tokens) > seen for tokens in task.tokens)
    if cut:
        print(f"of {cut} prompts the model sees the last {seen} tokens alone: they have more", file=sys.stderr)
    if max(map(len, task.tokens)) + task.arguments.num_tokens > seen + 1:
        print(f"what is beyond {seen} tokens is written with the last {seen} in view, and slower", file=sys.stderr)


def show(task: Generation, written: Iterable[GeneratedToken]) -> int:
    """Print the texts, or write them to --output, in the order of the prompts; the number of generated tokens."""
    path = task.arguments.output
    following = [list[int]() for _ in task.prompts]
    ended, num_shown = set[int](), 0
    grows = path is None and len(task.prompts) == 1 and sys.stdout.isatty()
    live = TextStream(lambda tokens: task.tokenizer.decode([*task.shown_of(0), *tokens])) if grows else None
    with opened_output(path) as file:
        for number, token in written:
            if token is None:
                ended.add(number)
            else:
                following[number].append(token)
            if live:
                print(f"{live.finish()}\n" if token is None else live.add(token), end="", flush=True)
                continue
            while num_shown in ended:
                show_one(task, num_shown, following[num_shown], file)
                num_shown += 1
    return sum(map(len, following))


@contextlib.contextmanager
def opened_output(path: Path | None) -> Iterator[TextIO | None]:
    """The file, open for writing, if there is one; a UserError where that fails, and a full disk names it."""
    if path is None:
        yield None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise unwritten(f"--output {path}", path, error) from error
    try:
        with file:
            yield file
    except OSError as error:
        if error.errno in OF_WRITING and error.filename is None:
            error.filename = str(path)
        raise


def show_one(task: Generation, number: int, following: Sequence[int], file: TextIO | None) -> None:
    """Print the text of one prompt, or write it to `file` as a line of JSON."""
    prompt, tokens = task.prompts[number], task.shown_of(number)
    text = task.tokenizer.decode([*tokens, *following])
    if file is None:
        several = f"--- prompt {number + 1} of {len(task.prompts)}\n" if len(task.prompts) > 1 else ""
        print(f"{several}{text}", flush=True)
        return
    before = task.tokenizer.decode(tokens)
    after = text[len(before) :] if text.startswith(before) else task.tokenizer.decode(following)
    is_whole = len(following) < task.arguments.num_tokens
    line = {"prompt": prompt, "text": after, "num_tokens": len(following), "ended": "eod" if is_whole else "length"}
    file.write(json.dumps(line) + "\n")
    file.flush()


def run(arguments: GenerateArguments, _place: Place | None = None) -> int:
    """Generation on all ranks, and the exit status."""
    task = prepare(arguments)
    return launch(partial(write, task), world_size=task.model.config.layout.world_size)
