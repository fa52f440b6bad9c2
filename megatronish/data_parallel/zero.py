"""What do the ranks of the data axis share? Nothing, the optimizer (ZeRO-1), or gradients too (ZeRO-2).

Rajbhandari et al. 2020 (arXiv:1910.02054). All three are one thing with two numbers: over how many ranks a bucket is
shared, and over how many these are copied. Plain data parallelism shares over one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatronish.data_parallel.gradients import GradientBuckets
from megatronish.data_parallel.offload import OffloadedGradients
from megatronish.data_parallel.parameters import FlatParameters
from megatronish.data_parallel.plan import Source, plan_buckets
from megatronish.mesh import Axis
from megatronish.sharding import Shard, Sharding


class Zero:
    """Parameters and gradients of one rank's model in flat buckets.

    `shards` is what this rank keeps of each parameter for the optimizer, `gradients` the gradients of these elements,
    complete between `collect` and the next `zero`. Both lack parameters of which it keeps nothing, and `gradients` the
    frozen ones (`requires_grad` is False). `counted` names the ones that this rank counts in a sum over `shard_axis`,
    tp and pp in which every element counts once.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shardings: Mapping[str, Sharding],
        *,
        stage: int,
        dtype: torch.dtype,
        shard_axis: Axis,
        replicate_axis: Axis,
        tp: Axis,
        embedding_axis: Axis,
        sources: Mapping[str, frozenset[Source]],
        bucket_size: int,
        overlap_reduce: bool,
        overlap_gather: bool,
        reduce_dtype: torch.dtype,
        masters_on: torch.device | None = None,
    ) -> None:
        self.shard_axis, self.replicate_axis = shard_axis, replicate_axis
        learning = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        plans, frozen = (
            plan_buckets(
                some,
                shardings,
                tp=tp,
                embedding_axis=embedding_axis,
                shard_axis=shard_axis,
                bucket_size=bucket_size,
                sources=sources,
            )
            for some in (learning, {name: p for name, p in parameters.items() if name not in learning})
        )
        self.parameters = FlatParameters(
            parameters,
            shardings,
            plans,
            frozen,
            dtype=dtype,
            tp=tp,
            shard_axis=shard_axis,
            overlap=overlap_gather,
            masters_on=masters_on,
        )
        self.buckets = GradientBuckets(
            learning,
            plans,
            shard_axis=shard_axis,
            replicate_axis=replicate_axis,
            overlap=overlap_reduce,
            keeps_whole=stage < 2,
            reduce_dtype=reduce_dtype,
        )
        self.shards: dict[str, Shard] = self.parameters.shards
        self._seen = OffloadedGradients(self.buckets.parts, masters_on)
        self.gradients: dict[str, Tensor] = {
            name: segment.of(part)
            for plan, part in zip(plans, self._seen.tensors, strict=True)
            for name, segment in plan.segments(shard_axis).items()
        }
        self.counted = {name for plan in (*plans, *frozen) if plan.counted for name in plan.names} & self.shards.keys()
        self.zero, self.starting, self.delivered = self.buckets.zero, self.buckets.starting, self.buckets.delivered
        self.publish, self.wait_before = self.parameters.publish, self.parameters.wait_before

    @property
    def sums(self) -> dict[nn.Parameter, Tensor]:
        """Where the gradient of each parameter adds up (stages 0 and 1)."""
        return self.buckets.sums

    def counted_gradients(self) -> list[Tensor]:
        """Flat tensors with the gradients that this rank counts, and zeros."""
        return [bucket.part for bucket in self.buckets.buckets if bucket.plan.counted]

    def finish(self) -> None:
        """Returns once every gradient is summed over all that it must be summed over."""
        self.buckets.finish()
        self._seen.start()

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        self.buckets.scale(factor)
        self._seen.scale(factor)

    def collect(self) -> None:
        """Returns once the gradients are where the optimizer reads them."""
        self._seen.finish()
