"""Gradient buckets: flat fp32 buffers, reduced while backward still runs.

A bucket is a row of parameters of one reduction domain whose gradients are summed over the same axes and come from the
same actions. Gradients, parameters and optimizer states all lie in this order. Each parameter, and the part that each
rank keeps, begins at a multiple of so many elements that vector loads of GPUs find 16 bytes. A part may end anywhere
inside a parameter.

A gradient is final once each of its sources has delivered for the last time. A source is a kind of action of one of
the rank's chunks: (0, "B") is the backward of chunk 0, from which autograd's hooks report, (0, "W") its weight
gradients, which report themselves (`weight_gradient_ready`). A tied embedding can have two: the backward of the chunk
that embeds and the weight gradients of the chunk that ends the model. The reduction of a full bucket starts at once, in
the bucket's turn (the order must be the same on every rank), and `finish_reduction` waits for what is in progress.

What is reduced (Rajbhandari et al. 2020, arXiv:1910.02054), over the data ranks of the bucket's domain: over the ranks
that *shard* a bucket a reduce-scatter, after which each holds the sum of its own part; then over the ranks that hold
*replicas* of these an all-reduce of the part. Plain data parallelism has replicas alone, ZeRO-1 shards alone, its
hybrid both. At last `finish_reduction` sums over tp what is partial there, and over stages what is tied
(`Sharding.sums_over`).

With `gives_back` a bucket's memory is given back when a step begins, and taken again when its first gradient arrives:
at the end of the first forward, where activations and logits are at their peak, there are no gradients. ZeRO-2 keeps no
more of the gradients than this rank's part. A bucket's buffer lives from the first gradient that arrives in a backward
until it is reduced, after every backward, and the parts add up over the micro-batches.

Memory that is taken is not filled with zeros: the first gradient of a parameter is written, and later ones are added
(`GradientSum`). Zeros are written between parameters, and before a reduction for those without a gradient.
"""

import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatronish.core.errors import RunError
from megatronish.ops.gradient_sum import GradientSum
from megatronish.parallel import comm
from megatronish.parallel.bucketing import CODE_BLOCK, MAX_PENDING, cut_into_buckets, offsets, padded_size
from megatronish.parallel.data_parallel.coded_sums import PendingSum, start_coded_sum
from megatronish.parallel.data_parallel.data_parallel import DataParallelSettings
from megatronish.parallel.mesh import Axis, Domain
from megatronish.parallel.sharding import Sharding

Source = tuple[int, str]
"""A chunk, and the kind of its actions from which gradients come."""
MOST_ALONE = 2_000_000
"""Most elements of a bucket that no data ranks share, on a CPU."""


class Segment(NamedTuple):
    """What a rank keeps of one parameter: elements `start` to `stop` of it, flattened, from `at` on in its part."""

    start: int
    stop: int
    at: int

    def of(self, part: Tensor) -> Tensor:
        """These elements, in the part of the bucket that this rank keeps."""
        return part.narrow(0, self.at, self.stop - self.start)


class SentAs(NamedTuple):
    """How matrices are sent: `gradients` as codes (qgZ), or the matrices themselves, in blocks of so many (qwZ)."""

    gradients: bool = False
    weight_block: int | None = None

    def aligned(self, alignment: int) -> int:
        """Elements at whose multiples parameters begin, so that each begins with a block of its own."""
        return math.lcm(alignment, CODE_BLOCK if self.gradients else 1, self.weight_block or 1)


@dataclass(frozen=True)
class BucketPlan:
    """Parameters that lie side by side, each from a multiple of `alignment` elements on.

    `sharding` is that of one of them; that of any other has the same `sums_over` and `is_counted`. Those that are
    `sent_as` codes are matrices.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    alignment: int
    sources: frozenset[Source]
    domain: Domain
    sharding: Sharding
    sent_as: SentAs

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Elements before each parameter."""
        return tuple(offsets(self.sizes, self.alignment))[:-1]

    @cached_property
    def size(self) -> int:
        """Elements with all padding."""
        return padded_size(self.sizes, alignment=self.alignment, ranks=self.domain.shard.size)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Padding: where it begins, and how many elements it has."""
        ends = [offset + size for offset, size in zip(self.offsets, self.sizes, strict=True)]
        spans = zip(ends, [*self.offsets[1:], self.size], strict=True)
        return tuple((end, begin - end) for end, begin in spans if end < begin)

    @cached_property
    def sums_over(self) -> tuple[Axis, ...]:
        """Axes over which the gradients are summed besides the domain's data ranks."""
        return self.sharding.sums_over(self.domain)

    @cached_property
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
        segments = {}
        for name, begin, size in zip(self.names, self.offsets, self.sizes, strict=True):
            low, high = max(begin, first), min(begin + size, first + share)
            if low < high:
                segments[name] = Segment(low - begin, high - begin, low - first)
        return segments


