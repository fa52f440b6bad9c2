"""Formats of chat data: the functions that make conversations of a line, and how a format is recognised.

A new format is a function and a line in `FORMATS`. A function raises ValueError, a sentence that ends in no full stop,
for a line that is not of its format.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatronish.core.foreign import json_value
from megatronish.data.chat.conversation import SAME_ROLE, Conversation, Message, PlainText, conversation_of
from megatronish.data.chat.preferences import CompletionPair, LabelledCompletion, chosen_and_rejected, labelled

Record = dict[str, Any]


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
    found = conversation_of([*prompt, *completion], tools, roles="prompt and completion")
    asked = {number for number in found.answers if number < len(prompt)}
    return replace(found, counts=tuple(counts and number not in asked for number, counts in enumerate(found.counts)))


def _pairs(record: Record) -> CompletionPair:
    """{"prompt", "chosen", "rejected"}: texts, or lists of messages; without a prompt their common beginning is one."""
    first, second = (
        prompted(prompt, completion, record.get("tools")) for prompt, completion in chosen_and_rejected(record)
    )
    return CompletionPair(first, second)


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
    "text": _text,
    "pairs": _pairs,
    "labelled": labelled,
}
"""Functions by the names of --chat-format."""


def format_of(record: Record) -> str:
    """Name of the format of a record, by its keys. ValueError if it has the keys of none."""
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
    if "text" in record:
        return "text"
    keys = ", ".join(sorted(map(str, record))[:6]) or "none"
    raise ValueError(
        f"its keys ({keys}) are of no known format; write messages, conversations, instruction and output, prompt and "
        "completion, text, or chosen and rejected"
    )


def read_record(line: bytes, *, format_name: str) -> tuple[str, ChatRecord]:
    """The format and the content of a line of JSON; `auto` recognises the format. ValueError for what is wrong."""
    record = json_value(line.decode("utf-8-sig"))
    if not isinstance(record, dict):
        raise ValueError(f"a line must be a JSON object, not {type(record).__name__}")
    found = format_of(record) if format_name == "auto" else format_name
    return found, FORMATS[found](record)
