"""Preparation of chats: a file of conversations to masked tokens in a cache, made once for equal data and settings.

The name in the cache is a hash of all that determines the samples: the bytes of the file, the template, the tokenizer,
the options. So changed data are encoded again, and nothing old is ever read for them.

A new format of chat data is a function and a line in `FORMATS`. A function raises ValueError, a sentence that ends in
no full stop, for a line that is not of its format.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatronish.config.sections.data import ChatConfig
from megatronish.core.errors import UserError
from megatronish.core.files import one_builder
from megatronish.core.foreign import json_value
from megatronish.core.roles import SAME_ROLE
from megatronish.data.chat.conversation import (
    CompletionPair,
    Conversation,
    LabelledCompletion,
    Message,
    PlainText,
    chosen_and_rejected,
    conversation_of,
    labelled,
)
from megatronish.data.chat.encoder import ChatEncoder, EncodedChat
from megatronish.data.chat.masked import ChatCounts, MaskedTokens, MaskedWriter, counts_path
from megatronish.data.chat.setup import ChatSetup
from megatronish.data.chat.template import ChatTemplate
from megatronish.data.indexed import token_dtype
from megatronish.data.inputs import is_parquet
from megatronish.data.readers import read_batches

Record = dict[str, Any]
INPUTS, TARGETS = ("input", "inputs"), ("target", "targets", "output")


def _openai(record: Record) -> Conversation:
    """{"messages": [{"role", "content", "tool_calls"}], "tools": [...]}, as OpenAI's fine-tuning takes it."""
    return conversation_of(record.get("messages"), record.get("tools", record.get("functions")))


def _sharegpt(record: Record) -> Conversation:
    """{"conversations": [{"from", "value"}], "system", "tools"}."""
    turns = next((record[name] for name in ("conversations", "conversation", "messages") if name in record), None)
    if not isinstance(turns, list) or not turns:
        raise ValueError("conversations must be a list of turns that is not empty")
    messages = _system(record) + [_turn(number, turn) for number, turn in enumerate(turns, 1)]
    return conversation_of(messages, record.get("tools"), roles="conversations")


def _turn(number: int, turn: Any) -> Message:
    """Message of a turn: a call of a function is JSON in its value."""
    if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
        raise ValueError(f"turn {number} must be an object with `from` and `value`")
    kept = {name: turn[name] for name in ("train", "weight") if name in turn}
    # In ShareGPT's data a call has a role of its own, whose value is the call alone.
    if turn["from"] != "function_call":
        return {"role": SAME_ROLE.get(turn["from"], turn["from"]), "content": turn["value"], **kept}
    try:
        calls = json_value(turn["value"])
    except (ValueError, TypeError) as error:
        raise ValueError(f"turn {number} is a function_call whose value is no JSON ({error})") from None
    return {"role": "assistant", "content": None, "tool_calls": calls if isinstance(calls, list) else [calls], **kept}


def _alpaca(record: Record) -> Conversation:
    """{"instruction", "input", "output", "system", "history": [[user, assistant], ...]}."""
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise ValueError("history must be a list of pairs [question, answer]")
    # An empty input is the usual way to have none: it adds no line to the question.
    asked = [str(record[name]) for name in ("instruction", "input") if record.get(name)]
    messages = _system(record)
    for question, answer in [*history, ["\n".join(asked), record.get("output", record.get("response"))]]:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return conversation_of(messages, record.get("tools"), roles="the record")


def _system(record: Record) -> list[Message]:
    system = record.get("system")
    return [{"role": "system", "content": system}] if system else []


def _prompt_completion(record: Record) -> Conversation | PlainText:
    """{"prompt", "completion"}: both texts, or both lists of messages, of which those of the completion count."""
    return prompted(record.get("prompt"), record.get("completion"), record.get("tools"))


def prompted(prompt: Any, completion: Any, tools: Any = None) -> Conversation | PlainText:
    """A prompt and a completion, of which the latter counts. ValueError, a sentence, if they are not of one kind."""
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise ValueError("completion is empty")
        return PlainText(prompt, completion)
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise ValueError("prompt and completion must both be texts, or both be lists of messages")
    conversation = conversation_of([*prompt, *completion], tools, roles="prompt and completion")
    # Answers in the prompt are examples that the user gives, not what is to be learned.
    asked = {number for number in conversation.answers if number < len(prompt)}
    return replace(
        conversation, counts=tuple(counts and number not in asked for number, counts in enumerate(conversation.counts))
    )


