"""Encoder of chats: a conversation to tokens, and which of them are trained."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronish.config.sections.data import TrainOn
from megatronish.data.chat.answers import Rendered, TextSpan, UnclearError, render_answers
from megatronish.data.chat.conversation import Conversation, Message, PlainText, conversation_of
from megatronish.data.chat.template import NO_VARIABLES, ChatTemplate, Rendering
from megatronish.tokenizer.control_tokens import ControlEncoder, PlacedTokens

# Check that a chat template writes what a conversation has: some leave tools, their calls or the system out silently.
#
# A template without a place for calls writes "None" or nothing for an answer that is a call, and a model would learn
# it; others (Hermes, Llama 3.1) write the call and not the text next to it. Every format of calls has the names of
# functions as they are, and every template that has a place for the system writes what it says as it is.


def refuse_left_out(template: ChatTemplate, chat: Conversation, text: str) -> None:
    """ValueError, a sentence, if the text of a shielded conversation lacks a part of it."""
    for name in _names(chat.tools):
        if name not in text:
            raise _left_out(f"the tool {name}", template)
    for number, message in enumerate(chat.messages, 1):
        role = message["role"]
        if role in ("system", "developer") and (message["content"] or "").strip() not in text:
            raise _left_out(f"message {number}, of the {role},", template)
    if not any("tool_calls" in message for message in chat.messages):
        return
    # The text has the name of a function where the tools are, too: so each call is given a name of its own. Where a
    # template writes the numbers of calls in the place of their names, and these begin with them (Kimi K2), so is that.
    marks = frozenset[str]()
    for where in (_in_name, _in_number):
        messages = [_marked(number, each, where) for number, each in enumerate(chat.messages, 1)]
        marked = template.render_one(Rendering(messages, False, chat.variables), chat.tools)
        marks |= frozenset(re.findall(_mark(r"\d+", rf"(?:\d+|{_TEXT})"), marked))
        missing = [part for part in _parts_of_calls(chat) if part.mark not in marks]
        if not missing:
            return
    for part in missing:
        # Some leave such a text out where messages follow, as they do thoughts (gpt-oss): as the answer it is there.
        messages = [_marked(number, each, _in_name) for number, each in enumerate(chat.messages[: part.number], 1)]
        rendering = Rendering(messages, False, chat.variables)
        if not part.is_text or part.mark not in template.render_one(rendering, chat.tools):
            raise _left_out(part.what, template)


_TEXT = "text"


class _PartOfCall(NamedTuple):
    """A call of message `number`, or the text next to it: the mark that it is given, and what it is."""

    number: int
    mark: str
    what: str
    is_text: bool = False


def _parts_of_calls(chat: Conversation) -> Iterator[_PartOfCall]:
    """Calls, and the texts of their messages."""
    for number, message in enumerate(chat.messages, 1):
        if "tool_calls" not in message:
            continue
        for place, name in enumerate(_names(message["tool_calls"])):
            yield _PartOfCall(number, _mark(number, place), f"the call of {name} in message {number}")
        if _has_text(message):
            what = f"the text next to the call in message {number}"
            yield _PartOfCall(number, _mark(number, _TEXT), what, is_text=True)


def _has_text(message: Message) -> bool:
    return bool((message["content"] or "").strip())


def _mark(number: int | str, place: int | str) -> str:
    return f"_mark_{number}_{place}_"


def _marked(number: int, message: Message, where: Callable[[Any, str], Any]) -> Message:
    """A message whose calls have marks, behind the names of their functions or elsewhere, and so has its text."""
    if "tool_calls" not in message:
        return message
    text = {"content": message["content"].rstrip() + _mark(number, _TEXT)} if _has_text(message) else {}
    return {
        **message,
        **text,
        "tool_calls": [where(call, _mark(number, place)) for place, call in enumerate(message["tool_calls"])],
    }


def _in_name(call: Any, mark: str) -> Any:
    return {**call, "function": {**call["function"], "name": call["function"]["name"] + mark}}


def _in_number(call: Any, mark: str) -> Any:
    number = call.get("id")
    tells = isinstance(number, str) and call["function"]["name"] in number
    return {**call, "id": f"{number}{mark}"} if tells else call


def _names(functions: Iterable[Any]) -> Iterable[str]:
    """Names of tools, or of calls, as OpenAI writes both."""
    for each in functions:
        function = each.get("function", each)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            yield name


def _left_out(what: str, template: ChatTemplate) -> ValueError:
    return ValueError(f"the chat template {template.name} leaves {what} out; name another with --chat-template")


def _shielded(chat: Conversation, template: ChatTemplate) -> Conversation:
    """The conversation with no control token spelled in it."""
    messages, tools, variables = (template.shield(each) for each in (chat.messages, chat.tools, chat.variables))
    return Conversation(tuple(messages), chat.counts, tuple(tools), variables)


_A_TOOL = {"type": "function", "function": {"name": "a", "description": "a", "parameters": {"type": "object"}}}
_A_CALL = {"id": "a" * 9, "type": "function", "function": {"name": "a", "arguments": {}}}
"""A tool and its call, whose number is as long as Mistral's and has the name in it, as Kimi's."""


class EncodedChat(NamedTuple):
    """Tokens of a sample, whether each is trained, and the tokens that end its trained answers."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    ends: tuple[int, ...] = ()


