"""Linear layers cut over tensor-parallel ranks: column-parallel and row-parallel.

The two make a pair (Shoeybi et al. 2019, arXiv:1909.08053). The weight of the first is cut by columns of its output, so
each rank computes some of the features. The weight of the second is cut by rows of its input, so each rank computes a
part of every sum, and one reduction completes the sums. Under sequence parallelism (Korthikanti et al. 2022,
arXiv:2205.05198) the pair starts with an all-gather along the sequence and ends with a reduce-scatter, which together
move as many bytes as the all-reduce did.

A layer owns its weight, its collectives and their overlap; the arithmetic is that of its `product` (product.py). Where
a layer's `weight_gradients` is set, its backward computes the gradient of its input alone and defers that of the weight
(weight_gradients.py). Where it is given `sum_of`, its backward adds the weight's gradient there.

A layer may have adapters (`Adaptable`): its product sees the input that the adapter scales, and the adapter adds to the
output.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatronish.layers.product import DENSE, Product
from megatronish.layers.ring_products import ScatteredProduct, gathered_product
from megatronish.layers.weight_gradients import AddsInPlace, SumOf, WeightGradients
from megatronish.ops.grouped_mm import Groups
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis, TensorParallel
from megatronish.parallel.sharding import Cut, Init, Role, Sharding


class InputDropout(Protocol):
    """Dropout on the inputs of a transformer layer's adapters, in one forward of training."""

    def of_input(self, x: Tensor, *, site: str, rate: float, first_column: int = 0, is_whole: bool = False) -> Tensor:
        """[s, B, in] -> [s, B, in]: columns from `first_column` on of the global input.

        x holds this rank's own positions, or with `is_whole` those of all tp ranks.
        """
        ...


class Adapter(Protocol):
    """Adapter of a column-parallel or row-parallel layer."""

    def scaled_input(self, x: Tensor, /) -> Tensor:
        """The layer's input as the layer is to see it."""
        ...

    def __call__(self, x: Tensor, y: Tensor, drop: InputDropout | None, /) -> Tensor:
        """The layer's output y, reduced and with its bias, adapted; x is the layer's input."""
        ...


class GroupedAdapter(Protocol):
    """Adapter of a layer of experts: one for each expert that this rank holds."""

    def scaled_input(self, x: Tensor, groups: Groups, /) -> Tensor:
        """The rows as the layer is to see them."""
        ...

    def __call__(self, x: Tensor, y: Tensor, groups: Groups, /) -> Tensor:
        """The layer's output y, adapted. x are the layer's rows, sorted by expert."""
        ...


class Adaptable(nn.Module):
    """Layer that may have adapters, by their names, of which the one called `active_adapter` is applied.

    `section_names` name the parts of its output that an adapter is for.
    """

    section_names: tuple[str, ...] = ()
    active_adapter: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict()

    @property
    def adapter(self) -> Any:
        """The adapter that is applied: an `Adapter`, of experts a `GroupedAdapter`, or None."""
        name = self.active_adapter
        return self.adapters[name] if name is not None and name in self.adapters else None


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters, as a context; those that were applied before are applied again afterwards."""
    layers = [module for module in model.modules() if isinstance(module, Adaptable)]
    before = [layer.active_adapter for layer in layers]
    select_adapter(model, None)
    try:
        yield
    finally:
        for layer, name in zip(layers, before, strict=True):
            layer.active_adapter = name


def select_adapter(model: nn.Module, name: str | None) -> None:
    """From now on the model's linear layers apply the adapter of this name, those that have it; None: no adapter."""
    for module in model.modules():
        if isinstance(module, Adaptable):
            module.active_adapter = name


ALONE = TensorParallel(Axis("alone"))


class LinearLayer(Adaptable, AddsInPlace):
    """Layer that multiplies by one weight: base of column-parallel, row-parallel and output layers."""

    weight: nn.Parameter
    weight_gradients: WeightGradients | None = None

    def __init__(self) -> None:
        super().__init__()
        self.product: Product = DENSE

    def multiply(self, x: Tensor, bias: Tensor | None, *, tp: TensorParallel, product: Product | None = None) -> Tensor:
        """`linear` with the layer's own weight and product, or one of this forward, and its places for gradients."""
        queue, sum_of, product = self.weight_gradients, self.sum_of, product or self.product
        return linear(x, self.weight, bias, product=product, tp=tp, weight_gradients=queue, sum_of=sum_of)


