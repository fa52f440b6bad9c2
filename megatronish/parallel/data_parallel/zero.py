"""ZeRO 0 to 2 on flat buckets: data ranks shard nothing, the optimizer (ZeRO-1), or gradients too (ZeRO-2).

Rajbhandari et al. 2020 (arXiv:1910.02054). All three are one thing with two numbers: over how many ranks a bucket is
sharded, and over how many these are replicated. Plain data parallelism shards over one.

Offloaded gradients: copies in the CPU's memory, where masters live and the optimizer steps them.
On CUDA the copies go through pinned memory and no rank waits for them one by one: they start as soon as gradients are
summed, run while the norm is taken and agreed upon, and are waited for together. The way back, masters into the model,
is not waited for at all: what computes next on the device comes after it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatronish.ops.gradient_sum import GradientSum
from megatronish.parallel import comm
from megatronish.parallel.data_parallel.coded_weights import PendingWeights, round_weights, start_coded_gather
from megatronish.parallel.data_parallel.data_parallel import DataParallelSettings
from megatronish.parallel.data_parallel.gradients import BucketPlan, GradientBuckets, Source, plan_buckets
from megatronish.parallel.disk import DiskFile, copy_between
from megatronish.parallel.mesh import Domain
from megatronish.parallel.pinned import Form, pinned_zeros
from megatronish.parallel.sharding import Shard, Sharding, fill_zeros, flat_pieces


# Flat parameter buffers (ZeRO 0 to 2): the model computes with views of them, and each rank keeps masters of its part.
#
# Of each bucket a rank keeps the fp32 masters of its own part alone; in an fp32 model they are that part of the buffer.
# Frozen parameters have no masters in any precision: no step changes them. Values are drawn when their bucket is
# allocated, what is frozen in the precision of the run: while a rank is built it holds what it keeps, and one bucket in
# fp32 at most. After an update the parts are gathered, in the order in which a forward needs them, and each layer waits
# for its own when its forward begins: what is left of the all-gather overlaps with the layers before it.
class FlatParameters:
    """Parameters in flat buffers of `settings.dtype` (integers: of their own), with the initial values of a seed.

    Without `seed` they are zeros. `shards` is what this rank keeps of each. Unless `settings.overlap.gather`, `gather`
    waits for what it gathers.
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
        self.overlap = settings.overlap.gather
        self.plans, self._num_learning = (*plans, *frozen), len(plans)
        self.flats, self._masters = list[Tensor](), list[BucketMasters]()
        shards: dict[str, Shard] = {}
        self._gathering: dict[int, comm.Pending | PendingWeights] = {}
        self._bucket_of: dict[str, int] = {}
        offloaded = _offloaded(plans, parameters, settings)
        for number, plan in enumerate(self.plans):
            # Values are drawn in fp32 and rounded once: those of a master into the buffer that the model computes with,
            # those of what is frozen as they are drawn. Integers are a stored form (quantised weights), for a loader.
            first = parameters[plan.names[0]]
            learns = number < self._num_learning
            block = plan.sent_as.weight_block
            apart = learns and (
                settings.dtype != torch.float32 or settings.offload.masters_on is not None or block is not None
            )
            dtype = settings.dtype if first.is_floating_point() else first.dtype
            values = torch.zeros(plan.size, dtype=torch.float32 if apart else dtype, device=first.device)
            if seed is not None:
                for name, view in plan.views(values, parameters).items():
                    fill_zeros(view, shardings[name], plan.domain, names=(seed, "init", name))
            flat = values.to(dtype)
            if block is not None:
                flat = flat if flat is not values else torch.empty_like(values)
                round_weights(values, block, into=flat)
            if not apart:
                masters = BucketMasters.whole(plan, plan.part(flat), is_apart=False)
            elif offloaded:
                masters = offloaded[number]
                copy_between([(master, values) for values, master in masters.beside(plan.part(values))])
            else:
                masters = BucketMasters.whole(plan, plan.part(values).clone())
            del values
            # The model's parameters become views of the buffer.
            for name, view in plan.views(flat, parameters).items():
                parameters[name].data = view
                self._bucket_of[name] = number
            for name, segment in plan.segments().items():
                pieces, shape = list(shardings[name].pieces(plan.domain.model)), parameters[name].shape
                shards[name] = Shard(masters.of[name], flat_pieces(pieces, shape, segment.start, segment.stop))
            self.flats.append(flat)
            self._masters.append(masters)
        self.shards = {name: shards[name] for name in parameters if name in shards}  # in the model's order

    @torch.no_grad()
    def gather(self, *, frozen: bool = False) -> None:
        """Round the masters into the model, on every rank; where they were loaded, the `frozen` parameters too."""
        for number in reversed(range(len(self.plans) if frozen else self._num_learning)):
            plan, flat = self.plans[number], self.flats[number]
            masters = self._masters[number]
            if plan.sent_as.weight_block is not None:
                values = masters.joined(plan.part_size, flat.device)
                gather = start_coded_gather(values, plan.domain.shard, plan.sent_as.weight_block, into=flat)
                self._gathering[number] = gather
                continue
            part = plan.part(flat)
            copy_between(masters.beside(part))
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


