"""Flat parameter buffers (ZeRO 0 to 2): the model computes with views of them, and each rank keeps masters of its part.

Of each bucket a rank keeps the fp32 masters of its own part alone; in an fp32 model they are that part of the buffer.
Frozen parameters have no masters in any precision: no step changes them. Values are drawn when their bucket is
allocated, what is frozen in the precision of the run: while a rank is built it holds what it keeps, and one bucket in
fp32 at most. After an update the parts are gathered, in the
order in which a forward needs them, and each layer waits for its own when its forward begins: what is left of the
all-gather overlaps with the layers before it.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatronish.parallel import comm
from megatronish.parallel.data_parallel.offload import memory_on
from megatronish.parallel.data_parallel.plan import BucketPlan
from megatronish.parallel.data_parallel.settings import DataParallelSettings
from megatronish.parallel.sharding import Shard, Sharding, fill_zeros, flat_pieces


class FlatParameters:
    """Parameters in flat buffers of `settings.dtype` (integers: of their own), with the initial values of a seed.

    Without `seed` they are zeros. `shards` is what this rank keeps of each, `masters` the flat tensors these are views
    of. Unless `settings.overlap_gather`, `gather` waits for what it gathers.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shardings: Mapping[str, Sharding],
        plans: Sequence[BucketPlan],
        frozen: Sequence[BucketPlan],
        settings: DataParallelSettings,
        *,
        seed: int | None,
    ) -> None:
        self.overlap = settings.overlap_gather
        self.plans, self._num_learning = (*plans, *frozen), len(plans)
        self.flats, self.masters, self._are_apart = list[Tensor](), list[Tensor](), list[bool]()
        shards: dict[str, Shard] = {}
        self._gathering: dict[int, comm.Pending] = {}
        self._bucket_of: dict[str, int] = {}
        offloaded = _offloaded(plans, parameters, settings.masters_on)
        for number, plan in enumerate(self.plans):
            # Values are drawn in fp32 and rounded once: those of a master into the buffer that the model computes with,
            # those of what is frozen as they are drawn. Integers are a stored form (quantised weights), for a loader.
            first = parameters[plan.names[0]]
            learns = number < self._num_learning
            apart = learns and (settings.dtype != torch.float32 or settings.masters_on is not None)
            dtype = settings.dtype if first.is_floating_point() else first.dtype
            values = torch.zeros(plan.size, dtype=torch.float32 if apart else dtype, device=first.device)
            if seed is not None:
                for name, view in plan.views(values, parameters).items():
                    fill_zeros(view, shardings[name], plan.domain, names=(seed, "init", name))
            flat = values.to(dtype)
            if not apart:
                master = plan.part(flat)
            elif offloaded:
                master = offloaded[number].copy_(plan.part(values))
            else:
                master = plan.part(values).clone()
            del values
            # The model's parameters become views of the buffer.
            for name, view in plan.views(flat, parameters).items():
                parameters[name].data = view
                self._bucket_of[name] = number
            for name, segment in plan.segments().items():
                pieces, shape = list(shardings[name].pieces(plan.domain.model)), parameters[name].shape
                shards[name] = Shard(segment.of(master), flat_pieces(pieces, shape, segment.start, segment.stop))
            self.flats.append(flat)
            self.masters.append(master)
            self._are_apart.append(apart)
        self.shards = {name: shards[name] for name in parameters if name in shards}  # in the model's order

    @torch.no_grad()
    def gather(self, *, frozen: bool = False) -> None:
        """Round the masters into the model, on every rank; where they were loaded, the `frozen` parameters too."""
        for number in reversed(range(len(self.plans) if frozen else self._num_learning)):
            plan, flat, master = self.plans[number], self.flats[number], self.masters[number]
            part = plan.part(flat)
            if self._are_apart[number]:
                part.copy_(master, non_blocking=True)
            self._gathering[number] = comm.start_all_gather(part, plan.domain.shard, into=flat)
        # Masters that are parts of the buffers may be written next, as by the load of adapters after that of the base:
        # what is still on its way would bring back their old values.
        if frozen or not self.overlap:
            self.wait()

    def wait(self) -> None:
        """Returns once every parameter is gathered."""
        self.wait_for(self._bucket_of)

    def wait_for(self, names: Iterable[str]) -> None:
        """Returns once these parameters are gathered."""
        for number in sorted({self._bucket_of[name] for name in names}, reverse=True):
            if number in self._gathering:
                self._gathering.pop(number).wait()

    def gather_before(self, module: nn.Module, names: Sequence[str]) -> None:
        """From now on the module's forward begins with `wait_for` these."""
        module.register_forward_pre_hook(partial(self._before, names))

    def _before(self, names: Sequence[str], _module: nn.Module, _arguments: Any) -> None:
        if self._gathering:
            self.wait_for(names)


def _offloaded(
    plans: Sequence[BucketPlan], parameters: Mapping[str, nn.Parameter], masters_on: torch.device | None
) -> list[Tensor]:
    """Memory for the masters of these buckets, where they are to live apart from the model; else none."""
    if masters_on is None:
        return []
    shapes = [torch.empty(1, device=parameters[plan.names[0]].device).expand(plan.part_size) for plan in plans]
    return memory_on(masters_on, shapes)
