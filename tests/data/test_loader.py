"""Tests of the loader: the same samples in any layout, and a thread that neither hides errors nor hangs."""

import threading

import numpy as np
import pytest
import torch

from megatronish.data.loader import BatchShare, Collator, Prefetcher, micro_batches
from megatronish.data.mock import MockSamples
from megatronish.model.batch import MicroBatch

MOCK = MockSamples(name="training", seq_length=32, seed=1, vocab_size=100, eod=99)


def step(*, dp_size: int, micro_batch_size: int, consumed_samples: int = 24) -> list[MicroBatch]:
    """A step's micro-batches of all ranks, in the order of their samples."""
    of_ranks = [
        micro_batches(
            MOCK,
            consumed_samples=consumed_samples,
            global_batch_size=12,
            share=BatchShare(dp_rank, dp_size, micro_batch_size),
            collate=Collator(eod=99),
        )
        for dp_rank in range(dp_size)
    ]
    return [batch for batches in zip(*of_ranks, strict=True) for batch in batches]


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 1), (1, 12), (2, 3), (3, 2), (4, 3), (12, 1)])
def test_a_step_is_the_same_samples_in_any_layout(dp_size: int, micro_batch_size: int) -> None:
    batches = step(dp_size=dp_size, micro_batch_size=micro_batch_size)
    assert torch.cat([batch.sample_ids for batch in batches]).tolist() == list(range(24, 36))
    expected = np.stack([MOCK.sample(index).tokens for index in range(24, 36)])
    assert torch.cat([batch.tokens for batch in batches]).tolist() == expected[:, :-1].tolist()
    assert torch.cat([batch.labels for batch in batches]).tolist() == expected[:, 1:].tolist()


def test_a_share_is_refused_that_does_not_divide_the_batch() -> None:
    with pytest.raises(AssertionError, match="is not divisible by micro-batch size times dp size = 8"):
        BatchShare(0, 2, 4).sample_ids(consumed_samples=0, global_batch_size=12)


def prefetch(num_ahead: int, prepare: object = None, **options: float) -> Prefetcher:
    def mock_step(consumed_samples: int, size: int) -> list[MicroBatch]:
        share = BatchShare(0, 1, size)
        return micro_batches(
            MOCK, consumed_samples=consumed_samples, global_batch_size=size, share=share, collate=Collator(eod=99)
        )

    def ramp(consumed_samples: int) -> int:
        return 2 if consumed_samples < 8 else 4

    return Prefetcher(
        prepare or mock_step,  # type: ignore[arg-type]
        consumed_samples=4,
        global_batch_size=ramp,
        num_ahead=num_ahead,
        **options,
    )


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


@pytest.mark.parametrize("num_ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_nothing_is_prepared_after_the_last_step(num_ahead: int, num_steps: int) -> None:
    prepared: list[int] = []

    def prepare(consumed_samples: int, size: int) -> list[MicroBatch]:
        prepared.append(consumed_samples)
        return []

    with prefetch(num_ahead, prepare, num_steps=num_steps) as steps:
        assert list(steps) == [[]] * num_steps
        assert next(steps, None) is None
    assert prepared == [4, 6, 8][:num_steps]


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
