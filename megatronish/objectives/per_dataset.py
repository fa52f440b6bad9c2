"""Losses of each data set: what an objective of token losses reports in addition, where data sets are mixed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatronish.model.batch import MicroBatch
from megatronish.objectives.objective import LOSS, Metrics, Objective, Sums


class PerDataset:
    """An objective whose loss is also reported as `loss/NAME` of each data set, a mean over its own trained tokens.

    Training is that of the objective: the sums added here are only reported.
    """

    def __init__(self, objective: Objective, datasets: Sequence[str]) -> None:
        self.objective, self.datasets = objective, list(datasets)
        self._losses = [f"{LOSS}/{name}" for name in datasets]
        self._tokens = [f"tokens/{name}" for name in datasets]
        self.names: tuple[str, ...] = (*objective.names, *self._losses, *self._tokens)

    def weight(self, batch: MicroBatch) -> int:
        """The divisor of the objective, which this one leaves as it is."""
        return self.objective.weight(batch)

    def sums(self, token_losses: Tensor, batch: MicroBatch) -> Sums:
        """[S/cp, B] -> the sums of the objective, and of each data set its loss and its trained tokens.

        The latter are zeros for a batch of other data, as that of a validation set with files of its own.
        """
        if batch.dataset_ids is None:
            none = token_losses.new_zeros((), dtype=torch.float32)
            return {**self.objective.sums(token_losses, batch), **dict.fromkeys([*self._losses, *self._tokens], none)}
        mask = batch.loss_mask.t().to(torch.float32).flatten()
        ids = batch.dataset_ids.t().flatten()
        losses = token_losses.detach().float().flatten() * mask
        sums = [losses.new_zeros(len(self.datasets)).index_add(0, ids, each) for each in (losses, mask)]
        of_each = zip([*self._losses, *self._tokens], torch.cat(sums).unbind(), strict=True)
        return {**self.objective.sums(token_losses, batch), **dict(of_each)}

    def reported(self, metrics: Metrics) -> Metrics:
        """A loss divided by the tokens of its data set; that of a set without a token in the step is left out."""
        reported = {name: value for name, value in metrics.items() if name not in (*self._losses, *self._tokens)}
        for loss, tokens in zip(self._losses, self._tokens, strict=True):
            if metrics[tokens] > 0:
                reported[loss] = metrics[loss] / metrics[tokens]
        return reported
