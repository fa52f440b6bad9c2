"""Soft cap of scores or logits, c tanh(x / c): small values pass, large ones come no further than c (Gemma 2)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """[...] -> [...]: c tanh(x / c), in the dtype of x. What is kept for the backward is tanh(x / c)."""
    return _SoftCap.apply(x, cap)


class _SoftCap(torch.autograd.Function):
    """The product with c is a tensor of its own: the cross-entropy of logits overwrites what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        tanh = (x / cap).tanh_()
        ctx.save_for_backward(tanh)
        return tanh * cap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (tanh,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(grads[0], tanh), None  # one kernel: no tensor besides the result
