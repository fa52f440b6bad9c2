"""Dispatch of tokens to experts over ep: one sort, one exchange of counts, one all-to-all of rows each way.

A token that has chosen K experts is sent as K rows. Rows are sorted by expert, so they are sorted by ep rank too:
expert e is on ep rank e // (E / ep). What arrives is sorted by source and then by expert; a second sort brings the rows
of each local expert together. The way back undoes both sorts. Sorting, copying and adding are gathers by a permutation,
forward and backward: no atomic additions, so the same layout gives the same bits. Rows are gathered by `index_select`,
which copies whole rows: on a CPU four times as fast as indexing by a tensor.

Counts are sent first, and the host reads both split sizes at once: the one synchronisation of a layer.

With a capacity at most C = ceil(factor K S / E) tokens of each *sequence* go to an expert, the first ones. A limit per
rank or per micro-batch, as other frameworks have it, is another model in every layout. This limit is a property of the
sequence: a choice is kept if fewer than C earlier choices of its sequence fell on the same expert. Ranks that hold
parts of a sequence exchange their counts, [blocks, B, E] integers, and count on from the blocks before theirs.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.ops.grouped_mm import Groups
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis


class RouteSizes(NamedTuple):
    """Numbers of rows that are sent: `sent` and `received` by rank of ep.

    `arriving` int64 [ep, E / ep] are those from each rank for each local expert, `of_experts` all of each local expert.
    A recomputation keeps them, so that nothing is exchanged again.
    """

    arriving: Tensor
    sent: list[int]
    received: list[int]
    of_experts: tuple[int, ...]


class TokenRoute(NamedTuple):
    """Route of N rows to the experts and back, N = T K or fewer where choices are dropped. N' rows arrive on this rank.

    `order` [T K] lists the choices (token t's k-th is t K + k) sorted by expert, dropped ones last; `inverse` [T K] is
    its inverse.
    `local_order` [N'] sorts what arrives by local expert, `local_inverse` [N'] is its inverse; both None where ep has
    one rank. `groups` are the rows of each local expert.
    """

    num_choices: int
    order: Tensor
    inverse: Tensor
    local_order: Tensor | None
    local_inverse: Tensor | None
    sizes: RouteSizes
    groups: Groups


def make_route(choices: Tensor, *, num_experts: int, ep: Axis, sizes: RouteSizes | None = None) -> TokenRoute:
    """Route of the choices [T, K] of this rank's tokens; every rank of ep calls it at the same time.

    A choice of `num_experts` is dropped: it goes nowhere. `sizes` are those of an earlier route of the same choices.
    """
    # 1. Rows by expert. A stable sort, so that the order of equal experts is that of the tokens: the same on every run.
    # Choices of `num_experts`, dropped, come last.
    flat = choices.reshape(-1)
    # int16 sorts three times as fast as int64.
    experts, order = flat.to(torch.int16 if num_experts <= 2**15 else torch.int32).sort(stable=True)
    inverse = _inverse(order)
    if sizes is None:
        # Where the rows of each expert end. On a GPU, bincount would make the host wait for the largest number.
        numbers = torch.arange(num_experts, dtype=experts.dtype, device=flat.device)
        ends = torch.searchsorted(experts, numbers, right=True)
        sizes = _exchange_counts(ends.diff(prepend=ends.new_zeros(1)), ep)
    local_order = local_inverse = None
    # 2. What arrives is sorted by source, then by local expert. `arriving` says how many rows each pair has, so the
    # expert of each row is known without sending it.
    if ep.size > 1:
        local = torch.arange(num_experts // ep.size, device=flat.device, dtype=torch.int16).repeat(ep.size)
        expert_of_row = local.repeat_interleave(sizes.arriving.reshape(-1), output_size=sum(sizes.received))
        local_order = expert_of_row.argsort(stable=True)
        local_inverse = _inverse(local_order)
    groups = Groups.of(sizes.of_experts, flat.device)
    return TokenRoute(choices.shape[1], order, inverse, local_order, local_inverse, sizes, groups)


def _exchange_counts(counts: Tensor, ep: Axis) -> RouteSizes:
    """int64 [E], rows for each expert -> what each rank of ep sends to each expert of this one."""
    arriving = comm.all_to_all(counts, ep).view(ep.size, -1)
    leaving, coming = torch.stack([counts.view(ep.size, -1), arriving]).tolist()  # the host waits here, once
    sent, received = ([sum(of_rank) for of_rank in of_ranks] for of_ranks in (leaving, coming))
    return RouteSizes(arriving, sent, received, tuple(sum(of_expert) for of_expert in zip(*coming, strict=True)))


def dispatch(x: Tensor, route: TokenRoute, *, ep: Axis) -> Tensor:
    """[T, D] -> [N', D]: a row for each choice, on the rank of the chosen expert, sorted by local expert."""
    rows = _TakeTokens.apply(x, route.order, route.inverse, route.num_choices, sum(route.sizes.sent))
    rows = comm.all_to_all_rows(rows, ep, sent=route.sizes.sent, received=route.sizes.received)
    if route.local_order is None:
        return rows
    return _Permute.apply(rows, route.local_order, route.local_inverse)


def combine(rows: Tensor, weights: Tensor, route: TokenRoute, *, ep: Axis) -> Tensor:
    """[N', D], [T, K] -> [T, D]: the rows of a token on its own rank, weighted and added in the order it chose."""
    # The steps of `dispatch` in reverse order, each by its inverse.
    if route.local_order is not None:
        rows = _Permute.apply(rows, route.local_inverse, route.local_order)
    rows = comm.all_to_all_rows(rows, ep, sent=route.sizes.received, received=route.sizes.sent)
    # Dropped choices were never sent: they come last in `order`, and add zeros to their token.
    if num_dropped := weights.numel() - rows.shape[0]:
        rows = torch.cat([rows, rows.new_zeros(num_dropped, rows.shape[1])])
    return _WeightedSum.apply(rows, weights, route.order, route.inverse)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


class _TakeTokens(torch.autograd.Function):
    """[T, D] -> [N, D], the token of each choice; backward gathers and adds K rows a token, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, num_choices: int, num_rows: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_choices = num_choices
        return x.index_select(0, order[:num_rows] // num_choices)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (inverse,) = ctx.saved_tensors
        dy = grads[0]
        if num_dropped := inverse.numel() - dy.shape[0]:
            dy = torch.cat([dy, dy.new_zeros(num_dropped, dy.shape[1])])
        dy, tokens = dy.index_select(0, inverse), inverse.numel() // ctx.num_choices
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
    """[T K, D] rows sorted by expert, [T, K] -> [T, D]: the weighted rows of each token, in the order it chose.

    The gathered rows are weighted in place, and the backward gathers from dy [T, D] straight into the sorted order.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        y = rows.index_select(0, inverse).view(*weights.shape, rows.shape[-1])
        return y.mul_(weights.unsqueeze(-1).to(rows.dtype)).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weights, order, inverse = ctx.saved_tensors
        # Row i of the sorted order is choice order[i], of token order[i] // K: its gradient is that token's dy, times
        # its weight below.
        drows = grads[0].index_select(0, order // weights.shape[1])  # [T K, D]
        dweights = None
        if ctx.needs_input_grad[1]:
            # Before the weights are multiplied in, as drows is still dy here: d weight = row . dy.
            dweights = (rows * drows).sum(-1, dtype=weights.dtype).index_select(0, inverse).view_as(weights)
        drows.mul_(weights.flatten().index_select(0, order).unsqueeze(-1).to(drows.dtype))
        return drows, dweights, None, None


class Capacity(NamedTuple):
    """Limit of each expert in a sequence, and the axes that cut sequences: tp (tokens of its own a rank) inside cp."""

    limit: int
    cp: Axis
    tp: Axis

    @classmethod
    def of(cls, factor: float, *, num_chosen: int, num_experts: int, seq_length: int, cp: Axis, tp: Axis) -> "Capacity":
        """Capacity of a sequence of `seq_length` tokens."""
        return cls(math.ceil(factor * num_chosen * seq_length / num_experts), cp, tp)


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