class ChatEncoder:
    """Conversations and plain texts to tokens with a mask.

    `template` is None where no data need one, `with_tools` another one for conversations with tools, where a model has
    it. `beginning` are the tokens that the tokenizer puts before a plain text.
    """

    def __init__(
        self,
        controls: ControlEncoder,
        template: ChatTemplate | None,
        *,
        train_on: TrainOn = "assistant",
        beginning: Sequence[int] = (),
        with_tools: ChatTemplate | None = None,
    ) -> None:
        self.controls, self.template, self.train_on = controls, template, train_on
        self._with_tools = with_tools
        self._beginning = list(beginning)
        self._eos = controls.names[controls.eos]

    def encode(self, record: Conversation | PlainText) -> list[EncodedChat]:
        """The sample of a record; several where only one for each trained answer shows the model what it will see.

        ValueError, a sentence, for what cannot be encoded.
        """
        if isinstance(record, PlainText):
            return [self._plain(record)]
        template = self._template_for(record.tools)
        chat = _shielded(record, template)
        answers = self._trained(chat)
        try:
            return [self._encoded(template, chat, answers)]
        except UnclearError:
            if self.train_on == "all" or answers == [len(chat.messages) - 1]:
                raise
        return [self._encoded(template, chat.until(answer), [answer]) for answer in answers]

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), *, variables: Mapping[str, Any] = NO_VARIABLES
    ) -> list[int]:
        """Tokens of a conversation, up to where the model begins its answer; ValueError, a sentence, for no text.

        `variables` are more of the template's than it has anyway.
        """
        template = self._template_for(tools)
        shield = template.shield
        asked = Rendering(shield(list(messages)), True, shield(dict(variables)))
        shielded = template.render_one(asked, shield(list(tools)))
        places = template.control_places(shielded)
        return self._placed(template.unshield(shielded), places).ids

    def ends_of_answers(self) -> tuple[int, ...]:
        """Tokens with which the template ends an answer, or a call of a tool; none if it does not tell."""
        ends = list[int]()
        for answer, tools in (({"content": "b"}, ()), ({"content": "", "tool_calls": [_A_CALL]}, [_A_TOOL])):
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", **answer}]
            with suppress(ValueError):
                ends += self.encode(conversation_of(messages, list(tools)))[0].ends
        return tuple(dict.fromkeys(ends))

    def _template_for(self, tools: Sequence[Any]) -> ChatTemplate:
        template = self._with_tools if tools and self._with_tools is not None else self.template
        assert template is not None, "conversations need a template"
        return template

    def _placed(self, text: str, places: Sequence[tuple[int, int]]) -> PlacedTokens:
        """Tokens of a text. ValueError for half a surrogate pair: JSON can spell one, and the libraries fail on it."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{text[error.start]!r} is half of a character, which has no tokens") from None
        return self.controls.encode(text, places)

    def _trained(self, chat: Conversation) -> list[int]:
        """Numbers of the answers to train on; with train_on=all, of those to leave out."""
        if self.train_on == "all":
            if any(not counts for number, counts in enumerate(chat.counts) if number not in chat.answers):
                raise ValueError("with --train-on all only an answer may have train=false or weight=0")
            return [number for number in chat.answers if not chat.counts[number]]
        answers = [number for number in chat.answers if chat.counts[number]]
        return [number for number in answers if self.train_on == "assistant" or number == chat.answers[-1]]

    def _encoded(self, template: ChatTemplate, chat: Conversation, answers: Sequence[int]) -> EncodedChat:
        rendered = render_answers(template, chat, answers)
        refuse_left_out(template, chat, rendered.text)
        text = template.unshield(rendered.text)
        placed = self._placed(text, rendered.controls)
        begins, ends = np.array(placed.begins, np.int64), np.array(placed.ends, np.int64)
        mask = _inside(begins, ends, rendered.answers)
        closing = tuple(sorted(set(self._closing(rendered, text))))
        if self.train_on == "all":
            mask, closing = ~mask, ()
        return EncodedChat(np.array(placed.ids, np.int32), mask, closing)

    def _closing(self, rendered: Rendered, text: str) -> Iterable[int]:
        """Ids of the control tokens that end the answers."""
        at_end = {end: text[begin:end] for begin, end in rendered.controls}
        return (self.controls.names[at_end[answer.end]] for answer in rendered.answers)

    def _plain(self, record: PlainText) -> EncodedChat:
        """Plain text with an end: special tokens that it spells are text. A token across the border is the prompt's."""
        placed = self._placed(record.prompt + record.completion, ())
        border = 0 if self.train_on == "all" else len(record.prompt)
        tokens = [*self._beginning, *placed.ids, self._eos]
        mask = [*(border == 0 for _ in self._beginning), *(begin >= border for begin in placed.begins), True]
        return EncodedChat(np.array(tokens, np.int32), np.array(mask, np.bool_), (self._eos,))


