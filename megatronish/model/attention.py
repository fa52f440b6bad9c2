"""Self-attention of a transformer layer: qkv projection, rotary embedding, core attention, output projection."""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor, nn

from megatronish.attention.attend import attend
from megatronish.attention.core import ProbabilityDropout
from megatronish.attention.mask import AttentionMask
from megatronish.config.model import ModelConfig
from megatronish.config.training import AttentionBackend
from megatronish.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatronish.layers.norm import Norm
from megatronish.mesh import Axis, TensorParallel
from megatronish.model.context import Context
from megatronish.model.recompute import recompute
from megatronish.model.rope import rotate


@dataclass(frozen=True)
class CoreAttention:
    """Core attention, softmax(q k^T / sqrt(H)) v, with the settings that all layers of a model share.

    `cp` is the axis over which the sequence is cut, `method` how a rank reaches the rest of it (attend.py), `backend`
    what computes a whole sequence (core.py). `recompute`: the backward computes it again from q, k and v (selective
    recomputation).
    """

    cp: Axis = field(default_factory=partial(Axis, "cp"))
    method: Literal["p2p", "a2a"] = "p2p"
    backend: AttentionBackend = "auto"
    recompute: bool = False

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        first_head: int,
        dropout: ProbabilityDropout | None,
    ) -> Tensor:
        """[S/cp, B, n, H], [S/cp, B, k, H], [S/cp, B, k, H] -> [S/cp, B, n H], for heads from `first_head` on."""
        run = partial(
            attend,
            cp=self.cp,
            method=self.method,
            mask=mask,
            backend=self.backend,
            first_head=first_head,
            dropout=dropout,
        )
        return recompute(run, q, k, v) if self.recompute else run(q, k, v)


class Attention(nn.Module):
    """Self-attention, [S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D]).

    A rank has N/tp query heads and K/tp key/value heads.
    """

    def __init__(
        self, config: ModelConfig, *, layer: int, tp: TensorParallel, core: CoreAttention, output_std: float
    ) -> None:
        super().__init__()
        self.config, self.layer, self.core = config, layer, core
        self.window_size, self.dropout_rate = config.window_size, config.attention_dropout
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
            heads * size, config.hidden_size, tp=tp, bias=config.linear_bias, init_std=output_std
        )
        if config.qk_layernorm:
            # Each tp rank normalises heads of its own with the shared weight.
            make_norm = partial(Norm, size, kind=config.normalization, epsilon=config.norm_epsilon, partial=tp.size > 1)
            self.q_norm, self.k_norm = make_norm(), make_norm()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[S, B, D] -> [S, B, D]; with a cache, the new queries attend to the keys and values of all tokens so far."""
        q, k, v = self.queries_keys_values(x, context)
        if context.cache is not None:
            k, v = context.cache.extended(k, v, layer=self.layer)
        mask = context.mask(self.window_size)
        dropout = context.attention_dropout(layer=self.layer, rate=self.dropout_rate)
        return self.out(self.core(q, k, v, mask=mask, first_head=self.first_head, dropout=dropout))

    def queries_keys_values(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """[S, B, D] -> [S, B, N/tp, H], [S, B, K/tp, H], [S, B, K/tp, H], normalised and rotated."""
        size, heads, kv_heads = self.config.head_size, self.num_local_heads, self.num_local_kv_heads
        sections = (heads * size, kv_heads * size, kv_heads * size)
        q, k, v = (part.unflatten(-1, (-1, size)) for part in self.qkv(x).split(sections, dim=-1))
        if self.config.qk_layernorm:
            q, k = self.q_norm(q), self.k_norm(k)
        if context.rotation is not None:
            q, k = (rotate(part, context.rotation, interleaved=self.config.rotary_interleaved) for part in (q, k))
        return q, k, v
