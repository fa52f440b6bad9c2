"""Chats that every contestant of benchmarks/finetuning.py trains on, the same ones in each step. torch is enough.

A step is some rows of megatronish's packing plan: contestants that pack take these rows, the others their chats.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

LEARNING_RATE, RANK, ALPHA = 1e-3, 16, 32.0
IGNORED = -100
"""Label of a token without a loss."""


@dataclass(frozen=True)
class ChatCase:
    """Sizes of a small Llama and of its batches: a step has `rows` rows, and chats have about `answer` tokens."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_groups: int
    seq_length: int
    vocab_size: int
    rows: int
    answer: int


CASES = {
    "tiny": ChatCase(2, 32, 64, 4, 2, 128, 320, 2, 20),
    "small": ChatCase(6, 256, 768, 8, 4, 512, 8192, 4, 100),
}


@dataclass(frozen=True)
class ChatJob:
    """What a contestant is to do: the size of the case, the folder with base, adapter and chats, and whether it packs.

    A padded micro-batch has as many chats as a packed one has rows.
    """

    module: str
    size: str
    folder: str
    packs: bool

    @property
    def case(self) -> ChatCase:
        """The sizes."""
        return CASES[self.size]

    def chats(self) -> "Chats":
        """What is trained on."""
        return Chats(**torch.load(Path(self.folder) / "chats.pt", weights_only=True))


class Chats(NamedTuple):
    """Tokens of each chat and whether it has a loss, its place in the data set, and the chats of each row of a step."""

    tokens: list[Tensor]
    masks: list[Tensor]
    places: list[tuple[int, int]]
    steps: list[list[list[int]]]

    def rows_of(self, step: int, *, packs: bool) -> list[list[int]]:
        """Chats of each row of a step; without packing one chat a row."""
        rows = self.steps[step % len(self.steps)]
        return rows if packs else [[chat] for row in rows for chat in row]

    def num_tokens(self, step: int) -> int:
        """Tokens of the chats of a step, without those that fill up rows."""
        return sum(len(self.tokens[chat]) for row in self.rows_of(step, packs=True) for chat in row)

    def num_trained(self, step: int) -> int:
        """Tokens of a step that have a loss. Nothing predicts the first token of a chat."""
        return sum(int(self.masks[chat][1:].sum()) for row in self.rows_of(step, packs=True) for chat in row)


def padded(rows: list[Tensor], value: int) -> Tensor:
    """[B, S] of rows of different lengths."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def micro_batches_of(rows: list[list[int]], size: int) -> list[list[list[int]]]:
    """Rows in groups of `size`; the last one may be smaller."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


class Tuner(Protocol):
    """A frozen base and its adapter in one framework."""

    @property
    def num_parameters(self) -> int:
        """Parameters that learn."""
        ...

    def num_places(self, step: int) -> int:
        """Places of all micro-batches of a step, those that are filled up included."""
        ...

    def step(self, step: int) -> float | None:
        """One update; the mean loss of the trained tokens before it."""
        ...
