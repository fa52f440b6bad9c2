"""Normalisation layers: LayerNorm and RMSNorm, and RMSNorm over heads that tp ranks share."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatronish.config.sections.block import NormParameters
from megatronish.config.sections.model import ModelConfig
from megatronish.ops.library import accumulation_dtype
from megatronish.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis, TensorParallel
from megatronish.parallel.sharding import Cut, Init, Role, Sharding
from megatronish.specs.attention import ranks_of_a_head


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019) over the last dim, [..., size] -> [..., size].

    `partial`: each tp rank normalises other values (a part of the sequence, or heads of its own) with the same weight,
    so its gradient is a part of the whole. `one_plus` stores the weight as w - 1. `of_heads`: of queries or keys.
    `learned`: the weight, and LayerNorm's bias; the weight alone; or nothing.
    """

    def __init__(
        self,
        size: int,
        *,
        kind: Literal["LayerNorm", "RMSNorm"],
        epsilon: float,
        partial: bool,
        one_plus: bool = False,
        of_heads: bool = False,
        learned: NormParameters = "all",
    ) -> None:
        super().__init__()
        self.size, self.kind, self.epsilon, self.partial, self.one_plus = size, kind, epsilon, partial, one_plus
        self.role: Role = "qk_norm" if of_heads else "vector"
        self.weight = nn.Parameter(torch.empty(size)) if learned != "none" else None
        self.bias = nn.Parameter(torch.empty(size)) if kind == "LayerNorm" and learned == "all" else None

    def shardings(self) -> dict[str, Sharding]:
        """Both parameters are whole on every tp rank."""
        partial_over = frozenset({"tp"} if self.partial else ())
        init = Init(value=0.0 if self.one_plus else 1.0)
        shardings = {}
        if self.weight is not None:
            shardings["weight"] = Sharding((self.size,), partial_over=partial_over, role=self.role, init=init)
        if self.bias is not None:
            shardings["bias"] = Sharding((self.size,), partial_over=partial_over, role=self.role)
        return shardings

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]: x normalised, scaled and, in LayerNorm, shifted."""
        weight = self._weight_for(x)
        if self.kind == "LayerNorm":
            return layer_norm(x, weight, self._bias_for(weight), epsilon=self.epsilon, one_plus=self.one_plus)
        return rms_norm(x, weight, epsilon=self.epsilon, one_plus=self.one_plus)

    def of_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + y, and x + y itself: the residual addition and the norm after it in one operator."""
        weight = self._weight_for(x)
        if self.kind == "LayerNorm":
            return add_layer_norm(x, y, weight, self._bias_for(weight), epsilon=self.epsilon, one_plus=self.one_plus)
        return add_rms_norm(x, y, weight, epsilon=self.epsilon, one_plus=self.one_plus)

    def _weight_for(self, x: Tensor) -> Tensor:
        """The weight; if none is learned, one that changes nothing."""
        return x.new_full((self.size,), 0.0 if self.one_plus else 1.0) if self.weight is None else self.weight

    def _bias_for(self, weight: Tensor) -> Tensor:
        """The bias; if none is learned, zeros."""
        return weight.new_zeros(self.size) if self.bias is None else self.bias


def residual_norm(config: ModelConfig, *, tp: TensorParallel) -> Norm:
    """Norm of a model's hidden states [S, B, D], of which a rank has S/tp rows under sequence parallelism."""
    return Norm(
        config.hidden_size,
        kind=config.normalization,
        epsilon=config.norm_epsilon,
        partial=tp.cuts_sequence,
        one_plus=config.apply_layernorm_1p,
        learned=config.norm_parameters,
    )


class AllHeadsNorm(nn.Module):
    """RMSNorm over all heads of queries, or of keys, at once (OLMoE): [..., n H / tp] -> [..., n H / tp].

    Features and weight are cut over tp, so the sum of squares of a token is an all-reduce of one number; in the
    backward, so is the part of the gradient that comes through it.
    """

    def __init__(self, size: int, *, epsilon: float, tp: Axis) -> None:
        super().__init__()
        self.size, self.epsilon, self.tp = size, epsilon, tp
        self.weight = nn.Parameter(torch.empty(size // tp.size))

    def shardings(self) -> dict[str, Sharding]:
        """Cut over tp, with the features."""
        return {"weight": Sharding((self.size,), (Cut(0, "tp"),), role="qk_norm", init=Init(value=1.0))}

    def forward(self, x: Tensor) -> Tensor:
        """[..., n H / tp] -> [..., n H / tp]."""
        return _CutRMSNorm.apply(x, self.weight, self.size, self.epsilon, self.tp)


class EachHeadNorm(nn.Module):
    """Norm of each head with a weight of its own and no bias (StableLM, Cohere): [..., n / tp, H] -> [..., n / tp, H].

    The weight, [n H], is cut over tp with the heads. With n < tp a rank has a part of the weight of a head, which it
    normalises as its neighbours do, and they send each other their parts.
    """

    def __init__(
        self, heads: int, size: int, *, kind: Literal["LayerNorm", "RMSNorm"], epsilon: float, tp: Axis
    ) -> None:
        super().__init__()
        self.heads, self.size, self.kind, self.epsilon, self.tp = heads, size, kind, epsilon, tp
        self.sharers = ranks_of_a_head(heads, tp.size)
        self.weight = nn.Parameter(torch.empty(heads * size // tp.size))

    def shardings(self) -> dict[str, Sharding]:
        """Cut over tp, with the heads."""
        shape = (self.heads * self.size,)
        return {"weight": Sharding(shape, (Cut(0, "tp"),), role="qk_norm", init=Init(value=1.0))}

    def forward(self, x: Tensor) -> Tensor:
        """[..., n / tp, H] -> [..., n / tp, H]."""
        ones = x.new_ones(self.size)
        if self.kind == "LayerNorm":
            normalised = layer_norm(x, ones, x.new_zeros(self.size), epsilon=self.epsilon)
        else:
            normalised = rms_norm(x, ones, epsilon=self.epsilon)
        weight = comm.gather_from_neighbours(self.weight, self.tp, self.sharers) if self.sharers > 1 else self.weight
        return normalised * weight.view(-1, self.size)


class _CutRMSNorm(torch.autograd.Function):
    """RMSNorm of vectors of which each rank of the axis holds a part, [..., size / tp]; sums are in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, size: int, epsilon: float, axis: Axis) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        squares = comm.all_reduce(wide.square().sum(-1, keepdim=True), axis)
        scale = torch.rsqrt(squares / size + epsilon)  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        ctx.size, ctx.axis = size, axis
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, scale = ctx.saved_tensors
        normal = x.to(scale.dtype) * scale
        dy = grads[0].to(scale.dtype)
        dweight = (dy * normal).flatten(0, -2).sum(0)
        dnormal = dy * weight
        # Every rank's output depends on the sum of squares, so this sum runs over all of them.
        along = comm.all_reduce((dnormal * normal).sum(-1, keepdim=True), ctx.axis) / ctx.size
        dx = (dnormal - normal * along) * scale
        return dx.to(x.dtype), dweight.to(weight.dtype), None, None, None