def _pairs(record: Record) -> CompletionPair:
    """{"prompt", "chosen", "rejected"}: texts, or lists of messages; without a prompt their common beginning is one."""
    first, second = (
        prompted(prompt, completion, record.get("tools")) for prompt, completion in chosen_and_rejected(record)
    )
    return CompletionPair(first, second)


def _input_target(record: Record) -> PlainText:
    """{"input", "target"}, also "inputs" and "targets" or "output": texts, of which the latter counts."""
    texts = [next((record[name] for name in names if name in record), None) for names in (INPUTS, TARGETS)]
    for name, text in zip(("input", "target"), texts, strict=True):
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must be a text that is not empty")
    return PlainText(*texts)  # type: ignore[arg-type]


def _text(record: Record) -> PlainText:
    """{"text"}: every token is trained."""
    text = record.get("text")
    if not isinstance(text, str) or not text:
        raise ValueError("text must be a text that is not empty")
    return PlainText("", text)


ChatRecord = Conversation | PlainText | CompletionPair | tuple[LabelledCompletion, ...]

FORMATS: dict[str, Callable[[Record], ChatRecord]] = {
    "openai": _openai,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "input_target": _input_target,
    "text": _text,
    "pairs": _pairs,
    "labelled": labelled,
}
"""Functions by the names of --chat-format."""


def format_of(record: Record) -> str:
    """Name of the format of a record, by its keys. ValueError if it has the keys of none."""
    # The order matters: a pair may have messages or a prompt, too, and a labelled completion has a prompt.
    if {"chosen", "rejected"} & record.keys():
        return "pairs"
    turns = record.get("messages", record.get("conversations", record.get("conversation")))
    if turns is not None:
        first = turns[0] if isinstance(turns, list) and turns else {}
        has_roles = "messages" in record and not (isinstance(first, dict) and "from" in first)
        return "openai" if has_roles else "sharegpt"
    if "instruction" in record:
        return "alpaca"
    if {"prompt", "completion", "label"} <= record.keys():
        return "labelled"
    if {"prompt", "completion"} <= record.keys():
        return "prompt_completion"
    if not record.keys().isdisjoint(INPUTS) and not record.keys().isdisjoint(TARGETS):
        return "input_target"
    if "text" in record:
        return "text"
    keys = ", ".join(sorted(map(str, record))[:6]) or "none"
    raise ValueError(
        f"its keys ({keys}) are of no known format; write messages, conversations, instruction and output, prompt and "
        "completion, input and target, text, or chosen and rejected"
    )


def read_record(line: bytes, *, format_name: str) -> tuple[str, ChatRecord]:
    """The format and the content of a line of JSON; `auto` recognises the format. ValueError for what is wrong."""
    # Editors of Windows begin a file with a byte order mark, which JSON does not allow.
    record = json_value(line.decode("utf-8-sig"))
    if not isinstance(record, dict):
        raise ValueError(f"a line must be a JSON object, not {type(record).__name__}")
    chat_format = format_of(record) if format_name == "auto" else format_name
    return chat_format, _with_variables(FORMATS[chat_format](record), record.get("chat_template_kwargs"))


def _with_variables(content: ChatRecord, variables: Any) -> ChatRecord:
    """A conversation, or a pair of them, with the template's variables of its line."""
    if variables is None:
        return content
    if not isinstance(variables, dict):
        raise ValueError("chat_template_kwargs must be an object")
    if isinstance(content, CompletionPair):
        first, second = (
            replace(half, variables=variables) if isinstance(half, Conversation) else half
            for half in (content.first, content.second)
        )
        return replace(content, first=first, second=second)
    return replace(content, variables=variables) if isinstance(content, Conversation) else content


logger = logging.getLogger(__name__)

FORMAT = "megatronish chats 4"
MOST_BAD = 0.5
"""With a larger part of bad lines, the format or the template is wrong."""


class NothingToTrainError(UserError):
    """UserError: a file of chats has no trained token."""


Labelled = tuple[LabelledCompletion, ...]
"""Labelled completions of a line: one, or the two of a pair."""


