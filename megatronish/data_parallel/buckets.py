"""When is a gradient final, and who adds it up? Contiguous gradient buffers, reduced while backward still runs.

Parameters are filled into buckets in the reverse of their order in the model, which is about the order in which
backward finishes them. A bucket is a flat fp32 buffer and the list of axes over which it is summed: the data axis
always, tp for partial gradients, the first and last stage for a tied embedding.

A gradient is final once each of its sources has delivered for the last time. A source is a kind of action of one of
the rank's chunks: (0, "B") is the backward of chunk 0, from which autograd's hooks report, (0, "W") its weight
gradients, which report themselves (`delivered`). A tied embedding can have two: the backward of the chunk that embeds
and the weight gradients of the one that ends the model. A full bucket's all-reduce over the data axis starts at once,
in the bucket's turn (the order must be the same on every rank), and `finish` waits for what is still under way.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from megatronish import comm
from megatronish.errors import RunError
from megatronish.mesh.groups import Axis
from megatronish.sharding import Sharding

Source = tuple[int, str]
"""A chunk, and the kind of its actions from which gradients come."""

WHOLE_BACKWARD: frozenset[Source] = frozenset({(0, "B")})


@dataclass
class Bucket:
    """Gradients that lie side by side and are summed over the same axes.

    `counted` says whether this rank counts them in a sum over tp and pp in which each element counts once.
    """

    names: list[str]
    flat: Tensor
    views: dict[str, Tensor]
    finishing_axes: tuple[Axis, ...]
    counted: bool
    waiting_for: set[tuple[str, Source]] = field(default_factory=set)
    reduction: comm.Pending | None = None


class GradientBuckets:
    """The gradients of one rank's parameters, accumulated in fp32 over the micro-batches of a step."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        shardings: dict[str, Sharding],
        *,
        data: Axis,
        tp: Axis,
        holders: Axis,
        bucket_size: int,
        overlap: bool,
        sources: Mapping[str, frozenset[Source]] | None = None,
    ) -> None:
        """`sources` of each parameter are by default the backward of the one chunk."""
        self.data, self.overlap = data, overlap
        self._sources = sources or dict.fromkeys(parameters, WHOLE_BACKWARD)
        self._last_source: Source | None = None
        self._next_launch = 0
        self._name_of = {parameter: name for name, parameter in parameters.items()}

        def kind(name: str) -> tuple[bool, bool, bool]:
            """Tied last, partial before it: every rank then meets the finishing axes in the same order."""
            sharding = shardings[name]
            return sharding.tied and holders.size > 1, sharding.partial and tp.size > 1, sharding.dim is None

        assert self._sources.keys() == parameters.keys(), self._sources.keys() ^ parameters.keys()
        self.buckets: list[Bucket] = []
        last_first = list(reversed(parameters))
        for (tied, partial_, replicated), names in groupby(sorted(last_first, key=kind), key=kind):
            axes = ((tp,) if partial_ else ()) + ((holders,) if tied else ())
            counted = (not replicated or tp.is_first) and (not tied or holders.is_first)
            for part in _parts(list(names), parameters, bucket_size):
                self.buckets.append(_bucket(part, parameters, axes, counted))
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        self.views = {name: self._bucket_of[name].views[name] for name in parameters}
        for name, parameter in parameters.items():
            self._attach(name, parameter)
        self.zero()

    def _attach(self, name: str, parameter: nn.Parameter) -> None:
        """Let autograd add into the bucket; where dtypes differ, a hook adds instead."""
        mixed = parameter.dtype != torch.float32
        if not mixed:
            parameter.grad = self.views[name]
        if mixed or (self.data.size > 1 and self.overlap):
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name, mixed))

    def _accumulated(self, name: str, mixed: bool, parameter: nn.Parameter) -> None:
        # A linear layer that puts its weight gradient off hands autograd None, and this is called none the less.
        if mixed and parameter.grad is not None:
            self.views[name].add_(parameter.grad)
            parameter.grad = None
        self.delivered(parameter)

    def zero(self) -> None:
        """Begin a step."""
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.waiting_for = {(name, source) for name in bucket.names for source in self._sources[name]}
            bucket.reduction = None
        self._next_launch = 0
        self._last_source = None

    def starting(self, action: tuple[str, int, int], is_last: bool) -> None:
        """(kind, chunk, micro-batch) comes next: if it is the last of its kind in its chunk, what it adds is final."""
        kind, chunk, _ = action
        self._last_source = (chunk, kind) if is_last and self.overlap else None

    def delivered(self, parameter: nn.Parameter) -> None:
        """The action at work has added all that it adds to this gradient."""
        if self._last_source is not None:
            self.mark_ready(self._name_of[parameter], self._last_source)

    def mark_ready(self, name: str, source: Source) -> None:
        """Nothing more comes to the gradient of `name` from there. What is none of its sources changes nothing."""
        if source in self._sources[name]:
            waiting_for = self._bucket_of[name].waiting_for
            if (name, source) not in waiting_for:
                raise RunError(
                    f"the gradient of {name} was complete, and more of it came in the same backward: layers that share "
                    "a parameter were computed again one by one. Use --no-overlap-grad-reduce, or leave "
                    "--recompute-granularity full out"
                )
            waiting_for.remove((name, source))
        while self._next_launch < len(self.buckets) and not self.buckets[self._next_launch].waiting_for:
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self.buckets[self._next_launch]
        bucket.reduction = comm.start_all_reduce(bucket.flat, self.data)
        self._next_launch += 1

    def finish(self) -> None:
        """Returns once every gradient is summed over all that it must be summed over."""
        while self._next_launch < len(self.buckets):
            self._launch_next()
        for bucket in self.buckets:
            assert bucket.reduction is not None
            bucket.reduction.wait()
            for axis in bucket.finishing_axes:
                comm.all_reduce(bucket.flat, axis)

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        for bucket in self.buckets:
            bucket.flat.mul_(factor)


def _parts(names: list[str], parameters: dict[str, nn.Parameter], bucket_size: int) -> Iterator[list[str]]:
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


def _bucket(
    names: list[str], parameters: dict[str, nn.Parameter], finishing_axes: tuple[Axis, ...], counted: bool
) -> Bucket:
    sizes = [parameters[name].numel() for name in names]
    flat = torch.zeros(sum(sizes), dtype=torch.float32, device=parameters[names[0]].device)
    views = {name: part.view_as(parameters[name]) for name, part in zip(names, flat.split(sizes), strict=True)}
    return Bucket(names, flat, views, finishing_axes, counted)
