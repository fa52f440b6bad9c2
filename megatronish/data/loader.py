"""Loader: the micro-batches of each step, and a thread that prepares them ahead.

Sample numbers of a step are dealt in turn: micro-batch m of data-parallel rank d holds the B samples from
consumed_samples + (m * dp_size + d) * B on. So a position in the data is one number, and whatever the layout, the same
samples make up the same step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from megatronish.data.sample import Dataset, Sample
from megatronish.model.batch import MicroBatch


@dataclass(frozen=True)
class BatchShare:
    """The part of every global batch that one data-parallel rank takes."""

    dp_rank: int
    dp_size: int
    micro_batch_size: int

    def sample_ids(self, *, consumed_samples: int, global_batch_size: int) -> list[range]:
        """Numbers of the samples of each micro-batch of the step that starts at `consumed_samples`."""
        stride = self.micro_batch_size * self.dp_size
        num_micro_batches, rest = divmod(global_batch_size, stride)
        assert rest == 0, f"{global_batch_size=} is not divisible by micro-batch size times dp size = {stride}"
        begin = consumed_samples + self.dp_rank * self.micro_batch_size
        firsts = range(begin, begin + num_micro_batches * stride, stride)
        return [range(first, first + self.micro_batch_size) for first in firsts]


def micro_batches(
    dataset: Dataset,
    *,
    consumed_samples: int,
    global_batch_size: int,
    share: BatchShare,
    collate: Callable[[Sequence[Sample], Sequence[int]], MicroBatch],
    pin_memory: bool = False,
) -> list[MicroBatch]:
    """All micro-batches of one step for one data-parallel rank, on the CPU; `pin_memory` needs a GPU."""
    parts = share.sample_ids(consumed_samples=consumed_samples, global_batch_size=global_batch_size)
    batches = [collate([dataset.sample(index) for index in part], part) for part in parts]
    return [batch.pinned() for batch in batches] if pin_memory else batches


class Prefetcher:
    """Iterator over the micro-batches of steps; a thread prepares the next `num_ahead` steps during training.

    `prepare(consumed_samples, global_batch_size)` makes the micro-batches of a step;
    `global_batch_size(consumed_samples)` is the number of its samples. An exception in the thread is raised by the
    `next()` of the step it belongs to.
    """

    def __init__(
        self,
        prepare: Callable[[int, int], list[MicroBatch]],
        *,
        consumed_samples: int,
        global_batch_size: Callable[[int], int],
        num_ahead: int,
    ) -> None:
        self._prepare = prepare
        self._consumed_samples = consumed_samples
        self._global_batch_size = global_batch_size
        self._num_ahead = num_ahead
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch") if num_ahead else None
        self._ahead: deque[Future[list[MicroBatch]]] = deque()

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> list[MicroBatch]:
        if self._pool is None:
            return self._prepare(*self._next_step())
        while len(self._ahead) <= self._num_ahead:
            self._ahead.append(self._pool.submit(self._prepare, *self._next_step()))
        return self._ahead.popleft().result()

    def _next_step(self) -> tuple[int, int]:
        consumed = self._consumed_samples
        size = self._global_batch_size(consumed)
        self._consumed_samples += size
        return consumed, size

    def close(self) -> None:
        """Stop the thread; a second call does nothing."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
