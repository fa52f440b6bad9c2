"""What is the loss of each token when the vocabulary is shared by the ranks of tp?

No rank ever sees the logits of another: the maximum, the sum of exponentials and the target's logit are enough, one
number a token each. Rows of padding do not take part, so the loss does not depend on how much of it a tp size asks for.

The logits are the largest tensor of a step, so there is only one of them. In fp32 their exponentials take their place
in the forward, and their gradient in the backward. In bf16 or fp16 that would round the exponentials, so the logits
stay, the exponentials are computed in fp32 for a few tokens at a time, in the forward for their sum and once more in
the backward, and there the gradient takes the logits' place.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatronish import comm
from megatronish.mesh.groups import Axis

CHUNK = 2**20  # elements whose exponentials stand beside 16-bit logits: 4 MB, which stay in a cache (docs/LOG.md)


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, *, vocab_size: int, tp: Axis) -> Tensor:
    """[S, B, V/tp], [S, B] -> [S, B] in fp32: -log softmax of each label, over the true vocabulary.

    The logits are used up: the forward overwrites them, and the backward hands their memory on as their gradient, to
    which it then belongs.
    """
    return _CrossEntropy.apply(logits, labels, vocab_size, tp)


class _CrossEntropy(torch.autograd.Function):
    """Of all the tensors here, all but `flat` and a chunk of exponentials hold one number a token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, tp: Axis) -> Tensor:
        flat = logits.detach().flatten(0, -2)
        rows = flat.shape[-1]
        first = tp.rank * rows
        num_true = min(max(vocab_size - first, 0), rows)
        # In place, and `mark_dirty` is not needed, as nothing else reads them.
        flat[:, num_true:] = -torch.inf
        local = labels.flatten() - first
        elsewhere = (local < 0) | (local >= num_true)
        local = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        maximum = comm.all_reduce(flat.amax(-1).float(), tp, "max")
        target = flat.gather(-1, local).squeeze(-1).float().sub_(maximum).masked_fill_(elsewhere, 0.0)
        total = torch.empty_like(maximum)
        for tokens, exponentials in _exponentials(flat, maximum):
            total[tokens] = exponentials.sum(-1)
        target, total = comm.all_reduce(torch.stack((target, total)), tp).unbind()
        ctx.save_for_backward(flat, maximum, total, local, elsewhere)
        ctx.shape = logits.shape
        return (total.log() - target).view_as(labels)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flat, maximum, total, local, elsewhere = ctx.saved_tensors
        grad = grads[0].flatten()
        factor, at_target = (grad / total).unsqueeze(-1), -grad.masked_fill(elsewhere, 0.0).unsqueeze(-1)
        if flat.dtype == torch.float32:
            flat.mul_(factor).scatter_add_(-1, local, at_target)
        else:
            for tokens, exponentials in _exponentials(flat, maximum):
                dlogits = exponentials.mul_(factor[tokens]).scatter_add_(-1, local[tokens], at_target[tokens])
                flat[tokens] = dlogits
        return flat.view(ctx.shape), None, None, None


def _exponentials(flat: Tensor, maximum: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """[T, V/tp], [T] -> exp(logit - maximum) in fp32, of some tokens after the others: until the next ones are asked.

    fp32 logits are overwritten with theirs, all at once.
    """
    if flat.dtype == torch.float32:
        yield slice(None), flat.sub_(maximum.unsqueeze(-1)).exp_()
        return
    num_tokens, rows = flat.shape
    size = max(1, CHUNK // rows)
    chunk = torch.empty(min(size, num_tokens), rows, dtype=torch.float32, device=flat.device)
    for start in range(0, num_tokens, size):
        tokens = slice(start, min(start + size, num_tokens))
        exponentials = chunk[: tokens.stop - start].copy_(flat[tokens])
        yield tokens, exponentials.sub_(maximum[tokens].unsqueeze(-1)).exp_()
