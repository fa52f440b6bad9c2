"""Relative position bias: what a distance adds to the scores of attention, learned for each head (T5).

Distances have buckets: short ones have a bucket each, longer ones share buckets that grow by powers, and from
`max_distance` on all have the last one. In an encoder half of the buckets are for keys after the query. Raffel et al.
2020 (arXiv:1910.10683), section 2.1.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatronish.parallel.mesh import TensorParallel
from megatronish.parallel.sharding import Cut, Init, Sharding


class RelativeBias(nn.Module):
    """Score bias of one side of a model, [q], [k] -> [n/tp, q, k], which all layers of the side read.

    Every pipeline stage holds the table, with layers of the side or without: it is small, and its gradient is summed
    over the stages whatever the split of the layers is.
    """

    def __init__(
        self,
        num_buckets: int,
        num_heads: int,
        *,
        max_distance: int,
        looks_ahead: bool,
        tp: TensorParallel,
        init_std: float,
    ) -> None:
        super().__init__()
        self.num_buckets, self.num_heads, self.init_std = num_buckets, num_heads, init_std
        self.max_distance, self.looks_ahead = max_distance, looks_ahead
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads // tp.size))

    def shardings(self) -> dict[str, Sharding]:
        """Columns are cut over tp, with the heads; every stage holds it."""
        shape, cuts = (self.num_buckets, self.num_heads), (Cut(1, "tp"),)
        return {"weight": Sharding(shape, cuts, role="positions", tied="stages", init=Init(self.init_std))}

    def forward(self, queries: Tensor, keys: Tensor, heads: slice = slice(None)) -> Tensor:
        """int64 [q], [k], some of this tp rank's heads -> [n, q, k]."""
        table = self.weight[:, heads]
        return F.embedding(self.buckets(queries, keys), table).movedim(2, 0)

    def buckets(self, queries: Tensor, keys: Tensor) -> Tensor:
        """int64 [q], [k] -> the bucket of each distance, int64 [q, k]."""
        after, size = keys - queries[:, None], self.num_buckets
        first = torch.zeros_like(after)
        if self.looks_ahead:
            size //= 2
            first, distance = torch.where(after > 0, size, 0), after.abs()
        else:
            distance = (-after).clamp_min(0)
        exact = size // 2
        # In fp32, as it has always been computed: another rounding would send a distance to the bucket beside it.
        growth = torch.log(distance.clamp_min(1).float() / exact) / math.log(self.max_distance / exact)
        longer = (exact + (growth * (size - exact)).to(torch.int64)).clamp_max(size - 1)
        return first + torch.where(distance < exact, distance, longer)
