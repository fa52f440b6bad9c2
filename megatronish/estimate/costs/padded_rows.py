"""Rows of ZeRO-3: every rank holds as many rows of a parameter as any other one, the last ranks padding among them.

FSDP shares the rows of each parameter. Where they are not a multiple of the ranks (few experts over many ranks) the
weights of all ranks are padded, as is what is gathered; gradients and the optimizer's states have true rows alone, so
the first ranks have most of them and the last ones may have none.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megatronish.estimate.costs.buckets import rounded_up
from megatronish.estimate.costs.memory_table import Memory
from megatronish.estimate.costs.stage_parameters import StageParameter
from megatronish.estimate.costs.state_traffic import DataRanks


class Rows(NamedTuple):
    """Elements on a rank of parameters that learn: with padding, without it, and with an even share of all rows."""

    padded: int
    own: int
    even: float


class PaddedRows(NamedTuple):
    """Rows of a stage on the rank at these places among those that shard each domain, the first by default."""

    data_ranks: Mapping[str, DataRanks]
    places: Mapping[str, int]

    def learning(self, parameters: Iterable[StageParameter]) -> Rows:
        """Rows of all these parameters that learn."""
        padded, own, even = 0, 0, 0.0
        for each in parameters:
            if each.learns:
                shard, _ = self.data_ranks[each.domain]
                part = rounded_up(each.rows, shard) // shard
                padded += part * each.columns
                own += min(max(each.rows - part * self.places.get(each.domain, 0), 0), part) * each.columns
                even += each.size / shard
        return Rows(padded, own, even)

    def gathered(self, parameter: StageParameter) -> int:
        """Elements of a gathered parameter."""
        return rounded_up(parameter.rows, self.data_ranks[parameter.domain].shard) * parameter.columns

    def state(self, memory: Memory, parameters: Iterable[StageParameter]) -> Memory:
        """What ZeRO-3 holds, of `memory` with even shares in fp32."""
        rows = self.learning(parameters)
        if not rows.even:
            return memory
        return memory._replace(
            parameters=memory.parameters + round(4 * (rows.padded - rows.even)) if memory.parameters else 0,
            gradients=memory.gradients + round(4 * (rows.own - rows.even)) if memory.gradients else 0,
            optimizer=round(memory.optimizer * rows.own / rows.even),
        )
