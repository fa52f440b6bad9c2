"""Bytes that a rank exchanges in a step, added up by axis and collective; their sizes are in micro_batch.py."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatronish.estimate.costs.micro_batch import MicroBatchSizes
from megatronish.parallel.schedules.live_activations import StageLoad

SCALAR = 8  # bytes of a number in fp64, or an integer


class TrafficKey(NamedTuple):
    """Name of the group of ranks, and of the collective."""

    axis: str
    collective: str


@dataclass(eq=False)
class StepTraffic(MicroBatchSizes):
    """Bytes of one step on a rank of a stage, whose layers `load` has: of each call those of its largest tensor."""

    load: StageLoad
    stage: int
    sent: Counter[TrafficKey] = field(default_factory=Counter)

    def add(self, axis: str, collective: str, size: float) -> None:
        """Bytes of a whole step on an axis, if it has more than one rank."""
        if self.ranks.get(axis, 2) > 1:
            self.sent[TrafficKey(axis, collective)] += round(size)

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """Ranks of the axes that may be of one."""
        layout = self.config.layout
        ep, etp = self.experts if self.has_experts else (1, 1)
        dp = layout.dp // self.config.parallel.num_islands
        return {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": dp, "ep": ep, "etp": etp}

    @property
    def has_experts(self) -> bool:
        """Whether the model has layers with experts, on this stage or another."""
        return self.config.model.num_experts is not None

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step."""
        return self.config.num_microbatches
