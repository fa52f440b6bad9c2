"""Dispatch of tokens to experts by DeepEP (parallel/deep_ep.py): a token goes once to each rank that has its experts.

There a row of it is made for each of these experts, as on a single rank (layers/dispatch.py), and what they make of it
is weighted and added: the weights go with the token. So one sum of each rank comes back, and DeepEP adds these. The
backward of the way there is the way back, and the other way round.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatronish.layers import dispatch
from megatronish.layers.dispatch import RouteSizes, TokenRoute
from megatronish.ops.grouped_mm import Groups
from megatronish.parallel import comm
from megatronish.parallel.deep_ep import Returning, Sent, TokenExchange
from megatronish.parallel.mesh import Axis

HERE = Axis("ep")


class DeepRoute:
    """Route of choices [T, K] to the experts and back by DeepEP. `lost` is for rooms, which it does not have.

    Where rows go is known once they have gone: `sent` is what the first way there has found, which a recomputation
    keeps.
    """

    lost = None

    def __init__(
        self, exchange: TokenExchange, choices: Tensor, *, num_experts: int, drops: bool, sent: Sent | None = None
    ) -> None:
        self.exchange, self.num_experts, self.sizes = exchange, num_experts, sent
        self.num_choices = choices.shape[1]
        self.choices = choices.masked_fill(choices == num_experts, -1) if drops else choices
        self._local: TokenRoute | None = None

    @property
    def groups(self) -> Groups:
        """Rows of each local expert; known once they have arrived."""
        assert self._local is not None, "nothing was sent yet"
        return self._local.groups

    def to_experts(
        self, x: Tensor, weights: Tensor, *, ep: Axis, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Tensor, Tensor]:
        """[T, D], [T, K] -> [N', D], a row for each choice of a local expert, and the weights [M, K] of their tokens.

        `meanwhile` is called while the tokens are on their way; its backward follows while their gradients are.
        """
        assert ep is self.exchange.axis
        under_way = _TokensInProgress(self)
        tokens, weights = _StartTokens.apply(x, weights, under_way)
        if meanwhile is not None:
            meanwhile()
        tokens, weights = _EndTokens.apply(tokens, weights, under_way)
        assert self.sizes is not None
        # Once they are there, what is kept until the backward or for a recomputation takes a quarter.
        small = torch.int16 if len(self.sizes.counts) < 2**15 else torch.int32
        self.sizes = self.sizes._replace(choices=self.sizes.choices.to(small))
        self._local = _local_route(self.sizes)
        return dispatch.dispatch(tokens, self._local, ep=HERE), weights

    def from_experts(self, rows: Tensor, weights: Tensor, *, ep: Axis) -> Tensor:
        """[N', D], [M, K] -> [T, D]: the weighted rows of each token."""
        assert ep is self.exchange.axis and self._local is not None and self.sizes is not None
        sums = dispatch.combine(rows, weights, self._local, ep=HERE)  # [M, D]
        back: Tensor = _TokensBack.apply(sums, self.exchange, self.sizes.handle)
        return back


def _local_route(sent: Sent) -> TokenRoute:
    """Route of the tokens that have arrived to this rank's experts; choices of other ranks' are none of its rows."""
    counts, number = sent.counts, sum(sent.counts)
    flat = sent.choices.flatten()
    order = flat.masked_fill(flat < 0, len(counts)).sort(stable=True).indices
    groups = Groups.of(tuple(counts), flat.device)
    # Without `non_blocking` the host would wait here until the tokens have arrived, in each recomputation, too.
    arriving = torch.tensor([counts]).to(flat.device, non_blocking=True)
    sizes = RouteSizes(arriving, [number], [number], groups)
    inverse = dispatch.inverse_of(order)
    return TokenRoute(sent.choices.shape[1], order[:number], inverse, True, None, None, sizes, groups)


class _TokensInProgress:
    """Tokens and their weights between start and end of their way, forward and then backward."""

    def __init__(self, route: DeepRoute) -> None:
        self.route, self.layer = route, comm.layer_of(route.exchange.axis)
        self.pending: comm.Pending | None = None
        self.returning: Returning | None = None

    def start(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Memory of what arrives, which nothing may read before the end."""
        route, exchange = self.route, self.route.exchange
        if route.sizes is None:
            self.pending, route.sizes = exchange.start(x, route.choices, weights, num_experts=route.num_experts)
        else:  # a recomputation: the same weights to the same places
            self.pending = exchange.start_again(x, route.sizes.handle)
        return self.pending.unfinished, route.sizes.weights.view_as(route.sizes.weights)

    def end(self) -> None:
        """Wait for what arrives."""
        assert self.pending is not None
        self.pending.wait()
        self.pending = None

    def start_back(self, rows: Tensor, weights: Tensor | None) -> None:
        """Let gradients go back, [M, D] and [M, K]."""
        assert self.route.sizes is not None
        handle = self.route.sizes.handle
        self.returning = self.route.exchange.start_back(rows, handle, weights=weights, layer=self.layer)

    def end_back(self) -> tuple[Tensor, Tensor | None]:
        """Their sums, [T, D] and [T, K], waited for."""
        assert self.returning is not None
        sums, weights = self.returning
        self.returning = None
        return sums.wait(), weights


class _StartTokens(torch.autograd.Function):
    """First half of the way there, whose backward is the end of the way back of the gradients.

    Autograd takes what was computed last first. So what was computed between the halves has its backward between them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, under_way: _TokensInProgress) -> tuple[Tensor, Tensor]:
        ctx.under_way = under_way
        return under_way.start(x, weights)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        return *ctx.under_way.end_back(), None


class _EndTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, under_way: _TokensInProgress) -> tuple[Tensor, Tensor]:
        ctx.under_way = under_way
        under_way.end()
        return tokens.view_as(tokens), weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.under_way.start_back(grads[0], grads[1] if ctx.needs_input_grad[1] else None)
        return *grads, None  # of the shapes that autograd wants; the other half hands on what arrives


class _TokensBack(torch.autograd.Function):
    """[M, D] -> [T, D]: sums of what ranks have made of a token; backward sends its gradient to them again."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, exchange: TokenExchange, handle: Any) -> Tensor:
        ctx.exchange, ctx.handle = exchange, handle
        return exchange.start_back(sums, handle).rows.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.exchange.start_again(grads[0], ctx.handle).wait(), None, None
