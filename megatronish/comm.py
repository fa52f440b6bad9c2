"""Which values cross between ranks, forward and backward? The only file that calls collectives.

Every function is handed the `Axis` it works on. On an axis of size one it hands its input back and sends nothing;
that shortcut stands here and nowhere else. Sequence-parallel shapes cut the sequence, dim 0, over tp.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatronish.mesh import Axis


class Pending:
    """A collective under way; `wait` returns its result. Holds what must not be freed meanwhile."""

    def __init__(self, result: Tensor, *works: dist.Work | None, source: Tensor | None = None) -> None:
        self._result, self._works, self._source = result, works, source

    def wait(self) -> Tensor:
        """The result, once it is there (on CUDA: once the current stream may use it)."""
        for work in self._works:
            if work is not None:
                work.wait()
        self._works, self._source = (), None
        return self._result


# torch 2.13 renamed both; 2.11 has the old names alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def start_all_reduce(x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Pending:
    """[...] -> [...], in place: every rank gets the sum (or maximum) over the axis."""
    if axis.size == 1:
        return Pending(x)
    return Pending(x, dist.all_reduce(x, _REDUCTIONS[op], group=axis.group, async_op=True))


def start_all_gather(x: Tensor, axis: Axis, *, into: Tensor | None = None) -> Pending:
    """[s, ...] -> [size * s, ...]: every rank gets the pieces of all, in the order of the axis.

    `into` is where they are put; x may be the part of it that is this rank's piece.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    whole = x.new_empty(axis.size * x.shape[0], *x.shape[1:]) if into is None else into
    return Pending(whole, _all_gather(whole, x, group=axis.group, async_op=True), source=x)


def start_reduce_scatter(x: Tensor, axis: Axis, *, into: Tensor | None = None) -> Pending:
    """[size * s, ...] -> [s, ...]: every rank gets its piece of the sum over the axis.

    `into` is where it is put; it may be the part of x that it is the sum of.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    piece = x.new_empty(x.shape[0] // axis.size, *x.shape[1:]) if into is None else into
    return Pending(piece, _reduce_scatter(piece, x, group=axis.group, async_op=True), source=x)


def all_reduce(x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
    """`start_all_reduce`, finished."""
    return start_all_reduce(x, axis, op).wait()


def piece_of(x: Tensor, axis: Axis) -> Tensor:
    """[size * s, ...] -> [s, ...]: this rank's piece; nothing is sent."""
    return x if axis.size == 1 else x.chunk(axis.size)[axis.rank]


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return all_reduce(grads[0].contiguous().clone(), ctx.axis), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, axis)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return start_all_gather(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return start_reduce_scatter(grads[0], ctx.axis).wait(), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return start_reduce_scatter(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return start_all_gather(grads[0], ctx.axis).wait(), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _exchange(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _exchange(grads[0], ctx.axis), None


def _exchange(x: Tensor, axis: Axis) -> Tensor:
    x = x.contiguous()
    exchanged = torch.empty_like(x)
    dist.all_to_all_single(exchanged, x, group=axis.group)
    return exchanged


def copy_to(x: Tensor, tp: Axis) -> Tensor:
    """[S, B, D] -> [S, B, D]: identity forward, all-reduce over tp backward.

    `f` of Shoeybi et al. 2019 (arXiv:1909.08053, fig. 3).
    """
    return x if tp.size == 1 else _CopyTo.apply(x, tp)


def reduce_from(x: Tensor, tp: Axis) -> Tensor:
    """[S, B, D] -> [S, B, D], in place: all-reduce over tp forward, identity backward.

    `g` of Shoeybi et al. 2019 (arXiv:1909.08053, fig. 3).
    """
    return x if tp.size == 1 else _ReduceFrom.apply(x, tp)


def gather_from_sequence(x: Tensor, tp: Axis) -> Tensor:
    """[S/tp, B, D] -> [S, B, D]: all-gather forward, reduce-scatter backward.

    `g` of Korthikanti et al. 2022 (arXiv:2205.05198, fig. 5): what follows is computed by every tp rank in part.
    """
    return x if tp.size == 1 else _GatherSequence.apply(x, tp)


def reduce_scatter_to_sequence(x: Tensor, tp: Axis) -> Tensor:
    """[S, B, D] -> [S/tp, B, D]: reduce-scatter forward, all-gather backward.

    `g bar` of Korthikanti et al. 2022 (arXiv:2205.05198, fig. 5).
    """
    return x if tp.size == 1 else _ReduceScatterSequence.apply(x, tp)


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """[size * s, ...] -> [size * s, ...]: piece i goes to place i, and piece i of the result came from there.

    The same forward and backward.
    """
    return x if axis.size == 1 else _AllToAll.apply(x, axis)


def start_shift(x: Tensor, axis: Axis, *, tag: int = 0) -> Pending:
    """[...] -> [...]: hand x to the next place of the axis, the last to the first, and get that of the place before.

    Shifts that are under way at the same time need tags of their own on gloo; NCCL ignores tags and keeps the order, so
    every rank must start them in the same one. Each is one batch, in which a send cannot wait for its own receive.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    arriving = torch.empty_like(x)
    after, before = (axis.ranks[(axis.rank + step) % axis.size] for step in (1, -1))
    transfers = [
        dist.P2POp(dist.isend, x, after, axis.group, tag),
        dist.P2POp(dist.irecv, arriving, before, axis.group, tag),
    ]
    return Pending(arriving, *dist.batch_isend_irecv(transfers), source=x)


def start_send(x: Tensor, axis: Axis, *, to: int, tag: int) -> Pending:
    """[...]: hand x to place `to` of the axis. On gloo it is finished only when the receive has been posted."""
    x = x.contiguous()
    return Pending(x, dist.isend(x, axis.ranks[to], group=axis.group, tag=tag))


def start_receive(buffer: Tensor, axis: Axis, *, source: int, tag: int) -> Pending:
    """[...]: fill the buffer from place `source` of the axis. gloo matches by `tag`, NCCL by order."""
    return Pending(buffer, dist.irecv(buffer, axis.ranks[source], group=axis.group, tag=tag))


def barrier(axis: Axis) -> None:
    """Returns once every rank of the axis has come here."""
    all_reduce(torch.zeros(1), axis)