@dataclass(frozen=True)
class ChatLine:
    """A line with its place in its file: a record, or what is wrong with it."""

    where: str
    record: Conversation | PlainText | CompletionPair | ValueError


def prepared(path: Path, setup: ChatSetup, *, cache: Path | None) -> MaskedTokens:
    """Masked tokens of a file, from the cache or made now; other processes that want the same wait.

    UserError with file and line if more than half of its lines are bad, or if it has nothing to train on.
    """
    if not path.is_file():
        raise UserError(f"--data-path {path} does not exist; name a file of chats, as JSON lines")
    if is_parquet(path):
        raise UserError(f"--data-path {path} is Parquet; write its rows as JSON lines (pandas: to_json(lines=True))")
    # The name of the file is there for people who look into the cache; the hash alone decides.
    folder = cache or path.parent / "cache"
    prefix = folder / f"{path.name}-{_key(path, setup)[:32]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # All ranks of a machine come here at once: one encodes, and the others find its result.
        with one_builder(prefix):
            if not counts_path(prefix).is_file():
                _build(path, setup, prefix)
    except OSError as error:
        raise UserError(
            f"the tokens of {path} cannot be kept in {folder}: {error.strerror}; name another folder with "
            "--data-cache-path"
        ) from error
    return MaskedTokens(prefix)


def _key(path: Path, setup: ChatSetup) -> str:
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(repr((FORMAT, content, setup.identity)).encode()).hexdigest()


def _build(path: Path, setup: ChatSetup, prefix: Path) -> None:
    counts = ChatCounts()
    # The smallest type that holds the vocabulary: what is mapped by all ranks is half as large with uint16.
    dtype = token_dtype(max(setup.vocab_size, 1))
    with MaskedWriter(prefix, dtype=dtype) as writer:
        encode_file(path, setup, counts, writer)
        check(path, counts)
        writer.finish(counts.as_json())


def encode_file(path: Path, setup: ChatSetup, counts: ChatCounts, writer: MaskedWriter) -> None:
    """Write all samples of a file, and count what becomes of its lines."""
    encoders = _Encoders(setup)
    names = {number: name for name, number in setup.controls.names.items()}
    bos = setup.controls.names.get(setup.bos)
    for line in read_lines(path, setup.config, counts):
        try:
            samples = encoders.samples_of(line.record)
        except ValueError as error:
            # A mistake of the user (a template that does not fit) is that of every line, so it is told at once.
            if isinstance(error, UserError):
                raise
            counts.add_bad(line.where, error)
            continue
        counts.split += len(samples) > 1
        for texts in samples:
            # A template that writes the first token, and a tokenizer that adds it again: a model learns that silently.
            if any(bos is not None and text.tokens[:2].tolist() == [bos, bos] for text in texts):
                counts.double_bos += 1
                counts.told.append(f"{line.where}: the sample begins with two {setup.bos}")
            # The first token has nothing before it, so its mask trains nothing.
            if not all(text.mask[1:].any() for text in texts):
                counts.untrained += 1
                continue
            for text in texts:
                writer.add(text.tokens, text.mask)
            counts.samples += 1
            counts.tokens += sum(len(text.tokens) for text in texts)
            counts.trained += sum(int(np.count_nonzero(text.mask[1:])) for text in texts)
            counts.longest = max(counts.longest, sum(len(text.tokens) for text in texts))
            counts.add_ends(sorted({names[token] for text in texts for token in text.ends}))
    if (template := encoders.template) is not None:
        counts.template = template.name
        counts.date = setup.config.chat_date if template.reads_date else ""


class _Encoders:
    """The encoder of a file's records, with a template from the first conversation on."""

    def __init__(self, setup: ChatSetup) -> None:
        self._setup = setup
        self._encoder: ChatEncoder | None = None

    @property
    def template(self) -> ChatTemplate | None:
        """The template that conversations were written with."""
        return None if self._encoder is None else self._encoder.template

    def samples_of(self, record: Conversation | PlainText | CompletionPair | ValueError) -> list[list[EncodedChat]]:
        """Samples of a record: each is one text, or the two of a pair. ValueError for what cannot be encoded."""
        if isinstance(record, ValueError):
            raise record
        if not isinstance(record, CompletionPair):
            return [[text] for text in self._texts_of(record)]
        # Two texts come of a half where the template writes an earlier answer differently than the last one.
        texts = [text for half in (record.first, record.second) for text in self._texts_of(half)]
        if len(texts) != 2:
            raise ValueError("the template writes its answers differently when others follow; end it at one answer")
        texts[0].mask[0] = record.label  # of the first token, which nothing predicts (dataset.py reads it)
        return [texts]

    def _texts_of(self, record: Conversation | PlainText) -> list[EncodedChat]:
        is_chat = isinstance(record, Conversation)
        # Plain texts need no template, so that a model without one can learn from them.
        if self._encoder is None or (self._encoder.template is None and is_chat):
            self._encoder = self._setup.encoder(for_chats=is_chat)
        return self._encoder.encode(record)


