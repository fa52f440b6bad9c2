"""MLP of a transformer layer: up-projection, activation, down-projection."""

import torch.nn.functional as F
from torch import Tensor, nn

from megatronish.config.model import ModelConfig
from megatronish.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatronish.mesh import TensorParallel
from megatronish.ops.activation import bias_gelu, bias_swiglu, is_fused


class MLP(nn.Module):
    """MLP, [S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D]), with F features between.

    SwiGLU has a gate of F more features; GELU and squared ReLU have none.
    """

    def __init__(self, config: ModelConfig, *, tp: TensorParallel, output_std: float) -> None:
        super().__init__()
        self.config = config
        gated = config.swiglu
        self.fc1 = ColumnParallelLinear(
            config.hidden_size,
            config.ffn_size * (2 if gated else 1),
            tp=tp,
            bias=config.linear_bias,
            init_std=config.init_method_std,
            sections=(config.ffn_size,) * (2 if gated else 1),
        )
        self.fc2 = RowParallelLinear(
            config.ffn_size,
            config.hidden_size,
            tp=tp,
            bias=config.linear_bias,
            init_std=output_std,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, D]: fc1, activation, fc2."""
        # A fused activation adds fc1's bias and sums its gradient in passing; torch adds it best in the product itself.
        fused = not self.config.squared_relu and is_fused(x)
        x = self.fc1(x, skip_bias=fused)
        return self.fc2(self.activate(x, self.fc1.bias if fused else None))

    def activate(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[S, B, F/tp] (gated: [S, B, 2 F/tp], gate before up), a bias not yet added -> [S, B, F/tp]."""
        if self.config.swiglu:
            return bias_swiglu(x, bias)
        if self.config.squared_relu:
            return F.relu(x).square()
        return bias_gelu(x, bias, approximate="tanh" if self.config.openai_gelu else "none")
