"""MLP of a transformer layer: up-projection, activation, down-projection."""

import torch.nn.functional as F
from torch import Tensor, nn

from megatronish.config.model import ModelConfig
from megatronish.layer_specs import MLPSpec
from megatronish.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatronish.mesh import TensorParallel
from megatronish.model.context import Context
from megatronish.ops.activation import bias_gelu, bias_swiglu, is_fused


class MLP(nn.Module):
    """MLP, [S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D]), with F features between.

    SwiGLU has a gate of F more features; GELU and squared ReLU have none.
    """

    def __init__(self, config: ModelConfig, spec: MLPSpec, *, tp: TensorParallel, output_std: float) -> None:
        super().__init__()
        self.activation = spec.activation
        self.fc1 = ColumnParallelLinear(
            config.hidden_size,
            sum(spec.sections),
            tp=tp,
            bias=spec.bias,
            init_std=config.init_method_std,
            sections=spec.sections,
        )
        self.fc2 = RowParallelLinear(spec.ffn_size, config.hidden_size, tp=tp, bias=spec.bias, init_std=output_std)

    def forward(self, x: Tensor, _context: Context | None = None) -> Tensor:
        """[S, B, D] -> [S, B, D]: fc1, activation, fc2."""
        # A fused activation adds fc1's bias and sums its gradient in passing; torch adds it best in the product itself.
        fused = self.activation != "squared_relu" and is_fused(x)
        x = self.fc1(x, skip_bias=fused)
        return self.fc2(self.activate(x, self.fc1.bias if fused else None))

    def activate(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[S, B, F/tp] (gated: [S, B, 2 F/tp], gate before up), a bias not yet added -> [S, B, F/tp]."""
        match self.activation:
            case "swiglu":
                return bias_swiglu(x, bias)
            case "squared_relu":
                return F.relu(x).square()
            case "gelu_tanh":
                return bias_gelu(x, bias, approximate="tanh")
            case "gelu":
                return bias_gelu(x, bias, approximate="none")