class ColumnParallelLinear(LinearLayer):
    """Column-parallel linear layer, [S, B, in] (sequence parallel: [S/tp, B, in]) -> [S, B, out/tp].

    `sections` are parts of `out` that are cut one by one, so that a rank's output holds its part of each, by name.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: TensorParallel,
        bias: bool,
        init_std: float,
        sections: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.section_names = tuple(sections or ())
        self.sections = tuple((sections or {"": out_features}).values())
        assert sum(self.sections) == out_features and all(section % tp.size == 0 for section in self.sections)
        self.tp, self.init_std = tp, init_std
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features // tp.size, in_features))
        self.bias = nn.Parameter(torch.empty(out_features // tp.size)) if bias else None

    def shardings(self) -> dict[str, Sharding]:
        """Both parameters are cut along the output features."""
        shape = (self.out_features, self.in_features)
        cuts = (Cut(0, "tp", self.sections),)
        shardings = {"weight": self.product.stored(Sharding(shape, cuts, init=Init(self.init_std)))}
        if self.bias is not None:
            shardings["bias"] = Sharding((self.out_features,), cuts)
        return shardings

    def forward(self, x: Tensor, *, skip_bias: bool = False, drop: InputDropout | None = None) -> Tensor:
        """[S, B, in] -> [S, B, out/tp]. `skip_bias` leaves the bias, and its gradient, to a fused operator after it.

        `drop` is the dropout of an adapter's input.
        """
        y = self.multiply(x, None if skip_bias else self.bias, tp=self.tp)
        return y if self.adapter is None else self.adapter(x, y, drop)


class RowParallelLinear(LinearLayer):
    """Row-parallel linear layer, [S, B, in/tp] -> [S, B, out] (sequence parallel: [S/tp, B, out]).

    The bias is added once, after the reduction. `section` names the output for adapters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: TensorParallel,
        bias: bool,
        init_std: float,
        section: str | None = None,
    ) -> None:
        super().__init__()
        self.section_names = () if section is None else (section,)
        assert in_features % tp.size == 0
        self.tp, self.init_std = tp, init_std
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features // tp.size))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def shardings(self) -> dict[str, Sharding]:
        """The weight is cut along the input features; the bias is whole, its gradient partial over a cut sequence."""
        shape = (self.out_features, self.in_features)
        shardings = {"weight": self.product.stored(Sharding(shape, (Cut(1, "tp"),), init=Init(self.init_std)))}
        if self.bias is not None:
            shardings["bias"] = Sharding((self.out_features,), partial_over=self.tp.partial_over)
        return shardings

    def forward(self, x: Tensor, *, drop: InputDropout | None = None) -> Tensor:
        """[S, B, in/tp] -> [S, B, out], or [S/tp, B, out] of a cut sequence. `drop`: see ColumnParallelLinear."""
        adapter = self.adapter
        if adapter is None:
            return self._reduced(x)
        # IA3 of a row-parallel layer multiplies its inputs, so before the product; LoRA and scales of outputs come
        # after it.
        x = adapter.scaled_input(x)
        return adapter(x, self._reduced(x), drop)

    def _reduced(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return self.multiply(x, self.bias, tp=ALONE)
        # The bias after the reduction, once: in the product each rank of tp would add it to its term of the sum.
        if self.tp.by_pieces and self.tp.cuts_sequence and self.product is DENSE:
            y = self.multiply(x, None, tp=ALONE, product=ScatteredProduct(self.tp))
        else:
            y = self.multiply(x, None, tp=ALONE)
            reduce = comm.reduce_scatter_to_sequence if self.tp.cuts_sequence else comm.reduce_from
            y = reduce(y, self.tp.axis)
        return y if self.bias is None else y + self.bias


class WholeLinear(LinearLayer):
    """Linear layer that every rank of tp computes for its own tokens, [..., in] -> [..., out]: it needs no collective.

    For what is small: dense layers at the end of a model, and the way down to latents. `section` names the output for
    adapters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: TensorParallel,
        init_std: float,
        bias: bool = True,
        role: Role = "end",
        section: str | None = None,
    ) -> None:
        super().__init__()
        self.section_names = () if section is None else (section,)
        self.tp, self.init_std, self.role = tp, init_std, role
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def shardings(self) -> dict[str, Sharding]:
        """Whole on every rank; the gradients are partial over a cut sequence."""
        over, shape = self.tp.partial_over, (self.out_features, self.in_features)
        weight = Sharding(shape, partial_over=over, role=self.role, init=Init(self.init_std))
        shardings = {"weight": self.product.stored(weight)}
        if self.bias is not None:
            shardings["bias"] = Sharding((self.out_features,), partial_over=over)
        return shardings

    def forward(self, x: Tensor, *, drop: InputDropout | None = None) -> Tensor:
        """[..., in] -> [..., out]. `drop`: see ColumnParallelLinear."""
        y = self.multiply(x, self.bias, tp=ALONE)
        return y if self.adapter is None else self.adapter(x, y, drop)


def set_products(model: nn.Module, choose: Callable[[str, LinearLayer], Product]) -> None:
    """Give every linear layer of the model, the output layer included, the product chosen by its name.

    `choose` returns a new object for each layer whose product needs state of its own, or `layer.product` to keep it.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, LinearLayer):
            layer.product = choose(name, layer)


