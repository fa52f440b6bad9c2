"""LoRA (Hu et al. 2021, arXiv:2106.09685): y = W x + scale B A drop(x), with A [r, in] and B [out, r].

B begins at zero, so that the layer begins as the base's. Where things lie and what is sent over tp:

    column-parallel    A whole, applied to own positions; B cut as the rows of W        A x [s, B, r] is gathered
    row-parallel       A cut as the columns of W; B whole, applied to own positions     A x [S, B, r] is reduced
    whole              A and B whole, applied to own positions                          nothing

So an adapter never gathers its layer's input, and any r goes with any tp.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatronish.layers.experts import DOMAIN, GroupedProduct, StackedLinear
from megatronish.layers.linear import ALONE, ColumnParallelLinear, InputDropout, RowParallelLinear, WholeLinear, linear
from megatronish.ops.grouped_mm import Groups
from megatronish.parallel import comm
from megatronish.parallel.sharding import Cut, Init, Sharding


@dataclass(frozen=True)
class LoRASettings:
    """Rank r, alpha and dropout of all LoRA adapters of a model; `rank_stabilised` is rsLoRA's scale.

    The scale is alpha / r; of rsLoRA (Kalajdzievski 2023, arXiv:2312.03732) alpha / sqrt(r).
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    rank_stabilised: bool = False

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


class LowRank(nn.Module):
    """Factors A and B of one section, or of all local experts of it. `cuts` are sizes of the axes that cut them."""

    def __init__(self, a: Sharding, b: Sharding, **cuts: int) -> None:
        super().__init__()
        self._shardings = {"A": a, "B": b}
        self.A, self.B = (nn.Parameter(torch.empty(_local_shape(each, cuts))) for each in (a, b))

    def shardings(self) -> dict[str, Sharding]:
        """As the layer's kind says."""
        return self._shardings


def _local_shape(sharding: Sharding, sizes: dict[str, int]) -> list[int]:
    shape = list(sharding.shape)
    for cut in sharding.cuts:
        shape[cut.dim] //= sizes[cut.axis]
    return shape


def init_of_a(in_features: int) -> Init:
    """Initial values of A, with the standard deviation of PEFT's, which are uniform on +- 1 / sqrt(in)."""
    return Init(1.0 / math.sqrt(3 * in_features))


class LoRA(nn.Module):
    """LoRA adapters of some sections of one layer, as children under the sections' names."""

    def __init__(self, settings: LoRASettings, parts: dict[str, LowRank]) -> None:
        super().__init__()
        self.settings = settings
        for name, part in parts.items():
            self.add_module(name, part)

    def parts(self) -> Iterator[tuple[str, LowRank]]:
        """(section, its factors), in the order of the layer's output."""
        for name, part in self.named_children():
            assert isinstance(part, LowRank)
            yield name, part

    def scaled_input(self, x: Tensor, _groups: Groups | None = None) -> Tensor:
        """The layer's input, unchanged."""
        return x


