"""Generation behind `megatronish generate`: prompts and the model on all ranks, and the texts that are shown."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

from megatronish.commands.inference_flags import GenerateArguments
from megatronish.config.config import Config
from megatronish.config.parallel import ParallelConfig
from megatronish.config.plugins import PluginsConfig, import_plugins
from megatronish.config.training import TrainingConfig
from megatronish.data.encoding import read_line
from megatronish.errors import UserError
from megatronish.inference.generate import GeneratedToken, Sampling, generate
from megatronish.inference.load import SavedModel, find_trained, load_model
from megatronish.launch.local import launch
from megatronish.launch.place import Place
from megatronish.mesh import leave
from megatronish.tokenizer import Tokenizer, build_tokenizer, encode_prompt
from megatronish.train.run import start_mesh


@dataclass(frozen=True)
class Generation:
    """Checked input of every rank: the checkpoint, its config in the new layout, the tokenizer and the prompts."""

    arguments: GenerateArguments
    found: SavedModel
    config: Config
    tokenizer: Tokenizer
    prompts: tuple[str, ...]
    tokens: tuple[list[int], ...]


def check(arguments: GenerateArguments) -> None:
    """UserError for numbers out of range."""
    if not 0 <= arguments.temperature < math.inf:
        raise UserError(f"--temperature {arguments.temperature} must be a number from 0 on; for example 0.8")
    if not 0 < arguments.top_p <= 1:
        raise UserError(f"--top-p {arguments.top_p} must be above 0 and at most 1; for example 0.95")
    if arguments.top_k < 0 or arguments.num_tokens < 0:
        raise UserError(
            f"--top-k {arguments.top_k} and --num-tokens {arguments.num_tokens} must not be negative; use 0 or more"
        )
    if arguments.seq_length is not None and arguments.seq_length < 1:
        raise UserError(f"--seq-length {arguments.seq_length} must be at least 1; or leave it out")
    if arguments.batch_size < 1:
        raise UserError(f"--batch-size {arguments.batch_size} must be at least 1; use 1 for one prompt at a time")


def read_prompts(path: Path) -> tuple[str, ...]:
    """Prompts of a file, one per line; blank lines are skipped. UserError with the number of an invalid line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"--prompts-file {path} cannot be read: {error.strerror}; check the path") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                found.append(read_line(line, ["text"])[0] if path.suffix == ".jsonl" else line.decode())
        except ValueError as error:
            raise UserError(f"--prompts-file {path}:{number} holds no prompt: {error}; correct the line") from error
    if not found:
        raise UserError(f"--prompts-file {path} holds no prompt; write one a line")
    return tuple(found)


def prepare(arguments: GenerateArguments) -> Generation:
    """The generation of these arguments; every user error is raised here, before any rank starts."""
    check(arguments)
    import_plugins(arguments.plugin)
    found = find_trained(
        arguments.load, step=arguments.ckpt_step, tokenizer=arguments.tokenizer_model, adapter=arguments.adapter
    )
    config = found.config(
        ParallelConfig(
            tensor_model_parallel_size=arguments.tensor_model_parallel_size,
            pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
            data_parallel_size=1,
            expert_model_parallel_size=arguments.expert_model_parallel_size,
            expert_tensor_parallel_size=arguments.expert_tensor_parallel_size,
            device=arguments.device,
        ),
        TrainingConfig(
            seq_length=found.description.seq_length if arguments.seq_length is None else arguments.seq_length,
            micro_batch_size=1,
            bf16=arguments.bf16,
        ),
    )
    config = replace(config, plugins=PluginsConfig(arguments.plugin))
    tokenizer = build_tokenizer(found.description.data)
    prompts = arguments.prompt + (read_prompts(arguments.prompts_file) if arguments.prompts_file else ()) or ("\n",)
    tokens = tuple(
        encode_prompt(tokenizer, prompt, add_special_tokens=arguments.add_special_tokens) for prompt in prompts
    )
    return Generation(arguments, found, config, tokenizer, prompts, tokens)


def write(task: Generation, place: Place) -> int:
    """Generation on one rank, and its exit status."""
    mesh, flags = start_mesh(task.config, place), task.arguments
    dtype = torch.bfloat16 if flags.bf16 else torch.float32
    model = load_model(task.found.checkpoint, mesh=mesh, dtype=dtype, adapter=flags.adapter)
    if mesh.is_main:
        tell_of_long_texts(task)
    start = time.perf_counter()
    written = generate(
        model.model,
        task.tokens,
        num_tokens=flags.num_tokens,
        seq_length=task.config.training.seq_length,
        stops={task.tokenizer.eod, *task.found.description.stops},
        sampling=Sampling(flags.temperature, flags.top_k, flags.top_p, flags.seed),
        batch_size=flags.batch_size,
        mesh=mesh,
    )
    count = show(task, written) if mesh.is_main else sum(1 for _ in written)
    if mesh.is_main:
        seconds = time.perf_counter() - start
        print(f"{count:,} tokens in {seconds:.1f} s: {count / seconds:.1f} tokens/s", file=sys.stderr)
    leave()
    return 0


def tell_of_long_texts(task: Generation) -> None:
    """Messages about texts longer than the model sees: prompts that are cut, tokens without a KV cache."""
    seen = task.config.training.seq_length
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
    live = Live(task.tokenizer, task.tokens[0]) if grows else None
    with contextlib.nullcontext() if path is None else open_output(path) as file:
        for number, token in written:
            if token is None:
                ended.add(number)
            else:
                following[number].append(token)
            if live:
                live.show(following[0], is_all=bool(ended))
                continue
            while num_shown in ended:
                show_one(task, num_shown, following[num_shown], file)
                num_shown += 1
    return sum(map(len, following))


def open_output(path: Path) -> TextIO:
    """The file, open for writing; UserError where that fails."""
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}; choose another") from error


def show_one(task: Generation, number: int, following: Sequence[int], file: TextIO | None) -> None:
    """Print the text of one prompt, or write it to `file` as a line of JSON."""
    prompt, tokens = task.prompts[number], task.tokens[number]
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


class Live:
    """Text on a terminal that is printed token by token."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer, self.prompt = tokenizer, prompt
        self.shown = ""

    def show(self, following: Sequence[int], *, is_all: bool) -> None:
        """Print the new characters. The last token may end within a UTF-8 character: then wait, unless `is_all`."""
        text = self.tokenizer.decode([*self.prompt, *following])
        grows = text.startswith(self.shown)
        if is_all:
            print(text[len(self.shown) :] if grows else f"\n{text}", flush=True)
        elif grows and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[len(self.shown) :], end="", flush=True)
            self.shown = text


def run(arguments: GenerateArguments) -> int:
    """Generation on all ranks, and the exit status."""
    task = prepare(arguments)
    return launch(partial(write, task), world_size=task.config.layout.world_size)
