"""Encoder of pairs of texts for a model with an encoder and a decoder: what is read, and after it what is written.

A sample is [input, end, target, end], of which the target and its end are trained: the border between them is that of
the mask. A conversation gives one sample for each of its answers that counts. What is asked before an answer is one
text: by the chat template, where there is one, else the content of the one message of the user, after that of the
system.
"""

from collections.abc import Sequence

import numpy as np

from megatronish.config.sections.data import TrainOn
from megatronish.data.chat.conversation import Conversation, Message, PlainText
from megatronish.data.chat.encoder import ChatEncoder, EncodedChat, refuse_left_out
from megatronish.data.chat.template import ChatTemplate
from megatronish.tokenizer.control_tokens import ControlEncoder


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
        shield = self.template.shield
        before = Conversation(tuple(shield(chat.messages[:answer])), chat.counts[:answer], tuple(shield(chat.tools)))
        text = self.template.render(before.messages, before.tools, generation_prompt=True)
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