class BucketMasters(NamedTuple):
    """Masters of what a rank keeps of a bucket, by parameter, and the tensors that these are views of.

    `wholes` have the element of the rank's part at which each begins; none where they are the part itself.
    """

    of: dict[str, Tensor]
    wholes: list[tuple[int, Tensor]]

    @classmethod
    def whole(cls, plan: BucketPlan, flat: Tensor, *, is_apart: bool = True) -> "BucketMasters":
        """Views of one tensor that is as large as the part."""
        of = {name: segment.of(flat) for name, segment in plan.segments().items()}
        return cls(of, [(0, flat)] if is_apart else [])

    @classmethod
    def on_disk(cls, plan: BucketPlan, disk: DiskFile) -> "BucketMasters":
        """One for each parameter, from the start of a page on: so it is read and written past the cache."""
        segments = plan.segments()
        forms = [Form((segment.stop - segment.start,), torch.float32) for segment in segments.values()]
        of = dict(zip(segments, disk.zeros(forms), strict=True))
        return cls(of, [(segment.at, of[name]) for name, segment in segments.items()])

    def joined(self, size: int, device: torch.device) -> Tensor:
        """fp32 [size]: all of them, where the model computes; a copy unless they are there as one tensor."""
        if len(self.wholes) == 1 and (whole := self.wholes[0][1]).device == device and len(whole) == size:
            return whole
        values = torch.zeros(size, device=device)
        copy_between(self.beside(values))
        return values

    def beside(self, part: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs of what is in the part and the master of it."""
        return [(part.narrow(0, at, len(master)), master) for at, master in self.wholes]


def _offloaded(
    plans: Sequence[BucketPlan], parameters: Mapping[str, nn.Parameter], settings: DataParallelSettings
) -> list[BucketMasters]:
    """Memory for the masters of these buckets, where they are to live apart from the model; else none."""
    if settings.offload.masters_on is None:
        return []
    if settings.offload.folder is not None:
        disk = DiskFile(settings.offload.folder)
        return [BucketMasters.on_disk(plan, disk) for plan in plans]
    shapes = [torch.empty(1, device=parameters[plan.names[0]].device).expand(plan.part_size) for plan in plans]
    flats = memory_on(settings.offload.masters_on, shapes)
    return [BucketMasters.whole(plan, flat) for plan, flat in zip(plans, flats, strict=True)]


class Zero:
    """Parameters and gradients of one rank's stage in flat buckets: a `DataParallel`.

    The parameters have shapes and no values yet: the buckets hold those that names and `seed` say, or with `seed` None
    zeros, for a checkpoint to fill. `sources` are the actions from which the gradient of each parameter comes.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shardings: Mapping[str, Sharding],
        domains: Mapping[str, Domain],
        settings: DataParallelSettings,
        *,
        seed: int | None,
        sources: Mapping[str, frozenset[Source]],
        gives_back: bool = True,
    ) -> None:
        self.domains = domains
        learning = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        resting = {name: parameter for name, parameter in parameters.items() if name not in learning}
        plans, frozen = (
            plan_buckets(
                some,
                shardings,
                domains,
                bucket_size=settings.bucket_size,
                alignment=settings.alignment if some is learning else 16,  # int8 has one byte
                sources=sources,
                by_codes=settings.codes is not None and some is learning,
                weight_block=settings.weight_block if some is learning else None,
            )
            for some in (learning, resting)
        )
        self.parameters = FlatParameters(parameters, shardings, plans, frozen, settings, seed=seed)
        self.buckets = GradientBuckets(learning, plans, settings, gives_back=gives_back)
        self.shards: dict[str, Shard] = self.parameters.shards
        self._offloaded = OffloadedGradients(self.buckets.parts, settings.offload.gradients_on)
        self.gradients: dict[str, Tensor] = {
            name: segment.of(part)
            for plan, part in zip(plans, self._offloaded.tensors, strict=True)
            for name, segment in plan.segments().items()
        }
        counted = {name for plan in (*plans, *frozen) if plan.counted for name in plan.names}
        self.counted = {name for name in counted & self.shards.keys() if parameters[name].is_floating_point()}
        self.zero, self.begin_action = self.buckets.zero, self.buckets.begin_action
        self.weight_gradient_ready = self.buckets.weight_gradient_ready
        self.sum_of: Callable[[nn.Parameter], GradientSum] | None = self.buckets.sum_of
        self.gather_parameters, self.gather_before = self.parameters.gather, self.parameters.gather_before
        self.wait_for_parameters = self.parameters.wait

    @property
    def sums(self) -> dict[nn.Parameter, Tensor]:
        """Buffer in which the gradient of each parameter adds up (stages 0 and 1)."""
        return self.buckets.sums

    def counted_gradients(self) -> dict[str, list[Tensor]]:
        """Flat tensors with the gradients that this rank counts, and zeros, by domain."""
        gradients: dict[str, list[Tensor]] = {name: [] for name in self.domains}
        for bucket in self.buckets.buckets:
            if bucket.plan.counted:
                gradients[bucket.plan.domain.name].append(bucket.part)
        return gradients

    def finish_reduction(self) -> None:
        """Returns once every gradient is summed: over data ranks, then over replicas, tp and tied stages."""
        self.buckets.finish_reduction()
        self._offloaded.start()

    def scale(self, factor: float) -> None:
        """Multiply every gradient of this rank by `factor`."""
        self.buckets.scale(factor)
        self._offloaded.scale(factor)

    def wait_for_offload(self) -> None:
        """Returns once the gradients are where the optimizer reads them."""
        self._offloaded.finish()


