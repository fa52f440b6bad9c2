"""Places of the assistant's answers in a rendered text: what the model must write, found in two ways and compared.

An answer is everything from the end of the generation prompt to the token that ends the turn, inclusive.

By beginnings: the text before the answer (with the generation prompt), the text up to its end, and the whole text are
each a beginning of the next. That fails where a template looks ahead or back, which every conversation is checked for.

By marks: characters that no data have are put around the contents of answers, inside of their outer space, because
templates trim. Without the marks the text must be the same as ever. That fails where a template takes a content apart,
at a </think> for example. The token that ends the turn is the next control token.

One of them suffices, as each is verified by itself; where both apply, they must agree. {% generation %} blocks, which
few templates have, must agree too: alone they do not suffice, as some leave out the token that ends the turn. Answers
that neither finds in the whole conversation, because a template drops the thoughts of earlier turns, become samples of
their own, each ended by the answer: so the model sees what it will see when it answers.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatronish.data.chat.conversation import Conversation, Message
from megatronish.data.chat.sandbox import GENERATION_MARKS
from megatronish.data.chat.template import LARGEST_MARK, MARKS, ChatTemplate

TAIL = 24  # characters of a text that a message shows
_MARK = re.compile(f"[{chr(MARKS)}-{chr(LARGEST_MARK)}]")
_BLOCK_MARK = re.compile(f"[{''.join(GENERATION_MARKS)}]")


class TextSpan(NamedTuple):
    """Characters [begin, end) of a text."""

    begin: int
    end: int


class Rendered(NamedTuple):
    """A shielded text, the places of the template's control tokens, and the places of the answers asked for."""

    text: str
    controls: list[tuple[int, int]]
    answers: list[TextSpan]


class UnclearError(ValueError):
    """ValueError: which tokens are the answer's cannot be said for certain."""


def render_answers(template: ChatTemplate, chat: Conversation, answers: Sequence[int]) -> Rendered:
    """The whole conversation, which is shielded, with the places of these answers.

    UnclearError if one of them cannot be found for certain, another ValueError if the template refuses the messages.
    """
    search = _AnswerSearch.of(template, chat)
    places = [search.answer(number) for number in answers]
    return Rendered(search.text, search.controls, places)


@dataclass(frozen=True)
class _AnswerSearch:
    """A rendered conversation, and what is known of places in it."""

    template: ChatTemplate
    chat: Conversation
    text: str
    controls: list[tuple[int, int]]
    contents: dict[int, TextSpan]
    """Places of the contents of answers, of those that marks have found."""
    generated: list[TextSpan]
    """Places of {% generation %} blocks."""

    @classmethod
    def of(cls, template: ChatTemplate, chat: Conversation) -> "_AnswerSearch":
        text = template.render(chat.messages, chat.tools)
        contents = _contents_by_marks(template, chat, text)
        has_blocks = template.has_generation_blocks
        generated = _generated(template.render_marked(chat.messages, chat.tools)) if has_blocks else []
        return cls(template, chat, text, template.control_places(text), contents, generated)

    def answer(self, number: int) -> TextSpan:
        """TextSpan of an answer, with the token that ends the turn."""
        prompt, until, space = self._by_beginnings(number)
        content = self.contents.get(number)
        has_calls = "tool_calls" in self.chat.messages[number]
        if until is None and (content is None or has_calls):
            raise self._unclear(number, "the template changes what it wrote before when messages follow")
        begin = prompt if prompt is not None else self._before(content, space)
        if begin is None or (content is not None and begin > content.begin):
            raise self._unclear(number, "the generation prompt is no beginning of it")
        end = self._end_in(begin, until) if until is not None else None
        if content is not None and not has_calls:
            after = self._end_after(content.end, until)
            if until is None:
                end = after
            elif end != after:
                raise self._unclear(number, "two ways to find its end disagree")
        if end is None:
            raise self._endless(number, content.end if content is not None else until or begin)
        place = TextSpan(begin, end)
        self._check_blocks(number, place, content, until)
        return place

    def _by_beginnings(self, number: int) -> tuple[int | None, int | None, str]:
        """Where an answer begins, and where its turn ends; None for what is no beginning of the whole text.

        Then the space that is before the content of the answer where the conversation ends with it.
        """
        messages, tools = self.chat.messages, self.chat.tools
        prompt = _rendered(self.template, messages[:number], tools, generation_prompt=True)
        is_last = number + 1 == len(messages)
        until = self.text if is_last else _rendered(self.template, messages[: number + 1], tools)
        begin = None if prompt is None or not self.text.startswith(prompt) else len(prompt)
        space = ""
        if prompt is not None and until is not None and until.startswith(prompt):
            space = until[len(prompt) : len(until) - len(until[len(prompt) :].lstrip())]
        if begin is None or until is None or len(until) <= begin or not self.text.startswith(until):
            return begin, None, space
        return begin, len(until), space

    def _before(self, content: TextSpan | None, space: str) -> int | None:
        """Beginning of an answer by its content, with the space that the model writes before it."""
        if content is None:
            return None
        return content.begin - (len(space) if self.text[: content.begin].endswith(space) else 0)

    def _end_in(self, begin: int, until: int) -> int | None:
        """End of the last control token before `until`, if nothing but space follows it."""
        ends = [end for start, end in self.controls if begin <= start and end <= until]
        return ends[-1] if ends and not self.text[ends[-1] : until].strip() else None

    def _end_after(self, content_end: int, until: int | None) -> int | None:
        """End of the first control token after a content; without `until` it must follow with space between alone."""
        for start, end in self.controls:
            if start >= content_end:
                is_near = not self.text[content_end:start].strip() if until is None else end <= until
                return end if is_near else None
        return None

    def _check_blocks(self, number: int, answer: TextSpan, content: TextSpan | None, until: int | None) -> None:
        """UnclearError if {% generation %} blocks say otherwise. They may leave the token out that ends the turn."""
        if not self.template.has_generation_blocks:
            return
        last = max(answer.end, until or 0)
        inside = [block for block in self.generated if answer.begin <= block.begin and block.end <= last]
        if content is not None:
            inside = [block for block in inside if block.begin <= content.begin and content.end <= block.end]
        if not inside:
            raise self._unclear(number, "its {% generation %} blocks mark other text")

    def _unclear(self, number: int, why: str) -> UnclearError:
        return UnclearError(
            f"which tokens of message {number + 1} are the answer's cannot be said with the chat template "
            f"{self.template.name}: {why}; name another with --chat-template, or use --train-on all"
        )

    def _endless(self, number: int, content_end: int) -> UnclearError:
        tail = self.template.unshield(self.text[content_end : content_end + TAIL])
        follows = f"is followed by {tail!r}" if tail else "is the end of the text"
        return UnclearError(
            f"the answer in message {number + 1} {follows}, and no control token of the tokenizer ends it, so that a "
            f"model would never stop; the chat template {self.template.name} does not fit the tokenizer: name another "
            "with --chat-template"
        )


