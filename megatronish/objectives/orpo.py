"""ORPO: the loss of the chosen text and the odds ratio of chosen and rejected, without a reference model.

Hong et al. 2024 (arXiv:2403.07691).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatronish.objectives.pairs import PairScores, Pairwise


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
