"""Tests of collation: loss masks and documents of samples, of end-of-document tokens, and loss tokens on the CPU."""

import numpy as np
import pytest
import torch

from megatronish.config.sections.data import DataConfig
from megatronish.data.loader import Collator
from megatronish.data.sample import Sample
from megatronish.model.batch import MicroBatch

ALL = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


def sample(tokens: list[int], loss_mask: list[int] | None = None, document_ids: list[int] | None = None) -> Sample:
    return Sample(
        np.array(tokens),
        None if loss_mask is None else np.array(loss_mask, np.bool_),
        None if document_ids is None else np.array(document_ids),
    )


def test_a_plain_micro_batch_ignores_documents() -> None:
    batch = Collator(eod=9)([sample([5, 9, 6, 7, 9])] * 2, range(4, 6))
    assert batch.tokens.tolist() == [[5, 9, 6, 7]] * 2
    assert batch.labels.tolist() == [[9, 6, 7, 9]] * 2
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.sample_ids.tolist() == [4, 5]
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
    batch = Collator(9, **ALL)([sample(tokens)], range(1))
    assert batch.document_ids is not None
    assert batch.position_ids.tolist() == [position_ids]
    assert batch.document_ids.tolist() == [document_ids]
    assert batch.loss_mask.int().tolist() == [loss_mask]


@pytest.mark.parametrize("flags", [{}, ALL])
def test_what_a_sample_says_of_itself_comes_first(flags: dict[str, bool]) -> None:
    """Token 9 would end a document; here documents are [1 9 2] and [3 9 4], and tokens 9, 2 and 4 are predicted."""
    own = sample([1, 9, 2, 3, 9, 4], [0, 1, 1, 0, 0, 1], [0, 0, 0, 5, 5, 5])
    batch = Collator(9, **flags)([own], range(1))
    assert batch.document_ids is not None
    assert batch.loss_mask.int().tolist() == [[1, 1, 0, 0, 1]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 5, 5]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.num_loss_tokens == 3


def test_no_document_of_a_packed_sample_is_predicted_from_the_one_before() -> None:
    for loss_mask in (None, [1] * 6):
        batch = Collator(9)([sample([1, 9, 2, 3, 9, 4], loss_mask, [0, 0, 0, 1, 1, 1])], range(1))
        assert batch.loss_mask.int().tolist() == [[1, 1, 0, 1, 1]]


def test_samples_of_one_document_and_packed_ones_make_one_micro_batch() -> None:
    batch = Collator(9)([sample([1, 9, 2, 3]), sample([1, 2, 3, 4], document_ids=[0, 0, 1, 1])], range(2))
    assert batch.document_ids is not None
    assert batch.document_ids.tolist() == [[0, 0, 0], [0, 0, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch.num_loss_tokens == 5


def test_the_rules_of_a_config_are_those_of_its_flags() -> None:
    assert Collator.of(DataConfig(**ALL), eod=9) == Collator(9, **ALL)
    batch = Collator.of(DataConfig(**ALL), eod=None)([sample([0, 1, 0, 2])], range(1))
    assert (batch.position_ids.tolist(), batch.num_loss_tokens) == ([[0, 1, 2]], 3)


def test_a_sample_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(AssertionError, match="tokens of a sample are one row"):
        Sample(np.zeros((2, 3), np.int64))
    with pytest.raises(AssertionError, match=r"\(2,\) is not \(3,\)"):
        sample([1, 2, 3], loss_mask=[1, 1])
    with pytest.raises(AssertionError, match="document ids fall along a sample"):
        sample([1, 2, 3], document_ids=[1, 0, 0])


def masked_batch() -> MicroBatch:
    own = [sample([1, 2, 3, 4, 5, 6, 7, 8, 9], [0, *mask]) for mask in ([1, 1, 0, 0, 0, 0, 1, 0], [0, 1] * 4)]
    return Collator(eod=0)(own, range(2))


def test_loss_tokens_are_counted_before_any_copy_and_carried_along() -> None:
    """On a device without values (meta) nothing can be counted, and nothing is."""
    batch = masked_batch()
    moved = batch.to(torch.device("meta"))
    assert (batch.num_loss_tokens, moved.num_loss_tokens) == (7, 7)
    assert moved.loss_mask.is_meta
    with pytest.raises(AssertionError, match="loss tokens are counted on the CPU"):
        MicroBatch(*(getattr(moved, name) for name in ("tokens", "labels", "loss_mask", "position_ids", "sample_ids")))


def test_the_part_of_a_cp_rank_counts_its_own_loss_tokens() -> None:
    batch = masked_batch()
    parts = [batch.at(torch.tensor(places)) for places in ([0, 1, 6, 7], [2, 3, 4, 5])]
    assert [part.num_loss_tokens for part in parts] == [5, 2]
    assert all(part.num_loss_tokens == int(part.loss_mask.sum()) for part in parts)
    assert [part.to(torch.device("meta")).num_loss_tokens for part in parts] == [5, 2]


@pytest.mark.gpu
def test_a_pinned_micro_batch_stays_pinned_until_it_is_copied() -> None:
    batch = masked_batch()
    pinned = batch.pinned()
    part = pinned.at(torch.arange(4))
    assert pinned.tokens.is_pinned()
    assert part.loss_mask.is_pinned()
    assert (pinned.num_loss_tokens, part.num_loss_tokens) == (7, 4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = pinned.to(torch.device("cuda"))
        assert moved.num_loss_tokens == 7
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(moved.tokens.cpu(), batch.tokens)
