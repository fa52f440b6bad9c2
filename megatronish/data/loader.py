"""Which micro-batches does a data-parallel rank get in the step that starts at `consumed_samples`?

Sample numbers of a step are dealt in turn: micro-batch m of rank d holds the B samples from
consumed_samples + (m * dp_size + d) * B on. So a position in the data is one number, and whatever the layout, the same
samples make up the same step.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
import torch

from megatronish.data.blend import Dataset, Samples
from megatronish.model.batch import MicroBatch


def micro_batches(
    dataset: Dataset,
    *,
    consumed_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    eod: int,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> list[MicroBatch]:
    """All micro-batches of one step for one data-parallel rank."""
    num_micro_batches, rest = divmod(global_batch_size, micro_batch_size * dp_size)
    assert rest == 0, f"{global_batch_size=} is not divisible by {micro_batch_size=} times {dp_size=}"
    firsts = [consumed_samples + (m * dp_size + dp_rank) * micro_batch_size for m in range(num_micro_batches)]
    return [
        micro_batch(
            dataset,
            range(first, first + micro_batch_size),
            eod=eod,
            reset_position_ids=reset_position_ids,
            reset_attention_mask=reset_attention_mask,
            eod_mask_loss=eod_mask_loss,
        )
        for first in firsts
    ]


def micro_batch(
    dataset: Samples,
    sample_ids: range,
    *,
    eod: int,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> MicroBatch:
    """The micro-batch of these samples.

    An end-of-document token belongs to the document it ends. What is predicted from it, the next document's first
    token, counts in the loss unless `eod_mask_loss`, as in Megatron-LM.
    """
    samples = np.stack([dataset.sample(index) for index in sample_ids])
    tokens, labels = samples[:, :-1], samples[:, 1:]
    is_end = tokens == eod
    position_ids = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    if reset_position_ids:
        follows_end = np.pad(is_end[:, :-1], ((0, 0), (1, 0)))
        position_ids = position_ids - np.maximum.accumulate(np.where(follows_end, position_ids, 0), axis=1)
    document_ids = np.cumsum(is_end, axis=1) - is_end if reset_attention_mask else None
    return MicroBatch(
        tokens=torch.tensor(tokens),
        labels=torch.tensor(labels),
        loss_mask=torch.tensor(~is_end if eod_mask_loss else np.ones_like(is_end)),
        position_ids=torch.tensor(position_ids),
        sample_ids=torch.tensor(sample_ids),
        document_ids=None if document_ids is None else torch.tensor(document_ids),
    )


class Prefetcher:
    """The steps' micro-batches one after another, the next `num_ahead` being prepared by a thread meanwhile.

    `prepare(consumed_samples, global_batch_size)` makes a step's; `global_batch_size(consumed_samples)` says how many
    samples it takes. What goes wrong in the thread is raised by the `next()` whose step it concerns.
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
        """Stop the thread; idempotent."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
