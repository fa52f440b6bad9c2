"""Experts of one layer, stacked: gated or plain MLPs of one shape, cut over ep by expert and over etp by feature.

Gate and up-projection of expert e are `gate_up[e, 0]` and `gate_up[e, 1]`: with a dim of their own, what a rank holds
is one rectangle of the global tensor, however it is cut. The rows of all local experts lie sorted by expert, and each
product over them is one grouped product.

Biases of gate and up-projection are cut as the features. The outputs of ranks of etp are terms of a sum, to which the
bias of the down-projection belongs: each rank adds the columns that it holds of it to its own term.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatronish.layers.dispatch import ExpertRoute
from megatronish.layers.linear import ALONE, LinearLayer, linear
from megatronish.layers.product import Product
from megatronish.layers.recompute import recompute, restoring
from megatronish.ops.gradient_sum import GradientSum
from megatronish.ops.grouped_mm import (
    Groups,
    add_grouped_bias,
    add_grouped_weight_gradient,
    grouped_bias_gradient,
    grouped_input_gradient,
    grouped_mm,
    grouped_weight_gradient,
)
from megatronish.parallel import comm
from megatronish.parallel.mesh import ExpertParallel
from megatronish.parallel.sharding import Cut, Init, Sharding
from megatronish.specs.chunk_sizes import LARGE_MATRIX

DOMAIN = "experts"


class GroupedProduct(Product):
    """Product of rows sorted by expert with one weight for each expert: made for one forward, used by its backward.

    The weight is [E, ..., out, in], `shape`; dims between are flattened into the outputs.
    """

    def __init__(self, groups: Groups, shape: torch.Size) -> None:
        self.groups, self.shape = groups, shape

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], [E, ..., out, in] -> [N, out]."""
        assert bias is None, "StackedLinear adds it"
        return grouped_mm(x, _matrices(weight), self.groups)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """[N, out], [E, ..., out, in] -> [N, in]."""
        return grouped_input_gradient(dy, _matrices(weight), self.groups)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """[N, out], [N, in] -> [E, ..., out, in]."""
        return grouped_weight_gradient(dy, x, self.groups).view(self.shape)

    def add_weight_gradient(self, to: GradientSum, dy: Tensor, x: Tensor) -> None:
        """Add the gradient of every expert to the fp32 sum [E, ..., out, in]."""
        is_large = self.shape[-2:].numel() >= LARGE_MATRIX
        add_grouped_weight_gradient(to._replace(total=_matrices(to.total)), dy, x, self.groups, is_large=is_large)


def _matrices(weight: Tensor) -> Tensor:
    """[E, 2, F, D] -> [E, 2 F, D], a view; [E, D, F] as it is."""
    return weight.flatten(1, -2)


class GroupedProducts(Protocol):
    """Products of a layer of experts, one for each forward."""

    def stored(self, weight: Sharding) -> Sharding:
        """Sharding of the layer's weight in the form in which the products read it."""
        ...

    def of(self, groups: Groups, shape: torch.Size) -> Product:
        """Product of one forward, whose rows lie in these groups, with a weight of this shape."""
        ...


class DenseGroups:
    """Products in the precision of their operands."""

    def stored(self, weight: Sharding) -> Sharding:
        """The weight as it is, in full precision."""
        return weight

    def of(self, groups: Groups, shape: torch.Size) -> Product:
        """Product of one forward."""
        return GroupedProduct(groups, shape)


