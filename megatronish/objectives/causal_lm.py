"""Causal language modelling: the sum of the losses of unmasked tokens, over their number."""

from torch import Tensor

from megatronish.model.batch import MicroBatch
from megatronish.objectives.objective import LOSS, Sums


class CausalLM:
    """Next-token prediction, an `Objective`. `batch.loss_mask` says which predictions count."""

    names: tuple[str, ...] = (LOSS,)

    def weight(self, batch: MicroBatch) -> int:
        """Number of unmasked predictions of a micro-batch."""
        return batch.num_loss_tokens

    def sums(self, token_losses: Tensor, batch: MicroBatch) -> Sums:
        """[S/cp, B] -> the sum over the unmasked predictions."""
        return {LOSS: (token_losses * batch.loss_mask.t()).sum()}