def _rendered(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[object], *, generation_prompt: bool = False
) -> str | None:
    """Text of a part of a conversation; None if the template refuses it, as it may refuse no message at all."""
    try:
        return template.render(messages, tools, generation_prompt=generation_prompt)
    except ValueError:
        return None


def _contents_by_marks(template: ChatTemplate, chat: Conversation, text: str) -> dict[int, TextSpan]:
    """Places of the contents of answers, by marks around them, except of those that lose their marks.

    Each content has marks of its own. None is found if the marks have changed the rest of the text.
    """
    answers = [number for number in chat.answers if (chat.messages[number]["content"] or "").strip()]
    if MARKS + 2 * len(answers) > LARGEST_MARK:
        return {}
    messages = list(chat.messages)
    for order, number in enumerate(answers):
        content = messages[number]["content"]
        inner = content.strip()
        first = content.index(inner)
        begin, end = chr(MARKS + 2 * order), chr(MARKS + 2 * order + 1)
        marked = f"{content[:first]}{begin}{inner}{end}{content[first + len(inner) :]}"
        messages[number] = {**messages[number], "content": marked}
    rendered = _rendered(template, messages, chat.tools)
    if rendered is None:
        return {}
    plain, places = _without_marks(rendered)
    if plain != text:
        return {}
    found = {}
    for order, number in enumerate(answers):
        begins, ends = places.get(2 * order, []), places.get(2 * order + 1, [])
        if len(begins) == len(ends) == 1 and text[begins[0] : ends[0]] == chat.messages[number]["content"].strip():
            found[number] = TextSpan(begins[0], ends[0])
    return found


def _without_marks(text: str) -> tuple[str, dict[int, list[int]]]:
    """The text without marks, and where in it each mark was."""
    places: dict[int, list[int]] = {}
    for order, match in enumerate(_MARK.finditer(text)):
        places.setdefault(ord(match[0]) - MARKS, []).append(match.start() - order)
    return _MARK.sub("", text), places


def _generated(text: str) -> list[TextSpan]:
    """Places of {% generation %} blocks in the text without their marks."""
    found, start = [], 0
    for order, match in enumerate(_BLOCK_MARK.finditer(text)):
        place = match.start() - order
        if match[0] == GENERATION_MARKS[0]:
            start = place
        else:
            found.append(TextSpan(start, place))
    return found
