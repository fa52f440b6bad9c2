"""Random values of a forward, hashes of each element's global position: dropout, and what routers draw."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatronish.ops.dropout import ProbabilityDropout, dropout_add
from megatronish.parallel.streams import keep_mask, mask_keys, uniform

SITES = ("embedding", "attention", "attention_output", "mlp_output", "jitter", "forced choice")
"""Places in a layer at which the library's own modules draw; a block may name others."""


@dataclass(frozen=True)
class LayerDropout:
    """Dropout masks and routers' random values of one layer, whatever the layout and what was drawn before.

    `keys` [sites, 2] are those of the streams (streams.py) that `names` and a site of `sites` name. `all_positions`
    [S/cp] are those of all tp ranks together.
    """

    names: tuple[str | int, ...]
    sample_ids: Tensor  # int64 [B], global
    keys: Tensor
    all_positions: Tensor | None = None
    sites: tuple[str, ...] = SITES

    def hidden(self, x: Tensor, *, site: str, positions: Tensor, rate: float, residual: Tensor | None = None) -> Tensor:
        """[s, B, D] -> [s, B, D]: `positions` [s] are those that x holds, under sequence parallelism a part of all.

        `residual` [s, B, D] is added to what is left of x.
        """
        names = {"keys": self._keys_of(site), "sample_ids": self.sample_ids, "positions": positions}
        return dropout_add(x, residual, **names, rate=rate)

    def columns_of(self, x: Tensor, *, site: str, positions: Tensor, rate: float, first_column: int) -> Tensor:
        """[s, B, d] -> [s, B, d]: d channels from `first_column` on, which is all that this tp rank holds of x."""
        columns = torch.arange(first_column, first_column + x.shape[-1], device=x.device)
        places = (self.sample_ids, positions.unsqueeze(-1))
        keep = keep_mask(self._keys_of(site), places=places, columns=columns, rate=rate)
        return torch.where(keep, x * (1.0 / (1.0 - rate)), 0.0)

    def attention(self, rate: float) -> ProbabilityDropout:
        """Dropout of the layer's attention probabilities."""
        return ProbabilityDropout(self._keys_of("attention"), self.sample_ids, rate)

    def of_router(self, *, site: str, positions: Tensor, num_columns: int) -> Tensor:
        """Uniform values of -1 to 1, [s, B, num_columns] fp32, for the tokens at `positions` [s]."""
        columns = torch.arange(num_columns, device=positions.device)
        return uniform(self._keys_of(site), places=(self.sample_ids, positions.unsqueeze(-1)), columns=columns)

    def _keys_of(self, site: str) -> Tensor:
        if site in self.sites:
            return self.keys[self.sites.index(site)]
        # A site that only its block knows: its keys are made where they are asked for.
        return mask_keys([(*self.names, site)], device=self.keys.device)[0]


class Dropout:
    """Dropout and random values of one forward pass, by layer; the embedding's are those of layer 0.

    `more_sites` are those of the adapters of a layer.
    """

    def __init__(
        self,
        seed: int,
        step: int,
        sample_ids: Tensor,
        *,
        layers: Sequence[int],
        all_positions: Tensor | None = None,
        more_sites: Sequence[str] = (),
    ) -> None:
        streams, sites = [(seed, "dropout", step, layer) for layer in layers], (*SITES, *more_sites)
        keys = mask_keys(((*names, site) for names in streams for site in sites), device=sample_ids.device)
        self._layers = {
            layer: LayerDropout(names, sample_ids, of_layer, all_positions, sites)
            for layer, names, of_layer in zip(layers, streams, keys.split(len(sites)), strict=True)
        }

    def of_layer(self, layer: int) -> LayerDropout:
        """Dropout of one of the layers."""
        return self._layers[layer]
