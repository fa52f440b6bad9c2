"""Records of routing in one forward pass: the choices of experts, and what routers count and lose."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from megatronish.layers.router import Balance
from megatronish.parallel.mesh import Axis


class RecordedRouting(NamedTuple):
    """Choices of this rank's tokens, [T, K] int16, which are kept, and the sizes of their route (`ExpertRoute.sizes`).

    It is all that a recomputation needs.
    """

    choices: Tensor
    kept: Tensor | None
    sizes: Any


@dataclass(frozen=True)
class Tally:
    """What the routers of one forward count and lose, by name and layer; a forward that is recomputed adds once.

    `balance` has the factors of the balancing losses, `axes` cut a sequence (cp, and tp where each rank has tokens of
    its own).
    """

    balance: Balance
    axes: tuple[Axis, ...]
    sums: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def add(self, name: str, layer: int, value: Tensor) -> None:
        """Take in a sum of this rank's tokens."""
        self.sums.setdefault(name, {})[layer] = value.detach()

    def stacked(self, num_layers: int) -> dict[str, Tensor]:
        """[num_layers, ...] of each name, zeros for layers that are elsewhere or have no experts."""
        stacked = {}
        for name, values in self.sums.items():
            some = next(iter(values.values()))
            stacked[name] = some.new_zeros(num_layers, *some.shape)
            for layer, value in values.items():
                stacked[name][layer] = value
        return stacked


@dataclass(frozen=True)
class RoutingRecord:
    """Routing of one forward: choices by layer, which the first forward records and a recomputation replays.

    Without a `tally` nothing is counted and no loss balances the load, as in evaluation.
    """

    cp: Axis = field(default_factory=partial(Axis, "cp"))
    tally: Tally | None = None
    routings: dict[int, RecordedRouting] = field(default_factory=dict)