def memory_on(device: torch.device, like: Sequence[Tensor]) -> list[Tensor]:
    """Zeros of these shapes there; in memory that a GPU can copy from and to without waiting if it is the CPU's."""
    if device.type == "cpu" and any(tensor.device.type == "cuda" for tensor in like):
        return pinned_zeros([Form(tuple(tensor.shape), tensor.dtype) for tensor in like])
    return [torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) for tensor in like]


class OffloadedGradients:
    """Flat gradients as the optimizer reads them: themselves, or copies of them where masters live."""

    def __init__(self, gradients: Sequence[Tensor], copies_on: torch.device | None) -> None:
        self._gradients, self._are_apart, self._factor = gradients, copies_on is not None, 1.0
        self.tensors = gradients if copies_on is None else memory_on(copies_on, gradients)

    def start(self) -> None:
        """Start to copy: the gradients are summed."""
        self._factor = 1.0
        if self._are_apart:
            for gradient, copy in zip(self._gradients, self.tensors, strict=True):
                copy.copy_(gradient, non_blocking=True)

    def scale(self, factor: float) -> None:
        """Multiply the copies, too, once they have come."""
        self._factor *= factor

    def finish(self) -> None:
        """Returns once the copies are complete."""
        if not self._are_apart:
            return
        for device in {gradient.device for gradient in self._gradients if gradient.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        if self._factor != 1.0:
            for copy in self.tensors:
                copy.mul_(self._factor)
        self._factor = 1.0
