"""How is one matrix product shared by the ranks of tp?

Two halves make a pair (Shoeybi et al. 2019, arXiv:1909.08053): the first matrix is cut by columns of its output, so
each rank computes some of the features; the second by rows of its input, so each rank computes a part of every sum,
and one reduction finishes them. Under sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) the pair starts
by gathering the sequence and ends by scattering it again, which moves as many bytes as the reduction did.

Where a layer's `weight_gradients` is set, its backward computes the gradient of its input alone and leaves the weight's
for later (weight_gradients.py).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatronish import comm
from megatronish.layers.weight_gradients import WeightGradients
from megatronish.mesh import Axis, TensorParallel
from megatronish.sharding import Cut, Init, Sharding

ALONE = TensorParallel(Axis("alone"))


class ColumnParallelLinear(nn.Module):
    """[S, B, in] (sequence parallel: [S/tp, B, in]) -> [S, B, out/tp].

    `sections` are parts of `out` that are cut one by one, so that a rank's output holds its part of each.
    """

    weight_gradients: WeightGradients | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: TensorParallel,
        bias: bool,
        init_std: float,
        sections: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        sections = sections or (out_features,)
        assert sum(sections) == out_features and all(section % tp.size == 0 for section in sections)
        self.tp, self.init_std, self.sections = tp, init_std, sections
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features // tp.size, in_features))
        self.bias = nn.Parameter(torch.empty(out_features // tp.size)) if bias else None

    def shardings(self) -> dict[str, Sharding]:
        """Both parameters are cut along the output features."""
        shape = (self.out_features, self.in_features)
        cuts = (Cut(0, "tp", self.sections),)
        found = {"weight": Sharding(shape, cuts, init=Init(self.init_std))}
        if self.bias is not None:
            found["bias"] = Sharding((self.out_features,), cuts)
        return found

    def forward(self, x: Tensor, *, leaves_bias: bool = False) -> Tensor:
        """See the class. The bias can be left to what follows, which then adds it and has its gradient."""
        return column_parallel(
            x,
            self.weight,
            None if leaves_bias else self.bias,
            tp=self.tp,
            weight_gradients=self.weight_gradients,
        )


class RowParallelLinear(nn.Module):
    """[S, B, in/tp] -> [S, B, out] (sequence parallel: [S/tp, B, out]). The bias is added once, after the reduction."""

    weight_gradients: WeightGradients | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: TensorParallel,
        bias: bool,
        init_std: float,
    ) -> None:
        super().__init__()
        assert in_features % tp.size == 0
        self.tp, self.init_std = tp, init_std
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features // tp.size))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def shardings(self) -> dict[str, Sharding]:
        """The weight is cut along the input features; the bias is whole, its gradient partial over a cut sequence."""
        shape = (self.out_features, self.in_features)
        found = {"weight": Sharding(shape, (Cut(1, "tp"),), init=Init(self.init_std))}
        if self.bias is not None:
            found["bias"] = Sharding((self.out_features,), partial_over=self.tp.partial_over)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if self.tp.size == 1:
            return product(x, self.weight, self.bias, self.weight_gradients)
        y = product(x, self.weight, None, self.weight_gradients)
        reduce = comm.reduce_scatter_to_sequence if self.tp.cuts_sequence else comm.reduce_from
        y = reduce(y, self.tp.axis)
        return y if self.bias is None else y + self.bias


def column_parallel(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    *,
    tp: TensorParallel,
    weight_gradients: WeightGradients | None = None,
) -> Tensor:
    """[S, B, in] (sequence parallel: [S/tp, B, in]), [out/tp, in] -> [S, B, out/tp]."""
    if tp.size == 1 and weight_gradients is None:
        return F.linear(x, weight, bias)
    return _ColumnParallel.apply(x, weight, bias, tp, weight_gradients)


def product(
    x: Tensor, weight: nn.Parameter, bias: Tensor | None, weight_gradients: WeightGradients | None = None
) -> Tensor:
    """[..., in], [out, in] -> [..., out], of what this rank holds: shared by nobody."""
    return column_parallel(x, weight, bias, tp=ALONE, weight_gradients=weight_gradients)


class _ColumnParallel(torch.autograd.Function):
    """The product of a column-parallel layer, written out so that its backward can overlap and can be split.

    The reduction of the input's gradient runs while the weight's gradient is computed. Under sequence parallelism only
    the rank's own part of the input is kept; the whole is gathered again while the input's gradient is computed, or,
    where the weight's gradient is put off, not before it is needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        tp: TensorParallel,
        weight_gradients: WeightGradients | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.has_bias = tp, bias is not None
        # The sum is found by the Parameter itself, which under checkpointing the saved tensor is not.
        ctx.weight_gradients, ctx.parameter = weight_gradients, None if weight_gradients is None else weight
        whole = comm.start_all_gather(x, tp.sequence_axis).wait()
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        dy = grads[0].contiguous()
        gathered_over = ctx.tp.sequence_axis
        at_once = ctx.weight_gradients is None
        learns = ctx.needs_input_grad[1]
        gathering = comm.start_all_gather(x, gathered_over) if at_once and learns else None
        dx = dy @ weight
        whole = gathering.wait() if gathering else None
        start_reduction = comm.start_reduce_scatter if ctx.tp.cuts_sequence else comm.start_all_reduce
        reducing = start_reduction(dx, ctx.tp.axis)
        flat_dy = dy.flatten(0, -2)
        dweight = None if whole is None else flat_dy.t() @ whole.flatten(0, -2)
        dbias = flat_dy.sum(0) if ctx.has_bias else None
        if learns and not at_once:
            ctx.weight_gradients.defer(ctx.parameter, dy, x, axis=gathered_over)
        return reducing.wait(), dweight, dbias, None, None
