"""Gradients that add up in fp32 over the micro-batches of a step, and matrix products that write or add them there.

The first gradient of a step is written, so no pass fills the memory with zeros before it.

Where factors have 16 bits, a product of its own is rounded to 16, written, and read again by an addition that reads and
writes the sum: 2 + 2 + 4 + 4 bytes an element. A GEMM on CUDA adds to the sum in fp32 as it computes, 4 + 4 bytes and
one launch (the first of a step 4), and nothing is rounded in between. A CPU's has no such form.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class GradientSum(NamedTuple):
    """fp32 memory where a gradient adds up. If it `is_new` its values mean nothing yet: what comes now is written."""

    total: Tensor
    is_new: bool = False

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of any dtype."""
        if self.is_new:
            self.total.copy_(gradient)
        else:
            self.total.add_(gradient)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add a b, [m, k] x [k, n]. On a CPU a product of 16-bit factors is rounded to their dtype first."""
        if a.dtype == self.total.dtype:  # no memory for the product, and no other pass over the sum
            self.total.addmm_(a, b, beta=0 if self.is_new else 1)
        elif sums_unrounded(self.total.device.type, a.dtype):
            _add_unrounded(self.total, a, b, beta=0 if self.is_new else 1)
        else:
            self.add(a @ b)

    def filled(self) -> Tensor:
        """The sum, zero where nothing has come yet: for what adds to parts of it."""
        return self.total.zero_() if self.is_new else self.total


@cache
def sums_unrounded(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the GEMM of such a device adds products of factors of this 16-bit dtype to sums in fp32: tried once."""
    if device_type != "cuda":
        return False
    half = torch.zeros(16, 16, dtype=dtype, device=device_type)
    try:
        _add_unrounded(torch.zeros(16, 16, device=device_type), half, half, beta=1)
    except (AttributeError, RuntimeError, TypeError):  # a torch or a GPU that lacks it
        return False
    return True


def _add_unrounded(total: Tensor, a: Tensor, b: Tensor, *, beta: int) -> None:
    if total.device.type == "cpu":  # tests alone come here: the same sum, by copies of the factors
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)
    else:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)
