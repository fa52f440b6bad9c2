"""Which parameters lie side by side, and which rank keeps which part of them? The layout of flat buffers.

A bucket is a row of parameters whose gradients are summed over the same axes and come from the same actions, padded so
that every rank that shares it keeps an equal part, wherever that ends inside a parameter. Gradients, parameters and
what the optimizer keeps all lie in this order.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from megatronish.mesh import Axis
from megatronish.sharding import Sharding

Source = tuple[int, str]
"""A chunk, and the kind of its actions from which gradients come."""

WHOLE_BACKWARD: frozenset[Source] = frozenset({(0, "B")})


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
    """Parameters that lie side by side. `size` counts padding.

    `finishing_axes` are those over which gradients are summed besides the data axis. `counted` says whether this rank
    counts them in a sum over tp and pp in which each element counts once.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    size: int
    sources: frozenset[Source]
    finishing_axes: tuple[Axis, ...]
    counted: bool

    def views(self, flat: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """[size] -> each parameter's elements in its shape."""
        parts = flat.split([*self.sizes, self.size - sum(self.sizes)])
        return {name: part.view(parameters[name].shape) for name, part in zip(self.names, parts, strict=False)}

    def part(self, flat: Tensor, axis: Axis) -> Tensor:
        """[size] -> [size / axis]: what this rank keeps where the bucket is shared over the axis."""
        share = self.size // axis.size
        return flat.narrow(0, axis.rank * share, share)

    def segments(self, axis: Axis) -> dict[str, Segment]:
        """Of each parameter of which it keeps something, what."""
        share = self.size // axis.size
        first = axis.rank * share
        found, begin = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            low, high = max(begin, first), min(begin + size, first + share)
            if low < high:
                found[name] = Segment(low - begin, high - begin, low - first)
            begin += size
        return found


def plan_buckets(
    parameters: Mapping[str, Tensor],
    shardings: Mapping[str, Sharding],
    *,
    tp: Axis,
    embedding_axis: Axis,
    shard_axis: Axis,
    bucket_size: int,
    sources: Mapping[str, frozenset[Source]],
) -> list[BucketPlan]:
    """Buckets of about `bucket_size` elements, in the reverse of the model's order: about that of a backward."""

    def kind(name: str) -> tuple[bool, bool, bool]:
        """Tied last, partial before it: every rank then meets the finishing axes in the same order."""
        sharding = shardings[name]
        return sharding.tied and embedding_axis.size > 1, sharding.partial and tp.size > 1, sharding.dim is None

    plans = []
    last_first = list(parameters)[::-1]
    for (tied, partial, replicated), of_kind in groupby(sorted(last_first, key=kind), key=kind):
        axes = ((tp,) if partial else ()) + ((embedding_axis,) if tied else ())
        counted = (not replicated or tp.is_first) and (not tied or embedding_axis.is_first)
        by_sources: dict[frozenset[Source], list[str]] = {}
        for name in of_kind:
            by_sources.setdefault(sources[name], []).append(name)
        for sources_of, of_sources in by_sources.items():
            for names in _parts(of_sources, parameters, bucket_size):
                sizes = tuple(parameters[name].numel() for name in names)
                size = -(-sum(sizes) // shard_axis.size) * shard_axis.size
                plans.append(BucketPlan(tuple(names), sizes, size, sources_of, axes, counted))
    return plans


def _parts(names: list[str], parameters: Mapping[str, Tensor], bucket_size: int) -> Iterator[list[str]]:
    part: list[str] = []
    size = 0
    for name in names:
        part.append(name)
        size += parameters[name].numel()
        if size >= bucket_size:
            yield part
            part, size = [], 0
    if part:
        yield part
