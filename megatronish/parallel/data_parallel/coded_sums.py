"""Sums of gradients that are sent as codes: qgZ of ZeRO++ (Wang et al. 2023, arXiv:2306.10209, section 3.3).

In the place of a reduce-scatter, each rank sends every other rank the codes of the part that it keeps, in int8 or int4
with a scale for each block of 128 elements (parallel/block_codes.py): one all-to-all. The receiver adds up in fp32, in
the order of ranks, its own term as it is. So an element of a sum is off by at most

    sum over the other ranks of the largest magnitude in its block / (2 q),        q = 127 or 7

and all that use the sum use the same bits of it, as one rank makes it. Blocks begin and end with a parameter's elements
on a rank. Vectors (norms, biases) are small, and summed exactly: in a block with elements of a matrix they would be
rounded to nothing.

What is rounded are the terms of each rank, which depend on the layout. So parallel is not equal to serial here; the
bound is what holds.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatronish.parallel import comm
from megatronish.parallel.block_codes import add_decoded, encode
from megatronish.parallel.bucketing import CODE_BLOCK, bytes_of_block, rounded_up
from megatronish.parallel.mesh import Axis


class PendingSum:
    """Exchange of codes in progress; `wait` adds them up, in the place of what this rank keeps."""

    def __init__(self, pending: comm.Pending, own: Sequence[Tensor], axis: Axis, dtype: str) -> None:
        self._pending, self._own, self._axis, self._dtype = pending, own, axis, dtype

    def wait(self) -> Sequence[Tensor]:
        """[s] each: the sums of this rank's parts, in fp32."""
        arrived = self._pending.wait().view(self._axis.size, -1, bytes_of_block(self._dtype))
        first = 0
        for own in self._own:
            mine = _blocks(own)
            total = torch.zeros_like(mine)
            for rank, codes in enumerate(arrived[:, first : first + len(mine)]):
                if rank == self._axis.rank:
                    total += mine
                else:
                    add_decoded(codes, self._dtype, total)
            own.copy_(total.view(-1)[: len(own)])
            first += len(mine)
        return self._own


def start_coded_sum(parts: Sequence[Tensor], axis: Axis, dtype: str, *, own: Sequence[Tensor]) -> PendingSum:
    """Start the sums over the axis of some tensors, fp32 [n, s], of which rank i keeps row i.

    `own` are this rank's rows, [s] each, which the sums overwrite. Each row has blocks of its own.
    """
    blocks = [rounded_up(part.shape[1], CODE_BLOCK) // CODE_BLOCK for part in parts]
    codes = torch.empty(axis.size, sum(blocks), bytes_of_block(dtype), dtype=torch.uint8, device=parts[0].device)
    for part, columns in zip(parts, codes.split(blocks, dim=1), strict=True):
        for row, into in zip(part, columns, strict=True):
            encode(_blocks(row), dtype, into)
    rows = [sum(blocks)] * axis.size
    pending = comm.start_all_to_all_rows(codes.flatten(0, 1), axis, sent=rows, received=rows)
    return PendingSum(pending, own, axis, dtype)


def _blocks(rows: Tensor) -> Tensor:
    """[..., s] -> [n, CODE_BLOCK], with zeros at the end of each row that does not fill its blocks."""
    lacking = -rows.shape[-1] % CODE_BLOCK
    return (F.pad(rows, (0, lacking)) if lacking else rows).reshape(-1, CODE_BLOCK)
