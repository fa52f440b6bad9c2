"""Bucket plans: which parameters lie side by side in flat buffers, and which rank keeps which part of them.

A bucket is a row of parameters of one reduction domain whose gradients are summed over the same axes and come from the
same actions. Gradients, parameters and optimizer states all lie in this order. Each parameter, and the part that each
rank keeps, begins at a multiple of so many elements that vector loads of GPUs find 16 bytes. A part may end anywhere
inside a parameter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from megatronish.parallel.bucketing import cut_into_buckets, offsets, padded_size
from megatronish.parallel.mesh import Axis, Domain
from megatronish.parallel.sharding import Sharding

Source = tuple[int, str]
"""A chunk, and the kind of its actions from which gradients come."""
MOST_ALONE = 2_000_000
"""Elements of a bucket that no data ranks share, on a CPU."""


class Segment(NamedTuple):
    """What a rank keeps of one parameter: elements `start` to `stop` of it, flattened, from `at` on in its part."""

    start: int
    stop: int
    at: int

    def of(self, part: Tensor) -> Tensor:
        """These elements, in the part of the bucket that this rank keeps."""
        return part.narrow(0, self.at, self.stop - self.start)


@dataclass(frozen=True)
class BucketPlan:
    """Parameters that lie side by side: of `sizes` elements from `offsets` on, in `size` elements with all padding.

    `sharding` is that of one of them; that of any other has the same `sums_over` and `is_counted`.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int
    sources: frozenset[Source]
    domain: Domain
    sharding: Sharding

    @property
    def sums_over(self) -> tuple[Axis, ...]:
        """Axes over which the gradients are summed besides the domain's data ranks."""
        return self.sharding.sums_over(self.domain)

    @property
    def counted(self) -> bool:
        """Whether this rank counts the parameters (`Sharding.is_counted`)."""
        return self.sharding.is_counted(self.domain)

    def views(self, flat: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """[size] -> each parameter's elements in its shape."""
        spans = zip(self.names, self.offsets, self.sizes, strict=True)
        return {name: flat.narrow(0, offset, size).view(parameters[name].shape) for name, offset, size in spans}

    @property
    def part_size(self) -> int:
        """Elements that a rank keeps."""
        return self.size // self.domain.shard.size

    def part(self, flat: Tensor) -> Tensor:
        """[size] -> [size / shard]: what this rank keeps."""
        share = self.part_size
        return flat.narrow(0, self.domain.shard.rank * share, share)

    def segments(self) -> dict[str, Segment]:
        """Of each parameter of which this rank keeps something, what."""
        share = self.part_size
        first = self.domain.shard.rank * share
        found = {}
        for name, begin, size in zip(self.names, self.offsets, self.sizes, strict=True):
            low, high = max(begin, first), min(begin + size, first + share)
            if low < high:
                found[name] = Segment(low - begin, high - begin, low - first)
        return found


def plan_buckets(
    parameters: Mapping[str, Tensor],
    shardings: Mapping[str, Sharding],
    domains: Mapping[str, Domain],
    *,
    bucket_size: int,
    alignment: int,
    sources: Mapping[str, frozenset[Source]],
) -> list[BucketPlan]:
    """Buckets of about `bucket_size` elements, in the reverse of the model's order: about that of a backward.

    Parameters and parts begin at multiples of `alignment` elements. Integers, which only a `Product` can read, lie in
    buckets of their own. So does each tied parameter, in an order of names: the stages that hold it add up whole
    buckets, and on each of them its gradient comes from other actions. Large buckets serve the exchange of data ranks.
    Without it, those on a CPU are smaller: gradients take memory from the heap while activations are given back piece
    by piece, and small ones fit into holes.
    """
    order = list(domains)

    def kind(name: str) -> tuple[str, int, bool, list[str], bool, list[str], str]:
        """Tied last, partial before it: every rank then meets the axes of `sums_over` in the same order."""
        sharding, parameter = shardings[name], parameters[name]
        integers = "" if parameter.is_floating_point() else str(parameter.dtype)
        domain = domains[sharding.domain]
        is_tied = sharding.tied and domain.embedding.size > 1
        partial_over = sorted(axis for axis in sharding.partial_over if domain.model[axis].size > 1)
        cut_axes, alone = sorted(sharding.cut_axes), name if is_tied else ""
        return integers, order.index(domain.name), is_tied, partial_over, not sharding.cuts, cut_axes, alone

    plans = []
    last_first = list(parameters)[::-1]
    for _, of_kind in groupby(sorted(last_first, key=kind), key=kind):
        by_sources: dict[frozenset[Source], list[str]] = {}
        for name in of_kind:
            by_sources.setdefault(sources[name], []).append(name)
        for sources_of, of_sources in by_sources.items():
            domain, first = domains[shardings[of_sources[0]].domain], parameters[of_sources[0]]
            is_alone = domain.shard.size * domain.replicate.size == 1 and first.device.type == "cpu"
            most = min(bucket_size, MOST_ALONE) if is_alone else bucket_size
            for part in cut_into_buckets([parameters[name].numel() for name in of_sources], most):
                names = tuple(of_sources[number] for number in part)
                sharding = shardings[names[0]]
                sizes = tuple(parameters[name].numel() for name in names)
                plans.append(
                    BucketPlan(
                        names=names,
                        sizes=sizes,
                        offsets=tuple(offsets(sizes, alignment))[:-1],
                        size=padded_size(sizes, alignment=alignment, ranks=domain.shard.size),
                        sources=sources_of,
                        domain=domain,
                        sharding=sharding,
                    )
                )
    return plans
