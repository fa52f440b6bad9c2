"""Normalisation layers: LayerNorm and RMSNorm."""

from typing import Literal

import torch
from torch import Tensor, nn

from megatronish.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megatronish.sharding import Init, Role, Sharding


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019) over the last dim, [..., size] -> [..., size].

    `partial`: each tp rank normalises other values (a part of the sequence, or heads of its own) with the same weight,
    so its gradient is a part of the whole. `one_plus` stores the weight as w - 1. `of_heads`: of queries or keys.
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
    ) -> None:
        super().__init__()
        self.size, self.epsilon, self.partial, self.one_plus = size, epsilon, partial, one_plus
        self.role: Role = "qk_norm" if of_heads else "vector"
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if kind == "LayerNorm" else None

    def shardings(self) -> dict[str, Sharding]:
        """Both parameters are whole on every tp rank."""
        partial_over = frozenset({"tp"} if self.partial else ())
        init = Init(value=0.0 if self.one_plus else 1.0)
        found = {"weight": Sharding((self.size,), partial_over=partial_over, role=self.role, init=init)}
        if self.bias is not None:
            found["bias"] = Sharding((self.size,), partial_over=partial_over, role=self.role)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]: x normalised, scaled and, in LayerNorm, shifted."""
        if self.bias is not None:
            return layer_norm(x, self.weight, self.bias, epsilon=self.epsilon, one_plus=self.one_plus)
        return rms_norm(x, self.weight, epsilon=self.epsilon, one_plus=self.one_plus)

    def of_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + y, and x + y itself: the residual addition and the norm after it in one operator."""
        if self.bias is not None:
            return add_layer_norm(x, y, self.weight, self.bias, epsilon=self.epsilon, one_plus=self.one_plus)
        return add_rms_norm(x, y, self.weight, epsilon=self.epsilon, one_plus=self.one_plus)
