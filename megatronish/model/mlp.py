"""What does each token make of itself? The MLP of a block."""

import torch.nn.functional as F
from torch import Tensor, nn

from megatronish.config.model import ModelConfig
from megatronish.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatronish.mesh.groups import Axis


class MLP(nn.Module):
    """[S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D]): up to F features, a nonlinearity, back to D."""

    def __init__(self, config: ModelConfig, *, tp: Axis, sequence_parallel: bool, output_std: float) -> None:
        super().__init__()
        self.config = config
        gated = config.swiglu
        self.fc1 = ColumnParallelLinear(
            config.hidden_size,
            config.ffn_size * (2 if gated else 1),
            tp=tp,
            sequence_parallel=sequence_parallel,
            bias=config.linear_bias,
            init_std=config.init_method_std,
            sections=(config.ffn_size,) * (2 if gated else 1),
        )
        self.fc2 = RowParallelLinear(
            config.ffn_size,
            config.hidden_size,
            tp=tp,
            sequence_parallel=sequence_parallel,
            bias=config.linear_bias,
            init_std=output_std,
        )

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.fc2(self.activate(self.fc1(x)))

    def activate(self, x: Tensor) -> Tensor:
        """[S, B, F/tp] (gated: [S, B, 2 F/tp], gate before up) -> [S, B, F/tp]."""
        if self.config.swiglu:
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up
        if self.config.squared_relu:
            return F.relu(x).square()
        return F.gelu(x, approximate="tanh" if self.config.openai_gelu else "none")
