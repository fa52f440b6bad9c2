"""Conversations: what a line of chat data is, whatever its format; and the checks that all formats share."""

from dataclasses import dataclass
from typing import Any

from megatronish.core.foreign import json_value

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
SAME_ROLE = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}
SAME_ROLE |= {"observation": "tool", "function_response": "tool", "ipython": "tool", "chatgpt": "assistant"}


@dataclass(frozen=True)
class Conversation:
    """Messages as templates take them; `counts[i]` is False where message i must not be trained on."""

    messages: tuple[Message, ...]
    counts: tuple[bool, ...]
    tools: tuple[Any, ...] = ()

    @property
    def answers(self) -> list[int]:
        """Numbers of the messages that the assistant wrote."""
        return [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]

    def until(self, answer: int) -> "Conversation":
        """The conversation up to this answer, which alone counts."""
        counts = tuple(number == answer for number in range(answer + 1))
        return Conversation(self.messages[: answer + 1], counts, self.tools)


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
    found = Conversation(tuple(checked), tuple(counts), tuple(_tools(tools)))
    if not found.answers:
        raise ValueError("no message is the assistant's, so there is nothing to learn")
    return found


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
    return {"role": role, "content": content, **kept}


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
    """Tool call {type, function: {name, arguments}}. Arguments are a JSON text in the data, an object in templates."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"message {number} has a tool call without the name of a function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json_value(arguments or "{}")
        except ValueError as error:
            raise ValueError(f"message {number} has a tool call whose arguments are no JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"message {number} has a tool call whose arguments are no object")
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
