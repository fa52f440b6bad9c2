"""Random values of a forward, hashes of each element's global position: dropout, and what routers draw."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatronish.streams import keep_mask, uniform


@dataclass(frozen=True)
class Dropout:
    """Dropout masks and routers' random values of one forward pass, whatever the layout and what was drawn before."""

    seed: int
    step: int
    sample_ids: Tensor  # int64 [B], global

    def hidden(self, x: Tensor, *, layer: int, site: str, positions: Tensor, rate: float) -> Tensor:
        """[s, B, D] -> [s, B, D]: `positions` [s] are those that x holds, under sequence parallelism a part of all."""
        if rate == 0.0:
            return x
        keep = keep_mask(
            *self._names(layer, site),
            places=(self.sample_ids, positions.unsqueeze(-1)),
            columns=torch.arange(x.shape[-1], device=x.device),
            rate=rate,
        )
        return x * keep * (1.0 / (1.0 - rate))

    def attention(
        self,
        probabilities: Tensor,
        *,
        layer: int,
        first_head: int,
        rate: float,
        queries: Tensor,
        keys: Tensor,
    ) -> Tensor:
        """[B, n, q, k] -> [B, n, q, k]: n heads from `first_head` on, global positions [q] and [k]."""
        heads = torch.arange(first_head, first_head + probabilities.shape[1], device=probabilities.device)
        places = (self.sample_ids[:, None, None], heads[:, None], queries)
        keep = keep_mask(*self._names(layer, "attention"), places=places, columns=keys, rate=rate)
        return probabilities * keep * (1.0 / (1.0 - rate))

    def of_router(self, *, layer: int, site: str, positions: Tensor, num_columns: int) -> Tensor:
        """Uniform values of -1 to 1, [s, B, num_columns] fp32, for the tokens at `positions` [s]."""
        columns = torch.arange(num_columns, device=positions.device)
        return uniform(*self._names(layer, site), places=(self.sample_ids, positions.unsqueeze(-1)), columns=columns)

    def _names(self, layer: int, site: str) -> tuple[str | int, ...]:
        return (self.seed, "dropout", self.step, layer, site)
