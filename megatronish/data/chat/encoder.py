"""Encoder of chats: a conversation to tokens, and which of them are trained."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronish.config.sections.chat import TrainOn
from megatronish.data.chat.answers import Rendered, TextSpan, UnclearError, render_answers
from megatronish.data.chat.conversation import Conversation, Message, PlainText
from megatronish.data.chat.template import ChatTemplate
from megatronish.data.chat.written import refuse_left_out
from megatronish.tokenizer.control_tokens import ControlEncoder, PlacedTokens


class EncodedChat(NamedTuple):
    """Tokens of a sample, whether each is trained, and the tokens that end its trained answers."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    ends: tuple[int, ...] = ()


class ChatEncoder:
    """Conversations and plain texts to tokens with a mask.

    `template` is None where no data need one. `beginning` are the tokens that the tokenizer puts before a plain text.
    """

    def __init__(
        self,
        controls: ControlEncoder,
        template: ChatTemplate | None,
        *,
        train_on: TrainOn = "assistant",
        beginning: Sequence[int] = (),
    ) -> None:
        self.controls, self.template, self.train_on = controls, template, train_on
        self._beginning = list(beginning)
        self._eos = controls.names[controls.eos]

    def encode(self, record: Conversation | PlainText) -> list[EncodedChat]:
        """The sample of a record; several where only one for each trained answer shows the model what it will see.

        ValueError, a sentence, for what cannot be encoded.
        """
        if isinstance(record, PlainText):
            return [self._plain(record)]
        assert self.template is not None, "conversations need a template"
        shield = self.template.shield
        chat = Conversation(tuple(shield(record.messages)), record.counts, tuple(shield(record.tools)))
        answers = self._trained(chat)
        try:
            return [self._encoded(chat, answers)]
        except UnclearError:
            if self.train_on == "all" or answers == [len(chat.messages) - 1]:
                raise
        return [self._encoded(chat.until(answer), [answer]) for answer in answers]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Tokens of a conversation, up to where the model begins its answer; ValueError, a sentence, for no text."""
        assert self.template is not None, "conversations need a template"
        shield = self.template.shield
        shielded = self.template.render(shield(list(messages)), shield(list(tools)), generation_prompt=True)
        places = self.template.control_places(shielded)
        return self._placed(self.template.unshield(shielded), places).ids

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

    def _encoded(self, chat: Conversation, answers: Sequence[int]) -> EncodedChat:
        assert self.template is not None
        rendered = render_answers(self.template, chat, answers)
        refuse_left_out(self.template, chat, rendered.text)
        text = self.template.unshield(rendered.text)
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
