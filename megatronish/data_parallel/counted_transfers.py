"""Transfers of torch's `fully_shard` with their bytes counted on the line of the axis, as those of comm.py are."""

from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from megatronish.watch.record import LineRecord


class CountedAllGather(DefaultAllGather):
    """Torch's all-gather of a unit's parameters."""

    def __init__(self, line: LineRecord) -> None:
        self._line = line

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[s] -> [size * s], as torch does it."""
        self._line.count("all_gather", input_tensor)
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class CountedReduceScatter(DefaultReduceScatter):
    """Torch's reduce-scatter of a unit's gradients."""

    def __init__(self, line: LineRecord) -> None:
        self._line = line

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[size * s] -> [s], as torch does it."""
        self._line.count("reduce_scatter", input_tensor)
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


def count_transfers(unit: FSDPModule, line: LineRecord | None) -> None:
    """Count the bytes of what a unit gathers and reduces, where its axis has a record."""
    if line is not None:
        unit.set_custom_all_gather(CountedAllGather(line))
        unit.set_custom_reduce_scatter(CountedReduceScatter(line))