def split_backward(model: nn.Module, weight_gradients: WeightGradients | None) -> None:
    """From now on the model's linear layers defer their weight gradients to this queue (None: compute them at once)."""
    for layer in model.modules():
        if isinstance(layer, LinearLayer):
            layer.weight_gradients = weight_gradients


def deferrable_weights(model: nn.Module) -> set[nn.Parameter]:
    """Weights of the model's linear layers: once the backward is split their gradients arrive in W actions."""
    return {layer.weight for layer in model.modules() if isinstance(layer, LinearLayer)}


def linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    *,
    product: Product,
    tp: TensorParallel,
    weight_gradients: WeightGradients | None = None,
    sum_of: SumOf | None = None,
) -> Tensor:
    """[S, B, in] (sequence parallel: [S/tp, B, in]), [out/tp, in], [out/tp] -> [S, B, out/tp].

    The matrix product of a column-parallel layer; with a `tp` of one rank, of any layer. Autograd's own `F.linear` is
    the fast path where there is nothing to overlap, to defer or to exchange.
    """
    # A weight that is frozen has no gradient to defer or to add up.
    gives_to_autograd = (weight_gradients is None and sum_of is None) or not weight.requires_grad
    if product is DENSE and tp.size == 1 and gives_to_autograd:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, product, tp, weight_gradients, sum_of)


class _Linear(torch.autograd.Function):
    """Product of a column-parallel layer, with a backward that overlaps its collectives and can be split.

    Only this rank's part of a cut sequence is kept for the backward: x is gathered again while the input's gradient is
    computed, or, where the weight's gradient is deferred, when that is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        product: Product,
        tp: TensorParallel,
        weight_gradients: WeightGradients | None,
        sum_of: SumOf | None,
    ) -> Tensor:
        # x is needed for the weight's gradient alone: a frozen weight keeps no activation.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.product, ctx.tp, ctx.has_bias = product, tp, bias is not None
        # The sum of gradients is found by the Parameter itself, which under checkpointing the saved tensor is not.
        ctx.weight_gradients, ctx.sum_of = weight_gradients, sum_of
        ctx.parameter = None if weight_gradients is None and sum_of is None else weight
        if tp.by_pieces and tp.cuts_sequence and product is DENSE:
            return gathered_product(x, weight, bias, tp)
        # Sequence parallel: [S/tp, B, in] -> [S, B, in].
        whole = comm.start_all_gather(x, tp.sequence_axis).wait()
        return product.forward(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        product, tp = ctx.product, ctx.tp
        dy = grads[0].contiguous()  # [S, B, out/tp]
        learns, at_once = ctx.needs_input_grad[1], ctx.weight_gradients is None

        # x is gathered ([S/tp, B, in] -> [S, B, in]) while this rank's term of the input's gradient is computed.
        gathering = comm.start_all_gather(x, tp.sequence_axis) if learns and at_once else None
        dx = product.input_gradient(dy, weight)  # [S, B, in], one term of the sum over tp
        whole = None if gathering is None else gathering.wait()

        # The terms are summed over tp, to [S, B, in] or to [S/tp, B, in], while the weight's gradient is computed.
        start_reduction = comm.start_reduce_scatter if tp.cuts_sequence else comm.start_all_reduce
        reducing = start_reduction(dx, tp.axis)
        # Three ways out for the weight's gradient: to autograd, into the sum of the bucket, or into the queue of a W
        # action. Autograd gets None in the last two.
        dweight = None
        if whole is not None and ctx.sum_of is None:
            dweight = product.weight_gradient(dy, whole)  # [out/tp, in]
        elif whole is not None:
            product.add_weight_gradient(ctx.sum_of(ctx.parameter), dy, whole)
        dbias = dy.flatten(0, -2).sum(0) if ctx.has_bias else None
        # x as it was saved, cut over the sequence: the queue gathers it only while it computes.
        if learns and not at_once:
            ctx.weight_gradients.defer(ctx.parameter, dy, x, axis=tp.sequence_axis, product=product)
        return reducing.wait(), dweight, dbias, None, None, None, None
