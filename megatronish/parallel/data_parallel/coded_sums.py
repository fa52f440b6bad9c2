"""Sums of gradients that are sent as codes: qgZ of ZeRO++ (Wang et al. 2023, arXiv:2306.10209, section 3.3).

In the place of a reduce-scatter, each rank sends every other rank the codes of the part that it keeps, in int8 or int4
with a scale for each block of 128 elements (ops/block_codes.py): one all-to-all. The receiver adds up in fp32, in the
order of ranks, its own term as it is. So an element of a sum is off by at most

    sum over the other ranks of the largest magnitude in its block / (2 q),        q = 127 or 7

and all that use the sum use the same bits of it, as one rank makes it. Blocks begin and end with a parameter's elements
on a rank. Vectors (norms, biases) are small, and summed exactly: in a block with elements of a matrix they would be
rounded to nothing.

What is rounded are the terms of each rank, which depend on the layout. So parallel is not equal to serial here; the
bound is what holds.
"""

import torch
from torch import Tensor

from megatronish.parallel import comm
from megatronish.parallel.block_codes import add_decoded, encoded
from megatronish.parallel.bucketing import CODE_BLOCK
from megatronish.parallel.mesh import Axis


class PendingSum:
    """Exchange of codes in progress; `wait` adds them up, in the place of what this rank keeps."""

    def __init__(self, pending: comm.Pending, own: Tensor, axis: Axis, dtype: str) -> None:
        self._pending, self._own, self._axis, self._dtype = pending, own, axis, dtype

    def wait(self) -> Tensor:
        """[size / n]: the sum of this rank's part, in fp32."""
        blocks = self._own.view(-1, CODE_BLOCK)
        total = torch.zeros_like(blocks)
        for rank, codes in enumerate(self._pending.wait().chunk(self._axis.size)):
            if rank == self._axis.rank:
                total += blocks
            else:
                add_decoded(codes, self._dtype, total)
        return self._own.copy_(total.view(-1))


def start_coded_sum(flat: Tensor, axis: Axis, dtype: str, *, own: Tensor) -> PendingSum:
    """Start the sum over the axis of flat, fp32 [n * s], for multiples s of CODE_BLOCK.

    `own` is this rank's part of it, [s], which is overwritten by the sum: a view, or a copy where flat is freed.
    """
    codes = encoded(flat.view(-1, CODE_BLOCK), dtype)
    rows = [len(codes) // axis.size] * axis.size
    return PendingSum(comm.start_all_to_all_rows(codes, axis, sent=rows, received=rows), own, axis, dtype)
