"""DPO and IPO: the log-ratio of chosen and rejected, by the model and by its reference, as a classifier of pairs.

Rafailov et al. 2023 (arXiv:2305.18290), Azar et al. 2023 (arXiv:2310.12036) for IPO, Chowdhury et al. 2024
(arXiv:2403.00409) for robust, Zhao et al. 2023 (arXiv:2305.10425) for hinge.
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from megatronish.objectives.pairs import PairScores, Pairwise


class DPO(Pairwise):
    """Direct preference optimisation, with the losses of --dpo-loss-type."""

    def __init__(
        self,
        *,
        beta: float,
        dpo_loss_type: Literal["sigmoid", "hinge", "robust", "ipo"] = "sigmoid",
        label_smoothing: float = 0.0,
    ) -> None:
        self.beta, self.loss_type, self.label_smoothing = beta, dpo_loss_type, label_smoothing

    def losses(self, scores: PairScores) -> Tensor:
        """[P]: of the difference h of the log-ratios of chosen and rejected."""
        if self.loss_type == "ipo":  # per token, as its authors ran it: sums would grow with the lengths
            of_tokens = scores.log_ratios / scores.pairs.lengths
            return (of_tokens[:, 0] - of_tokens[:, 1] - 1 / (2 * self.beta)).square()
        h = self.beta * (scores.log_ratios[:, 0] - scores.log_ratios[:, 1])
        if self.loss_type == "hinge":
            return (1 - h).relu()
        if self.loss_type == "robust":  # unbiased where this part of the labels is swapped
            return smoothed(h, -self.label_smoothing, keep=1 - self.label_smoothing) / (1 - 2 * self.label_smoothing)
        return smoothed(h, self.label_smoothing)

    def rewards(self, scores: PairScores) -> Tensor:
        """[P, 2]: beta times the log-ratios."""
        return self.beta * scores.log_ratios


class IPO(DPO):
    """DPO with the squared loss of IPO, under a name of its own."""

    def __init__(self, *, beta: float) -> None:
        super().__init__(beta=beta, dpo_loss_type="ipo")


def smoothed(h: Tensor, swapped: float, *, keep: float | None = None) -> Tensor:
    """-log sigmoid(h), and with weight `swapped` that of -h, the loss of a swapped pair; `keep` is 1 - swapped."""
    keep = 1 - swapped if keep is None else keep
    return -keep * F.logsigmoid(h) - swapped * F.logsigmoid(-h)
