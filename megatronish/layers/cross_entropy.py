"""What is the loss of each token when the vocabulary is shared by the ranks of tp?

No rank ever sees the logits of another: the maximum, the sum of exponentials and the target's logit are enough, one
number a token each. Rows of padding do not take part, so the loss does not depend on how much of it a tp size asks for.
"""

from typing import Any

import torch
from torch import Tensor

from megatronish import comm
from megatronish.mesh.groups import Axis


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, *, vocab_size: int, tp: Axis) -> Tensor:
    """[S, B, V/tp], [S, B] -> [S, B] in fp32: -log softmax of each label, over the true vocabulary.

    The logits are used up: they are overwritten, forward and backward.
    """
    return _CrossEntropy.apply(logits, labels, vocab_size, tp)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, tp: Axis) -> Tensor:
        rows = logits.shape[-1]
        first = tp.rank * rows
        num_true = min(max(vocab_size - first, 0), rows)
        # In place where the logits are fp32 already; `mark_dirty` is not needed, as nothing else reads them.
        exponentials = logits.detach().float()
        exponentials[..., num_true:] = -torch.inf
        maximum = comm.all_reduce(exponentials.amax(-1), tp, "max")
        exponentials.sub_(maximum.unsqueeze(-1))
        local = labels - first
        elsewhere = (local < 0) | (local >= num_true)
        local = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        target = exponentials.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0.0)
        total = exponentials.exp_().sum(-1)
        target, total = comm.all_reduce(torch.stack((target, total)), tp).unbind()
        ctx.save_for_backward(exponentials, total, local, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        exponentials, total, local, elsewhere = ctx.saved_tensors
        grad = grads[0]
        dlogits = exponentials.mul_((grad / total).unsqueeze(-1))
        dlogits.scatter_add_(-1, local, -grad.masked_fill(elsewhere, 0.0).unsqueeze(-1))
        return dlogits.to(ctx.dtype), None, None, None
