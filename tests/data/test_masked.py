"""Tests of masked tokens: which are chosen, what becomes of them, and that nothing but their names decides it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatronish.data.loader import BatchShare, Collator, micro_batches
from megatronish.data.masked import MaskedCollator
from megatronish.data.sample import Sample
from megatronish.data.sentences import pair
from megatronish.model.batch import MicroBatch
from megatronish.tokenizer.control_tokens import MaskTokens

MASKS = MaskTokens(first=1, separator=2, mask=3, filler=0)
VOCABULARY, S = 1000, 64


class Texts:
    """Pairs of texts of their own lengths, filled up."""

    name = identity = "texts"
    num_samples = None

    def sample(self, index: int) -> Sample:
        length = S - 3 - index % 20
        text = np.random.default_rng(index).integers(10, VOCABULARY, length)
        return pair((text[:20], text[20:]), length=S, masks=MASKS, is_swapped=index % 3 == 0)


def collator(*, mask_prob: float = 0.15, seed: int = 7) -> MaskedCollator:
    return MaskedCollator(Collator(eod=None), MASKS, VOCABULARY, seed, mask_prob)


def step(share: BatchShare, *, size: int = 24) -> list[MicroBatch]:
    return micro_batches(Texts(), consumed_samples=48, global_batch_size=size, share=share, collate=collator())


def test_a_part_of_the_text_is_chosen_and_special_tokens_and_filler_never_are() -> None:
    samples = [Texts().sample(number) for number in range(300)]
    batch = collator()(samples, range(300))
    originals = torch.from_numpy(np.stack([sample.tokens[:-1] for sample in samples]))
    assert torch.equal(batch.labels, originals)
    chosen, special = batch.loss_mask, torch.isin(originals, torch.tensor(MASKS))
    assert not (chosen & special).any() and not (batch.tokens != originals)[~chosen].any()
    number = int(chosen.sum())
    assert number / int((~special).sum()) == pytest.approx(0.15, abs=0.01)
    masked, same = batch.tokens[chosen] == MASKS.mask, (batch.tokens == originals)[chosen]
    assert int(masked.sum()) / number == pytest.approx(0.8, abs=0.02)
    assert int(same.sum()) / number == pytest.approx(0.1, abs=0.02)
    assert len(batch.tokens[chosen][~masked & ~same].unique()) > 100  # any token
    assert batch.num_loss_tokens == number and batch.sentences is not None and batch.sentences.num_masked == number


def test_filler_is_never_chosen_whatever_its_tokens_are() -> None:
    sample = Texts().sample(5)
    number = sample.num_filler
    assert number > 0
    tokens = sample.tokens.copy()
    tokens[-number - 1 :] = 50  # a plain token
    row = collator(mask_prob=1.0).masked(replace(sample, tokens=tokens), 5)
    assert not row.is_chosen[-number:].any() and (row.tokens[-number:] == 50).all() and row.is_chosen.sum() > 20


def test_a_batch_knows_the_order_of_each_pair() -> None:
    batch = collator()([Texts().sample(number) for number in range(7)], range(7))
    assert batch.sentences is not None
    assert batch.sentences.is_swapped.tolist() == [number % 3 == 0 for number in range(7)]


def test_masks_are_named_by_seed_sample_and_place_alone() -> None:
    (whole,) = step(BatchShare(0, 1, 24))
    assert whole.document_ids is not None and whole.sentences is not None
    for dp, size in ((2, 3), (4, 2), (1, 1)):
        for rank in range(dp):
            for part in step(BatchShare(rank, dp, size)):
                rows = part.sample_ids - 48
                for name in ("tokens", "labels", "loss_mask", "document_ids", "position_ids"):
                    assert torch.equal(getattr(part, name), getattr(whole, name)[rows]), name
                assert part.sentences is not None
                assert torch.equal(part.sentences.token_types, whole.sentences.token_types[rows])
                assert torch.equal(part.sentences.is_swapped, whole.sentences.is_swapped[rows])
    sample = Texts().sample(5)
    row = collator().masked(sample, 9)
    assert np.array_equal(collator().masked(sample.until(S - 4), 9).tokens, row.tokens[: S - 5])
    assert not np.array_equal(row.tokens, collator().masked(sample, 10).tokens)
    assert not np.array_equal(row.tokens, collator(seed=8).masked(sample, 9).tokens)


def test_a_rank_of_cp_keeps_its_part_of_each_row_and_the_count_of_whole_rows() -> None:
    (whole,) = step(BatchShare(0, 1, 24))
    places = torch.arange(0, S, 2)
    part = whole.at(places)
    assert part.sentences is not None and whole.sentences is not None
    assert torch.equal(part.sentences.token_types, whole.sentences.token_types[:, places])
    assert part.sentences.num_masked == whole.num_loss_tokens > part.num_loss_tokens
    assert torch.equal(part.sentences.is_swapped, whole.sentences.is_swapped)


def test_the_objective_of_text_without_sentences_has_no_pairs() -> None:
    texts = [Sample(np.arange(10, 10 + S + 1)) for _ in range(3)]
    batch = collator(mask_prob=1.0)(texts, range(3))
    assert batch.sentences is None and batch.document_ids is None and batch.num_loss_tokens == 3 * S
