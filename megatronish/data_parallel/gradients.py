"""When is a gradient final, and who adds it up? Flat gradient buffers, reduced while backward still runs.

A gradient is final once each of its sources has delivered for the last time. A source is a kind of action of one of
the rank's chunks: (0, "B") is the backward of chunk 0, from which autograd's hooks report, (0, "W") its weight
gradients, which report themselves (`delivered`). A tied embedding can have two: the backward of the chunk that embeds
and the weight gradients of the one that ends the model. A full bucket's exchange starts at once, in the bucket's turn
(the order must be the same on every rank), and `finish` waits for what is still under way.

What is exchanged (Rajbhandari et al. 2020, arXiv:1910.02054): over the ranks that *share* a bucket a reduce-scatter,
after which each holds the sum of its own part; then over the ranks that are *copies* of these an all-reduce of the
part. Plain data parallelism has copies alone, ZeRO-1 sharing ranks alone, its hybrid both.

ZeRO-2 keeps no more of the gradients than this rank's part. A bucket's buffer lives from the first gradient that
arrives in a backward until it is exchanged, after every backward, and the parts add up over the micro-batches.
"""

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from megatronish import comm
from megatronish.data_parallel.plan import BucketPlan, Source
from megatronish.errors import RunError
from megatronish.mesh import Axis

MOST_UNDER_WAY = 2  # exchanges of buckets that ZeRO-2 frees afterwards


@dataclass
class Bucket:
    """The gradients of a plan. `flat` is None where they are not kept whole and no backward is at work on them."""

    plan: BucketPlan
    part: Tensor
    flat: Tensor | None
    views: dict[str, Tensor] = field(default_factory=dict)
    waiting_for: set[tuple[str, Source]] = field(default_factory=set)


