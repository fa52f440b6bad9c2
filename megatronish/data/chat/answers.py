"""Places of the assistant's answers in a rendered text: what the model must write, found in two ways and compared.

An answer is everything from the end of the generation prompt to the token that ends the turn, inclusive. Where a
template ends no turn (GLM-4), the token that begins the next one ends it, if the model stops at it; the last answer has
it, too.

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
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import itemgetter
from typing import NamedTuple

from megatronish.data.chat.conversation import Conversation, Message
from megatronish.data.chat.template import (
    GENERATION_MARKS,
    LARGEST_MARK,
    MARKS,
    ChatTemplate,
    Rendering,
    without_generation_marks,
)

TAIL = 24  # characters of a text that a message shows, or that are compared
MOST_RENDERED = 64  # answers of a conversation whose beginnings are rendered
RENDERED_AT_ONCE = 8
MOST_ALIKE = 200  # characters at the ends of two texts that are compared
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


class _Beginning(NamedTuple):
    """Where an answer begins and its turn ends, None for what is no beginning of the whole text.

    Where the conversation ends with the answer, `lead` is what comes between prompt and content, and `own_end` the
    token that ends it.
    """

    begin: int | None
    until: int | None
    lead: str
    own_end: str | None


class _Frame(NamedTuple):
    """Text around the content of an answer: before the answer, in it before its content, and after that."""

    before: str
    lead: str
    trail: str


def render_answers(template: ChatTemplate, chat: Conversation, answers: Sequence[int]) -> Rendered:
    """The whole conversation, which is shielded, with the places of these answers.

    UnclearError if one of them cannot be found for certain, another ValueError if the template refuses the messages.

    Each beginning is rendered for itself, which takes the square of the turns. So of a very long conversation only the
    first and the last answers are found by beginnings, and the others by marks where the text around them is the same.
    """
    # 1. The whole conversation is rendered once, with and without marks.
    search = _AnswerSearch.of(template, chat)
    half = MOST_RENDERED // 2
    near, far = (
        (answers, []) if len(answers) <= MOST_RENDERED else ([*answers[:half], *answers[-half:]], answers[half:-half])
    )
    places: dict[int, TextSpan] = {}
    # 2. Answers near the ends, by beginnings and marks. Renderings are batched, since each batch may be a call to a
    # contained process.
    for start in range(0, len(near), RENDERED_AT_ONCE):
        numbers = near[start : start + RENDERED_AT_ONCE]
        for number, beginning in zip(numbers, search.beginnings(numbers), strict=True):
            places[number] = search.answer(number, beginning)
    # 3. Answers in the middle: by marks alone, if what is around the content is the same as around an answer that was
    # found.
    frames = {search.frame(number, place) for number, place in places.items()} - {None} if far else set()
    num_left = MOST_RENDERED
    for number in far:
        span = search.answer_like(number, frames)
        # An answer in another frame (a call of a tool) is rendered like the first ones, but at most MOST_RENDERED of
        # them.
        if span is None:
            if not (num_left := num_left - 1):
                raise ValueError(
                    f"it has {len(answers):,} answers, which the chat template {template.name} writes in many ways, "
                    "so that finding them takes too long; cut it into shorter conversations"
                )
            span = search.answer(number, search.beginnings([number])[0])
            frames |= {search.frame(number, span)} - {None}
        places[number] = span
    return Rendered(search.text, search.controls, [places[number] for number in answers])


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
        # One call for both texts: the second has marks in the contents of answers, and may fail alone.
        marked = _with_marks(chat)
        wanted = [chat.messages] if marked is None else [chat.messages, marked]
        first, *others = template.render_all([Rendering(each, False, chat.variables) for each in wanted], chat.tools)
        if isinstance(first, ValueError):
            raise first
        text = without_generation_marks(first)
        contents = _contents_by_marks(chat, text, others[0] if others else None)
        generated = _generated(first) if template.has_generation_blocks else []
        text += _end_by_next_turn(template, chat, text)
        return cls(template, chat, text, template.control_places(text), contents, generated)

    def beginnings(self, numbers: Sequence[int]) -> list[_Beginning]:
        """What the beginnings of the conversation say of these answers: up to each of them, and to its end."""
        messages, given = self.chat.messages, self.chat.variables
        wanted = [
            rendering
            for number in numbers
            for rendering in (
                Rendering(messages[:number], True, given),
                Rendering(messages[: number + 1], False, given),
            )
        ]
        # The beginning up to the end of the last message is the whole text, which is rendered already.
        if numbers[-1] + 1 == len(messages):
            wanted.pop()
        texts: list[str | None] = [
            None if isinstance(text, ValueError) else without_generation_marks(text)
            for text in self.template.render_all(wanted, self.chat.tools)
        ]
        if len(texts) % 2:
            texts.append(self.text)
        return [
            self._beginning(number, prompt, until)
            for number, prompt, until in zip(numbers, texts[::2], texts[1::2], strict=True)
        ]

    def _beginning(self, number: int, prompt: str | None, until: str | None) -> _Beginning:
        # The template may have written the prompt otherwise in the whole text: then it is no beginning, and says
        # nothing.
        begin = None if prompt is None or not self.text.startswith(prompt) else len(prompt)
        content, lead = (self.chat.messages[number]["content"] or "").strip(), ""
        if prompt is not None and until is not None and until.startswith(prompt) and content:
            # Templates write a space, or a token that begins a response, between prompt and content: the model has to
            # write it, too.
            lead, is_there, _ = until[len(prompt) :].partition(content)
            lead = lead if is_there else ""
        own_end = None if until is None else self._last_control(until)
        # An answer that ends where it begins, or an end that is no beginning of the whole text: the end is unknown.
        if begin is None or until is None or len(until) <= begin or not self.text.startswith(until):
            return _Beginning(begin, None, lead, own_end)
        return _Beginning(begin, self._with_next_turn(begin, len(until)), lead, own_end)

    def _last_control(self, text: str) -> str | None:
        """The control token that ends a text, behind which there is space alone; None if none does."""
        begin, end = next(reversed(self.template.control_places(text)), (0, 0))
        return None if text[end:].strip() else text[begin:end] or None

    def _with_next_turn(self, begin: int, until: int) -> int:
        """End of a turn that nothing ends: that of the token behind it, which begins the next turn, if it stops one."""
        first = bisect_left(self.controls, until, key=itemgetter(0))
        if not self.template.stops or self._end_in(begin, until) is not None or first == len(self.controls):
            return until
        start, end = self.controls[first]
        is_stop = self.text[start:end] in self.template.stops and not self.text[until:start].strip()
        return end if is_stop else until

    def frame(self, number: int, answer: TextSpan) -> _Frame | None:
        """The text around the content of an answer that was found; None if marks have not found its content."""
        if (content := self.contents.get(number)) is None or "tool_calls" in self.chat.messages[number]:
            return None
        before = self.text[max(answer.begin - TAIL, 0) : answer.begin]
        return _Frame(before, self.text[answer.begin : content.begin], self.text[content.end : answer.end])

    def answer_like(self, number: int, frames: Iterable[_Frame | None]) -> TextSpan | None:
        """TextSpan of an answer whose content marks have found, in a frame of another answer; None if it has none."""
        content = self.contents.get(number)
        if content is None or "tool_calls" in self.chat.messages[number]:
            return None
        end = self._end_after(content.end, None)
        for frame in frames:
            assert frame is not None
            place = TextSpan(content.begin - len(frame.lead), content.end + len(frame.trail))
            if place.end == end and frame == self.frame(number, place):
                self._check_blocks(number, place, content, None)
                self._check_thoughts(number, place)
                return place
        return None

    def answer(self, number: int, beginning: _Beginning) -> TextSpan:
        """TextSpan of an answer, with the token that ends the turn."""
        # 1. Beginning: where the generation prompt ends, else where marks found the content. Calls of tools have no
        # content to mark.
        prompt, until, lead, own_end = beginning
        content = self.contents.get(number)
        has_calls = "tool_calls" in self.chat.messages[number]
        if until is None and (content is None or has_calls):
            raise self._unclear(number, "the template changes what it wrote before when messages follow")
        begin = prompt if prompt is not None else self._before(content, lead)
        if begin is None or (content is not None and begin > content.begin):
            raise self._unclear(number, "the generation prompt is no beginning of it")
        # 2. End: by the text up to the end of the turn, and by the first control token behind the content. If both know
        # it, they must agree.
        end = self._end_in(begin, until) if until is not None else None
        if content is not None and not has_calls:
            after = self._end_after(content.end, until)
            if until is None:
                end = after
            elif end != after:
                raise self._unclear(number, "two ways to find its end disagree")
        # 3. No control token ends the turn: a model that learns it would never stop.
        if end is None:
            raise self._endless(number, content.end if content is not None else until or begin)
        if (
            until is None
            and own_end in self.template.ends
            and self._last_control(self.text[:end]) not in self.template.ends
        ):
            raise self._unclear(number, "the token that ends it is no longer written when messages follow")
        place = TextSpan(begin, end)
        self._check_blocks(number, place, content, until)
        self._check_thoughts(number, place)
        return place

    def _before(self, content: TextSpan | None, lead: str) -> int | None:
        """Beginning of an answer by its content, with what the model writes before it."""
        if content is None:
            return None
        return content.begin - (len(lead) if self.text[: content.begin].endswith(lead) else 0)

    def _end_in(self, begin: int, until: int) -> int | None:
        """End of the last control token before `until`, if nothing but space follows it."""
        # `controls` are in order and do not overlap, so both of their columns are sorted.
        last = bisect_right(self.controls, until, key=itemgetter(1)) - 1
        if last < 0 or self.controls[last][0] < begin:
            return None
        end = self.controls[last][1]
        return end if not self.text[end:until].strip() else None

    def _end_after(self, content_end: int, until: int | None) -> int | None:
        """End of the control tokens that end a turn after a content; None if there are none.

        They follow each other with space between alone: what ends a response, for one, and what ends the turn (Cohere).
        """
        first = bisect_left(self.controls, content_end, key=itemgetter(0))
        if first == len(self.controls):
            return None
        # Without `until` a control token further on may be that of the next turn: then only space may lie between.
        if until is None and self.text[content_end : self.controls[first][0]].strip():
            return None
        closing = [self.controls[first]]
        for begin, end in islice(self.controls, first + 1, None):
            last_begin, last_end = closing[-1]
            is_last = self.text[last_begin:last_end] in self.template.ends or (until is not None and end > until)
            if is_last or self.text[last_end:begin].strip():
                break
            closing.append((begin, end))
        if until is not None:
            return closing[-1][1] if closing[0][1] <= until else None
        ends = (end for begin, end in closing if self.text[begin:end] in self.template.ends)
        return next(ends, closing[0][1])

    def _check_blocks(self, number: int, answer: TextSpan, content: TextSpan | None, until: int | None) -> None:
        """UnclearError if {% generation %} blocks say otherwise. They may leave the token out that ends the turn."""
        if not self.template.has_generation_blocks:
            return
        # Blocks of other turns prove nothing: only those that begin at or after the answer, or before it with the
        # generation prompt (SmolLM 3), and end within its turn count.
        last = max(answer.end, until or 0)
        last = next((place for place in range(last, len(self.text)) if not self.text[place].isspace()), len(self.text))
        first = bisect_left(self.generated, answer.begin, key=itemgetter(0))
        first -= first > 0 and self._begins_with_prompt(self.generated[first - 1], number, answer)
        inside = [*takewhile(lambda block: block.end <= last, islice(self.generated, first, None))]
        if content is not None:
            inside = [block for block in inside if block.begin <= content.begin and content.end <= block.end]
        if not inside:
            raise self._unclear(number, "its {% generation %} blocks mark other text")

    def _begins_with_prompt(self, block: TextSpan, number: int, answer: TextSpan) -> bool:
        """Whether a block that begins before an answer reaches into it, and has no other answer."""
        others = (content for other, content in self.contents.items() if other < number)
        return block.end > answer.begin and all(content.end <= block.begin for content in others)

    def _check_thoughts(self, number: int, answer: TextSpan) -> None:
        """UnclearError if the answer lacks the thoughts that its message has: the template drops those of this turn."""
        thoughts = self.chat.messages[number].get("reasoning_content")
        if isinstance(thoughts, str) and thoughts.strip() not in self.text[answer.begin : answer.end]:
            raise UnclearError(
                f"the chat template {self.template.name} leaves the thoughts of message {number + 1} out "
                "(reasoning_content); name another with --chat-template, or remove them from the data"
            )

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


def _end_by_next_turn(template: ChatTemplate, chat: Conversation, text: str) -> str:
    """What begins the turn after the last answer, where nothing ends it and the model stops at it; empty elsewhere."""
    last = chat.messages[-1]
    ends = [end for _, end in template.control_places(text)[-1:]]
    if not template.stops or last["role"] != "assistant" or (ends and not text[ends[0] :].strip()):
        return ""
    mark = chr(MARKS)
    follows = {"role": "tool" if "tool_calls" in last else "user", "content": mark, "name": "a", "tool_call_id": "a"}
    (longer,) = template.render_all([Rendering([*chat.messages, follows], False, chat.variables)], chat.tools)
    if isinstance(longer, ValueError):
        return ""
    # The template may drop the thoughts of this turn now. So the next turn begins with the control token before which
    # most is as it was.
    longer = without_generation_marks(longer).partition(mark)[0]
    content, best, end_of_turn = text.rstrip(), 0, ""
    space = text[len(content) :]
    for begin, end in template.control_places(longer):
        before = longer[:begin].rstrip()
        alike = _alike(content, before)
        between = longer[len(before) : begin]
        if alike > best and between.startswith(space) and longer[begin:end] in template.stops:
            best, end_of_turn = alike, between[len(space) :] + longer[begin:end]
    return end_of_turn


def _alike(one: str, other: str) -> int:
    """Characters at the end of two texts that are equal, up to some."""
    size = min(len(one), len(other), MOST_ALIKE)
    return next((number for number in range(size) if one[-1 - number] != other[-1 - number]), size)


def _with_marks(chat: Conversation) -> list[Message] | None:
    """The messages with marks of its own around the content of each answer; None if there are too many."""
    answers = _answers_with_content(chat)
    # Two private characters for each answer: a mark that is lost or repeated concerns this answer alone.
    if MARKS + 2 * len(answers) > LARGEST_MARK:
        return None
    messages = list(chat.messages)
    for order, number in enumerate(answers):
        content = messages[number]["content"]
        inner = content.strip()
        first = content.index(inner)
        begin, end = chr(MARKS + 2 * order), chr(MARKS + 2 * order + 1)
        marked = f"{content[:first]}{begin}{inner}{end}{content[first + len(inner) :]}"
        messages[number] = {**messages[number], "content": marked}
    return messages


def _answers_with_content(chat: Conversation) -> list[int]:
    return [number for number in chat.answers if (chat.messages[number]["content"] or "").strip()]


def _contents_by_marks(chat: Conversation, text: str, rendered: str | ValueError | None) -> dict[int, TextSpan]:
    """Places of the contents of answers, by marks around them, except of those that lose their marks.

    None is found if the marks have changed the rest of the text.
    """
    if rendered is None or isinstance(rendered, ValueError):
        return {}
    plain, places = _without_marks(without_generation_marks(rendered))
    # The template looks into contents: what it made of marked ones proves nothing about the text without marks.
    if plain != text:
        return {}
    spans = {}
    for order, number in enumerate(_answers_with_content(chat)):
        begins, ends = places.get(2 * order, []), places.get(2 * order + 1, [])
        # Once each, and around the content as the data have it: else the template has cut or repeated the content.
        if len(begins) == len(ends) == 1 and text[begins[0] : ends[0]] == chat.messages[number]["content"].strip():
            spans[number] = TextSpan(begins[0], ends[0])
    return spans


def _without_marks(text: str) -> tuple[str, dict[int, list[int]]]:
    """The text without marks, and where in it each mark was."""
    places: dict[int, list[int]] = {}
    for order, match in enumerate(_MARK.finditer(text)):
        # Without marks: each one before it has moved it by a character.
        places.setdefault(ord(match[0]) - MARKS, []).append(match.start() - order)
    return _MARK.sub("", text), places


def _generated(text: str) -> list[TextSpan]:
    """Places of {% generation %} blocks in the text without their marks."""
    spans, start = [], 0
    for order, match in enumerate(_BLOCK_MARK.finditer(text)):
        place = match.start() - order
        if match[0] == GENERATION_MARKS[0]:
            start = place
        else:
            spans.append(TextSpan(start, place))
    return spans
