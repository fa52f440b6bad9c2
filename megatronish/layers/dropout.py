"""Random values of a forward, hashes of each element's global position: dropout, and what routers draw."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatronish.streams import keep_mask, mask_keys, uniform

SITES = ("embedding", "attention", "attention_output", "mlp_output", "jitter", "forced choice")
"""Places in a layer at which the library's own modules draw; a block may name others."""


@dataclass(frozen=True)
class LayerDropout:
    """Dropout masks and routers' random values of one layer, whatever the layout and what was drawn before.

    `keys` [SITES, 2] are those of the streams (streams.py) that `names` and a site name. `all_positions` [S/cp] are
    those of all tp ranks together.
    """

    names: tuple[str | int, ...]
    sample_ids: Tensor  # int64 [B], global
    keys: Tensor
    all_positions: Tensor | None = None

    def hidden(self, x: Tensor, *, site: str, positions: Tensor, rate: float, first_column: int = 0) -> Tensor:
        """[s, B, D] -> [s, B, D]: `positions` [s] are those that x holds, under sequence parallelism a part of all.

        x may be a part of the channels, from `first_column` on.
        """
        if rate == 0.0:
            return x
        keep = keep_mask(
            self._keys_of(site),
            places=(self.sample_ids, positions.unsqueeze(-1)),
            columns=torch.arange(first_column, first_column + x.shape[-1], device=x.device),
            rate=rate,
        )
        return x * keep * (1.0 / (1.0 - rate))

    def attention(
        self, probabilities: Tensor, *, first_head: int, rate: float, queries: Tensor, keys: Tensor
    ) -> Tensor:
        """[B, n, q, k] -> [B, n, q, k]: n heads from `first_head` on, global positions [q] and [k]."""
        heads = torch.arange(first_head, first_head + probabilities.shape[1], device=probabilities.device)
        places = (self.sample_ids[:, None, None], heads[:, None], queries)
        keep = keep_mask(self._keys_of("attention"), places=places, columns=keys, rate=rate)
        return probabilities * keep * (1.0 / (1.0 - rate))

    def of_router(self, *, site: str, positions: Tensor, num_columns: int) -> Tensor:
        """Uniform values of -1 to 1, [s, B, num_columns] fp32, for the tokens at `positions` [s]."""
        columns = torch.arange(num_columns, device=positions.device)
        return uniform(self._keys_of(site), places=(self.sample_ids, positions.unsqueeze(-1)), columns=columns)

    def _keys_of(self, site: str) -> Tensor:
        if site in SITES:
            return self.keys[SITES.index(site)]
        # A site that only its block knows: its keys are made where they are asked for.
        return mask_keys([(*self.names, site)], device=self.keys.device)[0]


class Dropout:
    """Dropout and random values of one forward pass, by layer; the embedding's are those of layer 0."""

    def __init__(
        self, seed: int, step: int, sample_ids: Tensor, *, layers: Sequence[int], all_positions: Tensor | None = None
    ) -> None:
        streams = [(seed, "dropout", step, layer) for layer in layers]
        keys = mask_keys(((*names, site) for names in streams for site in SITES), device=sample_ids.device)
        self._layers = {
            layer: LayerDropout(names, sample_ids, of_layer, all_positions)
            for layer, names, of_layer in zip(layers, streams, keys.split(len(SITES)), strict=True)
        }

    def of_layer(self, layer: int) -> LayerDropout:
        """Dropout of one of the layers."""
        return self._layers[layer]