def _inside(begins: NDArray[np.int64], ends: NDArray[np.int64], places: Sequence[TextSpan]) -> NDArray[np.bool_]:
    """bool [tokens]: whether a token lies in one of the places, all of it. Places rise."""
    if not places:
        return np.zeros(len(begins), np.bool_)
    firsts, lasts = np.array(places, np.int64).T
    nearest = np.searchsorted(firsts, begins, side="right") - 1
    return (nearest >= 0) & (ends <= lasts[nearest])


# Pairs of texts, for a model with an encoder and a decoder: what is read, and after it what is written.
#
# A sample is [input, end, target, end], of which the target and its end are trained: the border between them is that of
# the mask. A conversation gives one sample for each of its answers that counts. What is asked before an answer is one
# text: by the chat template, where there is one, else the content of the one message of the user, after that of the
# system.


class SideEncoder(ChatEncoder):
    """Conversations and pairs of texts to tokens of two sides; `end` ends each."""

    def __init__(self, controls: ControlEncoder, template: ChatTemplate | None, *, train_on: TrainOn, end: int) -> None:
        super().__init__(controls, template, train_on=train_on)
        self._end = end
        self._ends = (end,) if end in controls.names.values() else ()

    def encode(self, record: Conversation | PlainText) -> list[EncodedChat]:
        """The sample of a pair of texts, or one for each answer; ValueError, a sentence, for what cannot be encoded."""
        if isinstance(record, PlainText):
            return [self._pair(self._placed(record.prompt, ()).ids, record.completion)]
        return [self._pair(self._asked(record, answer), _content(record, answer)) for answer in self._trained(record)]

    def _pair(self, asked: Sequence[int], target: str) -> EncodedChat:
        if not asked:
            raise ValueError("its input is empty, and an encoder reads one; learn texts with --dataset-type pretrain")
        written = self._placed(target, ()).ids
        if not written:
            raise ValueError("its target is empty, so there is nothing to learn")
        tokens = [*asked, self._end, *written, self._end]
        mask = np.arange(len(tokens)) > len(asked)
        return EncodedChat(np.array(tokens, np.int32), mask, self._ends)

    def _asked(self, chat: Conversation, answer: int) -> list[int]:
        """Tokens of the conversation before an answer."""
        if self.template is None:
            return self._placed(_one_question(chat, answer), ()).ids
        asked = replace(chat, messages=chat.messages[:answer], counts=chat.counts[:answer])
        before = _shielded(asked, self.template)
        text = self.template.render_one(Rendering(before.messages, True, before.variables), before.tools)
        refuse_left_out(self.template, before, text)
        return self._placed(self.template.unshield(text), self.template.control_places(text)).ids


def _content(chat: Conversation, answer: int) -> str:
    """Text of an answer; ValueError for one that is a call of a tool."""
    message: Message = chat.messages[answer]
    if "tool_calls" in message or not message["content"]:
        raise ValueError(f"message {answer + 1} calls a tool, and a decoder learns texts alone; set its train to false")
    return str(message["content"])


def _one_question(chat: Conversation, answer: int) -> str:
    """Text of the messages before an answer, one of the user, and before it what the system says."""
    before = chat.messages[:answer]
    roles = [message["role"] for message in before if message["role"] not in ("system", "developer")]
    if roles != ["user"] or chat.tools:
        raise ValueError(
            f"what comes before message {answer + 1} is not one question, and no chat template makes one text of it; "
            "name one with --chat-template, or write input and target"
        )
    return "\n".join(message["content"] for message in before)