class GradientBuckets:
    """The gradients of one rank's parameters, accumulated in fp32 over the micro-batches of a step.

    `parts` says of each bucket what this rank keeps of it, [size / shard_axis], summed once `finish` has returned.
    `reduce_dtype` is that of what is sent. Unless `keeps_whole`, gradients are ZeRO-2's.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        plans: Sequence[BucketPlan],
        *,
        shard_axis: Axis,
        replicate_axis: Axis,
        overlap: bool,
        keeps_whole: bool = True,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shard_axis, self.replicate_axis, self.overlap = shard_axis, replicate_axis, overlap
        self.keeps_whole, self.reduce_dtype = keeps_whole, reduce_dtype
        self._parameters = parameters
        self._name_of = {parameter: name for name, parameter in parameters.items()}
        self._delivering: Source | None = None
        self.buckets = [self._bucket(plan, next(iter(parameters.values())).device) for plan in plans]
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.plan.names}
        self._due: deque[Bucket] = deque()
        self._num_begun = 0  # buckets that were due at first
        self._under_way: deque[tuple[Bucket, comm.Pending]] = deque()
        for name, parameter in parameters.items():
            self._attach(name, parameter)
        self.zero()

    def _bucket(self, plan: BucketPlan, device: torch.device) -> Bucket:
        if not self.keeps_whole:
            part = torch.zeros(plan.size // self.shard_axis.size, dtype=torch.float32, device=device)
            return Bucket(plan, part, None)
        flat = torch.zeros(plan.size, dtype=torch.float32, device=device)
        return Bucket(plan, plan.part(flat, self.shard_axis), flat, plan.views(flat, self._parameters))

    def _attach(self, name: str, parameter: nn.Parameter) -> None:
        """Let autograd add into the bucket; where it cannot, a hook adds instead."""
        by_hook = parameter.dtype != torch.float32 or not self.keeps_whole
        if not by_hook:
            parameter.grad = self._bucket_of[name].views[name]
        if by_hook or (self.overlap and self.shard_axis.size * self.replicate_axis.size > 1):
            # By a weak reference: Python does not see the cycle through autograd, so nothing of it would ever be freed.
            parameter.register_post_accumulate_grad_hook(partial(_report, weakref.ref(self), name, by_hook))

    def _accumulated(self, name: str, by_hook: bool, parameter: nn.Parameter) -> None:
        # A linear layer that puts its weight gradient off hands autograd None, and this is called none the less.
        if by_hook and parameter.grad is not None:
            self._whole(self._bucket_of[name]).views[name].add_(parameter.grad)
            parameter.grad = None
        self.delivered(parameter)

    def _whole(self, bucket: Bucket) -> Bucket:
        """The bucket with a buffer for all of it."""
        if bucket.flat is None:
            bucket.flat = bucket.part.new_zeros(bucket.plan.size)
            bucket.views = bucket.plan.views(bucket.flat, self._parameters)
        return bucket

    @property
    def sums(self) -> dict[nn.Parameter, Tensor]:
        """Where the gradient of each parameter adds up, if it is kept whole."""
        return {self._parameters[name]: view for bucket in self.buckets for name, view in bucket.views.items()}

    @property
    def parts(self) -> list[Tensor]:
        """What this rank keeps of each bucket."""
        return [bucket.part for bucket in self.buckets]

    def zero(self) -> None:
        """Begin a step."""
        for bucket in self.buckets:
            (bucket.part if bucket.flat is None else bucket.flat).zero_()
        self._begin(self.buckets if self.keeps_whole else [])

    def _begin(self, buckets: Sequence[Bucket]) -> None:
        """These are to be exchanged, in this order, each once it is full."""
        self._due = deque(buckets)
        self._num_begun = len(buckets)
        self._delivering = None
        for bucket in buckets:
            bucket.waiting_for = {(name, source) for name in bucket.plan.names for source in bucket.plan.sources}

    def starting(self, action: tuple[str, int, int], is_last: bool) -> None:
        """(kind, chunk, micro-batch) comes next: if it is the last of its kind in its chunk, what it adds is final."""
        kind, chunk, _ = action
        if self.keeps_whole:
            self._delivering = (chunk, kind) if is_last and self.overlap else None
            return
        self._exchange_all()
        if kind == "B":
            self._begin([bucket for bucket in self.buckets if (chunk, kind) in bucket.plan.sources])
            for bucket in self._due:
                bucket.waiting_for = {(name, (chunk, kind)) for name in bucket.plan.names}
            self._delivering = (chunk, kind) if self.overlap else None

    def delivered(self, parameter: nn.Parameter) -> None:
        """The action at work has added all that it adds to this gradient."""
        if self._delivering is not None:
            self.mark_ready(self._name_of[parameter], self._delivering)

    def mark_ready(self, name: str, source: Source) -> None:
        """Nothing more comes to the gradient of `name` from there. What is none of its sources changes nothing."""
        bucket = self._bucket_of[name]
        if source in bucket.plan.sources:
            if (name, source) not in bucket.waiting_for:
                raise RunError(
                    f"the gradient of {name} was complete, and more of it came in the same backward: layers that share "
                    "a parameter were computed again one by one. Use --no-overlap-grad-reduce, or leave "
                    "--recompute-granularity full out"
                )
            bucket.waiting_for.remove((name, source))
        while self._due and not self._due[0].waiting_for:
            self._exchange_next()

    def _exchange_all(self) -> None:
        while self._due:
            self._exchange_next()

    def _exchange_next(self) -> None:
        bucket = self._whole(self._due.popleft())
        assert bucket.flat is not None
        sent = bucket.flat.to(self.reduce_dtype)
        into = bucket.plan.part(sent, self.shard_axis)
        if self._copies_at_once:
            pending = comm.start_all_reduce(sent, self.replicate_axis)
        else:
            pending = comm.start_reduce_scatter(sent, self.shard_axis, into=into)
        if not self.keeps_whole:
            bucket.flat, bucket.views = None, {}
            while len(self._under_way) >= MOST_UNDER_WAY:
                self._add_up(*self._under_way.popleft())
        self._under_way.append((bucket, pending))

    @property
    def _copies_at_once(self) -> bool:
        """Whether a bucket's exchange is all there is to exchange: it is shared with nobody, and kept until the end."""
        return self.keeps_whole and self.shard_axis.size == 1

    @property
    def num_launched(self) -> int:
        """Buckets of this step (ZeRO-2: of this backward) whose exchange has begun."""
        return self._num_begun - len(self._due)

    def _add_up(self, bucket: Bucket, pending: comm.Pending) -> None:
        """Take what has arrived into the part."""
        arrived = pending.wait()
        if not self.keeps_whole:
            bucket.part.add_(arrived)
        elif self.reduce_dtype != bucket.part.dtype:
            bucket.part.copy_(arrived)

    def finish(self) -> None:
        """Returns once every part is summed over all that it must be summed over."""
        self._exchange_all()
        while self._under_way:
            self._add_up(*self._under_way.popleft())
        if not self._copies_at_once and self.replicate_axis.size > 1:
            sums = [comm.start_all_reduce(part.to(self.reduce_dtype), self.replicate_axis) for part in self.parts]
            for part, pending in zip(self.parts, sums, strict=True):
                part.copy_(pending.wait())
        for bucket in self.buckets:
            for axis in bucket.plan.finishing_axes:
                comm.all_reduce(bucket.part, axis)

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        for part in self.parts:
            part.mul_(factor)


def _report(buckets: "weakref.ref[GradientBuckets]", name: str, by_hook: bool, parameter: nn.Parameter) -> None:
    """A gradient has arrived."""
    if (alive := buckets()) is not None:
        alive._accumulated(name, by_hook, parameter)
