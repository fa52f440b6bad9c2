"""Collectives and point-to-point transfers over one axis of the mesh. The only file that calls those of a step.

Two kinds of functions. `start_*` start a transfer of plain tensors, which autograd does not see, and return a
`Pending`: the caller computes during the transfer. `copy_to`, `reduce_from`, `reduce_scatter_to_sequence`,
`gather_whole_sequence`, `split_sequence`, `all_to_all`, `all_to_all_rows` and `gather_from_neighbours` are
differentiable: each calls one collective forward and the transposed one backward (of the two that cut and join what
all ranks hold alike, one of both), and waits for it.

Every function takes the `Axis` that it works on. On an axis of size one it returns its input and sends nothing; this
shortcut is here and nowhere else. Sequence-parallel shapes cut the sequence, dim 0, over tp.

Each call is an entry of the axis's record (watch/record.py), made before torch is called; a wait says for which entry.
So a rank that hangs can be named from outside.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from threading import get_ident
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatronish.parallel.mesh import Axis
from megatronish.parallel.ranges import WAIT, is_recording, marked
from megatronish.watch.record import Entry

T = TypeVar("T")


class Work(Protocol):
    """Collective that was started, of torch or of another library."""

    def wait(self) -> Any:
        """Have the current stream, or on a CPU this thread, wait for its end."""
        ...


class Pending:
    """Collective in progress over `axis`; `wait` returns its result. Keeps what is sent alive until then.

    `entry` is what the axis's record has of it.
    """

    def __init__(
        self,
        result: Tensor,
        *works: Work | None,
        axis: Axis | None = None,
        source: Tensor | None = None,
        entry: Entry | None = None,
    ) -> None:
        assert axis is not None or not works
        self._result, self._works, self._axis, self._source, self._entry = result, works, axis, source, entry
        if entry is not None and is_recording():
            entry.line.record.recorded.add(self)

    @property
    def unfinished(self) -> Tensor:
        """The tensor that will hold the result, to hand on: nothing may read it before `wait`."""
        return self._result

    def wait(self) -> Tensor:
        """Result of the collective; on CUDA the current stream waits for it, and the CPU does not."""
        if self._axis is not None and self._works:
            with marked(f"{WAIT}{self._axis.name}"), _waiting(self._entry):
                for work in self._works:
                    if work is not None:
                        work.wait()
            if self._entry is not None:
                self._entry.line.record.recorded.discard(self)
        self._works, self._source = (), None
        return self._result


class _Waiting:
    """Context in which this thread waits for an entry."""

    __slots__ = ("_entry", "_start", "_thread")

    def __init__(self, entry: Entry) -> None:
        self._entry, self._thread = entry, get_ident()

    def __enter__(self) -> None:
        record = self._entry.line.record
        record.waiting[self._thread] = self._entry
        self._start = record.clock()

    def __exit__(self, *_: object) -> None:
        record = self._entry.line.record
        record.waiting[self._thread] = None
        # On GPUs a backward has a thread of autograd's own, while the main thread waits for its end.
        if self._thread == record.main_thread or torch._C._current_graph_task_id() != -1:
            record.waits(self._start, record.clock())


_WITHOUT_RECORD = nullcontext()


def _waiting(entry: Entry | None) -> AbstractContextManager[object]:
    return _WITHOUT_RECORD if entry is None else _Waiting(entry)


def entry_of(operation: str, x: Tensor, axis: Axis, layer: int | None = None) -> Entry | None:
    """Entry of a collective that is about to be called with x; None on an axis that has no record."""
    return None if axis.line is None else axis.line.enter(operation, x, layer)


def layer_of(axis: Axis) -> int | None:
    """Number of the layer that this rank computes, for the entry of its backward."""
    return None if axis.line is None else axis.line.record.layer


# torch 2.13 renamed both; 2.11 has the old names alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def start_all_reduce(x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum", *, layer: int | None = None) -> Pending:
    """All-reduce, [...] -> [...], in place: every rank gets the sum (or maximum) over the axis. Not differentiable.

    `layer` is for the record: that of a backward.
    """
    if axis.size == 1:
        return Pending(x)
    entry = entry_of("all_reduce", x, axis, layer)
    return Pending(x, dist.all_reduce(x, _REDUCTIONS[op], group=axis.group, async_op=True), axis=axis, entry=entry)


def start_all_gather(x: Tensor, axis: Axis, *, into: Tensor | None = None, layer: int | None = None) -> Pending:
    """All-gather, [s, ...] -> [size * s, ...]: every rank gets the pieces of all ranks, in the order of the axis.

    `into` is the buffer of the result; x may be this rank's piece of that buffer. Not differentiable.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    whole = x.new_empty(axis.size * x.shape[0], *x.shape[1:]) if into is None else into
    entry = entry_of("all_gather", x, axis, layer)
    work = _all_gather(whole, x, group=axis.group, async_op=True)
    return Pending(whole, work, axis=axis, source=x, entry=entry)


