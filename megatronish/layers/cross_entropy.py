"""What is the loss of each token when the vocabulary is shared by the ranks of tp?

No rank ever sees the logits of another: the maximum, the sum of exponentials and the target's logit are enough, one
number a token each (ops/cross_entropy.py). Rows of padding do not take part, so the loss does not depend on how much of
it a tp size asks for.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatronish import comm
from megatronish.mesh import Axis
from megatronish.ops.cross_entropy import cross_entropy_gradient_, cross_entropy_statistics


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, *, vocab_size: int, tp: Axis) -> Tensor:
    """[S, B, V/tp], [S, B] -> [S, B] in fp32: -log softmax of each label, over the true vocabulary.

    The logits are used up: the forward may overwrite them, and the backward hands their memory on as their gradient, to
    which it then belongs.
    """
    return _CrossEntropy.apply(logits, labels, vocab_size, tp)


class _CrossEntropy(torch.autograd.Function):
    """All the tensors here but the logits hold one number a token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, tp: Axis) -> Tensor:
        # In place, and `mark_dirty` is not needed, as nothing else reads them.
        flat, flat_labels = logits.detach().flatten(0, -2).contiguous(), labels.flatten()
        rows = flat.shape[-1]
        first = tp.rank * rows
        num_true = min(max(vocab_size - first, 0), rows)
        mine, total, target = cross_entropy_statistics(flat, flat_labels, first=first, num_true=num_true)
        maximum = comm.all_reduce(mine.clone(), tp, "max")
        # A rank's exponentials are relative to its own maximum.
        total, target = comm.all_reduce(torch.stack((total * (mine - maximum).exp_(), target)), tp).unbind()
        ctx.save_for_backward(flat, flat_labels, mine, total * (maximum - mine).exp_())
        ctx.shape, ctx.first, ctx.num_true = logits.shape, first, num_true
        return (total.log() - (target - maximum)).view_as(labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        flat, labels, maximum, total = ctx.saved_tensors
        grad = grads[0].flatten()
        cross_entropy_gradient_(flat, labels, maximum, grad / total, grad, first=ctx.first, num_true=ctx.num_true)
        torch.autograd.graph.increment_version(flat)  # for a second backward to find out: kernels do not
        return flat.view(ctx.shape), None, None, None
