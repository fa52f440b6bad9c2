"""Loader: the micro-batches of each step, collated from samples, and a thread that prepares them ahead.

Sample numbers of a step are dealt in turn: micro-batch m of data-parallel rank d holds the B samples from
consumed_samples + (m * dp_size + d) * B on. So a position in the data is one number, and whatever the layout, the same
samples make up the same step. Of several islands (DiLoCo) each has a row of the step's samples, dealt in the same way
to its data ranks: so no layout of an island changes what the island learns from.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatronish.config.config import Config
from megatronish.config.sections.data import DataConfig
from megatronish.data.sample import Dataset, Sample, read_ahead
from megatronish.model.batch import CompletionPairs, MicroBatch
from megatronish.parallel.mesh import Mesh


@dataclass(frozen=True)
class BatchShare:
    """The part of every global batch that one data-parallel rank takes, of `dp_size` in each island."""

    dp_rank: int
    dp_size: int
    micro_batch_size: int
    island: int = 0
    num_islands: int = 1

    @classmethod
    def of(cls, mesh: Mesh, micro_batch_size: int) -> "BatchShare":
        """That of a rank of the mesh."""
        return cls(mesh.dp.rank, mesh.dp.size, micro_batch_size, mesh.islands.rank, mesh.islands.size)

    def sample_ids(self, *, consumed_samples: int, global_batch_size: int) -> list[range]:
        """Numbers of the samples of each micro-batch of the step that starts at `consumed_samples`."""
        stride = self.micro_batch_size * self.dp_size
        num_micro_batches, rest = divmod(global_batch_size, dealt := stride * self.num_islands)
        assert rest == 0, f"{global_batch_size=} is not divisible by micro-batch size times dp size = {dealt}"
        begin = consumed_samples + self.island * num_micro_batches * stride + self.dp_rank * self.micro_batch_size
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
    read_ahead(dataset, [index for part in parts for index in part])
    batches = [collate([dataset.sample(index) for index in part], part) for part in parts]
    return [batch.pinned() for batch in batches] if pin_memory else batches


class Prefetcher:
    """Iterator over the micro-batches of `num_steps` steps; a thread prepares the next `num_ahead` during training.

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
        num_steps: float = math.inf,
    ) -> None:
        self._prepare = prepare
        self._consumed_samples = consumed_samples
        self._global_batch_size = global_batch_size
        self._num_ahead = num_ahead
        self._num_left = num_steps  # what comes after the last step is not read: it may be on a store
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch") if num_ahead else None
        self._ahead: deque[Future[list[MicroBatch]]] = deque()

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> list[MicroBatch]:
        if not self._ahead and self._num_left <= 0:
            raise StopIteration
        if self._pool is None:
            return self._prepare(*self._next_step())
        while len(self._ahead) <= self._num_ahead and self._num_left > 0:
            self._ahead.append(self._pool.submit(self._prepare, *self._next_step()))
        return self._ahead.popleft().result()

    def _next_step(self) -> tuple[int, int]:
        consumed = self._consumed_samples
        size = self._global_batch_size(consumed)
        self._consumed_samples += size
        self._num_left -= 1
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


# Shorter rows: the samples of a micro-batch without the filler that none of them needs.
#
# Chats that are not packed are a row each, which is filled up to the sequence length; most of it would be computed for
# nothing. No loss reads filler and masks go by place, so rows of any length have the same losses and gradients, and it
# does not matter which samples a layout puts into one micro-batch.
PLACES = 64
"""Lengths are multiples of it: few shapes, which kernels and the memory's allocator like."""


def places_together(config: Config) -> int | None:
    """Number of places of which the length of a row is a multiple; None where rows keep their length.

    They do where they are packed, where shapes are to be equal (CUDA graphs, compiled layers), with experts, which
    balance all tokens, and with LongRoPE, which turns by the length of a row. A model with an encoder packs none. tp
    and cp cut rows: cp into two pieces for each rank.
    """
    packs = config.chat.pack_samples and not config.model.has_encoder
    keeps = packs or config.training.cuda_graph or config.training.compile
    if keeps or config.model.num_experts is not None or config.model.short_context is not None:
        return None
    parallel = config.parallel
    return math.lcm(PLACES, 2 * parallel.context_parallel_size * parallel.tensor_model_parallel_size)


def shortened(samples: Sequence[Sample], *, multiple: int | None) -> list[Sample]:
    """Samples of one length, S + 1, cut to the longest without filler: s + 1 for a multiple s, at most S."""
    if multiple is None:
        return list(samples)
    longest = max(len(sample.tokens) - sample.num_filler for sample in samples) - 1
    length = multiple * max(1, math.ceil(longest / multiple)) + 1
    return [sample.until(length) if length < len(sample.tokens) else sample for sample in samples]


