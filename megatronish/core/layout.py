"""Layout: the grid of ranks over (pp, dp, cp, tp), as pure arithmetic without torch and without processes.

Ranks are numbered row by row over (pp, dp, cp, tp): tp ranks are neighbours, because they communicate most, then cp,
then dp; pp is outermost, because stages communicate least. That is Megatron-LM's default order (tp-cp-ep-dp-pp,
fastest first).
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

AXES = ("pp", "dp", "cp", "tp")


class Coordinates(NamedTuple):
    """Coordinates of a rank: its place on each axis."""

    pp: int
    dp: int
    cp: int
    tp: int


class ExpertLayout(NamedTuple):
    """Sizes of the grid of experts: `ep` ranks hold different experts, `etp` ranks parts of the same ones.

    The rest of a stage's ranks, edp of them for each, hold copies.
    """

    ep: int = 1
    etp: int = 1

    def line(self, layout: "Layout") -> str:
        """The grid on the ranks of a stage, as first lines have it."""
        edp = layout.dp * layout.cp * layout.tp // (self.ep * self.etp)
        return f"ep {self.ep} x etp {self.etp} x edp {edp}"


def choices_of_an_expert(factor: float, *, num_chosen: int, num_experts: int, seq_length: int) -> int:
    """Capacity: choices that an expert takes of a sequence of which each token chooses some."""
    return math.ceil(factor * num_chosen * seq_length / num_experts)


class RowRoom(NamedTuple):
    """Rows of tokens that a rank of ep sends each other one, however many it has: so no host asks how many there are.

    At most `factor` times the mean; with `to_capacity` at most what the capacity of experts leaves. Without both as
    many are sent as there are.
    """

    factor: float | None = None
    to_capacity: bool = False

    def rows(
        self, tokens: int, *, num_chosen: int, num_experts: int, ep: int, capacity: int | None = None
    ) -> int | None:
        """Rows for each rank, of `tokens` of which an expert takes `capacity`; None: as many as there are."""
        if ep == 1 or (self.factor is None and not self.to_capacity):
            return None
        of_rank = num_experts // ep
        most = tokens * min(num_chosen, of_rank)
        if self.to_capacity and capacity is not None:
            most = min(most, of_rank * capacity)
        if self.factor is not None:
            most = min(most, math.ceil(self.factor * tokens * num_chosen / ep))
        return most


def ranks_of_a_token(*, num_chosen: int, num_experts: int, ep: int) -> float:
    """Ranks of ep that the experts of a token lie on, in the mean of all choices."""
    others = num_experts - num_experts // ep
    return ep * (1 - math.comb(others, num_chosen) / math.comb(num_experts, num_chosen))


class DeepEPNeeds(NamedTuple):
    """What DeepEP would send: rows of so many elements, in this precision, among so many ranks of ep.

    Each goes to the ranks that have some of the `num_chosen` experts of `num_experts`.
    """

    ep: int
    hidden_size: int
    precision: str
    num_experts: int
    num_chosen: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh's axes, outermost first."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in AXES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes of the axes, in the order (pp, dp, cp, tp)."""
        return (self.pp, self.dp, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        """Number of all ranks: the product of the sizes."""
        return self.pp * self.dp * self.cp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of `rank`; ValueError outside 0 .. world_size - 1."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is outside this layout of {self.world_size} ranks")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(pp, dp, cp, tp)

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Number of the rank at these coordinates."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def groups(self, *axes: str) -> list[list[int]]:
        """Process groups of `axes`: lists of the ranks that differ on `axes` alone. Every rank is in one of them."""
        fixed = [name for name in AXES if name not in axes]
        moving = [name for name in AXES if name in axes]
        sizes = dict(zip(AXES, self.sizes, strict=True))
        groups = []
        for outer in product(*(range(sizes[name]) for name in fixed)):
            place = dict(zip(fixed, outer, strict=True))
            groups.append(
                [
                    self.rank(**place, **dict(zip(moving, inner, strict=True)))
                    for inner in product(*(range(sizes[name]) for name in moving))
                ]
            )
        return groups

    def expert_groups(self, experts: ExpertLayout) -> dict[str, list[list[int]]]:
        """Process groups of the experts, which are laid over the dp cp tp ranks of each stage once more.

        These ranks, in their order, are a grid (edp, ep, etp), etp fastest, as in Megatron-LM. ValueError where the
        grid does not fit.
        """
        width, ep, etp = self.dp * self.cp * self.tp, experts.ep, experts.etp
        if width % (ep * etp):
            raise ValueError(f"ep={ep} x etp={etp} must divide the {width} ranks of a stage")
        groups: dict[str, list[list[int]]] = {"edp": [], "ep": [], "etp": []}
        for stage in range(self.pp):
            ranks = list(range(stage * width, (stage + 1) * width))
            groups["etp"] += [ranks[i : i + etp] for i in range(0, width, etp)]
            groups["edp"] += [ranks[i :: ep * etp] for i in range(ep * etp)]
            for first in range(0, width, ep * etp):
                groups["ep"] += [ranks[first + i : first + ep * etp : etp] for i in range(etp)]
        return groups

    def __str__(self) -> str:
        names = ("dp", "tp", "pp", "cp") if self.cp > 1 else ("dp", "tp", "pp")
        return " x ".join(f"{name} {getattr(self, name)}" for name in names)
