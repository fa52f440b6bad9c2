"""Preference objectives, DPO, IPO, CPO, SimPO, ORPO and KTO: formulas over log-probabilities of completions (pairs.py).

DPO and IPO take the log-ratio of chosen and rejected, by the model and by its reference, as a classifier of pairs:
Rafailov et al. 2023 (arXiv:2305.18290), Azar et al. 2023 (arXiv:2310.12036) for IPO, Chowdhury et al. 2024
(arXiv:2403.00409) for robust, Zhao et al. 2023 (arXiv:2305.10425) for hinge.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatronish.model.batch import MicroBatch
from megatronish.objectives.objective import LOSS, Metrics, Sums
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


# CPO and SimPO: preference losses without a reference model.
#
# Xu et al. 2024 (arXiv:2401.08417) for CPO, Meng et al. 2024 (arXiv:2405.14734) for SimPO.


class CPO(Pairwise):
    """Contrastive preference optimisation: DPO with an even reference, and the loss of the chosen tokens."""

    def __init__(self, *, beta: float, label_smoothing: float = 0.0, cpo_alpha: float | None = None) -> None:
        self.beta, self.label_smoothing, self.alpha = beta, label_smoothing, 1.0 if cpo_alpha is None else cpo_alpha

    def losses(self, scores: PairScores) -> Tensor:
        """[P]: of the difference of the log-probabilities, plus alpha times the chosen tokens' loss."""
        rewards = self.rewards(scores)
        losses = smoothed(rewards[:, 0] - rewards[:, 1], self.label_smoothing)
        return losses + self.alpha * scores.chosen_loss if self.alpha else losses

    def rewards(self, scores: PairScores) -> Tensor:
        """[P, 2]: beta times the log-probabilities."""
        return self.beta * scores.log_probs


class SimPO(Pairwise):
    """Simple preference optimisation: means over tokens, and a margin; with alpha the loss of the chosen tokens too."""

    def __init__(
        self, *, beta: float, simpo_gamma: float = 0.5, label_smoothing: float = 0.0, cpo_alpha: float | None = None
    ) -> None:
        self.beta, self.gamma, self.label_smoothing, self.alpha = beta, simpo_gamma, label_smoothing, cpo_alpha or 0.0

    def losses(self, scores: PairScores) -> Tensor:
        """[P]: of the difference of the mean log-probabilities less the margin."""
        rewards = self.rewards(scores)
        losses = smoothed(rewards[:, 0] - rewards[:, 1] - self.gamma, self.label_smoothing)
        return losses + self.alpha * scores.chosen_loss if self.alpha else losses

    def rewards(self, scores: PairScores) -> Tensor:
        """[P, 2]: beta times the means of the tokens' log-probabilities."""
        return self.beta * scores.means


# ORPO: the loss of the chosen text and the odds ratio of chosen and rejected, without a reference model.
#
# Hong et al. 2024 (arXiv:2403.07691).


class ORPO(Pairwise):
    """Odds ratio preference optimisation. `beta` is the lambda of its paper."""

    def __init__(self, *, beta: float) -> None:
        self.beta = beta

    def losses(self, scores: PairScores) -> Tensor:
        """[P]: the loss of the tokens of prompt and chosen, and beta times that of the odds ratio."""
        chosen, rejected = (_log_odds(mean) for mean in scores.means.unbind(1))
        return scores.chosen_text_loss - self.beta * F.logsigmoid(chosen - rejected)

    def rewards(self, scores: PairScores) -> Tensor:
        """[P, 2]: beta times the means of the tokens' log-probabilities."""
        return self.beta * scores.means


def _log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p < 0. expm1 is exact near p = 1, and so is log1p near p = 0."""
    is_likely = log_p > -0.6931
    # Of the branch that is not taken, the gradient must be finite, too: it is multiplied by zero.
    likely, unlikely = log_p.where(is_likely, log_p.new_tensor(-0.5)), log_p.where(~is_likely, log_p.new_tensor(-1.0))
    return log_p - torch.where(is_likely, (-torch.expm1(likely)).log(), torch.log1p(-unlikely.exp()))


# KTO: completions that are said to be wanted or not, compared with how far the model has moved from its reference.
#
# Ethayarajh et al. 2024 (arXiv:2402.01306). The first completion of a pair is the labelled one. The second has the
# same prompt and a completion of another record: its log-ratio, a mean over the pairs of the global batch and not
# below zero, is the point of comparison z (`StepNumbers.kl`), which a pass before the step computes and no gradient
# goes through.

_CHOSEN, _REJECTED = "completions/chosen", "completions/rejected"


class KTO:
    """Kahneman-Tversky optimisation, a `PairObjective`."""

    names: tuple[str, ...] = (
        LOSS,
        "rewards/chosen",
        "rewards/rejected",
        "logps/chosen",
        "logps/rejected",
        "kl",
        _CHOSEN,
        _REJECTED,
    )

    def __init__(self, *, beta: float, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> None:
        self.beta, self.desirable, self.undesirable = beta, desirable_weight, undesirable_weight

    def weight(self, batch: MicroBatch) -> int:
        """Number of labelled completions."""
        assert batch.pairs is not None
        return len(batch.pairs.labels)

    def sums_of_pairs(self, scores: PairScores) -> Sums:
        """Sums of the losses, and of wanted and unwanted completions each those of rewards and log-probabilities."""
        wanted, ratios, kl = scores.pairs.labels, scores.log_ratios[:, 0], scores.pairs.of_step.kl
        losses = torch.where(
            wanted,
            self.desirable * (1 - torch.sigmoid(self.beta * (ratios - kl))),
            self.undesirable * (1 - torch.sigmoid(self.beta * (kl - ratios))),
        )
        rewards, log_probs = self.beta * ratios.detach(), scores.log_probs[:, 0].detach()
        return {
            LOSS: losses.sum(),
            "rewards/chosen": (rewards * wanted).sum(),
            "rewards/rejected": (rewards * ~wanted).sum(),
            "logps/chosen": (log_probs * wanted).sum(),
            "logps/rejected": (log_probs * ~wanted).sum(),
            "kl": log_probs.new_tensor(kl) * len(wanted),
            _CHOSEN: wanted.sum().float(),
            _REJECTED: (~wanted).sum().float(),
        }

    def reported(self, metrics: Metrics) -> Metrics:
        """Means over the wanted and over the unwanted completions; the margin where a step has both."""
        reported = {name: metrics[name] for name in (LOSS, "kl")}
        for kind, number in (("chosen", metrics[_CHOSEN]), ("rejected", metrics[_REJECTED])):
            if number > 0:
                reported |= {name: metrics[name] / number for name in (f"rewards/{kind}", f"logps/{kind}")}
        if {"rewards/chosen", "rewards/rejected"} <= reported.keys():
            reported["rewards/margins"] = reported["rewards/chosen"] - reported["rewards/rejected"]
        return reported
