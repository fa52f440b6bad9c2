"""How is the vocabulary shared by the ranks of tp on the way in?"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatronish import comm
from megatronish.mesh import Axis
from megatronish.sharding import Sharding


class VocabParallelEmbedding(nn.Module):
    """[B, S] -> [S, B, D] (sequence parallel: [S/tp, B, D]). Each rank holds padded_vocab_size / tp rows."""

    def __init__(
        self,
        vocab_size: int,
        padded_vocab_size: int,
        hidden_size: int,
        *,
        tp: Axis,
        sequence_parallel: bool,
        init_std: float,
        tied: bool = False,
    ) -> None:
        super().__init__()
        assert padded_vocab_size % tp.size == 0 and vocab_size <= padded_vocab_size
        self.tp, self.sequence_parallel, self.init_std, self.tied = tp, sequence_parallel, init_std, tied
        self.vocab_size, self.padded_vocab_size, self.hidden_size = vocab_size, padded_vocab_size, hidden_size
        self.weight = nn.Parameter(torch.empty(padded_vocab_size // tp.size, hidden_size))

    def shardings(self) -> dict[str, Sharding]:
        """Rows are cut over tp; padding is not part of the global tensor."""
        return {
            "weight": Sharding(
                (self.vocab_size, self.hidden_size),
                dim=0,
                sections=(self.padded_vocab_size,),
                tied=self.tied,
                init_std=self.init_std,
            )
        }

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens of other ranks look up a row that is then zeroed; the sum over tp puts the rows together."""
        tokens = tokens.t().contiguous()
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        rows = self.weight.shape[0]
        local = tokens - self.tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        embedded = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        embedded = embedded.masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.sequence_parallel:
            return comm.reduce_scatter_to_sequence(embedded, self.tp)
        return comm.reduce_from(embedded, self.tp)


class PositionEmbedding(nn.Module):
    """[B, S] -> [S, B, D] (sequence parallel: [S/tp, B, D]): a learned row for every position."""

    def __init__(
        self, num_positions: int, hidden_size: int, *, tp: Axis, sequence_parallel: bool, init_std: float
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel, self.init_std = tp, sequence_parallel, init_std
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_size))

    def shardings(self) -> dict[str, Sharding]:
        """Whole on every rank; each sees only its part of a cut sequence."""
        shape = tuple(self.weight.shape)
        return {"weight": Sharding(shape, partial=self.sequence_parallel, init_std=self.init_std)}

    def forward(self, position_ids: Tensor) -> Tensor:
        """See the class."""
        positions = position_ids.t()
        if self.sequence_parallel:
            positions = comm.piece_of(positions, self.tp)
        return F.embedding(positions, self.weight)
