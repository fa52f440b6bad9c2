"""Chats with a trained model: prompts from messages by its template, within its context, and what ends its answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatronish.config.sections.data import ChatConfig
from megatronish.data.chat.conversation import Message
from megatronish.data.chat.encoder import ChatEncoder
from megatronish.data.chat.setup import ChatSetup
from megatronish.formats.chat_files import trained_with
from megatronish.inference.load import SavedModel
from megatronish.tokenizer.tokenizer import Tokenizer


class ChatPrompt(NamedTuple):
    """Tokens of a chat up to the model's next answer, and the messages that are left after the oldest were dropped."""

    tokens: list[int]
    messages: list[Message]


@dataclass(frozen=True)
class ChatPrompts:
    """The chats of a model that sees `seq_length` tokens. `stops` end its answers."""

    encoder: ChatEncoder
    stops: frozenset[int]
    seq_length: int

    @classmethod
    def of(
        cls,
        found: SavedModel,
        tokenizer: Tokenizer,
        *,
        template: str | None,
        seq_length: int,
        variables: str | None = None,
    ) -> "ChatPrompts":
        """The chats of a model on disk; UserError if it has no template and `template` names none.

        `variables` are more of the template's, as JSON.
        """
        config = trained_with([*found.adapters.values(), *(() if found.is_hf else (found.checkpoint,))])
        config = ChatConfig(
            chat_template=template or config.chat_template,
            chat_template_kwargs=variables or config.chat_template_kwargs,
            chat_date=config.chat_date,
        )
        encoder = ChatSetup.of(config, found.description.data, tokenizer).encoder(for_chats=True)
        stops = {tokenizer.eod, *found.description.stops, *encoder.ends_of_answers()}
        return cls(encoder, frozenset(stops), seq_length)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of messages; ValueError, a sentence, for what the template cannot write or the model cannot see."""
        tokens = self.encoder.prompt(messages)
        if len(tokens) >= self.seq_length:
            raise ValueError(
                f"the messages have {len(tokens)} tokens, and the model sees {self.seq_length} with its answer; "
                "shorten them"
            )
        return tokens

    def fitted(self, messages: Sequence[Message], *, num_tokens: int) -> ChatPrompt:
        """The newest turns that leave room for an answer of `num_tokens`, at least for a quarter of the context.

        Messages of the system are kept. ValueError, a sentence, if the last turn alone has no room.
        """
        most = self.seq_length - min(num_tokens, max(1, self.seq_length // 4))
        kept = list(messages)
        for kept in _ever_fewer(messages):
            tokens = self.encoder.prompt(kept)
            if len(tokens) <= most:
                return ChatPrompt(tokens, kept)
        return ChatPrompt(self.encode(kept), kept)


def _ever_fewer(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The messages, and what is left of them as the oldest turn, from the user's message on, is dropped, and the next.

    The last turn stays.
    """
    starts = [number for number, message in enumerate(messages) if message["role"] == "user"]
    first = starts[0] if starts else len(messages)
    for start in starts or [first]:
        yield [*messages[:first], *messages[start:]]
