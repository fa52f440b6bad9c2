"""Objectives: what a model is trained for, as sums over micro-batches.

The model hands over the loss of every token, or its logits. An objective makes named sums of them, of which "loss" is
what backward starts from, and says by what the sums of a step are divided. Sums add up over micro-batches, stages and
data ranks, and are divided once: so no layout changes them (a mean of means would be another number).
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from megatronish.layers.vocabulary import VocabParallelLogits
from megatronish.model.batch import MicroBatch

Sums = dict[str, Tensor]
"""Scalars that add up over micro-batches and ranks, by name."""

Metrics = dict[str, float]
"""Sums of a step over all ranks, divided by its weight, by name."""

LOSS = "loss"


class Objective(Protocol):
    """An objective. A new one is a class in this folder, a line in `OBJECTIVES` (table.py) and in `OBJECTIVE_NAMES`."""

    names: tuple[str, ...]
    """Names of the sums, `LOSS` first; the same for every micro-batch."""

    def weight(self, batch: MicroBatch) -> int:
        """What this micro-batch adds to the divisor of the step's sums: counted on the CPU, before the forward."""
        ...

    def sums(self, token_losses: Tensor, batch: MicroBatch) -> Sums:
        """[S/cp, B] losses of all tokens that a rank holds -> the sums of the micro-batch; fp32 scalars."""
        ...


@runtime_checkable
class LogitsObjective(Protocol):
    """An objective that needs more than the losses of tokens: `sums_of_logits` takes the place of `sums`."""

    names: tuple[str, ...]

    def weight(self, batch: MicroBatch) -> int:
        """What this micro-batch adds to the divisor of the step's sums, as in `Objective`."""
        ...

    def sums_of_logits(self, logits: VocabParallelLogits, batch: MicroBatch) -> Sums:
        """[S/cp, B, V/tp] logits of all tokens that a rank holds -> the sums of the micro-batch.

        The sums, and so their gradients, are the same on all ranks of tp.
        """
        ...


@runtime_checkable
class ReportingObjective(Protocol):
    """An objective whose sums are not reported as they are: `reported` makes the metrics of a step of them."""

    def reported(self, metrics: Metrics) -> Metrics:
        """Metrics of a step, of its divided sums."""
        ...


def metrics_of(objective: object, sums: Mapping[str, float], *, weight: int) -> Metrics:
    """Metrics of a step from its sums over all ranks and their divisor."""
    divided = {name: value / max(weight, 1) for name, value in sums.items()}
    return objective.reported(divided) if isinstance(objective, ReportingObjective) else divided


class CausalLM:
    """Next-token prediction, an `Objective`. `batch.loss_mask` says which predictions count."""

    names: tuple[str, ...] = (LOSS,)

    def weight(self, batch: MicroBatch) -> int:
        """Number of unmasked predictions of a micro-batch."""
        return batch.num_loss_tokens

    def sums(self, token_losses: Tensor, batch: MicroBatch) -> Sums:
        """[S/cp, B] -> the sum over the unmasked predictions."""
        return {LOSS: (token_losses * batch.loss_mask.t()).sum()}
