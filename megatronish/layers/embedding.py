"""Embeddings of tokens (vocabulary cut over tensor-parallel ranks) and of learned positions."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatronish.layers.weight_gradients import SumOf
from megatronish.parallel import comm
from megatronish.parallel.mesh import TensorParallel
from megatronish.parallel.sharding import Cut, Init, Sharding


class VocabParallelEmbedding(nn.Module):
    """Token embedding, [B, S] -> [S, B, D] (sequence parallel: [S/tp, B, D]).

    Each rank holds padded_vocab_size / tp rows of the table. `tied`: the output layer multiplies by the same table.
    With `sum_of` the backward adds to the sum of gradients itself.
    """

    sum_of: SumOf | None = None

    def __init__(
        self,
        vocab_size: int,
        padded_vocab_size: int,
        hidden_size: int,
        *,
        tp: TensorParallel,
        init_std: float,
        tied: bool = False,
    ) -> None:
        super().__init__()
        assert padded_vocab_size % tp.size == 0 and vocab_size <= padded_vocab_size
        self.tp, self.init_std, self.tied = tp, init_std, tied
        self.vocab_size, self.padded_vocab_size, self.hidden_size = vocab_size, padded_vocab_size, hidden_size
        self.weight = nn.Parameter(torch.empty(padded_vocab_size // tp.size, hidden_size))

    def shardings(self) -> dict[str, Sharding]:
        """Rows are cut over tp; padding is not part of the global tensor."""
        return {
            "weight": Sharding(
                (self.vocab_size, self.hidden_size),
                (Cut(0, "tp", (self.padded_vocab_size,)),),
                role="embedding",
                tied=self.tied,
                init=Init(self.init_std),
            )
        }

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up the tokens whose rows this rank holds, zero elsewhere; the sum over tp completes the result."""
        tokens = tokens.t().contiguous()
        if self.tp.size == 1:
            return self._rows(tokens)
        rows = self.weight.shape[0]
        local = tokens - self.tp.axis.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        embedded = self._rows(local.masked_fill(elsewhere, 0))
        embedded = embedded.masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.tp.cuts_sequence:
            return comm.reduce_scatter_to_sequence(embedded, self.tp.axis)
        return comm.reduce_from(embedded, self.tp.axis)

    def _rows(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., D]. On a GPU rows added by index come in any order, so autograd's own gradient is taken."""
        if self.sum_of is None or self.weight.is_cuda or not self.weight.requires_grad:
            return F.embedding(tokens, self.weight)
        return _Rows.apply(tokens, self.weight, self.sum_of)


class _Rows(torch.autograd.Function):
    """Rows of a table, [...], [V, D] -> [..., D], whose gradients are added to the rows of the table's sum."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: nn.Parameter, sum_of: SumOf) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.parameter, ctx.sum_of = weight, sum_of
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (tokens,) = ctx.saved_tensors
        total = ctx.sum_of(ctx.parameter)
        total.index_add_(0, tokens.flatten(), grads[0].flatten(0, -2).to(total.dtype))
        return None, None, None


class PositionEmbedding(nn.Module):
    """Learned position embedding, [B, S] -> [S, B, D] (sequence parallel: [S/tp, B, D])."""

    def __init__(self, num_positions: int, hidden_size: int, *, tp: TensorParallel, init_std: float) -> None:
        super().__init__()
        self.tp, self.init_std = tp, init_std
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_size))

    def shardings(self) -> dict[str, Sharding]:
        """Whole on every rank; each sees only its part of a cut sequence, so its gradient is partial."""
        shape = tuple(self.weight.shape)
        return {
            "weight": Sharding(shape, partial_over=self.tp.partial_over, role="positions", init=Init(self.init_std))
        }

    def forward(self, position_ids: Tensor) -> Tensor:
        """Rows of this rank's positions: [B, S] -> [S, B, D], or [S/tp, B, D] of a cut sequence."""
        return F.embedding(comm.piece_of(position_ids.t(), self.tp.sequence_axis), self.weight)
