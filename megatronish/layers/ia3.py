"""IA3 (Liu et al. 2022, arXiv:2205.05638): a learned vector l multiplies features, and begins at one.

    output features    y = (W x + b) * l     of queries, keys and values, and of any layer but a down-projection
    input features     y = W (x * l) + b     of a down-projection

The vector is cut where the features are cut, and nothing is sent over tp.
"""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatronish.layers.experts import DOMAIN, StackedLinear
from megatronish.layers.linear import ColumnParallelLinear, InputDropout, RowParallelLinear
from megatronish.ops.grouped_mm import Groups
from megatronish.parallel.sharding import Cut, Init, Sharding

ONES = Init(value=1.0)


class FeatureScale(nn.Module):
    """Vector l of one section, of this local shape."""

    def __init__(self, sharding: Sharding, *local_shape: int) -> None:
        super().__init__()
        self._sharding = sharding
        self.l = nn.Parameter(torch.ones(local_shape))

    def shardings(self) -> dict[str, Sharding]:
        """As the layer's kind says."""
        return {"l": self._sharding}


class ColumnIA3(nn.Module):
    """IA3 of sections of a column-parallel layer, whose outputs are scaled, bias included."""

    def __init__(self, layer: ColumnParallelLinear, sections: Collection[str]) -> None:
        super().__init__()
        sizes = dict(zip(layer.section_names, layer.sections, strict=True))
        self.local_sizes = {name: size // layer.tp.size for name, size in sizes.items()}
        for name in (name for name in sizes if name in sections):
            sharding = Sharding((sizes[name],), (Cut(0, "tp"),), role="vector", init=ONES)
            self.add_module(name, FeatureScale(sharding, self.local_sizes[name]))

    def scaled_input(self, x: Tensor) -> Tensor:
        """The layer's input, unchanged."""
        return x

    def forward(self, _x: Tensor, y: Tensor, _drop: InputDropout | None) -> Tensor:
        """[S, B, out/tp] -> [S, B, out/tp]."""
        parts = dict(self.named_parameters())
        return y * torch.cat([parts.get(f"{name}.l", y.new_ones(size)) for name, size in self.local_sizes.items()])


class RowIA3(nn.Module):
    """IA3 of a row-parallel layer: a down-projection's input is scaled, another layer's output."""

    def __init__(self, layer: RowParallelLinear) -> None:
        super().__init__()
        (section,) = layer.section_names
        self.scales_input = section == "down"
        if self.scales_input:
            sharding = Sharding((layer.in_features,), (Cut(0, "tp"),), role="vector", init=ONES)
        else:
            sharding = Sharding((layer.out_features,), partial_over=layer.tp.partial_over, role="vector", init=ONES)
        size = layer.in_features // layer.tp.size if self.scales_input else layer.out_features
        self.add_module(section, FeatureScale(sharding, size))

    @property
    def _l(self) -> nn.Parameter:
        return next(self.parameters())

    def scaled_input(self, x: Tensor) -> Tensor:
        """[S, B, in/tp] -> [S, B, in/tp]."""
        return x * self._l if self.scales_input else x

    def forward(self, _x: Tensor, y: Tensor, _drop: InputDropout | None) -> Tensor:
        """[S, B, out] -> [S, B, out] (sequence parallel: [S/tp, B, out])."""
        return y if self.scales_input else y * self._l


class GroupedIA3(nn.Module):
    """IA3 of the experts' down-projection: their inputs are scaled, each expert's by a vector of its own."""

    def __init__(self, layer: StackedLinear) -> None:
        super().__init__()
        assert layer.section_names == ("down",), "gate and up-projection have no IA3"
        num_experts, _, width = layer.shape
        cuts = (Cut(0, "ep"), Cut(1, "etp"))
        sharding = Sharding((num_experts, width), cuts, domain=DOMAIN, role="vector", init=ONES)
        local = (num_experts // layer.parallel.ep.size, width // layer.parallel.etp.size)
        self.down = FeatureScale(sharding, *local)

    def scaled_input(self, x: Tensor, groups: Groups) -> Tensor:
        """[N, F / etp] -> [N, F / etp], rows sorted by expert."""
        rows = torch.arange(len(x), dtype=groups.ends.dtype, device=x.device)
        expert = torch.searchsorted(groups.ends, rows, right=True)
        # Rows behind the last group have any values, and so have their gradients: these go to a vector of no expert.
        return x * F.pad(self.down.l, (0, 0, 0, 1)).index_select(0, expert)

    def forward(self, _x: Tensor, y: Tensor, _groups: Groups) -> Tensor:
        """The layer's output, unchanged."""
        return y