class _Kinds(NamedTuple):
    """What parameters of one bucket have in common. With `by_codes` gradients of matrices may be sent as codes."""

    parameters: Mapping[str, Tensor]
    shardings: Mapping[str, Sharding]
    domains: Mapping[str, Domain]
    by_codes: bool
    weight_block: int | None

    def sent_as(self, name: str) -> SentAs:
        """How a parameter is sent: a gradient as codes only where data ranks share it."""
        sharding = self.shardings[name]
        if sharding.is_vector:
            return SentAs()
        by_codes = self.by_codes and self.domains[sharding.domain].shard.size > 1
        return SentAs(by_codes, self.weight_block if sharding.is_rounded else None)

    def sort_key(self, name: str) -> tuple[str, int, bool, list[str], bool, list[str], str, bool, bool]:
        """Key of a parameter's kind: those of one kind share buckets, and kinds are reduced in the order of their keys.

        Tied last, partial before it: every rank then meets the axes of `sums_over` in the same order.
        """
        sharding, parameter = self.shardings[name], self.parameters[name]
        integers = "" if parameter.is_floating_point() else str(parameter.dtype)
        domain = self.domains[sharding.domain]
        place, is_tied = list(self.domains).index(domain.name), sharding.is_shared or sharding.holders(domain).size > 1
        partial_over = sorted(axis for axis in sharding.partial_over if domain.model[axis].size > 1)
        cut_axes, alone = sorted(sharding.cut_axes), name if is_tied else ""
        sent = self.sent_as(name)
        codes = sent.gradients, sent.weight_block is not None
        return integers, place, is_tied, partial_over, not sharding.cuts, cut_axes, alone, *codes


def plan_buckets(
    parameters: Mapping[str, Tensor],
    shardings: Mapping[str, Sharding],
    domains: Mapping[str, Domain],
    *,
    bucket_size: int,
    alignment: int,
    sources: Mapping[str, frozenset[Source]],
    by_codes: bool = False,
    weight_block: int | None = None,
) -> list[BucketPlan]:
    """Buckets of about `bucket_size` elements, in the reverse of the model's order: about that of a backward.

    Parameters and parts begin at multiples of `alignment` elements. Integers, which only a `Product` can read, lie in
    buckets of their own. So does each tied parameter, in an order of names: the stages that hold it add up whole
    buckets, and on each of them its gradient comes from other actions. What several layers read is reduced last of all,
    as no one of them knows when its gradient is complete. Large buckets serve the exchange of data ranks.
    Without it, those on a CPU are smaller: gradients take memory from the heap while activations are given back piece
    by piece, and small ones fit into holes. With `by_codes` gradients of matrices that data ranks share are sent as
    codes, with `weight_block` the matrices are: no vector is in a bucket with them, and each begins with a block.
    """
    kinds = _Kinds(parameters, shardings, domains, by_codes, weight_block)
    plans = []
    last_first = list(parameters)[::-1]
    for _, of_kind in groupby(sorted(last_first, key=kinds.sort_key), key=kinds.sort_key):
        by_sources: dict[frozenset[Source], list[str]] = {}
        for name in of_kind:
            by_sources.setdefault(sources[name], []).append(name)
        for sources_of, of_sources in by_sources.items():
            domain, first = domains[shardings[of_sources[0]].domain], parameters[of_sources[0]]
            is_alone = domain.shard.size * domain.replicate.size == 1 and first.device.type == "cpu"
            most = min(bucket_size, MOST_ALONE) if is_alone else bucket_size
            sent_as = kinds.sent_as(of_sources[0])
            for part in cut_into_buckets([parameters[name].numel() for name in of_sources], most):
                names = tuple(of_sources[number] for number in part)
                sharding = shardings[names[0]]
                sizes = tuple(parameters[name].numel() for name in names)
                plans.append(
                    BucketPlan(
                        names=names,
                        sizes=sizes,
                        alignment=sent_as.aligned(alignment),
                        sources=sources_of,
                        domain=domain,
                        sharding=sharding,
                        sent_as=sent_as,
                    )
                )
    return plans


