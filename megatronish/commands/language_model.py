"""A language model in three lines: load it, let it write and answer, teach it by chats, save it.

    model = LanguageModel.load("models/Llama-3.2-1B")
    print(model.generate("Once upon a time"))
    model.finetune(chats, run_dir="runs/mine", adapter_type="lora", train_iters=100).save("models/mine")

The model lies in this process, on one device. What is trained on several is started by `finetune` on ranks of its own.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

from megatronish.commands.configuration import read_config
from megatronish.commands.inference_flags import ModelArguments, SamplingArguments
from megatronish.commands.model_loading import OpenedModel, open_model, sampling_of
from megatronish.commands.pretrain import pretrain
from megatronish.core.errors import RunError, UserError
from megatronish.data.chat.conversation import Message, checked_message
from megatronish.formats.convert import convert
from megatronish.inference.chat import ChatPrompts
from megatronish.inference.generate import Sampling
from megatronish.inference.session import Continuation, Session
from megatronish.launch.place import Place
from megatronish.parallel.mesh import leave
from megatronish.tokenizer.tokenizer import encode_prompt
from megatronish.train.embedded import train_rank

CHATS = "chats.jsonl"
OF_RANKS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")

LEARNING = {"dataset_type": "chat", "train_iters": 100, "lr": 1e-4, "micro_batch_size": 1, "global_batch_size": 8}
"""Flags of `finetune` where others are not given."""


@dataclass
class LanguageModel:
    """Trained model in this process. `close`, or a `with` block, gives its memory back; it loads itself again."""

    opened: OpenedModel
    arguments: ModelArguments
    _session: Session | None = None

    @classmethod
    def load(cls, source: str | Path, *, adapter: str | Path | None = None, **options: Any) -> Self:
        """The model in a run folder, in a Hugging Face folder, or of this name on its hub (org/name).

        `adapter` is a folder with an adapter of it, of PEFT or of a run. Options are flags of `megatronish generate`
        about the model: bf16, device, seq_length, tokenizer_model, ckpt_step. UserError for what is not one.
        """
        known = {field.name for field in fields(ModelArguments)} - {"load", "adapter", *OF_RANKS}
        for name in options:
            if name not in known:
                raise UserError(
                    f"{name} is not an option of a model in one process; there are {', '.join(sorted(known))}"
                )
        adapters = () if adapter is None else (str(adapter),)
        arguments = ModelArguments(load=Path(source), adapter=adapters, **options)
        return cls(open_model(arguments), arguments)

    def __repr__(self) -> str:
        """What was loaded, in a line: a notebook shows it where a cell ends with a model."""
        adapter = "".join(f", adapter={str(path)!r}" for path in self.arguments.adapter)
        return f"LanguageModel({str(self.arguments.load)!r}{adapter})"

    @overload
    def generate(self, prompts: str, **options: Any) -> str: ...
    @overload
    def generate(self, prompts: Sequence[str], **options: Any) -> list[str]: ...
    def generate(self, prompts: str | Sequence[str], **options: Any) -> str | list[str]:
        """What the model writes after a prompt, or after each of several, without the prompt.

        Options: `num_tokens` at most (200), `add_special_tokens` in the prompt (False), and those of sampling:
        temperature (0.8; 0 takes the likeliest token), top_k, top_p, seed.
        """
        num_tokens, special = options.pop("num_tokens", 200), options.pop("add_special_tokens", False)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        tokens = [encode_prompt(self.opened.tokenizer, text, add_special_tokens=special) for text in texts]
        order = Continuation(tokens, num_tokens, self.opened.stops, sampling(options), self.opened.adapter(None))
        written = self._write(order)
        return written[0] if isinstance(prompts, str) else written

    def chat(self, messages: str | Sequence[Message], *, template: str | None = None, **options: Any) -> str:
        """The model's answer to a question, or to messages of roles and contents, by its chat template.

        Options are those of `generate`; an answer has at most 512 tokens.
        """
        num_tokens = options.pop("num_tokens", 512)
        seen = self.opened.seq_length
        prompts = ChatPrompts.of(self.opened.found, self.opened.tokenizer, template=template, seq_length=seen)
        asked: Sequence[Message] = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        try:
            checked = [checked_message(number, message) for number, message in enumerate(asked, 1)]
            prompt = prompts.fitted(checked, num_tokens=num_tokens)
        except ValueError as error:
            raise UserError(f"the messages cannot be answered: {error}") from error
        adapter = self.opened.adapter(None)
        order = Continuation([prompt.tokens], num_tokens, prompts.stops, sampling(options), adapter)
        return self._write(order)[0]

    def finetune(self, chats: str | Path | Iterable[Mapping[str, Any]], *, run_dir: str | Path, **flags: Any) -> Self:
        """The model trained further on chats: a file of JSON lines, or objects like {"messages": [...]}.

        Flags are those of `megatronish finetune` without dashes, such as adapter_type="lora" or tp=2; LEARNING has
        those that are not given. It is trained on all ranks of its layout, and continues where `run_dir` has a
        checkpoint. This model stays as it is. RunError where training fails, which its own message, printed, explains.
        """
        if self.arguments.adapter:
            raise UserError("a model with an adapter is not taught further; save() it, and load what was saved")
        run_dir = Path(run_dir)
        if not isinstance(chats, str | Path):
            chats = _written_chats(chats, run_dir)
        source = self.opened.found.checkpoint
        start = (
            ["--load-hf", str(source)] if self.opened.found.is_hf else ["--load", str(source), "--use-checkpoint-args"]
        )
        flags = {"run_dir": run_dir, "data_path": chats, **LEARNING, **flags}
        words = [*start, "--finetune", *words_of(flags)]
        config, notes = read_config(words)
        self.close()
        if config.layout.world_size == 1:
            train_rank(config, Place(), notes=notes)
        elif status := pretrain(config, notes):
            raise RunError(f"fine-tuning in {run_dir} has ended with status {status}; its message is above")
        learns_adapter = config.adapter.adapter_type is not None
        given = {field.name: getattr(self.arguments, field.name) for field in fields(ModelArguments)}
        kept = {name: value for name, value in given.items() if name not in ("load", "adapter", "ckpt_step", *OF_RANKS)}
        if learns_adapter:
            return type(self).load(self.arguments.load, adapter=run_dir, ckpt_step=self.arguments.ckpt_step, **kept)
        return type(self).load(run_dir, **kept)

    def save(self, folder: str | Path) -> Path:
        """Write a Hugging Face folder, an adapter merged into the weights; returns it. UserError if it exists."""
        folder, found = Path(folder), self.opened.found
        adapter = next(iter(found.adapters.values()), None)
        source = "hf" if found.is_hf else "megatronish"
        step = {} if found.is_hf or self.arguments.ckpt_step is None else {"step": self.arguments.ckpt_step}
        convert(found.checkpoint, folder, source=source, target="hf", reading=step, adapter=adapter)
        return folder

    def close(self) -> None:
        """Give the model's memory back; the next text loads it again."""
        if self._session is not None:
            self._session.close()
            self._session = None
            leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, order: Continuation) -> list[str]:
        """The texts of all prompts, each as it reads after its prompt."""
        if order.num_tokens < 0:
            raise UserError(f"num_tokens={order.num_tokens} must not be negative; use 0 or more")
        if self._session is None:
            self._session = self.opened.load(Place())
        following = [list[int]() for _ in order.prompts]
        for number, token in self._session.generate(order):
            if token is not None:
                following[number].append(token)
        # Decoded with their prompts: a word may begin with a space that a tokenizer drops at the start of a text.
        decode = self.opened.tokenizer.decode
        before = [decode(list(prompt)) for prompt in order.prompts]
        whole = [decode([*prompt, *tokens]) for prompt, tokens in zip(order.prompts, following, strict=True)]
        return [text[len(prompt) :] for prompt, text in zip(before, whole, strict=True)]


def sampling(options: Mapping[str, Any]) -> Sampling:
    """The choice of tokens that these options ask for; UserError for one that is not known or out of range."""
    names = [field.name for field in fields(SamplingArguments)]
    for name in options:
        if name not in names:
            raise UserError(f"{name} is not an option of a text; there are num_tokens, {', '.join(names)}")
    return sampling_of(SamplingArguments(**options))


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """A command line of keywords: lr=1e-4 is --lr 1e-4, bf16=False is --no-bf16, a list is several words."""
    words: list[str] = []
    for name, value in flags.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{dashed}" if value else f"--no-{dashed}")
        elif isinstance(value, list | tuple):
            words += [f"--{dashed}", *map(str, value)]
        elif value is not None:
            words += [f"--{dashed}", str(value)]
    return words


def _written_chats(chats: Iterable[Mapping[str, Any]], run_dir: Path) -> Path:
    """A file of these chats in the run's folder. A run that continues has the same ones: else it is refused there."""
    lines = [json.dumps(chat, ensure_ascii=False) for chat in chats]
    if not lines:
        raise UserError("there are no chats to learn from; give at least one, such as {'messages': [...]}")
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / CHATS
    text = "\n".join(lines) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return path
