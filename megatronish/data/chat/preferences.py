"""Preferences: pairs of a chosen and a rejected completion, and completions that are labelled as wanted or not.

Both become two completions of one sample. Of a labelled one, the second has its prompt and the completion of the next
record of the file, of the last record that of the first: KTO measures by it how far the model has moved. Which it is
follows from the file alone. A pair that is read as two labelled ones is compared with the halves of the next pair.
"""

from dataclasses import dataclass
from typing import Any, Literal

from megatronish.data.chat.conversation import Conversation, PlainText

PAIRED = ("pairs", "labelled")
"""Formats whose records are two completions."""

Completion = Conversation | PlainText
Prompted = tuple[Any, Any]
"""Prompt and completion: both texts, or both lists of messages."""


@dataclass(frozen=True)
class CompletionPair:
    """Two completions of one prompt; `label` says whether the first is wanted."""

    first: Completion
    second: Completion
    label: bool = True


@dataclass(frozen=True)
class LabelledCompletion:
    """A completion with its prompt, as the record has them."""

    prompt: Any
    completion: Any
    tools: Any
    label: bool


def chosen_and_rejected(record: dict[str, Any]) -> tuple[Prompted, Prompted]:
    """Prompts and completions of {"prompt", "chosen", "rejected"}; without a prompt their common beginning is one."""
    for name in ("chosen", "rejected"):
        if not record.get(name):
            raise ValueError(f"{name} is missing or empty; a pair is an object with prompt, chosen and rejected")
    prompt = record.get("prompt")
    chosen, rejected = (_listed(record[name]) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError("chosen and rejected must both be texts, or both be lists of messages")
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same")
    if isinstance(prompt, str) and isinstance(chosen, list):
        prompt = None if _asks(chosen) else [{"role": "user", "content": prompt}]
    if prompt is None:
        begin = _common(chosen, rejected)
        prompt, chosen, rejected = chosen[:begin], chosen[begin:], rejected[begin:]
        if not chosen or not rejected:
            raise ValueError("chosen is the beginning of rejected, or rejected that of chosen; give a prompt")
    return (prompt, chosen), (prompt, rejected)


def labelled(record: dict[str, Any]) -> tuple[LabelledCompletion, ...]:
    """Record {"prompt", "completion", "label"}; a pair is two, of which the chosen one is wanted."""
    if {"chosen", "rejected"} & record.keys():
        both = zip(chosen_and_rejected(record), (True, False), strict=True)
        return tuple(LabelledCompletion(*prompted, record.get("tools"), label) for prompted, label in both)
    label = record.get("label")
    if not isinstance(label, bool):
        raise ValueError(f"label={label!r} must be true or false; or name --chat-format prompt_completion")
    return (LabelledCompletion(record.get("prompt"), record.get("completion"), record.get("tools"), label),)


def kind_of(chat_format: str) -> Literal["text", "pairs", "labelled"]:
    """What an objective learns from data of a format."""
    return "pairs" if chat_format == "pairs" else "labelled" if chat_format == "labelled" else "text"


def _listed(completion: Any) -> Any:
    """A completion that is one message as a list of it."""
    return [completion] if isinstance(completion, dict) else completion


def _asks(messages: list[Any]) -> bool:
    """Whether the messages begin with the prompt."""
    return isinstance(messages[0], dict) and messages[0].get("role") in ("user", "system", "developer")


def _common(one: Any, other: Any) -> int:
    """Length of the common beginning; that of texts leaves a space to the completions, whose tokens begin with it."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return length - 1 if isinstance(one, str) and length and one[length - 1] == " " else length
