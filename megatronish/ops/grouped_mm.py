"""Grouped matrix products: rows sorted by group, and one weight for each group (the experts of a rank).

    forward            y_e  = x_e W_e^T       x [N, in], W [E, out, in]  -> [N, out]
    input gradient     dx_e = dy_e W_e        dy [N, out]                -> [N, in]
    weight gradient    dW_e = dy_e^T x_e                                 -> [E, out, in]

`torch.nn.functional.grouped_mm` computes each in one call where it can: it takes neither fp64 nor strides that are no
multiple of 16 bytes, and on CUDA its fast path is bf16 on SM 80 and later. Elsewhere a loop over the groups that have
rows computes the same. A group without rows has a zero weight gradient. Groups may have a bias, too, [E, out].
"""

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from megatronish.ops.gradient_sum import GradientSum, sums_unrounded


class Groups:
    """Rows of each group: `ends` int32 [E] (the running sums) on the device of the rows, `sizes` on the host.

    Rows behind the last end are of no group: no product reads them, and what it returns in their places means nothing.
    Sizes that are not given are read from the device once they are asked for: a GPU's host waits then. torch's operator
    does not ask.
    """

    def __init__(self, ends: Tensor, sizes: tuple[int, ...] | None = None) -> None:
        self.ends, self._sizes = ends, sizes

    @classmethod
    def of(cls, sizes: tuple[int, ...], device: torch.device) -> "Groups":
        """Groups of rows that lie one after the other."""
        return cls(torch.tensor(list(accumulate(sizes)), dtype=torch.int32).to(device, non_blocking=True), sizes)

    @property
    def has_sizes(self) -> bool:
        """Whether the host knows the sizes, without waiting for them."""
        return self._sizes is not None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each group."""
        if self._sizes is None:
            self._sizes = tuple(self.ends.diff(prepend=self.ends.new_zeros(1)).tolist())
        return self._sizes

    def slices(self) -> list[tuple[int, slice]]:
        """(number of the group, its rows) of every group that has rows."""
        ends = list(accumulate(self.sizes))
        return [(e, slice(end - size, end)) for e, (size, end) in enumerate(zip(self.sizes, ends, strict=True)) if size]


def grouped_mm(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """[N, in], [E, out, in] -> [N, out]."""
    if _fits(x, weight):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=groups.ends)
    y = x.new_empty(x.shape[0], weight.shape[1])
    for e, rows in groups.slices():
        torch.mm(x[rows], weight[e].t(), out=y[rows])
    return y


def grouped_input_gradient(dy: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """[N, out], [E, out, in] -> [N, in]."""
    if _fits(dy, weight):
        return F.grouped_mm(dy, weight, offs=groups.ends)
    dx = dy.new_empty(dy.shape[0], weight.shape[2])
    for e, rows in groups.slices():
        torch.mm(dy[rows], weight[e], out=dx[rows])
    return dx


def grouped_weight_gradient(dy: Tensor, x: Tensor, groups: Groups) -> Tensor:
    """[N, out], [N, in] -> [E, out, in]."""
    if _fits(dy, x):
        dweight = F.grouped_mm(dy.t(), x, offs=groups.ends)
        _zero_without_rows(dweight, groups)
        return dweight
    dweight = dy.new_zeros(len(groups.sizes), dy.shape[1], x.shape[1])
    for e, rows in groups.slices():
        torch.mm(dy[rows].t(), x[rows], out=dweight[e])
    return dweight


def _zero_without_rows(dweight: Tensor, groups: Groups) -> None:
    """Zeros for groups without rows, where torch leaves what was in memory on sm_100 (pytorch issue 172439)."""
    if groups.has_sizes:
        for e, size in enumerate(groups.sizes):
            if not size:
                dweight[e].zero_()
    elif dweight.is_cuda and torch.cuda.get_device_capability(dweight.device) >= (10, 0):  # without asking for sizes
        is_empty = groups.ends.diff(prepend=groups.ends.new_zeros(1)) == 0
        dweight.masked_fill_(is_empty[:, None, None], 0)


def add_grouped_weight_gradient(
    to: GradientSum, dy: Tensor, x: Tensor, groups: Groups, *, is_large: bool = False
) -> None:
    """Add dy_e^T x_e to an fp32 sum [E, out, in] in place, group by group: no [E, out, in] in between in fp32.

    No grouped product of 16-bit rows has a result in fp32 (torch 2.13), so theirs is rounded and then added. Only of
    matrices that are large, where sizes are known, GEMMs of a GPU add to the sum, one for each group.
    """
    by_group = is_large and groups.has_sizes and sums_unrounded(dy.device.type, dy.dtype)
    if dy.dtype != to.total.dtype and not by_group:
        to.add(grouped_weight_gradient(dy, x, groups))
        return
    if to.is_new:
        for e, size in enumerate(groups.sizes):
            if not size:
                to.total[e].zero_()
    for e, rows in groups.slices():
        to._replace(total=to.total[e]).add_product(dy[rows].t(), x[rows])


def add_grouped_bias(y: Tensor, bias: Tensor, groups: Groups) -> None:
    """Add to each row of y [N, out], in place, the bias of its group, [E, out]."""
    for e, rows in groups.slices():
        y[rows] += bias[e]


def grouped_bias_gradient(dy: Tensor, groups: Groups) -> Tensor:
    """[N, out] -> [E, out], the sum of the rows of each group."""
    dbias = dy.new_zeros(len(groups.sizes), dy.shape[1])
    for e, rows in groups.slices():
        torch.sum(dy[rows], 0, out=dbias[e])
    return dbias


def _fits(rows: Tensor, other: Tensor) -> bool:
    """Whether torch's operator takes both, which are contiguous: dtype, last dims and addresses, multiples of 16 bytes.

    Storages begin at such addresses; a view of a flat buffer may begin anywhere in it.
    """
    if rows.shape[0] == 0 or rows.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if rows.device.type == "cuda" and (
        rows.dtype != torch.bfloat16 or torch.cuda.get_device_capability(rows.device) < (8, 0)
    ):
        return False
    element = rows.element_size()
    sizes = (rows.shape[-1], *other.shape[-2:]) if other.dim() == 3 else (rows.shape[-1], other.shape[-1])
    offsets = (rows.storage_offset(), other.storage_offset())
    return all(number * element % 16 == 0 for number in (*sizes, *offsets))
