"""Micro-batches: the same samples in any layout, masks at document ends, a thread that neither hides nor hangs."""

import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatronish.data.loader import Prefetcher, micro_batch, micro_batches
from megatronish.data.mock import MockSamples
from megatronish.model.batch import MicroBatch

MOCK = MockSamples(name="training", seq_length=32, seed=1, vocab_size=100, eod=99)


class Fixed:
    """One sample, again and again."""

    name = identity = "fixed"
    num_samples = None

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def sample(self, _index: int) -> NDArray[np.int64]:
        return np.array(self.tokens)


def step(*, dp_size: int, micro_batch_size: int, consumed_samples: int = 24) -> list[MicroBatch]:
    """A step's micro-batches of all ranks, in the order of their samples."""
    of_ranks = [
        micro_batches(
            MOCK,
            consumed_samples=consumed_samples,
            global_batch_size=12,
            micro_batch_size=micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            eod=99,
        )
        for dp_rank in range(dp_size)
    ]
    return [batch for batches in zip(*of_ranks, strict=True) for batch in batches]


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 1), (1, 12), (2, 3), (3, 2), (4, 3), (12, 1)])
def test_a_step_is_the_same_samples_in_any_layout(dp_size: int, micro_batch_size: int) -> None:
    batches = step(dp_size=dp_size, micro_batch_size=micro_batch_size)
    assert torch.cat([batch.sample_ids for batch in batches]).tolist() == list(range(24, 36))
    expected = np.stack([MOCK.sample(index) for index in range(24, 36)])
    assert torch.cat([batch.tokens for batch in batches]).tolist() == expected[:, :-1].tolist()
    assert torch.cat([batch.labels for batch in batches]).tolist() == expected[:, 1:].tolist()


def test_a_plain_micro_batch_ignores_documents() -> None:
    batch = micro_batch(Fixed([5, 9, 6, 7, 9]), range(2), eod=9)
    assert batch.tokens.tolist() == [[5, 9, 6, 7]] * 2
    assert batch.labels.tolist() == [[9, 6, 7, 9]] * 2
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.num_loss_tokens == 8
    assert batch.document_ids is None
    assert (batch.tokens.dtype, batch.position_ids.dtype, batch.sample_ids.dtype) == (torch.int64,) * 3
    assert (batch.loss_mask.dtype, batch.tokens.is_contiguous()) == (torch.bool, True)


@pytest.mark.parametrize(
    ("tokens", "position_ids", "document_ids", "loss_mask"),
    [
        ([5, 9, 6, 7, 9, 8, 1], [0, 1, 0, 1, 2, 0], [0, 0, 1, 1, 1, 2], [1, 0, 1, 1, 0, 1]),
        ([9, 9, 1, 2, 3, 9, 9], [0, 0, 0, 1, 2, 3], [0, 1, 2, 2, 2, 2], [0, 0, 1, 1, 1, 0]),
        ([1, 2, 3, 4, 5, 6, 9], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]),
    ],
)
def test_documents_of_a_sample_are_told_apart(
    tokens: list[int], position_ids: list[int], document_ids: list[int], loss_mask: list[int]
) -> None:
    """The token that ends a document belongs to it; what is predicted from it counts unless masked."""
    batch = micro_batch(
        Fixed(tokens), range(1), eod=9, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True
    )
    assert batch.document_ids is not None
    assert batch.position_ids.tolist() == [position_ids]
    assert batch.document_ids.tolist() == [document_ids]
    assert batch.loss_mask.int().tolist() == [loss_mask]


def prefetch(num_ahead: int, prepare: object = None) -> Prefetcher:
    def mock_step(consumed_samples: int, size: int) -> list[MicroBatch]:
        return [micro_batch(MOCK, range(consumed_samples, consumed_samples + size), eod=99)]

    def ramp(consumed_samples: int) -> int:
        return 2 if consumed_samples < 8 else 4

    return Prefetcher(prepare or mock_step, consumed_samples=4, global_batch_size=ramp, num_ahead=num_ahead)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_ahead", [0, 1, 5])
def test_prefetching_changes_nothing_but_the_time(num_ahead: int) -> None:
    with prefetch(num_ahead) as steps:
        taken = [next(steps)[0].sample_ids.tolist() for _ in range(4)]
    assert taken == [[4, 5], [6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_what_goes_wrong_ahead_is_raised_at_its_step(num_ahead: int) -> None:
    def prepare(consumed_samples: int, size: int) -> list[MicroBatch]:
        if consumed_samples >= 8:
            raise ValueError("truncated")
        return []

    with prefetch(num_ahead, prepare) as steps:
        assert [next(steps), next(steps)] == [[], []]
        with pytest.raises(ValueError, match="truncated"):
            next(steps)


def test_no_more_is_prepared_than_asked_for_and_no_thread_is_left() -> None:
    prepared: list[int] = []

    def prepare(consumed_samples: int, size: int) -> list[MicroBatch]:
        prepared.append(consumed_samples)
        return []

    threads = threading.active_count()
    steps = prefetch(3, prepare)
    next(steps)
    steps.close()
    steps.close()
    assert prepared == [4, 6, 8, 12][: len(prepared)]
    assert threading.active_count() == threads
