"""Transfers of torch's `fully_shard` with their bytes counted on the line of the axis, as those of comm.py are."""

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from megatronish.watch.record import LineRecord


class CountedAllGather(DefaultAllGather):
    """Torch's all-gather of a unit's parameters."""

    def __init__(self, line: LineRecord) -> None:
        self._line = line

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, *args: Any, **kwargs: Any
    ) -> Any:
        """[s] -> [size * s], as torch does it."""
        _count(self._line, "all_gather", input_tensor, group)
        return super().__call__(output_tensor, input_tensor, group, *args, **kwargs)


class CountedReduceScatter(DefaultReduceScatter):
    """Torch's reduce-scatter of a unit's gradients."""

    def __init__(self, line: LineRecord) -> None:
        self._line = line

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, *args: Any, **kwargs: Any
    ) -> Any:
        """[size * s] -> [s], as torch does it."""
        _count(self._line, "reduce_scatter", input_tensor, group)
        return super().__call__(output_tensor, input_tensor, group, *args, **kwargs)


def _count(line: LineRecord, operation: str, x: Tensor, group: ProcessGroup) -> None:
    """Count it on the line of the group that it goes over, which torch chooses: `line`, or another of the rank."""
    record, ranks = line.record, tuple(get_process_group_ranks(group))
    if record.counts_bytes:
        found = line if line.ranks == ranks else next((each for each in record.lines if each.ranks == ranks), None)
        if found is not None:
            found.count(operation, x)


def count_transfers(unit: FSDPModule, line: LineRecord | None) -> None:
    """Count the bytes of what a unit gathers and reduces, where its axis has a record."""
    if line is not None:
        unit.set_custom_all_gather(CountedAllGather(line))
        unit.set_custom_reduce_scatter(CountedReduceScatter(line))
