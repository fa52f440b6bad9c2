"""MLP of a transformer layer: up-projection, activation, down-projection."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatronish.config.sections.model import ModelConfig
from megatronish.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatronish.layers.recompute import recompute_rows
from megatronish.model.context import Context
from megatronish.ops.activation import bias_gelu, bias_swiglu, is_fused
from megatronish.ops.library import accumulation_dtype
from megatronish.parallel.mesh import TensorParallel
from megatronish.parallel.sharding import Init, Sharding
from megatronish.specs.layers import MLPSpec

FUSED = ("gelu", "gelu_tanh", "swiglu")
"""Activations with operators of their own, which add the bias of the first product."""


class MLP(nn.Module):
    """MLP, [S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D]), with F features between.

    SwiGLU, GEGLU and quick GEGLU have a gate of F more features; GELU, ReLU, squared ReLU and xIELU have none.
    """

    def __init__(self, config: ModelConfig, spec: MLPSpec, *, tp: TensorParallel, output_std: float) -> None:
        super().__init__()
        self.spec = spec
        self.xielu = XIELU(tp=tp) if spec.activation == "xielu" else None
        self.has_fused_activation = spec.is_plain and spec.activation in FUSED
        self.fc1 = ColumnParallelLinear(
            config.hidden_size,
            sum(spec.sections.values()),
            tp=tp,
            bias=spec.bias,
            init_std=config.hidden_std,
            sections=spec.sections,
        )
        self.fc2 = RowParallelLinear(
            spec.ffn_size, config.hidden_size, tp=tp, bias=spec.bias, init_std=output_std, section="down"
        )

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """[S, B, D] -> [S, B, D]: fc1, activation, fc2."""
        # A fused activation adds fc1's bias and sums its gradient in passing; torch adds it best in the product itself.
        fused = self.has_fused_activation and is_fused(x)
        x = self.fc1(x, skip_bias=fused, drop=context)
        if self.xielu is not None:
            return self.fc2(self.xielu(x), drop=context)
        return self.fc2(activated(x, self.fc1.bias if fused else None, self.spec), drop=context)


def activated(x: Tensor, bias: Tensor | None, spec: MLPSpec) -> Tensor:
    """[..., F] (gated: [..., 2 F], gate before up), a bias not yet added -> [..., F]."""
    match spec.activation:
        case "swiglu" if spec.is_plain:
            return bias_swiglu(x, bias)
        case "swiglu" | "geglu" | "quick_geglu":
            assert bias is None, "fc1 has added its bias"
            # Only x is kept: autograd would keep four more tensors of its half, and in fp32.
            return recompute_rows(partial(gated, spec=spec), x)
        case "relu":
            return F.relu(x)
        case "squared_relu":
            return F.relu(x).square()
        case "gelu_tanh":
            return bias_gelu(x, bias, approximate="tanh")
        case "gelu":
            return bias_gelu(x, bias, approximate="none")
        case "xielu":
            raise AssertionError("an activation that learns is a module")


QUICK = 1.702
"""x sigmoid(1.702 x) is nearly GELU (Hendrycks & Gimpel 2016)."""


def gated(x: Tensor, *, spec: MLPSpec) -> Tensor:
    """[..., 2 F], gate before up -> [..., F]: activation(gate) * (up + offset), both clamped before; in fp32."""
    gate, up = x.to(accumulation_dtype(x.dtype)).chunk(2, dim=-1)
    if spec.clamp is not None:
        gate, up = gate.clamp(max=spec.clamp), up.clamp(-spec.clamp, spec.clamp)
    if spec.activation == "geglu":
        activated_gate = F.gelu(gate, approximate="tanh")
    else:
        activated_gate = gate * torch.sigmoid((QUICK if spec.activation == "quick_geglu" else 1.0) * gate)
    return (activated_gate * (up + spec.up_offset)).to(x.dtype)


BETA = 0.5
FIRST_ALPHAS = {"alpha_p": 0.8, "alpha_n": 0.8 - BETA}
"""softplus(alpha) at the start of training: a_p and a_n are 0.8."""


class XIELU(nn.Module):
    """xIELU (Huang & Schlag 2024, arXiv:2411.13010) of the features of a rank, [..., F/tp] -> [..., F/tp], in fp32.

        f(x) = a_p x^2 + b x                     for x > 0
        f(x) = a_n (exp(x) - 1 - x) + b x        else

    with b = 1/2, a_p = softplus(alpha_p) and a_n = b + softplus(alpha_n). Both alphas are learned, and whole on every
    rank of tp, which has the part of their gradients that comes from its features.
    """

    def __init__(self, *, tp: TensorParallel) -> None:
        super().__init__()
        self.partial_over = frozenset({"tp"} if tp.size > 1 else ())
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))

    def shardings(self) -> dict[str, Sharding]:
        """Vectors, which do not decay."""
        return {
            name: Sharding((1,), partial_over=self.partial_over, init=Init(value=math.log(math.expm1(first))))
            for name, first in FIRST_ALPHAS.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        """[..., F/tp] -> [..., F/tp]."""
        return _XIELU.apply(x, self.alpha_p, self.alpha_n)


class _XIELU(torch.autograd.Function):
    """xIELU without branches: the term of a_p reads max(x, 0), that of a_n min(x, 0), and both are 0 at 0.

    Only x is kept. Autograd would keep four more tensors of its size, and need twelve at a time in the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
        ctx.save_for_backward(x, alpha_p, alpha_n)
        wide, a_p, a_n = _wide(x, alpha_p, alpha_n)
        below = wide.clamp(max=0)
        y = torch.expm1(below).sub_(below).mul_(a_n).add_(wide, alpha=BETA)
        return y.add_(wide.clamp(min=0).square_().mul_(a_p)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x, alpha_p, alpha_n = ctx.saved_tensors
        wide, a_p, a_n = _wide(x, alpha_p, alpha_n)
        dy = grads[0].to(wide.dtype)
        above, below = wide.clamp(min=0), wide.clamp(max=0)
        del wide
        grown = torch.expm1(below)
        of_a_n = below.neg_().add_(grown).mul_(dy).sum()
        del below
        of_a_p = above.square().mul_(dy).sum()
        dx = above.mul_(2 * a_p).add_(grown.mul_(a_n)).add_(BETA).mul_(dy)
        # softplus grows by the sigmoid.
        of_alphas = (
            (of_a * torch.sigmoid(alpha.to(of_a.dtype))).to(alpha.dtype)
            for of_a, alpha in ((of_a_p, alpha_p), (of_a_n, alpha_n))
        )
        return dx.to(x.dtype), *of_alphas


def _wide(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, a_p and a_n in the type that is computed in."""
    dtype = accumulation_dtype(x.dtype)
    return x.to(dtype), F.softplus(alpha_p.to(dtype)), BETA + F.softplus(alpha_n.to(dtype))
