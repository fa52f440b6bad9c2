"""Masked language modelling, BERT's objective, alone or with the order of sentences as a second loss.

    loss = mean over masked tokens + mean over pairs of sentences

Both means are over the whole step. Sums of a step are divided once, by its masked tokens, so the loss of a pair counts
as often as the step has masked tokens for each pair.
"""

from typing import Protocol, runtime_checkable

from megatronish.model.batch import MicroBatch
from megatronish.model.bert import BertLosses
from megatronish.objectives.objective import LOSS, CausalLM, Sums


@runtime_checkable
class SentenceObjective(Protocol):
    """An objective of the losses of tokens and of pairs of sentences: `sums_of_both` takes the place of `sums`."""

    names: tuple[str, ...]

    def weight(self, batch: MicroBatch) -> int:
        """What this micro-batch adds to the divisor of the step's sums, as in `Objective`."""
        ...

    def sums_of_both(self, losses: BertLosses, batch: MicroBatch) -> Sums:
        """Losses of all tokens and pairs that a rank holds -> the sums of the micro-batch; fp32 scalars."""
        ...


class MaskedLM(CausalLM):
    """Prediction of masked tokens, an `Objective`: `batch.loss_mask` says which tokens were chosen."""


class MaskedLMAndOrder:
    """Prediction of masked tokens and of the order of two sentences, a `SentenceObjective` that reports both losses."""

    names: tuple[str, ...] = (LOSS, "loss/masked", "loss/order")

    def weight(self, batch: MicroBatch) -> int:
        """Number of masked tokens of a micro-batch."""
        return batch.num_loss_tokens

    def sums_of_both(self, losses: BertLosses, batch: MicroBatch) -> Sums:
        """Of tokens [S/cp, B] and pairs [B] -> the sums over masked tokens, and over pairs."""
        assert batch.sentences is not None, "the micro-batch has no pairs of sentences"
        of_tokens = (losses.tokens * batch.loss_mask.t()).sum()
        of_pairs = losses.sentences.sum() * batch.sentences.tokens_a_pair
        return dict(zip(self.names, (of_tokens + of_pairs, of_tokens, of_pairs), strict=True))


def masked_objective(*, bert_no_binary_head: bool) -> MaskedLM | MaskedLMAndOrder:
    """The objective of a BERT with a binary head, or without."""
    return MaskedLM() if bert_no_binary_head else MaskedLMAndOrder()
