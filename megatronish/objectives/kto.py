"""KTO: completions that are said to be wanted or not, compared with how far the model has moved from its reference.

Ethayarajh et al. 2024 (arXiv:2402.01306). The first completion of a pair is the labelled one. The second has the same
prompt and a completion of another record: its log-ratio, a mean over the pairs of the global batch and not below zero,
is the point of comparison z (`StepNumbers.kl`), which a pass before the step computes and no gradient goes through.
"""

import torch

from megatronish.model.batch import MicroBatch
from megatronish.objectives.objective import LOSS, Metrics, Sums
from megatronish.objectives.pairs import PairScores

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
