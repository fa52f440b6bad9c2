"""Rows of ZeRO-3 on a disk: memory for `fully_shard` in a file, read before a unit is gathered and then forgotten.

`fully_shard` keeps a rank's rows of a parameter in one tensor, padded to as many rows as the first rank has. It would
pad by copying into memory of its own; here the tensor in the file is padded from the start, and takes its place.

A unit's rows are asked for when the unit before it is gathered. Which one comes next follows from what came after the
same two units the last time: in a forward the layer above, in a backward the one below. A wrong guess costs time alone.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from megatronish.parallel.disk import DiskFile, ask_for, release
from megatronish.parallel.pinned import Form


def allocate_rows(stage: nn.Module, disk: DiskFile, device: torch.device) -> None:
    """As `stage.to_empty(device=device)`, with this rank's rows in the file."""
    groups = list(_groups(stage))
    places = {id(place.sharded_param): place for group in groups for place in group.fsdp_params}
    parameters = [each for each in stage.parameters() if isinstance(each, DTensor)]
    forms = [Form(tuple(places[id(each)].padded_sharded_param_size), each.dtype) for each in parameters]
    rows = {id(each): padded for each, padded in zip(parameters, disk.zeros(forms), strict=True)}

    def allocated(tensor: Tensor) -> Tensor:
        if (padded := rows.get(id(tensor))) is None:
            return torch.empty_like(tensor, device=device)
        place = places[id(tensor)]
        # `fully_shard` knows memory that is padded already by its address.
        place._sharded_param_data = padded.view(-1)
        return place.to_sharded_dtensor(padded[: place.sharded_size[0]])

    stage._apply(allocated)
    order = ReadOrder()
    for group in groups:
        order.follow(group)


def _groups(stage: nn.Module) -> Iterator[FSDPParamGroup]:
    for unit in stage.modules():
        if isinstance(unit, FSDPModule):
            yield from unit._get_fsdp_state()._fsdp_param_groups


class ReadOrder:
    """The order in which units are gathered, as far as it was seen."""

    def __init__(self) -> None:
        self._last: tuple[FSDPParamGroup | None, FSDPParamGroup | None] = (None, None)
        self._after: dict[tuple[FSDPParamGroup | None, FSDPParamGroup | None], FSDPParamGroup] = {}

    def follow(self, group: FSDPParamGroup) -> None:
        """From now on have rows read when the group, or the one before it, is gathered, and forgotten afterwards."""
        unshard, wait_for_unshard = group.unshard, group.wait_for_unshard

        def read_and_unshard(async_op: bool = False) -> None:
            if not (group.is_unsharded or group._all_gather_result):
                self._gathers(group)
            unshard(async_op)

        def wait_and_forget() -> None:
            is_gathered = bool(group._all_gather_result)
            wait_for_unshard()
            if is_gathered:  # from the rows, in `unshard` or on a rank alone in the wait
                release(*_rows_of(group))

        vars(group).update(unshard=read_and_unshard, wait_for_unshard=wait_and_forget)

    def _gathers(self, group: FSDPParamGroup) -> None:
        self._after[self._last] = group
        self._last = self._last[1], group
        ask_for(_rows_of(group))
        if (following := self._after.get(self._last)) is not None:
            ask_for(_rows_of(following))


def _rows_of(group: FSDPParamGroup) -> list[Tensor]:
    return [place._sharded_param_data for place in group.fsdp_params]
