"""Dispatch of tokens to experts over ep: one sort, one exchange of counts, one all-to-all of rows each way.

A token that has chosen K experts is sent as K rows. Rows are sorted by expert, so they are sorted by ep rank too:
expert e is on ep rank e // (E / ep). What arrives is sorted by source and then by expert; a second sort brings the rows
of each local expert together. The way back undoes both sorts. Sorting, copying and adding are gathers by a permutation,
forward and backward: no atomic additions, so the same layout gives the same bits. Rows are gathered by `index_select`,
which copies whole rows: on a CPU four times as fast as indexing by a tensor.

Counts are sent first, and the host reads both split sizes at once: the one synchronisation of a layer. There is none
where ep has one rank, and none where each rank sends each other one a fixed number of rows (`room`): counts then stay
on the device. Rows that are no choice's lie behind the others, of any values: no group of a product has them, and no
token takes them. Choices that find no room are counted, and the step is computed again (engine/engine.py).

With a capacity at most C = ceil(factor K S / E) tokens of each *sequence* go to an expert, the first ones. A limit per
rank or per micro-batch, as other frameworks have it, is another model in every layout. This limit is a property of the
sequence: a choice is kept if fewer than C earlier choices of its sequence fell on the same expert. Ranks that hold
parts of a sequence exchange their counts, [blocks, B, E] integers, and count on from the blocks before theirs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatronish.core.layout import choices_of_an_expert
from megatronish.ops.grouped_mm import Groups
from megatronish.ops.permutation import collect, is_fused, spread
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis


class ExpertRoute(Protocol):
    """Route of rows to the experts and back, by all-to-all (`TokenRoute`) or by DeepEP (layers/deep_dispatch.py).

    `sizes` are all that a recomputation needs to send the same rows to the same places, known once they were sent.
    """

    @property
    def num_choices(self) -> int:
        """Experts that a token chooses."""
        ...

    @property
    def groups(self) -> Groups:
        """Rows of each local expert."""
        ...

    @property
    def sizes(self) -> Any:
        """Numbers of rows, and places."""
        ...

    @property
    def lost(self) -> Tensor | None:
        """Number of choices that found no room."""
        ...

    def to_experts(
        self, x: Tensor, weights: Tensor, *, ep: Axis, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Tensor, Tensor]:
        """[T, D], [T, K] -> [N', D], a row for each choice of a local expert, and the weights for the way back.

        `meanwhile` is called while rows are on their way to other ranks.
        """
        ...

    def from_experts(self, rows: Tensor, weights: Tensor, *, ep: Axis) -> Tensor:
        """[N', D] -> [T, D]: the weighted rows of a token, added, on its own rank."""
        ...


class RouteSizes(NamedTuple):
    """Numbers of rows that are sent: `sent` and `received` by rank of ep.

    `arriving` int64 [ep, E / ep] are those from each rank for each local expert, `groups` all of each local expert. A
    recomputation keeps them, so that nothing is exchanged or read again.
    """

    arriving: Tensor
    sent: list[int]
    received: list[int]
    groups: Groups


class TokenRoute(NamedTuple):
    """Route of N rows to the experts and back. N' rows arrive on this rank.

    `order` [N] has the choice of each row (token t's k-th is t K + k): sorted by expert, dropped ones last or left out.
    `inverse` [T K] has the row of each choice, N or more where it has none, as some may if it `lacks` rows.
    `local_order` [N'] sorts what arrives by local expert, `local_inverse` [N'] is its inverse; both None where ep has
    one rank. `groups` are the rows of each local expert. `lost` are the choices that found no room.
    """

    num_choices: int
    order: Tensor
    inverse: Tensor
    lacks: bool
    local_order: Tensor | None
    local_inverse: Tensor | None
    sizes: RouteSizes
    groups: Groups
    lost: Tensor | None = None

    def to_experts(
        self, x: Tensor, weights: Tensor, *, ep: Axis, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows sorted by local expert; the weights stay here."""
        return dispatch(x, self, ep=ep, meanwhile=meanwhile), weights

    def from_experts(self, rows: Tensor, weights: Tensor, *, ep: Axis) -> Tensor:
        """The weighted rows of each token."""
        return combine(rows, weights, self, ep=ep)


class _SentRows(NamedTuple):
    """Rows of choices as they are sent, and how many for each expert: see `TokenRoute`."""

    order: Tensor
    inverse: Tensor
    counts: Tensor
    lost: Tensor | None = None


def make_route(
    choices: Tensor,
    *,
    num_experts: int,
    ep: Axis,
    drops: bool = True,
    room: int | None = None,
    sizes: RouteSizes | None = None,
) -> TokenRoute:
    """Route of the choices [T, K] of this rank's tokens; every rank of ep calls it at the same time.

    A choice of `num_experts` is dropped, if it `drops` any: it goes nowhere. With `room` each rank sends each other one
    so many rows. `sizes` are those of an earlier route of the same choices.
    """
    # 1. Rows by expert. A stable sort, so that the order of equal experts is that of the tokens: the same on every run.
    # Choices of `num_experts`, dropped, come last.
    flat, num_choices, lost = choices.reshape(-1), choices.shape[1], None
    # int16 sorts three times as fast as int64.
    experts, order = flat.to(torch.int16 if num_experts <= 2**15 else torch.int32).sort(stable=True)
    inverse = inverse_of(order)
    if ep.size == 1:
        if drops:
            inverse.masked_fill_(flat == num_experts, len(order))
        sizes = sizes or _sizes_here(_counts(experts, num_experts), len(order))
        return TokenRoute(num_choices, order, inverse, drops, None, None, sizes, sizes.groups)
    if room is not None:
        counts = _counts(experts, num_experts)
        order, inverse, counts, lost = _in_rooms(_SentRows(order, inverse, counts), flat, ep, room)
        sizes = sizes or _sizes_of_rooms(counts, ep, room)
    elif sizes is None:
        sizes = _exchange_counts(_counts(experts, num_experts), ep)
    # 2. What arrives is sorted by source, then by local expert. `arriving` says how many rows each pair has, so the
    # expert of each row is known without sending it.
    local_order = _arriving_experts(sizes, room).argsort(stable=True)
    order = order[: sum(sizes.sent)]
    lacks = room is not None or len(order) < len(flat)
    local = local_order, inverse_of(local_order)
    return TokenRoute(num_choices, order, inverse, lacks, *local, sizes, sizes.groups, lost)


def _counts(experts: Tensor, num_experts: int) -> Tensor:
    """[T K], sorted -> int64 [E], rows for each expert. On a GPU, bincount would have the host wait for the largest."""
    numbers = torch.arange(num_experts, dtype=experts.dtype, device=experts.device)
    ends = torch.searchsorted(experts, numbers, right=True)
    return ends.diff(prepend=ends.new_zeros(1))


def _in_rooms(rows: _SentRows, choices: Tensor, ep: Axis, room: int) -> _SentRows:
    """Rows sorted by expert, of `choices` [T K], cut by rank of ep and padded or shortened to `room` for each."""
    # int64 [ep, E / ep]: where the rows of each expert end among those of its rank, as far as there is room for them.
    ends = rows.counts.view(ep.size, -1).cumsum(1)
    fitting, number = ends.clamp(max=room), ends[:, -1]
    starts = number.cumsum(0) - number
    lost = (number - fitting[:, -1]).sum()
    # Padding is any choice: what it sends is of no group there.
    rooms = torch.arange(ep.size * room, device=ends.device).view(ep.size, room)
    shifts = rooms[:, 0] - starts  # from a row's place to that in the room
    order = rows.order[(rooms - shifts[:, None]).clamp_(max=len(rows.order) - 1).flatten()]
    # A dropped choice is of a rank that is not there, and of no room.
    rank, nowhere = choices // ends.shape[1], ep.size * room
    row = rows.inverse + F.pad(shifts, (0, 1), value=nowhere + room).index_select(0, rank)
    inverse = row.masked_fill_(row >= (rank + 1) * room, nowhere)
    return _SentRows(order, inverse, fitting.diff(dim=1, prepend=fitting.new_zeros(ep.size, 1)).flatten(), lost)


def _arriving_experts(sizes: RouteSizes, room: int | None) -> Tensor:
    """[N'], the local expert of each row that arrives; E / ep of padding."""
    ep, num_local = sizes.arriving.shape
    if room is None:
        local = torch.arange(num_local, device=sizes.arriving.device, dtype=torch.int16).repeat(ep)
        return local.repeat_interleave(sizes.arriving.reshape(-1), output_size=sum(sizes.received))
    places = torch.arange(room, device=sizes.arriving.device).expand(ep, -1).contiguous()
    return torch.searchsorted(sizes.arriving.cumsum(1), places, right=True, out_int32=True).flatten()


def _sizes_here(counts: Tensor, number: int) -> RouteSizes:
    """int64 [E], rows for each expert -> those that stay on this rank, dropped ones behind the others."""
    return RouteSizes(counts.view(1, -1), [number], [number], Groups(_ends(counts)))


def _sizes_of_rooms(counts: Tensor, ep: Axis, room: int) -> RouteSizes:
    """int64 [E], rows for each expert -> what each rank of ep sends to each expert of this one, in equal rooms."""
    arriving = comm.all_to_all(counts, ep).view(ep.size, -1)
    return RouteSizes(arriving, [room] * ep.size, [room] * ep.size, Groups(_ends(arriving.sum(0))))


def _exchange_counts(counts: Tensor, ep: Axis) -> RouteSizes:
    """int64 [E], rows for each expert -> what each rank of ep sends to each expert of this one."""
    arriving = comm.all_to_all(counts, ep).view(ep.size, -1)
    leaving, coming = torch.stack([counts.view(ep.size, -1), arriving]).tolist()  # the host waits here, once
    sent, received = ([sum(of_rank) for of_rank in of_ranks] for of_ranks in (leaving, coming))
    of_experts = tuple(sum(of_expert) for of_expert in zip(*coming, strict=True))
    return RouteSizes(arriving, sent, received, Groups.of(of_experts, counts.device))


def _ends(counts: Tensor) -> Tensor:
    """[E] -> int32 [E], running sums."""
    return counts.cumsum(0, dtype=torch.int32)


def dispatch(x: Tensor, route: TokenRoute, *, ep: Axis, meanwhile: Callable[[], None] | None = None) -> Tensor:
    """[T, D] -> [N', D]: a row for each choice, on the rank of the chosen expert, sorted by local expert.

    `meanwhile` is called while the rows are on their way, where they go to other ranks.
    """
    places = (route.order, route.inverse, route.num_choices)
    rows = spread(x, *places) if is_fused(x) else _TakeTokens.apply(x, *places, route.lacks)
    sizes = route.sizes
    rows = comm.all_to_all_rows(rows, ep, sent=sizes.sent, received=sizes.received, meanwhile=meanwhile)
    if route.local_order is None:
        return rows
    return _Permute.apply(rows, route.local_order, route.local_inverse)


def combine(rows: Tensor, weights: Tensor, route: TokenRoute, *, ep: Axis) -> Tensor:
    """[N', D], [T, K] -> [T, D]: the rows of a token on its own rank, weighted and added in the order it chose."""
    # The steps of `dispatch` in reverse order, each by its inverse.
    if route.local_order is not None:
        rows = _Permute.apply(rows, route.local_inverse, route.local_order)
    rows = comm.all_to_all_rows(rows, ep, sent=route.sizes.received, received=route.sizes.sent)
    if is_fused(rows):
        return collect(rows, weights, route.order, route.inverse)
    return _WeightedSum.apply(rows, weights, route.order, route.inverse, route.lacks)


def inverse_of(order: Tensor) -> Tensor:
    """[N] -> [N], the place of each number in an order of them."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


def _rows_of_choices(rows: Tensor, inverse: Tensor, lacks: bool) -> Tensor:
    """[N, ...], [T K] -> [T K, ...], a new tensor: the row of each choice, zeros where it has none."""
    if not lacks:
        return rows.index_select(0, inverse)
    if len(rows) == 0:
        return rows.new_zeros(len(inverse), *rows.shape[1:])
    gathered = rows.index_select(0, inverse.clamp(max=len(rows) - 1))
    # A product by zero would not do: of a row that is no choice's any value may be there.
    return gathered.masked_fill_((inverse >= len(rows)).view(-1, *[1] * (rows.dim() - 1)), 0)


class _TakeTokens(torch.autograd.Function):
    """[T, D] -> [N, D], the token of each choice; backward gathers and adds K rows a token, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, num_choices: int, lacks: bool) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_choices, ctx.lacks = num_choices, lacks
        return x.index_select(0, order // num_choices)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (inverse,) = ctx.saved_tensors
        dy, tokens = _rows_of_choices(grads[0], inverse, ctx.lacks), inverse.numel() // ctx.num_choices
        return dy.view(tokens, ctx.num_choices, dy.shape[-1]).sum(1), None, None, None, None


class _Permute(torch.autograd.Function):
    """[N, D] -> [N, D], rows in another order; backward by the inverse permutation (autograd would scatter)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


class _WeightedSum(torch.autograd.Function):
    """[N, D] rows sorted by expert, [T, K] -> [T, D]: the weighted rows of each token, in the order it chose.

    The gathered rows are weighted in place, and the backward gathers from dy [T, D] straight into the sorted order.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, lacks: bool) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        ctx.lacks = lacks
        y = _rows_of_choices(rows, inverse, lacks).view(*weights.shape, rows.shape[-1])
        return y.mul_(weights.unsqueeze(-1).to(rows.dtype)).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weights, order, inverse = ctx.saved_tensors
        # Row i of the sorted order is choice order[i], of token order[i] // K: its gradient is that token's dy, times
        # its weight below.
        drows = grads[0].index_select(0, order // weights.shape[1])  # [N, D]
        dweights = None
        if ctx.needs_input_grad[1]:
            # Before the weights are multiplied in, as drows is still dy here: d weight = row . dy.
            dweights = (rows * drows).sum(-1, dtype=weights.dtype)
            dweights = _rows_of_choices(dweights, inverse, ctx.lacks).view_as(weights)
        drows.mul_(weights.flatten().index_select(0, order).unsqueeze(-1).to(drows.dtype))
        return drows, dweights, None, None, None


class Capacity(NamedTuple):
    """Limit of each expert in a sequence, and the axes that cut sequences: tp (tokens of its own a rank) inside cp."""

    limit: int
    cp: Axis
    tp: Axis

    @classmethod
    def of(cls, factor: float, *, num_chosen: int, num_experts: int, seq_length: int, cp: Axis, tp: Axis) -> "Capacity":
        """Capacity of a sequence of `seq_length` tokens."""
        sizes = {"num_chosen": num_chosen, "num_experts": num_experts, "seq_length": seq_length}
        return cls(choices_of_an_expert(factor, **sizes), cp, tp)


def kept_choices(choices: Tensor, positions: Tensor, capacity: Capacity, *, num_experts: int) -> Tensor:
    """[s, B, K] choices of this rank's tokens at `positions` [s] -> bool [s, B, K], whether each is kept.

    Positions rise within each of the rank's blocks: two under context parallelism (zigzag.py), unless an even tp cuts
    between them.
    """
    length, num_sequences, _ = choices.shape
    num_blocks = 2 if capacity.cp.size > 1 and capacity.tp.size % 2 else 1
    # 1. Earlier choices in the token's own block: a token chooses an expert once at most.
    chosen = torch.zeros(length, num_sequences, num_experts, dtype=torch.int32, device=choices.device)
    chosen.scatter_(2, choices, 1)
    blocks = chosen.unflatten(0, (num_blocks, -1))  # [blocks, s / blocks, B, E]
    counts = blocks.sum(1, dtype=torch.int32)  # [blocks, B, E]
    earlier = (blocks.cumsum(1, dtype=torch.int32) - blocks).flatten(0, 1)
    # 2. Choices in all blocks that begin before it, on whatever rank.
    starts = positions.unflatten(0, (num_blocks, -1))[:, 0].contiguous()  # [blocks]
    all_counts, all_starts = counts, starts
    for axis in (capacity.tp, capacity.cp):
        all_counts = comm.start_all_gather(all_counts, axis).wait()
        all_starts = comm.start_all_gather(all_starts, axis).wait()
    before = (all_starts < starts[:, None]).to(torch.int32)  # [blocks, all blocks]
    offset = torch.einsum("ma,abe->mbe", before.long(), all_counts.long())  # [blocks, B, E]
    place = earlier.gather(2, choices) + offset.repeat_interleave(length // num_blocks, 0).gather(2, choices)
    return place < capacity.limit