@dataclass
class Bucket:
    """The gradients of a plan. `flat` is None where they are not kept whole and no backward is at work on them.

    `unwritten` are parameters whose part of the memory has no values yet.
    """

    plan: BucketPlan
    part: Tensor
    flat: Tensor | None
    views: dict[str, Tensor] = field(default_factory=dict)
    waiting_for: set[tuple[str, Source]] = field(default_factory=set)
    unwritten: set[str] = field(default_factory=set)

    def write_zeros(self) -> None:
        """Complete memory in which gradients of some parameters have not come."""
        if self.unwritten:
            torch._foreach_zero_([self.views[name] for name in sorted(self.unwritten)])
            self.unwritten.clear()


class GradientBuckets:
    """The gradients of one rank's parameters, accumulated in fp32 over the micro-batches of a step.

    `parts` says of each bucket what this rank keeps of it, [size / shard], summed once `finish_reduction` has returned.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        plans: Sequence[BucketPlan],
        settings: DataParallelSettings,
        *,
        gives_back: bool = False,
    ) -> None:
        self.overlap, self.reduce_dtype, self._codes = settings.overlap.reduce, settings.reduce_dtype, settings.codes
        self.keeps_whole = settings.zero_stage < 2
        self.gives_back = self.keeps_whole and gives_back
        self._parameters = parameters
        self._name_of = {parameter: name for name, parameter in parameters.items()}
        self._source: Source | None = None  # the action at work, if what it adds is final
        self.buckets = [self._bucket(plan) for plan in plans]
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.plan.names}
        # In the order in which a backward fills them: a bucket that waits for the embedding must not keep those of
        # later layers, as of experts, from being reduced.
        place = {name: number for number, name in enumerate(parameters)}
        self._turns = sorted(self.buckets, key=lambda bucket: -min(place[name] for name in bucket.plan.names))
        self._queue: deque[Bucket] = deque()  # buckets to be reduced, in this order
        self._num_queued = 0  # at first
        self._reducing: deque[tuple[Bucket, comm.Pending | PendingSum]] = deque()
        for name, parameter in parameters.items():
            self._attach(name, parameter)
        self._enqueue(self._turns if self.keeps_whole else [])

    def _bucket(self, plan: BucketPlan) -> Bucket:
        device = self._parameters[plan.names[0]].device
        if not self.keeps_whole:
            part = torch.zeros(plan.size // plan.domain.shard.size, dtype=torch.float32, device=device)
            return Bucket(plan, part, None)
        # Kept whole, the part is a view of the buffer: after a reduce-scatter in place it holds the sum.
        flat = torch.zeros(plan.size, dtype=torch.float32, device=device)
        return Bucket(plan, plan.part(flat), flat, plan.views(flat, self._parameters))

    def _attach(self, name: str, parameter: nn.Parameter) -> None:
        """Let autograd add into the bucket; where it cannot, a hook adds instead."""
        bucket = self._bucket_of[name]
        domain = bucket.plan.domain
        # Autograd adds into .grad only in the parameter's dtype, and only if the buffer stays where it is. ZeRO-2 frees
        # it after each backward.
        by_hook = parameter.dtype != torch.float32 or not self.keeps_whole
        if not by_hook:
            parameter.grad = bucket.views[name]
            if self.gives_back:  # before autograd adds
                parameter.register_hook(partial(_prepare, weakref.ref(self), name))
        if by_hook or (self.overlap and domain.shard.size * domain.replicate.size > 1):
            # By a weak reference: Python does not see the cycle through autograd, so nothing of it would ever be freed.
            parameter.register_post_accumulate_grad_hook(partial(_report, weakref.ref(self), name, by_hook))

    def _accumulated(self, name: str, by_hook: bool, parameter: nn.Parameter) -> None:
        # A linear layer that defers its weight gradient hands autograd None, and this is called none the less.
        if by_hook and parameter.grad is not None:
            # In fp32, where each micro-batch is rounded once, by autograd, and their sum is not.
            self._sum_of(name).add(parameter.grad)
            parameter.grad = None
        self.weight_gradient_ready(parameter)

    def _whole(self, bucket: Bucket) -> Bucket:
        """The bucket with a buffer for all of it."""
        # Two ways to have no memory: ZeRO-2 has no buffer at all, `gives_back` keeps the tensor and its views over an
        # empty storage, as autograd holds these views.
        flat = bucket.flat
        if flat is None:
            bucket.flat = flat = bucket.part.new_empty(bucket.plan.size)
            bucket.views = bucket.plan.views(flat, self._parameters)
        elif not (storage := flat.untyped_storage()).nbytes():
            storage.resize_(flat.nbytes)
        else:
            return bucket
        bucket.unwritten = set(bucket.plan.names)
        if bucket.plan.gaps:  # which norms and collectives go over
            torch._foreach_zero_([flat.narrow(0, *gap) for gap in bucket.plan.gaps])
        return bucket

    @property
    def sums(self) -> dict[nn.Parameter, Tensor]:
        """Where the gradient of each parameter adds up, if it is kept whole."""
        return {self._parameters[name]: view for bucket in self.buckets for name, view in bucket.views.items()}

    def sum_of(self, parameter: nn.Parameter) -> GradientSum:
        """Where the gradient of a parameter adds up, with memory for it. Who asks adds to it."""
        return self._sum_of(self._name_of[parameter])

    def _sum_of(self, name: str) -> GradientSum:
        bucket = self._whole(self._bucket_of[name])
        is_new = name in bucket.unwritten
        bucket.unwritten.discard(name)
        return GradientSum(bucket.views[name], is_new)

    @property
    def parts(self) -> list[Tensor]:
        """What this rank keeps of each bucket."""
        return [bucket.part for bucket in self.buckets]

    def zero(self) -> None:
        """Begin a step: every gradient is zero."""
        for bucket in self.buckets:
            if bucket.flat is not None and self.gives_back:
                bucket.flat.untyped_storage().resize_(0)  # its views stay views of it
            else:
                (bucket.part if bucket.flat is None else bucket.flat).zero_()
        self._enqueue(self._turns if self.keeps_whole else [])

    def _enqueue(self, buckets: Sequence[Bucket]) -> None:
        """These are to be reduced, in this order, each once it is full."""
        self._queue = deque(buckets)
        self._num_queued = len(buckets)
        self._source = None
        for bucket in buckets:
            # Each source delivers each parameter once in a step: a plan groups parameters by their sources, so the
            # product is exact.
            bucket.waiting_for = {(name, source) for name in bucket.plan.names for source in bucket.plan.sources}

    def begin_action(self, action: tuple[str, int, int], is_last: bool) -> None:
        """(kind, chunk, micro-batch) comes next: if it is the last of its kind in its chunk, what it adds is final."""
        kind, chunk, _ = action
        # Kept whole, gradients add up over the micro-batches: only the last action of its kind makes one final. What a
        # W adds to has memory when it begins, as expected memory has it (StageWork of estimate/costs/memory.py).
        if self.keeps_whole:
            if kind == "W":
                for bucket in self.buckets:
                    self._whole(bucket)
            self._source = (chunk, kind) if is_last and self.overlap else None
            return
        # ZeRO-2: every backward is reduced by itself. What the one before has left is reduced now.
        self._reduce_all()
        if kind == "B":
            # Only what this backward adds to: other chunks deliver in backwards of their own, which have reductions of
            # their own.
            self._enqueue([bucket for bucket in self._turns if (chunk, kind) in bucket.plan.sources])
            for bucket in self._queue:
                bucket.waiting_for = {(name, (chunk, kind)) for name in bucket.plan.names}
            self._source = (chunk, kind) if self.overlap else None

    def weight_gradient_ready(self, parameter: nn.Parameter) -> None:
        """The action at work has added all that it adds to this gradient."""
        if self._source is not None and not self._bucket_of[self._name_of[parameter]].plan.sharding.is_shared:
            self.mark_ready(self._name_of[parameter], self._source)

    def mark_ready(self, name: str, source: Source) -> None:
        """Nothing more comes to the gradient of `name` from there. Sources its bucket does not wait for are ignored."""
        bucket = self._bucket_of[name]
        # A second delivery would mean that the bucket may have been reduced already, without what comes now.
        if source in bucket.plan.sources:
            if (name, source) not in bucket.waiting_for:
                raise RunError(
                    f"the gradient of {name} was complete, and more of it came in the same backward: layers that share "
                    "a parameter were computed again one by one. Use --no-overlap-grad-reduce, or leave "
                    "--recompute-granularity full out"
                )
            bucket.waiting_for.remove((name, source))
        # Only the first of the queue, even if later ones are full: ranks must start collectives in one order, and
        # gradients become final in different orders.
        while self._queue and not self._queue[0].waiting_for:
            self._reduce_next()

    def _reduce_all(self) -> None:
        while self._queue:
            self._reduce_next()

    def _reduce_next(self) -> None:
        """Start the reduction of the bucket whose turn it is."""
        bucket = self._whole(self._queue.popleft())
        bucket.write_zeros()
        domain = bucket.plan.domain
        assert bucket.flat is not None
        # The same tensor where the dtypes agree: then the reduction is in place, without a copy.
        sent = bucket.flat.to(self.reduce_dtype)
        pending: comm.Pending | PendingSum
        if bucket.plan.sent_as.gradients:
            assert self._codes is not None
            own = bucket.plan.part(bucket.flat)
            own = own if self.keeps_whole else own.clone()  # its buffer is freed before the sum is there
            pending = start_coded_sum([bucket.flat.view(domain.shard.size, -1)], domain.shard, self._codes, own=[own])
        elif self._is_one_all_reduce(bucket):
            pending = comm.start_all_reduce(sent, domain.replicate)
        else:
            # [size] -> [size / shard], into the place of this rank's part
            pending = comm.start_reduce_scatter(sent, domain.shard, into=bucket.plan.part(sent))
        # The buffer lives on in the transfer alone. At most MAX_PENDING transfers, or a slow network would keep all
        # gradients in memory.
        if not self.keeps_whole:
            bucket.flat, bucket.views = None, {}
            while len(self._reducing) >= MAX_PENDING:
                self._take_in(*self._reducing.popleft())
        self._reducing.append((bucket, pending))

    def _is_one_all_reduce(self, bucket: Bucket) -> bool:
        """Whether a bucket is not sharded and is kept until the end of the step."""
        return self.keeps_whole and bucket.plan.domain.shard.size == 1

    @property
    def num_launched(self) -> int:
        """Buckets of this step (ZeRO-2: of this backward) whose reduction has begun."""
        return self._num_queued - len(self._queue)

    def _take_in(self, bucket: Bucket, pending: comm.Pending | PendingSum) -> None:
        """Take what has arrived into the part."""
        arrived = pending.wait() if isinstance(pending, comm.Pending) else pending.wait()[0]
        # ZeRO-2 adds up sums of micro-batches. Else the result replaces the part, and in place nothing is left to do.
        if not self.keeps_whole:
            bucket.part.add_(arrived)
        elif arrived.dtype != bucket.part.dtype:
            bucket.part.copy_(arrived)

    def finish_reduction(self) -> None:
        """Returns once every part is summed: over data ranks, then over replicas, tp and tied stages."""
        # 1. Over the ranks that shard a bucket (or, not sharded, over all replicas).
        self._reduce_all()
        while self._reducing:
            self._take_in(*self._reducing.popleft())
        # 2. Over the replicas of a shard, all buckets at once.
        replicated = [
            bucket
            for bucket in self.buckets
            if bucket.plan.domain.replicate.size > 1 and not self._is_one_all_reduce(bucket)
        ]
        under_way = [
            comm.start_all_reduce(bucket.part.to(self.reduce_dtype), bucket.plan.domain.replicate)
            for bucket in replicated
        ]
        for bucket, pending in zip(replicated, under_way, strict=True):
            bucket.part.copy_(pending.wait())
        # 3. Over tp where each rank has a part of the gradient, and over the holders of a tied parameter.
        for bucket in self.buckets:
            for axis in bucket.plan.sums_over:
                comm.all_reduce(bucket.part, axis)

    def scale(self, factor: float) -> None:
        """Multiply every gradient of this rank by `factor`."""
        for part in self.parts:
            part.mul_(factor)


def _prepare(buckets: "weakref.ref[GradientBuckets]", name: str, gradient: Tensor | None) -> None:
    """Have the memory of a sum there before autograd adds a gradient to it, if there is one."""
    if gradient is not None and (alive := buckets()) is not None:
        alive._sum_of(name).filled()


def _report(buckets: "weakref.ref[GradientBuckets]", name: str, by_hook: bool, parameter: nn.Parameter) -> None:
    """Tell the buckets, if they are still there, that a gradient has arrived."""
    if (alive := buckets()) is not None:
        alive._accumulated(name, by_hook, parameter)
