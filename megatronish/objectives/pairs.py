"""Pair objectives: losses of log-probabilities of whole completions, which come two by two.

An objective here is a formula: it is given the log-probabilities of both completions of each pair, complete on every
rank (`pair_scores` adds up the parts that cp ranks hold, before anything that is not linear), and returns named sums.
The sums are the same on all cp ranks; `counted_once` leaves their values to one of them, and the gradients to all.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from megatronish.model.batch import CompletionPairs, MicroBatch
from megatronish.objectives.masked import SentenceObjective
from megatronish.objectives.objective import LOSS, LogitsObjective, Objective, Sums
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis


class PairScores(NamedTuple):
    """Log-probabilities of a micro-batch's P pairs. `texts` are those of the prompts and completions together."""

    log_probs: Tensor  # fp32 [P, 2], the sum over a completion's tokens
    texts: Tensor  # fp32 [P, 2]
    pairs: CompletionPairs

    @property
    def log_ratios(self) -> Tensor:
        """[P, 2]: how much more probable a completion is than by the reference, as a logarithm."""
        assert self.pairs.reference is not None, "the reference has not been computed"
        return self.log_probs - self.pairs.reference

    @property
    def means(self) -> Tensor:
        """[P, 2]: the mean over a completion's tokens."""
        return self.log_probs / self.pairs.lengths

    @property
    def chosen_loss(self) -> Tensor:
        """[P]: terms whose mean over the step's pairs is the mean loss over the step's chosen tokens."""
        return -self.log_probs[:, 0] / self.pairs.of_step.mean_length

    @property
    def chosen_text_loss(self) -> Tensor:
        """[P]: the same of prompts and chosen completions."""
        return -self.texts[:, 0] / self.pairs.of_step.mean_text_length


@runtime_checkable
class PairObjective(Protocol):
    """An objective of pairs of completions, a line in `OBJECTIVES` and in `OBJECTIVE_NAMES` as any other."""

    names: tuple[str, ...]

    def weight(self, batch: MicroBatch) -> int:
        """What this micro-batch adds to the divisor of the step's sums, as in `Objective`."""
        ...

    def sums_of_pairs(self, scores: PairScores) -> Sums:
        """Sums of the micro-batch, of numbers that are the same on all ranks that share it."""
        ...


AnyObjective = Objective | LogitsObjective | PairObjective | SentenceObjective


TIE = 1e-6
"""Share of log-probabilities that their rounding in fp32 may be."""


def _preferred(margins: Tensor, scores: PairScores) -> Tensor:
    """[P]: 1 where the chosen completion has the larger reward, 0 where the rejected one has, 1/2 where they are tied.

    Rewards relative to a reference are tied where both completions are as probable as in the reference, except
    for rounding: while the policy equals it, each sign is that of noise, and another in each layout.
    """
    of_margins = (margins.sign() + 1) / 2
    if scores.pairs.reference is None:
        return of_margins
    log_probs = scores.log_probs.detach()
    is_same = ((log_probs - scores.pairs.reference).abs() <= TIE * log_probs.abs()).all(1)
    return of_margins.masked_fill(is_same, 0.5)


class Pairwise:
    """Base of the objectives of a chosen and a rejected completion: `losses` and `rewards` are theirs."""

    names: tuple[str, ...] = (
        LOSS,
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
        "logps/chosen",
        "logps/rejected",
    )

    def losses(self, scores: PairScores) -> Tensor:
        """[P]: the loss of each pair."""
        raise NotImplementedError

    def rewards(self, scores: PairScores) -> Tensor:
        """[P, 2]: what the objective takes for the reward of each completion, for reports."""
        raise NotImplementedError

    def weight(self, batch: MicroBatch) -> int:
        """Number of pairs in the micro-batch."""
        assert batch.pairs is not None
        return len(batch.pairs.labels)

    def sums_of_pairs(self, scores: PairScores) -> Sums:
        """The sum of the losses, and of what is reported: each becomes a mean over the pairs of the global batch."""
        chosen, rejected = self.rewards(scores).detach().unbind(1)
        log_probs = scores.log_probs.detach().sum(0)
        reports = (
            chosen.sum(),
            rejected.sum(),
            (chosen - rejected).sum(),
            _preferred(chosen - rejected, scores).sum(),
            log_probs[0],
            log_probs[1],
        )
        return {LOSS: self.losses(scores).sum(), **dict(zip(self.names[1:], reports, strict=True))}


def pair_scores(token_losses: Tensor, batch: MicroBatch, cp: Axis) -> PairScores:
    """[S/cp, B] losses of the tokens of a rank -> the log-probabilities of whole completions, equal on all cp ranks.

    All-reduce over cp forward, identity backward: each rank's gradient is that of its own tokens.
    """
    pairs = batch.pairs
    assert pairs is not None, "the batch has no pairs of completions"
    num_pairs = len(pairs.labels)
    log_probs = -token_losses.float().flatten()
    both = torch.stack((log_probs * batch.loss_mask.t().flatten(), log_probs), dim=1)  # of completions, of texts
    places = pairs.of_labels.t().flatten()
    sums = both.new_zeros(2 * num_pairs + 1, 2).index_add(0, places, both)
    sums = comm.reduce_from(sums, cp)[:-1].view(num_pairs, 2, 2)
    return PairScores(sums[..., 0], sums[..., 1], pairs)


def counted_once(sums: Sums, cp: Axis) -> Sums:
    """Sums that all cp ranks hold, for adding up over ranks: zeros with a gradient on all ranks but the first."""
    if cp.is_first:
        return sums
    return {name: value - value.detach() for name, value in sums.items()}
