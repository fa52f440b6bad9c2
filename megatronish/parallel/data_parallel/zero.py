"""ZeRO 0 to 2 on flat buckets: data ranks shard nothing, the optimizer (ZeRO-1), or gradients too (ZeRO-2).

Rajbhandari et al. 2020 (arXiv:1910.02054). All three are one thing with two numbers: over how many ranks a bucket is
sharded, and over how many these are replicated. Plain data parallelism shards over one.
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from megatronish.parallel.data_parallel.gradients import GradientBuckets
from megatronish.parallel.data_parallel.offload import OffloadedGradients
from megatronish.parallel.data_parallel.parameters import FlatParameters
from megatronish.parallel.data_parallel.plan import Source, plan_buckets
from megatronish.parallel.data_parallel.settings import DataParallelSettings
from megatronish.parallel.mesh import Domain
from megatronish.parallel.sharding import Shard, Sharding


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
            )
            for some in (learning, resting)
        )
        self.parameters = FlatParameters(parameters, shardings, plans, frozen, settings, seed=seed)
        self.buckets = GradientBuckets(learning, plans, settings, gives_back=gives_back)
        self.shards: dict[str, Shard] = self.parameters.shards
        self._offloaded = OffloadedGradients(self.buckets.parts, settings.masters_on)
        self.gradients: dict[str, Tensor] = {
            name: segment.of(part)
            for plan, part in zip(plans, self._offloaded.tensors, strict=True)
            for name, segment in plan.segments().items()
        }
        counted = {name for plan in (*plans, *frozen) if plan.counted for name in plan.names}
        self.counted = {name for name in counted & self.shards.keys() if parameters[name].is_floating_point()}
        self.zero, self.begin_action = self.buckets.zero, self.buckets.begin_action
        self.weight_gradient_ready = self.buckets.weight_gradient_ready
        self.sum_of: Callable[[nn.Parameter], Tensor] | None = None
        if self.buckets.keeps_whole:
            self.sum_of = self.buckets.sum_of
        self.gather_parameters, self.gather_before = self.parameters.gather, self.parameters.gather_before
        self.wait_for_parameters = self.parameters.wait

    @property
    def sums(self) -> dict[nn.Parameter, Tensor]:
        """Buffer in which the gradient of each parameter adds up (stages 0 and 1)."""
        return self.buckets.sums

    def counted_gradients(self) -> dict[str, list[Tensor]]:
        """Flat tensors with the gradients that this rank counts, and zeros, by domain."""
        found: dict[str, list[Tensor]] = {name: [] for name in self.domains}
        for bucket in self.buckets.buckets:
            if bucket.plan.counted:
                found[bucket.plan.domain.name].append(bucket.part)
        return found

    def finish_reduction(self) -> None:
        """Returns once every gradient is summed over all that it must be summed over."""
        self.buckets.finish_reduction()
        self._offloaded.start()

    def scale(self, factor: float) -> None:
        """Multiply every gradient of this rank by `factor`."""
        self.buckets.scale(factor)
        self._offloaded.scale(factor)

    def wait_for_offload(self) -> None:
        """Returns once the gradients are where the optimizer reads them."""
        self._offloaded.finish()
