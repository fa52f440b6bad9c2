"""Check that a chat template writes what a conversation has: some leave tools, their calls or the system out silently.

A template without a place for calls writes "None" or nothing for an answer that is a call, and a model would learn it.
Every format of calls has the names of functions as they are, and every template that has a place for the system writes
what it says as it is.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatronish.data.chat.conversation import Conversation, Message
from megatronish.data.chat.template import ChatTemplate


def refuse_left_out(template: ChatTemplate, chat: Conversation, text: str) -> None:
    """ValueError, a sentence, if the text of a shielded conversation lacks a part of it."""
    for name in _names(chat.tools):
        if name not in text:
            raise _left_out(f"the tool {name}", template)
    for number, message in enumerate(chat.messages, 1):
        if message["role"] == "system" and (message["content"] or "").strip() not in text:
            raise _left_out(f"message {number}, of the system,", template)
    if not any("tool_calls" in message for message in chat.messages):
        return
    # The text has the name of a function where the tools are, too: so each call is given a name of its own.
    marked = template.render([_marked(number, each) for number, each in enumerate(chat.messages, 1)], chat.tools)
    marks = frozenset(re.findall(_mark(r"\d+", r"\d+"), marked))
    for number, message in enumerate(chat.messages, 1):
        for place, name in enumerate(_names(message.get("tool_calls", ()))):
            if _mark(number, place) not in marks:
                raise _left_out(f"the call of {name} in message {number}", template)


def _mark(number: int | str, place: int | str) -> str:
    return f"_mark_{number}_{place}_"


def _marked(number: int, message: Message) -> Message:
    """A message whose calls have marks behind the names of their functions."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "name": f"{call['function']['name']}{_mark(number, place)}"}}
        for place, call in enumerate(message["tool_calls"])
    ]
    return {**message, "tool_calls": calls}


def _names(functions: Iterable[Any]) -> Iterable[str]:
    """Names of tools, or of calls, as OpenAI writes both."""
    for each in functions:
        function = each.get("function", each)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            yield name


def _left_out(what: str, template: ChatTemplate) -> ValueError:
    return ValueError(f"the chat template {template.name} leaves {what} out; name another with --chat-template")
