"""Cross entropy with a z-loss (Chowdhery et al. 2022, arXiv:2204.02311), an objective with two sums.

    python pretrain_gpt.py --plugin examples/plugins/z_loss.py --objective z_loss --objective-args coefficient=1e-3 ...

The z-loss is the squared log-normaliser of the softmax: it keeps logits from drifting away. The log line and
metrics.jsonl show it as `z_loss` next to the loss that is minimised.
"""

from megatronish.layers.vocabulary import VocabParallelLogits
from megatronish.model.batch import MicroBatch
from megatronish.objectives.objective import LOSS, Sums
from megatronish.plugins import register_objective


class ZLoss:
    """Sums over the loss tokens. They add up over micro-batches and ranks, and are divided once."""

    names: tuple[str, ...] = (LOSS, "z_loss")  # the same for every micro-batch, what is minimised first

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def weight(self, batch: MicroBatch) -> int:
        """What the sums of a step are divided by, added up over its micro-batches."""
        return batch.num_loss_tokens

    def sums_of_logits(self, logits: VocabParallelLogits, batch: MicroBatch) -> Sums:
        """An objective that needs no more than the loss of each token has `sums(token_losses, batch)` instead."""
        losses, log_normalizers = logits.losses_and_normalizers(batch.labels.t().contiguous())
        mask = batch.loss_mask.t()
        z_loss = self.coefficient * (log_normalizers.square() * mask).sum()
        return {LOSS: (losses * mask).sum() + z_loss, "z_loss": z_loss}


register_objective("z_loss", ZLoss, options={"coefficient": 1e-4})
