"""Bytes of a rank's step, added up by axis and collective, and the sizes that they follow from."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.parallel.schedules.live_activations import StageLoad

SCALAR = 8  # bytes of a number in fp64, or an integer


class TrafficKey(NamedTuple):
    """Name of the group of ranks, and of the collective."""

    axis: str
    collective: str


@dataclass
class StepTraffic:
    """Bytes of one step on a rank of a stage, whose layers `load` has: of each call those of its largest tensor."""

    config: Config
    load: StageLoad
    stage: int
    vocab_size: int
    sent: Counter[TrafficKey] = field(default_factory=Counter)

    def add(self, axis: str, collective: str, size: float) -> None:
        """Bytes of a whole step on an axis, if it has more than one rank."""
        if self.sizes.get(axis, 2) > 1:
            self.sent[TrafficKey(axis, collective)] += round(size)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Ranks of the axes that may be of one."""
        layout, experts = self.config.layout, self.config.parallel.expert_layout
        ep, etp = experts if self.has_experts else (1, 1)
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

    @property
    def width(self) -> int:
        """Bytes of an element of activations."""
        return 4 if self.config.training.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a cp rank."""
        training = self.config.training
        return training.seq_length * training.micro_batch_size // self.config.layout.cp

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states of a micro-batch, H."""
        return self.tokens * self.config.model.hidden_size * self.width

    @property
    def cuts_sequence(self) -> bool:
        """Whether there is sequence parallelism."""
        return self.config.parallel.sequence_parallel and self.config.layout.tp > 1

    @property
    def freezes(self) -> bool:
        """Whether adapters learn, and the model itself is frozen."""
        return self.config.adapter.is_used