class _AddBias(torch.autograd.Function):
    """[N, out], [E, ...], columns -> [N, out]: the bias of a row's group is added to these columns of it, in place."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, groups: Groups, columns: slice) -> Tensor:
        ctx.groups, ctx.columns, ctx.shape = groups, columns, bias.shape
        add_grouped_bias(y[:, columns], bias.flatten(1), groups)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dbias = None
        if ctx.needs_input_grad[1]:
            dbias = grouped_bias_gradient(grads[0][:, ctx.columns], ctx.groups).view(ctx.shape)
        return grads[0], dbias, None, None


class StackedLinear(LinearLayer):
    """One weight for each of E / ep experts, [E / ep, ..., out, in], of which etp cuts dim `cut_dim`.

    With `bias` each has one, too, [E / ep, ..., out], of which etp cuts the last dim.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        parallel: ExpertParallel,
        cut_dim: int,
        init_std: float,
        sections: tuple[str, ...],
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.shape, self.cut_dim, self.init_std, self.parallel = shape, cut_dim, init_std, parallel
        self.section_names = sections
        self.grouped: GroupedProducts = DenseGroups()
        local = list(shape)
        local[0] //= parallel.ep.size
        local[cut_dim] //= parallel.etp.size
        self.weight = nn.Parameter(torch.empty(local))
        columns = shape[-2] // parallel.etp.size
        first = 0 if cut_dim == len(shape) - 2 else columns * parallel.etp.rank
        self.bias_columns = slice(first, first + columns * len(sections))
        self.bias = nn.Parameter(torch.empty(local[0], *shape[1:-2], columns)) if bias else None

    def shardings(self) -> dict[str, Sharding]:
        """Cut over ep by expert and over etp by feature; the gradient is summed over the experts' own data ranks."""
        cuts = (Cut(0, "ep"), Cut(self.cut_dim, "etp"))
        weight = Sharding(self.shape, cuts, domain=DOMAIN, init=Init(self.init_std))
        shardings = {"weight": self.grouped.stored(weight)}
        if self.bias is not None:
            shape = self.shape[:-1]
            cuts = (Cut(0, "ep"), Cut(len(shape) - 1, "etp"))
            shardings["bias"] = Sharding(shape, cuts, domain=DOMAIN, role="vector")
        return shardings

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """[N, in] -> [N, out], each row with the weight of its group."""
        adapter = self.adapter
        rows = rows if adapter is None else adapter.scaled_input(rows, groups)
        # One object for this forward and its backward, deferred or not: it knows how many rows each expert has.
        product = self.grouped.of(groups, self.weight.shape)
        queue, sum_of = self.weight_gradients, self.sum_of
        y = linear(rows, self.weight, None, product=product, tp=ALONE, weight_gradients=queue, sum_of=sum_of)
        if self.bias is not None:
            y = _AddBias.apply(y, self.bias, groups, self.bias_columns)
        return y if adapter is None else adapter(rows, y, groups)


class Experts(nn.Module):
    """E experts of one layer, of which this rank holds E / ep, each cut over etp.

    `sections` are ("gate", "up"), or ("up",). `activate` takes [N, sections * F / etp] to [N, F / etp].
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        *,
        sections: tuple[str, ...],
        activate: Callable[[Tensor], Tensor],
        parallel: ExpertParallel,
        init_std: float,
        output_std: float,
        bias: bool = False,
    ) -> None:
        super().__init__()
        assert num_experts % parallel.ep.size == 0 and ffn_size % parallel.etp.size == 0
        assert not bias or hidden_size % parallel.etp.size == 0
        self.activate, self.parallel = activate, parallel
        shape = (num_experts, len(sections), ffn_size, hidden_size)
        self.gate_up = StackedLinear(
            shape, parallel=parallel, cut_dim=2, init_std=init_std, sections=sections, bias=bias
        )
        down = (num_experts, hidden_size, ffn_size)
        self.down = StackedLinear(
            down, parallel=parallel, cut_dim=2, init_std=output_std, sections=("down",), bias=bias
        )

    def forward(
        self,
        x: Tensor,
        weights: Tensor | None,
        route: ExpertRoute,
        *,
        restores: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """[T, D], [T, K] -> [T, D]: this rank's tokens through the experts that they chose.

        `route` is that of the tokens of all etp ranks: [etp T, K] choices. Without weights each counts as it is.
        `restores`: the backward computes the activation again (--recompute-modules moe_act). `meanwhile` is called
        while the rows are on their way to the experts.
        """
        ep, etp = self.parallel.ep, self.parallel.etp
        # Ranks of etp hold parts of the same experts: each computes its part for the tokens of all of them.
        x = comm.gather_whole_sequence(x, etp, sums=True)
        if weights is None:
            weights = x.new_ones(len(x), route.num_choices, dtype=torch.float32)
        else:
            weights = comm.gather_whole_sequence(weights, etp, sums=True)
        rows, weights = route.to_experts(x, weights, ep=ep, meanwhile=meanwhile)  # [N', D]
        features = self.gate_up(rows, route.groups)
        activated = recompute(self.activate, features) if restores else self.activate(features)
        with restoring((activated,), lambda: (self.activate(features),), really=restores):
            rows = self.down(activated, route.groups)
        y = route.from_experts(rows, weights, ep=ep)  # [etp T, D], one term of the sum over etp
        return comm.reduce_scatter_to_sequence(y, etp)
