"""Random values of a forward, hashes of each element's global position: dropout, and what routers draw."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatronish.ops.dropout import ProbabilityDropout, dropout_add
from megatronish.streams import mask_keys, uniform

SITES = ("embedding", "attention", "attention_output", "mlp_output", "jitter", "forced choice")
"""Places in a layer at which the library's own modules draw; a block may name others."""


@dataclass(frozen=True)
class LayerDropout:
    """Dropout masks and routers' random values of one layer, whatever the layout and what was drawn before.

    `keys` [SITES, 2] are those of the streams (streams.py) that `names` and a site name.
    """

    names: tuple[str | int, ...]
    sample_ids: Tensor  # int64 [B], global
    keys: Tensor

    def hidden(self, x: Tensor, *, site: str, positions: Tensor, rate: float, residual: Tensor | None = None) -> Tensor:
        """[s, B, D] -> [s, B, D]: `positions` [s] are those that x holds, under sequence parallelism a part of all.

        `residual` [s, B, D] is added to what is left of x.
        """
        names = {"keys": self._keys_of(site), "sample_ids": self.sample_ids, "positions": positions}
        return dropout_add(x, residual, **names, rate=rate)

    def attention(self, rate: float) -> ProbabilityDropout:
        """Dropout of the layer's attention probabilities."""
        return ProbabilityDropout(self._keys_of("attention"), self.sample_ids, rate)

    def of_router(self, *, site: str, positions: Tensor, num_columns: int) -> Tensor:
        """Uniform values of -1 to 1, [s, B, num_columns] fp32, for the tokens at `positions` [s]."""
        columns = torch.arange(num_columns, device=positions.device)
        return uniform(self._keys_of(site), places=(self.sample_ids, positions.unsqueeze(-1)), columns=columns)

    def _keys_of(self, site: str) -> Tensor:
        if site in SITES:
            return self.keys[SITES.index(site)]
        return _other_keys((*self.names, site), self.keys.device)


@torch.compiler.disable
def _other_keys(names: tuple[str | int, ...], device: torch.device) -> Tensor:
    """Keys of a site that only its block knows, made where they are asked for."""
    return mask_keys([names], device=device)[0]


class Dropout:
    """Dropout and random values of one forward pass, by layer; the embedding's are those of layer 0."""

    def __init__(self, seed: int, step: int, sample_ids: Tensor, *, layers: Sequence[int]) -> None:
        streams = [(seed, "dropout", step, layer) for layer in layers]
        keys = mask_keys(((*names, site) for names in streams for site in SITES), device=sample_ids.device)
        self._layers = {
            layer: LayerDropout(names, sample_ids, of_layer)
            for layer, names, of_layer in zip(layers, streams, keys.split(len(SITES)), strict=True)
        }

    def of_layer(self, layer: int) -> LayerDropout:
        """Dropout of one of the layers."""
        return self._layers[layer]
