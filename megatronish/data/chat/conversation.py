"""Conversations: what a line of chat data is, whatever its format; and the checks that all formats share.

Preferences are pairs of a chosen and a rejected completion, and completions that are labelled as wanted or not.
Both become two completions of one sample. Of a labelled one, the second has its prompt and the completion of the next
record of the file, of the last record that of the first: KTO measures by it how far the model has moved. Which it is
follows from the file alone. A pair that is read as two labelled ones is compared with the halves of the next pair.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatronish.core.foreign import json_value
from megatronish.core.roles import ROLES, SAME_ROLE, THOUGHTS

Message = dict[str, Any]


class WrittenArguments(dict[str, Any]):
    """Arguments of a call that are a JSON text in the data, which templates that take one write as it is."""

    def __init__(self, arguments: Mapping[str, Any], text: str) -> None:
        super().__init__(arguments)
        self.text = text


@dataclass(frozen=True)
class Conversation:
    """Messages as templates take them; `counts[i]` is False where message i must not be trained on.

    `variables` are the template's for this conversation.
    """

    messages: tuple[Message, ...]
    counts: tuple[bool, ...]
    tools: tuple[Any, ...] = ()
    variables: dict[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> list[int]:
        """Numbers of the messages that the assistant wrote."""
        return [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]

    def until(self, answer: int) -> "Conversation":
        """The conversation up to this answer, which alone counts."""
        counts = tuple(number == answer for number in range(answer + 1))
        return replace(self, messages=self.messages[: answer + 1], counts=counts)


@dataclass(frozen=True)
class PlainText:
    """Text without roles: nothing of the prompt is trained, all of the completion is."""

    prompt: str
    completion: str


def conversation_of(messages: Any, tools: Any = None, *, roles: str = "messages") -> Conversation:
    """Conversation of messages with `role` and `content`; ValueError, a sentence, for what is not one."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{roles} must be a list of messages that is not empty")
    checked = [checked_message(number, message) for number, message in enumerate(messages, 1)]
    counts = [_counts(number, message) for number, message in enumerate(messages, 1)]
    conversation = Conversation(tuple(checked), tuple(counts), tuple(_tools(tools)))
    if not conversation.answers:
        raise ValueError("no message is the assistant's, so there is nothing to learn")
    return conversation


def checked_message(number: int, message: Any) -> Message:
    """Message with a known role, text as its content and tool calls whose arguments are objects."""
    if not isinstance(message, dict):
        raise ValueError(f"message {number} must be an object, not {type(message).__name__}")
    role = SAME_ROLE.get(str(message.get("role")), message.get("role"))
    if role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}; roles are {', '.join(ROLES)}")
    kept = {name: value for name, value in message.items() if name not in ("train", "weight", "role", "content")}
    content = _text(number, message.get("content"))
    calls = message.get("tool_calls") or []
    if not calls:
        kept.pop("tool_calls", None)
    if role in ("user", "assistant") and not (content or "").strip() and not (calls and role == "assistant"):
        raise ValueError(f"message {number} of the {role} is empty")
    if content is None and role != "assistant":
        raise ValueError(f"message {number} of the role {role} has no content")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise ValueError(f"message {number} has tool_calls, which must be a list of an assistant's message")
        kept["tool_calls"] = [_call(number, call) for call in calls]
    return {"role": role, "content": content, **kept, **_thoughts(number, message)}


def _thoughts(number: int, message: Any) -> dict[str, str]:
    """Thoughts of an answer under the two names that templates read; nothing for a message without them."""
    thoughts = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    if thoughts is None:
        return {}
    if not isinstance(thoughts, str):
        raise ValueError(f"message {number} has thoughts that are {type(thoughts).__name__} and no text")
    return {"thinking": thoughts, "reasoning_content": thoughts}


def _text(number: int, content: Any) -> str | None:
    """Content as one text, also where it is a list of parts; None for none."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part if isinstance(part, str) else _part(number, part) for part in content]
        return "".join(parts)
    raise ValueError(f"message {number} has a content that is {type(content).__name__} and no text")


def _part(number: int, part: Any) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"message {number} has a part of type {kind!r}; only text can be trained on")


def _call(number: int, call: Any) -> dict[str, Any]:
    """Tool call {type, function: {name, arguments}}. Arguments that are a JSON text in the data keep it."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"message {number} has a tool call without the name of a function")
    arguments = function.get("arguments", {})
    if isinstance(text := arguments, str):
        try:
            arguments = json_value(text or "{}")
        except ValueError as error:
            raise ValueError(f"message {number} has a tool call whose arguments are no JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"message {number} has a tool call whose arguments are no object")
    if isinstance(text, str):
        arguments = WrittenArguments(arguments, text or "{}")
    kept = {name: value for name, value in call.items() if name in ("id", "type") and value is not None}
    return {"type": "function", **kept, "function": {**function, "arguments": arguments}}


def _counts(number: int, message: Message) -> bool:
    """Whether a message may be trained on, by its `train` (true, false) or its `weight` (1, 0)."""
    train, weight = message.get("train", True), message.get("weight", 1)
    if train is None or weight is None:
        return True
    if not isinstance(train, bool):
        raise ValueError(f"message {number} has train={train!r}, which must be true or false")
    if weight not in (0, 1):
        raise ValueError(f"message {number} has weight={weight!r}, which must be 0 or 1")
    return train and bool(weight)


def _tools(tools: Any) -> list[Any]:
    if isinstance(tools, str):
        try:
            tools = json_value(tools) if tools.strip() else None
        except ValueError as error:
            raise ValueError(f"tools are no JSON ({error})") from None
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools must be a list of objects")
    return tools


PAIRED = ("pairs", "labelled")
"""Formats whose records are two completions."""

Completion = Conversation | PlainText
Prompted = tuple[Any, Any]
"""Prompt and completion: both texts, or both lists of messages."""


PROMPTS = ("messages", "conversations", "conversation")
"""Other names of what the completions of a pair answer."""


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
    """Prompts and completions of {"prompt", "chosen", "rejected"}; without a prompt their common beginning is one.

    Messages under another name are the prompt of completions that begin with an answer.
    """
    for name in ("chosen", "rejected"):
        if not record.get(name):
            raise ValueError(f"{name} is missing or empty; a pair is an object with prompt, chosen and rejected")
    prompt = record.get("prompt")
    chosen, rejected = (_listed(record[name]) for name in ("chosen", "rejected"))
    # Axolotl's files have the prompt as messages, and each answer as one message.
    if prompt is None and isinstance(chosen, list) and not _asks(chosen):
        prompt = next((record[name] for name in PROMPTS if record.get(name) is not None), None)
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