def read_lines(path: Path, config: ChatConfig, counts: ChatCounts) -> Iterator[ChatLine]:
    """Records of a file. The first good line decides which format `auto` is; another one is a bad line.

    A labelled completion becomes a pair with the completion of the next record, the last one's with that of the first.
    """
    first: Labelled = ()
    waiting: tuple[str, Labelled] | None = None
    for where, record in _records(path, config, counts):
        if not isinstance(record, tuple):
            yield ChatLine(where, record)
            continue
        # The last record is paired with the first, so that every prompt has a mismatch and none is used twice.
        first = first or record
        if waiting is not None:
            yield from _with_mismatches(*waiting, record)
        waiting = where, record
    if waiting is not None:
        yield from _with_mismatches(*waiting, first)


def _with_mismatches(where: str, records: Labelled, others: Labelled) -> Iterator[ChatLine]:
    """Pairs of the labelled completions of a line and of those of another line, with the same prompts."""
    for number, record in enumerate(records):
        yield _with_mismatch(where, record, others[min(number, len(others) - 1)])


def _with_mismatch(where: str, record: LabelledCompletion, other: LabelledCompletion) -> ChatLine:
    """Pair of a labelled completion and of another record's completion with the same prompt."""
    if other is record:
        return ChatLine(where, ValueError("it is the only record of its file, and each is compared with another one"))
    try:
        first, second = (prompted(record.prompt, each.completion, record.tools) for each in (record, other))
    except ValueError as error:
        return ChatLine(where, error)
    return ChatLine(where, CompletionPair(first, second, record.label))


def _records(path: Path, config: ChatConfig, counts: ChatCounts) -> Iterator[tuple[str, ChatRecord | ValueError]]:
    """Each line with its place."""
    for batch in read_batches(path, ()):
        for number, text in enumerate(batch.lines, batch.first_line):
            # Empty lines at the end of a file are no records, so they count in no part of bad lines.
            if not text.strip():
                continue
            counts.records += 1
            try:
                chat_format, record = read_record(text, format_name=config.chat_format)
                counts.chat_format = counts.chat_format or chat_format
                if chat_format != counts.chat_format:
                    raise ValueError(
                        f"it is of the format {chat_format}, and the lines before it of {counts.chat_format}"
                    )
            # JSON that is nested ten thousand levels deep ends the parser by its recursion, not by its grammar.
            except (ValueError, RecursionError) as error:
                yield f"{path}:{number}", ValueError(_sentence(error))
                continue
            yield f"{path}:{number}", record


def _sentence(error: Exception) -> str:
    is_json = type(error) is not ValueError
    return f"the line is no JSON that can be read ({error})" if is_json else str(error)


def check(path: Path, counts: ChatCounts) -> None:
    """UserError for a file of which nothing, or less than half, can be trained on."""
    if counts.records == 0:
        raise NothingToTrainError(f"--data-path {path} is empty; write a chat as a JSON object on each line")
    if counts.num_bad > MOST_BAD * counts.records:
        raise UserError(
            f"{counts.num_bad:,} of {counts.records:,} lines of {path} cannot be trained on, more than half; the "
            f"first: {counts.told[0]}"
        )
    if counts.double_bos:
        told = next(each for each in counts.told if "begins with two" in each)
        raise UserError(
            f"{counts.double_bos:,} samples begin with two tokens that begin a text; {told}: the chat template writes "
            "it twice; correct it, or name another with --chat-template"
        )
    if counts.samples == 0:
        raise NothingToTrainError(
            f"{path} has no trained token in its {counts.records:,} lines; look at `train` and `weight` of its "
            "messages, or use --train-on all"
        )
