"""Micro-batch: the tensors that data hands to the model for one forward pass."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor


class StepNumbers(NamedTuple):
    """Numbers of a whole step that losses of pairs need, means over the pairs of the global batch.

    `mean_length` is that of chosen completions, `mean_text_length` with their prompts. `kl` is KTO's.
    """

    mean_length: float = 1.0
    mean_text_length: float = 1.0
    kl: float = 0.0


NO_STEP = StepNumbers()


@dataclass(frozen=True)
class CompletionPairs:
    """Pairs of completions in a micro-batch: P of them, each with both halves in one row.

    `of_labels` says which text each label belongs to: 2 p and 2 p + 1 are those of pair p, 2 P is none of them. Lengths
    are counted when the micro-batch is made, of whole sequences. The numbers of the step and of the reference are
    filled in before the forward (engine/forward.py); the latter may come with the data.
    """

    of_labels: Tensor  # int64 [B, S]
    lengths: Tensor  # int64 [P, 2], tokens of the completions that are predicted
    text_lengths: Tensor  # int64 [P, 2], the same with their prompts
    labels: Tensor  # bool [P]: whether the first one is wanted
    reference: Tensor | None = None  # fp32 [P, 2]: log-probabilities by the reference
    of_step: StepNumbers = NO_STEP

    def copied(self, copy: Callable[[Tensor], Tensor]) -> "CompletionPairs":
        """A copy of every tensor."""
        copies: dict[str, Any] = {name: copy(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **copies)


@dataclass(frozen=True)
class SentencePairs:
    """Pairs of sentences in a micro-batch, one in each row: the token types of BERT, and the order of the sentences.

    `num_masked` are the masked tokens of whole rows, of which a cp rank has a part. `tokens_a_pair` is a number of the
    whole step, its masked tokens over its pairs, filled in before the forward (engine/forward.py).
    """

    token_types: Tensor  # int64 [B, S]: 0 in the first sentence, 1 in the second
    is_swapped: Tensor  # bool [B]: the first sentence came after the second
    num_masked: int
    tokens_a_pair: float = 1.0

    def copied(self, copy: Callable[[Tensor], Tensor]) -> "SentencePairs":
        """A copy of every tensor."""
        return replace(self, token_types=copy(self.token_types), is_swapped=copy(self.is_swapped))


@dataclass(frozen=True)
class TokensAhead:
    """What the layers of multi-token prediction read: for depth d the row that is d places later. Shapes [M, B, S].

    They are shifted in whole rows, before any cut, so that no rank needs what another one holds. `counts` are those of
    whole rows, too: predictions of the main loss, then of each depth. `factors` [M] are numbers of the step, filled in
    before the forward (engine/forward.py): predictions of the main loss for each prediction of a depth.
    """

    tokens: Tensor  # int64, token i + d
    labels: Tensor  # int64, label i + d
    loss_mask: Tensor  # bool, True where the prediction counts
    counts: tuple[int, ...]
    factors: Tensor | None = None  # fp32 [M]

    @classmethod
    def of(cls, batch: "MicroBatch", num_depths: int) -> "TokensAhead":
        """Those of a micro-batch of whole rows.

        A prediction counts where the main loss counts its label, and where position and label are of one document: by
        `document_ids`, or by positions that begin again.
        """
        length, depths = batch.tokens.shape[1], range(1, num_depths + 1)
        positions, documents = batch.position_ids, batch.document_ids
        masks = []
        for depth in depths:
            is_inside = _later(batch.loss_mask, depth) & (_later(positions, depth) == positions + depth)
            if documents is not None:
                is_inside &= _later(documents, depth) == documents
            is_inside[:, max(length - depth, 0) :] = False
            masks.append(is_inside)
        counts = (batch.num_loss_tokens, *(int(mask.sum()) for mask in masks))
        tokens, labels = (torch.stack([_later(row, d) for d in depths]) for row in (batch.tokens, batch.labels))
        ahead = cls(tokens, labels, torch.stack(masks), counts)
        return ahead.copied(Tensor.pin_memory) if batch.tokens.is_pinned() else ahead

    def at(self, places: Tensor) -> "TokensAhead":
        """Those of a cp rank that holds these places [s] of the sequence."""
        return self._with(lambda tensor: tensor[..., places])

    def copied(self, copy: Callable[[Tensor], Tensor]) -> "TokensAhead":
        """A copy of every tensor."""
        copied = self._with(copy)
        return copied if self.factors is None else replace(copied, factors=copy(self.factors))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, without factors as long as they are not known."""
        rows = [self.tokens, self.labels, self.loss_mask]
        return rows if self.factors is None else [*rows, self.factors]

    def _with(self, change: Callable[[Tensor], Tensor]) -> "TokensAhead":
        rows = (self.tokens, self.labels, self.loss_mask)
        tokens, labels, loss_mask = map(change, rows)
        return replace(self, tokens=tokens, labels=labels, loss_mask=loss_mask)


