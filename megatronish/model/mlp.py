"""MLP of a transformer layer: up-projection, activation, down-projection."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatronish.config.sections.model import ModelConfig
from megatronish.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatronish.layers.recompute import recompute
from megatronish.model.context import Context
from megatronish.ops.activation import bias_gelu, bias_swiglu, is_fused
from megatronish.ops.library import accumulation_dtype
from megatronish.parallel.mesh import TensorParallel
from megatronish.specs.layers import MLPSpec

FUSED = ("gelu", "gelu_tanh", "swiglu")
"""Activations with operators of their own, which add the bias of the first product."""


class MLP(nn.Module):
    """MLP, [S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D]), with F features between.

    SwiGLU, GEGLU and quick GEGLU have a gate of F more features; GELU, ReLU and squared ReLU have none.
    """

    def __init__(self, config: ModelConfig, spec: MLPSpec, *, tp: TensorParallel, output_std: float) -> None:
        super().__init__()
        self.spec = spec
        self.has_fused_activation = spec.is_plain and spec.activation in FUSED
        self.fc1 = ColumnParallelLinear(
            config.hidden_size,
            sum(spec.sections.values()),
            tp=tp,
            bias=spec.bias,
            init_std=config.init_method_std,
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
        return self.fc2(activated(x, self.fc1.bias if fused else None, self.spec), drop=context)


def activated(x: Tensor, bias: Tensor | None, spec: MLPSpec) -> Tensor:
    """[..., F] (gated: [..., 2 F], gate before up), a bias not yet added -> [..., F]."""
    match spec.activation:
        case "swiglu" if spec.is_plain:
            return bias_swiglu(x, bias)
        case "swiglu" | "geglu" | "quick_geglu":
            assert bias is None, "fc1 has added its bias"
            # Only x is kept: autograd would keep four more tensors of its half.
            return recompute(partial(gated, spec=spec), x)
        case "relu":
            return F.relu(x)
        case "squared_relu":
            return F.relu(x).square()
        case "gelu_tanh":
            return bias_gelu(x, bias, approximate="tanh")
        case "gelu":
            return bias_gelu(x, bias, approximate="none")


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