def start_reduce_scatter(x: Tensor, axis: Axis, *, into: Tensor | None = None, layer: int | None = None) -> Pending:
    """Reduce-scatter, [size * s, ...] -> [s, ...]: every rank gets its piece of the sum over the axis.

    `into` is the buffer of the result; it may be this rank's piece of x. Not differentiable.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    piece = x.new_empty(x.shape[0] // axis.size, *x.shape[1:]) if into is None else into
    entry = entry_of("reduce_scatter", x, axis, layer)
    work = _reduce_scatter(piece, x, group=axis.group, async_op=True)
    return Pending(piece, work, axis=axis, source=x, entry=entry)


def all_reduce(x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum", *, layer: int | None = None) -> Tensor:
    """All-reduce, [...] -> [...], in place, finished on return. Not differentiable; `reduce_from` is."""
    return start_all_reduce(x, axis, op, layer=layer).wait()


def all_gather_object(value: T, axis: Axis) -> list[T]:
    """Values of all ranks in the order of the axis, pickled on the way; finished on return."""
    if axis.size == 1:
        return [value]
    values: list[Any] = [None] * axis.size
    with entered("all_gather_object", axis):
        dist.all_gather_object(values, value, group=axis.group)
    return values


@contextmanager
def entered(operation: str, axis: Axis) -> Iterator[None]:
    """Context of an operation of torch that communicates by itself: one entry of the record, waited for meanwhile."""
    if axis.line is None:
        yield
        return
    with _Waiting(axis.line.enter_objects(operation)):
        yield


def symmetric_operators() -> Any:
    """torch's operators over symmetric memory, as far as it has them (parallel/symmetric.py)."""
    with suppress(ImportError):
        import_module("torch.distributed._symmetric_memory")  # it defines them
    return torch.ops.symm_mem


