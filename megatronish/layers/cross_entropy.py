"""Vocab-parallel cross entropy: the loss of each token from logits that are cut over tensor-parallel ranks.

No rank receives the logits of another. The maximum, the sum of exponentials and the target's logit are enough, one
number a token each (ops/cross_entropy.py). Padding of the vocabulary takes no part, so the loss does not depend on how
much padding a tp size needs.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatronish.ops.cross_entropy import cross_entropy_gradient_, cross_entropy_statistics
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, *, vocab_size: int, tp: Axis) -> Tensor:
    """[S, B, V/tp], [S, B] -> [S, B] in fp32: -log softmax of each label, over the true vocabulary.

    The logits are used up: the forward may overwrite them, and the backward hands their memory on as their gradient, to
    which it then belongs.
    """
    return _CrossEntropy.apply(logits, labels, vocab_size, tp)[0]


class LossesAndNormalizers(NamedTuple):
    """[S, B] in fp32: the loss of each token, and the log of the sum of exponentials of its logits."""

    losses: Tensor
    log_normalizers: Tensor


class VocabParallelLogits(NamedTuple):
    """Logits [S, B, V/tp] of all tokens: this tp rank's rows of the vocabulary, of which the last ones may be padding.

    `vocab_size` is the true vocabulary.
    """

    values: Tensor
    vocab_size: int
    tp: Axis

    def losses_and_normalizers(self, labels: Tensor) -> LossesAndNormalizers:
        """[S, B] -> the cross entropy of each label, and the log-normaliser. Both can be differentiated.

        The logits are used up, as in `vocab_parallel_cross_entropy`.
        """
        return LossesAndNormalizers(*_CrossEntropy.apply(self.values, labels, self.vocab_size, self.tp))


class _CrossEntropy(torch.autograd.Function):
    """Softmax and negative log-likelihood in one pass. All tensors but the logits hold one number a token, [S B]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, tp: Axis) -> tuple[Tensor, Tensor]:
        # This rank's rows of the vocabulary, of which the last ones may be padding. The kernel may overwrite the logits
        # [S B, V/tp]; `mark_dirty` is not needed, as nothing else reads them.
        flat, flat_labels = logits.detach().flatten(0, -2).contiguous(), labels.flatten()
        rows = flat.shape[-1]
        first = tp.rank * rows
        num_true = min(max(vocab_size - first, 0), rows)
        mine, total, target = cross_entropy_statistics(flat, flat_labels, first=first, num_true=num_true)
        # The maximum over the whole vocabulary comes first. Each rank's sum of exponentials is relative to the maximum
        # of its own rows, and is scaled to the common one before the sums over tp.
        maximum = comm.all_reduce(mine.clone(), tp, "max")
        total, target = comm.all_reduce(torch.stack((total * (mine - maximum).exp_(), target)), tp).unbind()
        ctx.save_for_backward(flat, flat_labels, mine, total * (maximum - mine).exp_())
        ctx.shape, ctx.first, ctx.num_true = logits.shape, first, num_true
        ctx.set_materialize_grads(False)
        logs = total.log()
        return (logs - (target - maximum)).view_as(labels), (logs + maximum).view_as(labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        # The gradient of a loss is softmax - one-hot, that of a log-normaliser softmax: each times what comes in, and
        # written over the logits: [S B, V/tp]. The total was scaled back to this rank's maximum in the forward, so that
        # the kernel needs no other.
        flat, labels, maximum, total = ctx.saved_tensors
        of_losses, of_normalizers = grads  # None for an output that nothing was computed from
        on_label = (torch.zeros_like(of_normalizers) if of_losses is None else of_losses).flatten()
        on_softmax = on_label if of_normalizers is None else on_label + of_normalizers.flatten()
        cross_entropy_gradient_(
            flat, labels, maximum, on_softmax / total, on_label, first=ctx.first, num_true=ctx.num_true
        )
        torch.autograd.graph.increment_version(flat)  # for a second backward to find out: kernels do not
        return flat.view(ctx.shape), None, None, None