def _later(rows: Tensor, depth: int) -> Tensor:
    """[B, S] -> [B, S]: of each place what is `depth` places later; zeros at the end."""
    shifted = torch.zeros_like(rows)
    shifted[:, : max(rows.shape[1] - depth, 0)] = rows[:, depth:]
    return shifted


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward pass. Shapes are [B, S]; B samples of S tokens.

    `sample_ids` are global: a sample's number in the whole run's order, whatever rank or micro-batch it fell to.
    Dropout masks are named by them, so they do not depend on the layout. `document_ids` is None unless documents
    packed into one sample must not attend to each other.

    `num_loss_tokens` is counted when a micro-batch is made, on the CPU: to count on a GPU would wait for the GPU.
    Copies have the number of what they are copies of.
    """

    tokens: Tensor  # int64 [B, S]
    labels: Tensor  # int64 [B, S], what is predicted at each position: the token after it, for BERT its own
    loss_mask: Tensor  # bool [B, S], True where the prediction counts
    position_ids: Tensor  # int64 [B, S]
    sample_ids: Tensor  # int64 [B]
    document_ids: Tensor | None = None  # int64 [B, whole S], equal within a document, rising along the sequence
    dataset_ids: Tensor | None = None  # int64 [B, S], the data set of each label, where losses are reported for each
    encoder_length: int = field(default=0, init=False)
    """Tokens of each row that an encoder reads, which come first; `with_encoder` says how many."""
    encoder_room: int = field(default=0, init=False)
    """Places along the whole stream that an encoder's rows may take: with fewer tokens, those of the decoder stay."""
    num_loss_tokens: int = field(init=False)
    """Unmasked predictions, those of the loss."""
    pairs: CompletionPairs | None = field(default=None, init=False)
    """Of objectives that compare completions; `with_pairs` gives a micro-batch its own."""
    sentences: SentencePairs | None = field(default=None, init=False)
    """Of BERT; `with_sentences` gives a micro-batch its own."""
    ahead: TokensAhead | None = field(default=None, init=False)
    """Of multi-token prediction, in training; `with_ahead` gives a micro-batch its own."""

    text_lengths: Tensor | None = field(default=None, init=False)
    """int64 [B]: tokens of each text so far, where rows are not whole texts; `with_text_lengths` says them."""

    def __post_init__(self) -> None:
        assert self.loss_mask.device.type == "cpu", "loss tokens are counted on the CPU"
        object.__setattr__(self, "num_loss_tokens", int(self.loss_mask.sum()))

    def at(self, places: Tensor) -> "MicroBatch":
        """The micro-batch of a cp rank that holds these places [s] of the sequence; its loss tokens are counted again.

        Document ids stay whole: attention needs those of the keys that other ranks hold.
        """

        def cut(tensor: Tensor) -> Tensor:
            return tensor[:, places]

        part = replace(
            self,
            tokens=cut(self.tokens),
            labels=cut(self.labels),
            loss_mask=cut(self.loss_mask),
            position_ids=cut(self.position_ids),
            dataset_ids=None if self.dataset_ids is None else cut(self.dataset_ids),
        )
        if self.encoder_length:
            length = self.encoder_length * len(places) // self.tokens.shape[1]  # as large a part of it
            part = part.with_encoder(length, room=self.encoder_room)
        if self.pairs is not None:
            part = part.with_pairs(replace(self.pairs, of_labels=cut(self.pairs.of_labels)))
        if self.sentences is not None:
            part = part.with_sentences(replace(self.sentences, token_types=cut(self.sentences.token_types)))
        if self.ahead is not None:
            part = part.with_ahead(self.ahead.at(places))
        return part.pinned() if self.tokens.is_pinned() else part

    def to(self, device: torch.device) -> "MicroBatch":
        """A copy on `device`. From pinned memory it overlaps with what the CPU does next."""
        return self._copied(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "MicroBatch":
        """A copy in page-locked memory, from which a GPU reads without the CPU. It needs a GPU."""
        return self._copied(Tensor.pin_memory)

    def clone(self) -> "MicroBatch":
        """A copy in memory of its own."""
        return self._copied(Tensor.clone)

    def copy_(self, other: "MicroBatch") -> None:
        """Overwrite the tensors, in place, by those of a micro-batch of the same shapes; the count stays."""
        for mine, theirs in zip(self._tensors, other._tensors, strict=True):
            mine.copy_(theirs, non_blocking=True)

    def with_pairs(self, pairs: CompletionPairs) -> "MicroBatch":
        """The same micro-batch with these pairs of completions."""
        batch = self._copied(lambda tensor: tensor)
        object.__setattr__(batch, "pairs", pairs)
        return batch

    def with_encoder(self, length: int, *, room: int = 0) -> Self:
        """The same micro-batch, of whose rows an encoder reads the first `length` tokens, and a decoder the others."""
        batch = self._copied(lambda tensor: tensor)
        object.__setattr__(batch, "encoder_length", length)
        object.__setattr__(batch, "encoder_room", room)
        return batch

    def with_text_lengths(self, lengths: Tensor) -> Self:
        """The same micro-batch, whose rows are texts of these lengths [B], or parts of them."""
        batch = self._copied(lambda tensor: tensor)
        object.__setattr__(batch, "text_lengths", lengths)
        return batch

    def with_sentences(self, sentences: SentencePairs) -> "MicroBatch":
        """The same micro-batch with these pairs of sentences."""
        batch = self._copied(lambda tensor: tensor)
        object.__setattr__(batch, "sentences", sentences)
        return batch

    def with_ahead(self, ahead: TokensAhead) -> "MicroBatch":
        """The same micro-batch with these tokens of multi-token prediction."""
        batch = self._copied(lambda tensor: tensor)
        object.__setattr__(batch, "ahead", ahead)
        return batch

    @property
    def sides(self) -> tuple[int, ...]:
        """Lengths of what a row consists of: encoder and decoder, or the sequence alone."""
        length = self.tokens.shape[1]
        return (self.encoder_length, length - self.encoder_length) if self.encoder_length else (length,)

    def starts(self, num_parts: int) -> tuple[int, ...]:
        """Places along the whole stream at which the sides begin, of a batch that is one of `num_parts` cut over cp."""
        return (0, max(self.encoder_room, self.encoder_length * num_parts)) if self.encoder_length else (0,)

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of the tensors, one fewer without documents."""
        return [tensor.shape for tensor in self._tensors]

    @property
    def _tensors(self) -> list[Tensor]:
        tensors = [self.tokens, self.labels, self.loss_mask, self.position_ids, self.sample_ids, self.document_ids]
        if self.sentences is not None:
            tensors += [self.sentences.token_types, self.sentences.is_swapped]
        if self.ahead is not None:
            tensors += self.ahead.tensors
        return [tensor for tensor in tensors if tensor is not None]

    def _copied(self, copy: Callable[[Tensor], Tensor]) -> Self:
        batch = object.__new__(type(self))  # not made by `replace`, which would count again
        for name, value in vars(self).items():
            if isinstance(value, CompletionPairs | SentencePairs | TokensAhead):
                value = value.copied(copy)
            object.__setattr__(batch, name, copy(value) if isinstance(value, Tensor) else value)
        return batch
