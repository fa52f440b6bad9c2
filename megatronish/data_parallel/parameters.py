"""Where do parameters live between two steps, and how do they get back to all ranks? Flat buffers, gathered as needed.

The model computes with views into flat buffers, a bucket each. Of each bucket a rank keeps the fp32 masters of its own
part alone; in an fp32 model they are that part of the buffer. After an update the parts are gathered, in the order in
which a forward needs them, and each layer waits for its own when its forward begins: what is left of the exchange hides
behind the layers before it.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatronish import comm
from megatronish.data_parallel.offload import memory_on
from megatronish.data_parallel.plan import BucketPlan
from megatronish.mesh import Axis
from megatronish.sharding import Shard, Sharding, flat_pieces


class FlatParameters:
    """Moves the parameters into flat buffers of `dtype`, their values taken in fp32 from what they hold now.

    `shards` is what this rank keeps of each, `masters` the flat tensors these are views of. Those of `frozen` are there
    for checkpoints alone: no step changes them. Unless `overlap`, `publish` waits for what it gathers.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shardings: Mapping[str, Sharding],
        plans: Sequence[BucketPlan],
        frozen: Sequence[BucketPlan] = (),
        *,
        dtype: torch.dtype,
        tp: Axis,
        shard_axis: Axis,
        overlap: bool,
        masters_on: torch.device | None = None,
    ) -> None:
        """`masters_on` is where masters live if not where the parameters do."""
        self.shard_axis, self.overlap = shard_axis, overlap
        self.plans, self._num_learning = (*plans, *frozen), len(plans)
        self.flats, self.masters = list[Tensor](), list[Tensor]()
        shards: dict[str, Shard] = {}
        self._gathering: dict[int, comm.Pending] = {}
        self._bucket_of: dict[str, int] = {}
        for number, plan in enumerate(self.plans):
            values = next(iter(parameters.values())).new_zeros(plan.size, dtype=torch.float32)
            for name, view in plan.views(values, parameters).items():
                view.copy_(parameters[name].detach())
            flat = values.to(dtype)
            part = plan.part(values, shard_axis)
            apart = dtype != torch.float32 or masters_on is not None
            master = _away(part, masters_on) if apart else plan.part(flat, shard_axis)
            for name, view in plan.views(flat, parameters).items():
                parameters[name].data = view
                self._bucket_of[name] = number
            for name, segment in plan.segments(shard_axis).items():
                pieces, shape = list(shardings[name].pieces(tp)), parameters[name].shape
                shards[name] = Shard(segment.of(master), flat_pieces(pieces, shape, segment.start, segment.stop))
            self.flats.append(flat)
            self.masters.append(master)
        self.shards = {name: shards[name] for name in parameters if name in shards}  # in the model's order

    @torch.no_grad()
    def publish(self, *, frozen: bool = False) -> None:
        """Round the masters into the model, on every rank; where they were loaded the `frozen` too."""
        for number in reversed(range(len(self.plans) if frozen else self._num_learning)):
            flat, master = self.flats[number], self.masters[number]
            part = self.plans[number].part(flat, self.shard_axis)
            if part.data_ptr() != master.data_ptr():
                part.copy_(master, non_blocking=True)
            self._gathering[number] = comm.start_all_gather(part, self.shard_axis, into=flat)
        if not self.overlap:
            self.wait_for(self._bucket_of)

    def wait_for(self, names: Iterable[str]) -> None:
        """Returns once these parameters are there."""
        for number in sorted({self._bucket_of[name] for name in names}, reverse=True):
            if number in self._gathering:
                self._gathering.pop(number).wait()

    def wait_before(self, module: nn.Module, names: Sequence[str]) -> None:
        """From now on the module's forward begins with `wait_for` these."""
        module.register_forward_pre_hook(partial(self._before, names))

    def _before(self, names: Sequence[str], _module: nn.Module, _arguments: Any) -> None:
        if self._gathering:
            self.wait_for(names)


def _away(part: Tensor, device: torch.device | None) -> Tensor:
    """A copy of its own, there."""
    return part.clone() if device is None else memory_on(device, part).copy_(part)
