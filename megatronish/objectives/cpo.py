"""CPO and SimPO: preference losses without a reference model.

Xu et al. 2024 (arXiv:2401.08417) for CPO, Meng et al. 2024 (arXiv:2405.14734) for SimPO.
"""

from torch import Tensor

from megatronish.objectives.dpo import smoothed
from megatronish.objectives.pairs import PairScores, Pairwise


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
