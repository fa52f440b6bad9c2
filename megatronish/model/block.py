"""What is one transformer layer? Attention, then an MLP, each on a normalised copy of the residual stream."""

import math
from functools import partial

from torch import Tensor, nn

from megatronish.config.model import ModelConfig
from megatronish.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatronish.layers.norm import Norm
from megatronish.mesh import TensorParallel
from megatronish.model.context import Context
from megatronish.model.mlp import MLP
from megatronish.model.rope import rotate


class Attention(nn.Module):
    """[S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D]): N/tp query and K/tp kv heads a rank."""

    def __init__(self, config: ModelConfig, *, layer: int, tp: TensorParallel, output_std: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads, kv_heads, size = config.num_attention_heads, config.num_kv_heads, config.head_size
        self.num_local_heads, self.num_local_kv_heads = heads // tp.size, kv_heads // tp.size
        self.first_head = tp.axis.rank * self.num_local_heads
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            (heads + 2 * kv_heads) * size,
            tp=tp,
            bias=config.qkv_bias,
            init_std=config.init_method_std,
            sections=(heads * size, kv_heads * size, kv_heads * size),
        )
        self.out = RowParallelLinear(
            heads * size,
            config.hidden_size,
            tp=tp,
            bias=config.linear_bias,
            init_std=output_std,
        )
        if config.qk_layernorm:
            # Each tp rank normalises heads of its own with the shared weight.
            make_norm = partial(Norm, size, kind=config.normalization, epsilon=config.norm_epsilon, partial=tp.size > 1)
            self.q_norm, self.k_norm = make_norm(), make_norm()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """See the class."""
        q, k, v = self.queries_keys_values(x, context)
        return self.out(context.attend(q, k, v, layer=self.layer, first_head=self.first_head))

    def queries_keys_values(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """[S, B, D] -> [S, B, N/tp, H], [S, B, K/tp, H], [S, B, K/tp, H], normalised and turned."""
        size, heads, kv_heads = self.config.head_size, self.num_local_heads, self.num_local_kv_heads
        sections = (heads * size, kv_heads * size, kv_heads * size)
        q, k, v = (part.unflatten(-1, (-1, size)) for part in self.qkv(x).split(sections, dim=-1))
        if self.config.qk_layernorm:
            q, k = self.q_norm(q), self.k_norm(k)
        if context.rotation is not None:
            q, k = (rotate(part, context.rotation, interleaved=self.config.rotary_interleaved) for part in (q, k))
        return q, k, v


class TransformerBlock(nn.Module):
    """[S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D]): layer number `layer` of the whole model."""

    def __init__(self, config: ModelConfig, *, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        make_norm = partial(
            Norm,
            config.hidden_size,
            kind=config.normalization,
            epsilon=config.norm_epsilon,
            partial=tp.cuts_sequence,
            one_plus=config.apply_layernorm_1p,
        )
        # Residual outputs start smaller, so that their sum over the depth does not grow (Radford et al. 2019).
        output_std = config.init_method_std / math.sqrt(2 * config.num_layers)
        self.attention_norm = make_norm()
        self.attention = Attention(config, layer=layer, tp=tp, output_std=output_std)
        self.mlp_norm = make_norm()
        self.mlp = MLP(config, tp=tp, output_std=output_std)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """See the class."""
        attended = self.attention(self.attention_norm(x), context)
        normalised, x = self.mlp_norm.of_sum(x, context.drop(attended, layer=self.layer, site="attention_output"))
        return x + context.drop(self.mlp(normalised), layer=self.layer, site="mlp_output")
