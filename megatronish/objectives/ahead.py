"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): further losses of an objective of token losses.

    loss + factor / M * sum over depths d of (sum of the losses of depth d / its predictions)

Each depth has predictions of its own number in a step: the ends of rows and of documents have none. Sums of a step are
divided once, by the predictions of the main loss, so a loss of depth d counts as often as the step has predictions of
the main loss for each of that depth. That is known before the step, from the data.
"""

import torch
from torch import Tensor

from megatronish.model.batch import MicroBatch
from megatronish.objectives.objective import LOSS, Metrics, Objective, ReportingObjective, Sums


class MultiTokenPrediction:
    """An objective of token losses, `Objective`, with the losses of `num_depths` layers that predict further tokens.

    What is reported as loss is that of the objective; the mean of depth d is `mtp_d_loss`.
    """

    def __init__(self, objective: Objective, *, num_depths: int, factor: float) -> None:
        self.objective, self.factor = objective, factor / num_depths
        self._losses = [f"mtp_{depth}_loss" for depth in range(1, num_depths + 1)]
        self._tokens = [f"mtp_{depth}_tokens" for depth in range(1, num_depths + 1)]
        self.names: tuple[str, ...] = (*objective.names, *self._losses, *self._tokens)

    def weight(self, batch: MicroBatch) -> int:
        """The divisor of the objective, which this one leaves as it is."""
        return self.objective.weight(batch)

    def sums(self, token_losses: Tensor, batch: MicroBatch) -> Sums:
        """[S/cp, B] -> the sums of the objective alone, in evaluation."""
        return self.objective.sums(token_losses, batch)

    def sums_ahead(self, losses: Tensor, batch: MicroBatch) -> tuple[Tensor, Sums]:
        """[1 + M, S/cp, B] -> what backward starts from, and the sums of the objective and of each depth."""
        ahead = batch.ahead
        assert ahead is not None and ahead.factors is not None, "the micro-batch has no tokens ahead"
        sums = self.objective.sums(losses[0], batch)
        mask = ahead.loss_mask.transpose(1, 2)
        of_depths = (losses[1:] * mask).sum((1, 2))
        total = sums[LOSS] + self.factor * (of_depths * ahead.factors).sum()
        counted = dict(zip(self._tokens, mask.sum((1, 2)).to(torch.float32).unbind(), strict=True))
        return total, {**sums, **dict(zip(self._losses, of_depths.unbind(), strict=True)), **counted}

    def reported(self, metrics: Metrics) -> Metrics:
        """The objective's metrics, and the mean of each depth; without one where nothing is predicted."""
        own = (*self._losses, *self._tokens)
        others = {name: value for name, value in metrics.items() if name not in own}
        if isinstance(self.objective, ReportingObjective):
            others = self.objective.reported(others)
        means = {
            loss: metrics[loss] / metrics[tokens]
            for loss, tokens in zip(self._losses, self._tokens, strict=True)
            if metrics[tokens] > 0
        }
        return others | means