class ColumnLoRA(LoRA):
    """LoRA of a column-parallel layer. `site` names its dropout masks within the transformer layer."""

    def __init__(
        self, layer: ColumnParallelLinear, sections: Collection[str], settings: LoRASettings, *, site: str
    ) -> None:
        tp, rank, width = layer.tp, settings.rank, layer.in_features
        a = Sharding((rank, width), partial_over=tp.partial_over, role="lora_a", init=init_of_a(width))
        sizes = dict(zip(layer.section_names, layer.sections, strict=True))
        parts = {
            name: LowRank(a, Sharding((size, rank), (Cut(0, "tp"),), role="lora_b"), tp=tp.size)
            for name, size in sizes.items()
            if name in sections
        }
        super().__init__(settings, parts)
        self.tp, self.site = tp, site
        self.local_sizes = {name: size // tp.size for name, size in sizes.items()}

    def forward(self, x: Tensor, y: Tensor, drop: InputDropout | None) -> Tensor:
        """[S, B, in], [S, B, out/tp] -> [S, B, out/tp] (sequence parallel: x is [S/tp, B, in])."""
        rate = self.settings.dropout
        # 1. A of every section, on own positions, each with a dropout mask of its own: [s, B, r].
        lows = []
        for name, part in self.parts():
            dropped = x if drop is None or rate == 0.0 else drop.of_input(x, site=f"{self.site}.{name}", rate=rate)
            lows.append(F.linear(dropped, part.A))
        # 2. All of them in one transfer: B's rows need every position, and the gradients of A x are summed over tp.
        low = torch.cat(lows, dim=-1)
        if self.tp.cuts_sequence:
            low = comm.gather_whole_sequence(low, self.tp.axis, sums=True)
        else:
            low = comm.copy_to(low, self.tp.axis)
        # 3. B of every section, added to the part of the output that is the section's.
        adapted = dict(zip(dict(self.parts()), low.split(self.settings.rank, dim=-1), strict=True))
        outputs = dict(zip(self.local_sizes, y.split(list(self.local_sizes.values()), dim=-1), strict=True))
        for name, part in self.parts():
            outputs[name] = torch.add(outputs[name], F.linear(adapted[name], part.B), alpha=self.settings.scale)
        return torch.cat(list(outputs.values()), dim=-1)


class RowLoRA(LoRA):
    """LoRA of a row-parallel layer. `site` names its dropout masks within the transformer layer."""

    def __init__(self, layer: RowParallelLinear, settings: LoRASettings, *, site: str) -> None:
        tp, rank, width = layer.tp, settings.rank, layer.in_features
        a = Sharding((rank, width), (Cut(1, "tp"),), role="lora_a", init=init_of_a(width))
        b = Sharding((layer.out_features, rank), partial_over=tp.partial_over, role="lora_b")
        (section,) = layer.section_names
        super().__init__(settings, {section: LowRank(a, b, tp=tp.size)})
        self.tp, self.site, self.first_column = tp, f"{site}.{section}", tp.axis.rank * (width // tp.size)

    def forward(self, x: Tensor, y: Tensor, drop: InputDropout | None) -> Tensor:
        """[S, B, in/tp], [S, B, out] -> [S, B, out] (sequence parallel: y is [S/tp, B, out])."""
        ((_, part),) = self.parts()
        if drop is not None and self.settings.dropout > 0.0:
            rate = self.settings.dropout
            x = drop.of_input(x, site=self.site, rate=rate, first_column=self.first_column, is_whole=True)
        low = F.linear(x, part.A)  # [S, B, r], one term of the sum over tp
        reduce = comm.reduce_scatter_to_sequence if self.tp.cuts_sequence else comm.reduce_from
        return torch.add(y, F.linear(reduce(low, self.tp.axis), part.B), alpha=self.settings.scale)


class WholeLoRA(LoRA):
    """LoRA of a layer that every rank has whole. `site` names its dropout masks within the transformer layer."""

    def __init__(self, layer: WholeLinear, settings: LoRASettings, *, site: str) -> None:
        over, rank, width = layer.tp.partial_over, settings.rank, layer.in_features
        a = Sharding((rank, width), partial_over=over, role="lora_a", init=init_of_a(width))
        b = Sharding((layer.out_features, rank), partial_over=over, role="lora_b")
        (section,) = layer.section_names
        super().__init__(settings, {section: LowRank(a, b)})
        self.site = f"{site}.{section}"

    def forward(self, x: Tensor, y: Tensor, drop: InputDropout | None) -> Tensor:
        """[s, B, in], [s, B, out] -> [s, B, out]."""
        ((_, part),) = self.parts()
        if drop is not None and self.settings.dropout > 0.0:
            x = drop.of_input(x, site=self.site, rate=self.settings.dropout)
        return torch.add(y, F.linear(F.linear(x, part.A), part.B), alpha=self.settings.scale)


class GroupedLoRA(LoRA):
    """LoRA of a layer of experts: for each expert A [r, in] and B [out, r] of its own, cut over ep by expert.

    Ranks of etp hold parts of the features and see the same rows. The factor that has no features of theirs is whole,
    and its gradient a term of the sum over etp: of gate and up-projection A, of the down-projection B, whose output is
    itself a term of the sum that the experts' output is.
    """

    def __init__(self, layer: StackedLinear, sections: Collection[str], settings: LoRASettings) -> None:
        assert settings.dropout == 0.0, "the rows of experts have no positions that a mask could be named by"
        self_parts = {name: _expert_factors(layer, settings.rank) for name in layer.section_names if name in sections}
        super().__init__(settings, self_parts)
        self.section_names = layer.section_names

    def forward(self, x: Tensor, y: Tensor, groups: Groups) -> Tensor:
        """[N, in], [N, sections * out] -> [N, sections * out], rows sorted by expert."""
        outputs = dict(zip(self.section_names, y.chunk(len(self.section_names), dim=-1), strict=True))
        for name, part in self.parts():
            low = _grouped(x, part.A, groups)  # [N, r]
            outputs[name] = torch.add(outputs[name], _grouped(low, part.B, groups), alpha=self.settings.scale)
        return torch.cat(list(outputs.values()), dim=-1)


def _expert_factors(layer: StackedLinear, rank: int) -> LowRank:
    """A [E, r, in] and B [E, out, r] of one section of a layer [E, (sections,) out, in]."""
    num_experts, *_, size, width = layer.shape
    by_expert, is_down = Cut(0, "ep"), layer.section_names == ("down",)
    whole = {"cuts": (by_expert,), "partial_over": frozenset({"etp"})}
    a_layout = {"cuts": (by_expert, Cut(2, "etp"))} if is_down else whole
    b_layout = whole if is_down else {"cuts": (by_expert, Cut(1, "etp"))}
    a = Sharding((num_experts, rank, width), **a_layout, domain=DOMAIN, role="lora_a", init=init_of_a(width))
    b = Sharding((num_experts, size, rank), **b_layout, domain=DOMAIN, role="lora_b")
    return LowRank(a, b, ep=layer.parallel.ep.size, etp=layer.parallel.etp.size)


def _grouped(x: Tensor, weight: nn.Parameter, groups: Groups) -> Tensor:
    """[N, in], [E, out, in] -> [N, out]."""
    return linear(x, weight, None, product=GroupedProduct(groups, weight.shape), tp=ALONE)