@dataclass(frozen=True)
class Collator:
    """Rules by which samples become a micro-batch: `collate(samples, sample_ids)`.

    The settings are about documents that end-of-document tokens end; a sample's own masks come first. An
    end-of-document token belongs to the document that it ends. The prediction made from it, the next document's first
    token, counts in the loss unless `eod_mask_loss`, as in Megatron-LM.
    """

    eod: int | None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    @classmethod
    def of(cls, data: DataConfig, *, eod: int | None) -> "Collator":
        """The rules that a config asks for."""
        return cls(
            eod,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        )

    def __call__(self, samples: Sequence[Sample], sample_ids: Sequence[int]) -> MicroBatch:
        """B samples of S + 1 tokens -> [B, S] tensors on the CPU."""
        mixed = [sample.dataset_ids for sample in samples if sample.dataset_ids is not None]
        assert len(mixed) in (0, len(samples)), (
            "some samples of a batch tell the data sets of their tokens, some do not"
        )
        packed = self.reset_attention_mask or any(sample.document_ids is not None for sample in samples)
        loss_mask = _stack([self._loss_mask(sample) for sample in samples])
        batch = MicroBatch(
            tokens=_stack([sample.tokens[:-1] for sample in samples]),
            labels=_stack([sample.tokens[1:] for sample in samples]),
            loss_mask=loss_mask,
            position_ids=_stack([self._position_ids(sample) for sample in samples]),
            sample_ids=torch.tensor(sample_ids),
            document_ids=_stack([self._document_ids(sample) for sample in samples]) if packed else None,
            dataset_ids=_stack([ids[1:] for ids in mixed]) if mixed else None,
        )
        pairs = completion_pairs(samples, loss_mask)
        return batch if pairs is None else batch.with_pairs(pairs)

    def _loss_mask(self, sample: Sample) -> NDArray[np.bool_]:
        """bool [S]: whether the token after each position counts."""
        if sample.loss_mask is not None:
            mask = sample.loss_mask[1:]
        else:
            mask = ~self._is_end(sample) if self.eod_mask_loss else np.ones(len(sample.tokens) - 1, np.bool_)
            mask[len(mask) - sample.num_filler :] = False
        # Between packed documents the label belongs to the next one, of which the position sees nothing.
        return mask if sample.document_ids is None else mask & (np.diff(sample.document_ids) == 0)

    def _document_ids(self, sample: Sample) -> NDArray[np.int64]:
        """int64 [S]; one document where documents of the sample may attend to each other."""
        if sample.document_ids is not None or self.reset_attention_mask:
            return self._documents(sample)
        return np.zeros(len(sample.tokens) - 1, np.int64)

    def _position_ids(self, sample: Sample) -> NDArray[np.int64]:
        """int64 [S], from 0 in the sample or in each of its documents."""
        places = np.arange(len(sample.tokens) - 1)
        if sample.document_ids is None and not self.reset_position_ids:
            return places
        documents = self._documents(sample)
        begins = np.diff(documents, prepend=documents[:1]) > 0
        return places - np.maximum.accumulate(np.where(begins, places, 0))

    def _documents(self, sample: Sample) -> NDArray[np.int64]:
        """int64 [S]: the sample's own document ids, or numbers of the documents that end-of-document tokens end."""
        if sample.document_ids is not None:
            return sample.document_ids[:-1]
        is_end = self._is_end(sample)
        return np.cumsum(is_end) - is_end

    def _is_end(self, sample: Sample) -> NDArray[np.bool_]:
        """bool [S]: whether a token that the model sees ends a document."""
        inputs = sample.tokens[:-1]
        return np.zeros(len(inputs), np.bool_) if self.eod is None else inputs == self.eod


def completion_pairs(samples: Sequence[Sample], loss_mask: Tensor) -> CompletionPairs | None:
    """Pairs of completions of samples that have them; `loss_mask` is the [B, S] of their predictions."""
    pair_labels = [sample.pair_labels for sample in samples if sample.pair_labels is not None]
    if not pair_labels:
        return None
    assert len(pair_labels) == len(samples), "some samples of a batch have pairs, some do not"
    numbers, first, num_texts = [], 0, 2 * sum(map(len, pair_labels))
    for sample, labels in zip(samples, pair_labels, strict=True):
        documents = sample.document_ids
        assert documents is not None, "the completions of a sample are documents"
        is_inside = (np.diff(documents) == 0) & (documents[1:] < 2 * len(labels))
        numbers.append(np.where(is_inside, documents[1:] + first, num_texts))
        first += 2 * len(labels)
    of_labels = _stack(numbers)
    counts = [
        torch.bincount(each.flatten(), minlength=num_texts + 1)[:-1].view(-1, 2)
        for each in (of_labels.masked_fill(~loss_mask, num_texts), of_labels)
    ]
    references = [sample.pair_reference for sample in samples if sample.pair_reference is not None]
    return CompletionPairs(
        of_labels,
        lengths=counts[0],
        text_lengths=counts[1],
        labels=torch.from_numpy(np.concatenate(pair_labels)),
        reference=torch.from_numpy(np.concatenate(references)) if references else None,
    )


def _stack(rows: Sequence[NDArray[Any]]) -> Tensor:
    """[S] arrays, B of them -> [B, S] on the CPU."""
    return torch.from_numpy(np.stack(rows))
