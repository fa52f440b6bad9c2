"""Gradient buffers of ZeRO-2 in the course of a backward: buckets that fill, and those whose reduction is in progress.

A bucket has a buffer from its first gradient on. It is reduced once it is full and in its turn, and its buffer is there
until the reduction after the next one begins, perhaps in the next backward. Without overlap all buckets of a backward
wait for its end.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from megatronish.estimate.costs.stage_parameters import StageParameter
from megatronish.estimate.costs.state_traffic import GradientBucket

MAX_PENDING = 2  # reductions of buckets that ZeRO-2 frees afterwards
TABLE = "embedding.tokens.weight"


class BufferBytes(NamedTuple):
    """Bytes of buffers as a backward of a chunk begins, at most while its layers are at work, and at its end.

    `first` are those while the first of these layers is at work, the last of the chunk: where reductions wait for the
    end there are fewer than later, when fewer activations wait. `table` are those of the embedding's bucket, if nothing
    before its gradient has made it.
    """

    before: int
    first: int
    layers: int
    end: int
    table: int


class Zero2Buffers:
    """Buffers of a stage. A backward of any chunk begins with what the one before has left."""

    def __init__(
        self, parameters: Sequence[StageParameter], buckets: Sequence[GradientBucket], *, overlaps: bool
    ) -> None:
        self._overlaps = overlaps
        self._arrivals = [each.name for each in reversed(parameters) if each.learns]
        place = {each.name: number for number, each in enumerate(parameters)}
        self._turns = sorted(buckets, key=lambda bucket: -min(place[name] for name in bucket.names))
        self._pending: deque[int] = deque()

    def backward(self, chunk: int) -> BufferBytes:
        """The next backward is one of this chunk."""
        queue = deque(bucket for bucket in self._turns if (chunk, "B") in bucket.sources)
        bucket_of = {name: bucket for bucket in queue for name in bucket.names}
        missing = {bucket.names: set(bucket.names) for bucket in queue}
        filling: dict[tuple[str, ...], int] = {}
        before = layers = end = sum(self._pending)
        table = 0
        first, at_first = 0, ""
        for name in self._arrivals:
            if name not in bucket_of:
                continue
            bucket = bucket_of[name]
            if name == TABLE and bucket.names not in filling:
                table = 4 * bucket.size
            filling[bucket.names] = 4 * bucket.size
            end = sum(self._pending) + sum(filling.values())
            if name.startswith("layers."):
                layers = max(layers, end)
                layer = ".".join(name.split(".")[:2])
                at_first = at_first or layer
                first = layers if self._overlaps or layer == at_first else first
            missing[bucket.names].discard(name)
            while self._overlaps and queue and not missing[queue[0].names]:
                self._reduce(filling.pop(queue.popleft().names))
        for bucket in queue:
            self._reduce(filling.get(bucket.names, 0))
        return BufferBytes(before, first, layers, end, table)

    def _reduce(self, size: int) -> None:
        if len(self._pending) == MAX_PENDING:
            self._pending.popleft()
        self._pending.append(size)