def piece_of(x: Tensor, axis: Axis) -> Tensor:
    """[size * s, ...] -> [s, ...]: this rank's piece of dim 0, a view; nothing is sent.

    Backward is a slice's: the gradient is zero outside this rank's piece.
    """
    return x if axis.size == 1 else x.chunk(axis.size)[axis.rank]


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.layer = axis, layer_of(axis)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # A copy: autograd may hand the same gradient to others, and the sum is made in place.
        return all_reduce(grads[0].clone(), ctx.axis, layer=ctx.layer), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, axis)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.layer = axis, layer_of(axis)
        return start_reduce_scatter(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return start_all_gather(grads[0], ctx.axis, layer=ctx.layer).wait(), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.layer = axis, layer_of(axis)
        return _exchange(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _exchange(grads[0], ctx.axis, layer=ctx.layer), None


def _exchange(x: Tensor, axis: Axis, *, layer: int | None = None) -> Tensor:
    x = x.contiguous()
    exchanged = torch.empty_like(x)
    entry = entry_of("all_to_all", x, axis, layer)
    work = dist.all_to_all_single(exchanged, x, group=axis.group, async_op=True)
    return Pending(exchanged, work, axis=axis, source=x, entry=entry).wait()


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sent: list[int], received: list[int]) -> Tensor:
        ctx.axis, ctx.sent, ctx.received, ctx.layer = axis, sent, received, layer_of(axis)
        return start_all_to_all_rows(x, axis, sent=sent, received=received).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sizes = {"sent": ctx.received, "received": ctx.sent}
        return start_all_to_all_rows(grads[0], ctx.axis, **sizes, layer=ctx.layer).wait(), None, None, None


class _RowsInProgress:
    """An exchange of rows between its start and its end, forward and then backward."""

    def __init__(self, axis: Axis, sent: list[int], received: list[int]) -> None:
        self.axis, self.sent, self.received, self.layer = axis, sent, received, layer_of(axis)
        self.pending: Pending | None = None

    def start(self, x: Tensor, *, is_backward: bool = False) -> Tensor:
        """Memory of the rows on their way, which nothing may read before the end."""
        sent, received = (self.received, self.sent) if is_backward else (self.sent, self.received)
        self.pending = start_all_to_all_rows(x, self.axis, sent=sent, received=received, layer=self.layer)
        return self.pending.unfinished

    def end(self) -> Tensor:
        """Rows that have arrived, for which this waits."""
        assert self.pending is not None
        arrived, self.pending = self.pending.wait(), None
        return arrived


class _StartRows(torch.autograd.Function):
    """First half of `_AllToAllRows`, whose backward is the end of the exchange of gradients.

    Autograd takes what was computed last first. So what was computed between the halves has its backward between them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: _RowsInProgress) -> Tensor:
        ctx.rows = rows
        return rows.start(x)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        return ctx.rows.end(), None


class _EndRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, rows: _RowsInProgress) -> Tensor:
        ctx.rows = rows
        rows.end()
        return arriving.view_as(arriving)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.rows.start(grads[0], is_backward=True)
        return grads[0], None  # it has the shape that autograd wants; the other half hands on what arrives


class _GatherSequence(torch.autograd.Function):
    """All-gather forward; backward a reduce-scatter, or this rank's piece where every rank has the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sums: bool) -> Tensor:
        ctx.axis, ctx.sums, ctx.layer = axis, sums, layer_of(axis)
        return start_all_gather(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.sums:
            return start_reduce_scatter(grads[0], ctx.axis, layer=ctx.layer).wait(), None, None
        return piece_of(grads[0], ctx.axis), None, None


class _SplitSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.layer = axis, layer_of(axis)
        return piece_of(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return start_all_gather(grads[0], ctx.axis, layer=ctx.layer).wait(), None


def copy_to(x: Tensor, tp: Axis) -> Tensor:
    """[...] -> [...]: identity forward, all-reduce of the gradient backward. `f` of Shoeybi et al. 2019."""
    return x if tp.size == 1 else _CopyTo.apply(x, tp)


def reduce_from(x: Tensor, tp: Axis) -> Tensor:
    """[S, B, D] -> [S, B, D], in place: all-reduce over tp forward, identity backward.

    `g` of Shoeybi et al. 2019 (arXiv:1909.08053, fig. 3).
    """
    return x if tp.size == 1 else _ReduceFrom.apply(x, tp)


def reduce_scatter_to_sequence(x: Tensor, tp: Axis) -> Tensor:
    """[S, B, D] -> [S/tp, B, D]: reduce-scatter forward, all-gather backward.

    `g bar` of Korthikanti et al. 2022 (arXiv:2205.05198, fig. 5).
    """
    return x if tp.size == 1 else _ReduceScatterSequence.apply(x, tp)


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """All-to-all forward and backward, [size * s, ...] -> [size * s, ...].

    Piece i of x goes to rank i of the axis, and piece i of the result comes from rank i. The exchange is its own
    transpose.
    """
    return x if axis.size == 1 else _AllToAll.apply(x, axis)


def start_all_to_all_rows(
    x: Tensor, axis: Axis, *, sent: list[int], received: list[int], layer: int | None = None
) -> Pending:
    """All-to-all of unequal pieces, [sum(sent), ...] -> [sum(received), ...]. Not differentiable.

    The first `sent[0]` rows go to rank 0 of the axis, and so on; `received[i]` rows come from rank i. Either may be 0.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    arriving = x.new_empty(sum(received), *x.shape[1:])
    entry = entry_of("all_to_all_rows", x, axis, layer)
    work = dist.all_to_all_single(arriving, x, received, sent, group=axis.group, async_op=True)
    return Pending(arriving, work, axis=axis, source=x, entry=entry)


def all_to_all_rows(
    x: Tensor, axis: Axis, *, sent: list[int], received: list[int], meanwhile: Callable[[], None] | None = None
) -> Tensor:
    """All-to-all of unequal pieces forward, [sum(sent), ...] -> [sum(received), ...], and of their gradients backward.

    The backward is the same exchange with the sizes swapped, known already: no rank asks for them again. `meanwhile` is
    called while the rows are on their way; the backward of what it computes follows while their gradients are.
    """
    if meanwhile is None:
        return x if axis.size == 1 else _AllToAllRows.apply(x, axis, sent, received)
    rows = _RowsInProgress(axis, sent, received)
    arriving = _StartRows.apply(x, rows)
    meanwhile()
    arrived: Tensor = _EndRows.apply(arriving, rows)
    return arrived


def gather_from_neighbours(x: Tensor, axis: Axis, number: int) -> Tensor:
    """[s, ...] -> [number * s, ...]: the pieces of `number` neighbours on the axis, this rank one of them, in order.

    The backward adds up what all of them give this rank's piece. Neighbours are ranks 0 to number - 1, and so on; an
    exchange of unequal pieces needs no process group of theirs.
    """
    first = axis.rank // number * number
    rows = [len(x) if first <= rank < first + number else 0 for rank in range(axis.size)]
    copies = x.expand(number, *x.shape).flatten(0, 1)  # one for each: expanding adds gradients up in fp32
    return all_to_all_rows(copies, axis, sent=rows, received=rows)


def gather_whole_sequence(x: Tensor, tp: Axis, *, sums: bool) -> Tensor:
    """[s, ...] -> [size * s, ...]: all-gather forward.

    Backward with `sums`: a reduce-scatter, where each rank uses the whole for a part of the loss. Without: this rank's
    piece, where all ranks compute the same from the whole.
    """
    return x if tp.size == 1 else _GatherSequence.apply(x, tp, sums)


def split_sequence(x: Tensor, tp: Axis) -> Tensor:
    """[size * s, ...] -> [s, ...]: this rank's piece of what all ranks hold alike. Backward is an all-gather."""
    return x if tp.size == 1 else _SplitSequence.apply(x, tp)


def start_shift(x: Tensor, axis: Axis, *, tag: int = 0, into: Tensor | None = None) -> Pending:
    """Ring shift, [...] -> [...]: send x to the next rank of the axis, and receive from the rank before.

    The last rank sends to the first. `into` is the buffer of what arrives. Not differentiable: a backward shifts
    gradients by itself (attention/ring.py).
    On gloo, shifts that are in progress at the same time need different tags. NCCL ignores tags and keeps the order of
    the calls, so every rank must start its shifts in the same order.
    """
    if axis.size == 1:
        return Pending(x)
    # Buffers: x [...] is read until the send is complete, so Pending keeps it; `arriving` [...] is the result.
    x = x.contiguous()
    arriving = torch.empty_like(x) if into is None else into
    # Neighbours on the ring, as global ranks: point-to-point calls of torch take no ranks of a group.
    after, before = (axis.ranks[(axis.rank + step) % axis.size] for step in (1, -1))
    # One batch (on NCCL one group call), in which no send waits for this rank's own receive: a ring of separate calls,
    # every rank with its send first, could deadlock.
    transfers = [
        dist.P2POp(dist.isend, x, after, axis.group, tag),
        dist.P2POp(dist.irecv, arriving, before, axis.group, tag),
    ]
    entry = entry_of("shift", x, axis)
    return Pending(arriving, *dist.batch_isend_irecv(transfers), axis=axis, source=x, entry=entry)


def start_send(x: Tensor, axis: Axis, *, to: int, tag: int) -> Pending:
    """Send of x, [...], to rank `to` of the axis. On gloo it is finished only when the receive has been posted."""
    x, peer = x.contiguous(), axis.ranks[to]
    entry = None if axis.line is None else axis.line.enter_peer("send", x, peer)
    return Pending(x, dist.isend(x, peer, group=axis.group, tag=tag), axis=axis, entry=entry)


def start_receive(buffer: Tensor, axis: Axis, *, source: int, tag: int) -> Pending:
    """Receive into `buffer`, [...], from rank `source` of the axis. gloo matches by `tag`, NCCL by order."""
    peer = axis.ranks[source]
    entry = None if axis.line is None else axis.line.enter_peer("receive", buffer, peer)
    return Pending(buffer, dist.irecv(buffer, peer, group=axis.group, tag=tag), axis=axis, entry=entry)


def barrier(axis: Axis, device: torch.device | None = None) -> None:
    """Barrier: returns when every rank of the axis has called it. `device` is one that the axis communicates on."""
    float(all_reduce(torch.zeros(1, device=device), axis))
