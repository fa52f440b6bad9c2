"""Masked tokens: the collator of BERT, which hides some tokens of a sample and asks for them.

Every token is chosen with the probability of --mask-prob, by itself. Of the chosen ones 80 % become the mask token,
10 % any token of the vocabulary, and 10 % stay, as Devlin et al. (2019, arXiv:1810.04805) have it. Special tokens and
filler are never chosen. What becomes of a token is named by (seed, number of the sample, place): so it depends on no
layout, on no worker, and not on the length of a row; and a sample that comes again in another epoch has other masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatronish.config.config import Config
from megatronish.data.loader import Collator
from megatronish.data.sample import Sample
from megatronish.model.batch import MicroBatch, SentencePairs
from megatronish.parallel.streams import numpy_stream
from megatronish.tokenizer.control_tokens import MaskTokens

MASKED, RANDOM = 0.8, 0.1
"""Parts of the chosen tokens that become the mask token, or any token; the others stay."""


class MaskedRow(NamedTuple):
    """A row as the model sees it [S], and which of its tokens are asked for, bool [S]."""

    tokens: NDArray[np.int64]
    is_chosen: NDArray[np.bool_]


@dataclass(frozen=True)
class MaskedCollator:
    """Rules by which samples become a micro-batch of BERT: `collate(samples, sample_ids)`.

    `rows` says what documents are; of a sample's S + 1 tokens the last, which is a label alone, is not read.
    """

    rows: Collator
    special: MaskTokens
    vocab_size: int
    seed: int
    mask_prob: float

    @classmethod
    def of(cls, config: Config, rows: Collator, special: MaskTokens, *, vocab_size: int) -> "MaskedCollator":
        """The rules that a config asks for."""
        return cls(rows, special, vocab_size, config.training.seed, config.data.mask_prob)

    def __call__(self, samples: Sequence[Sample], sample_ids: Sequence[int]) -> MicroBatch:
        """B samples of S + 1 tokens -> [B, S] tensors on the CPU."""
        batch = self.rows(samples, sample_ids)
        masked = [self.masked(sample, number) for sample, number in zip(samples, sample_ids, strict=True)]
        batch = replace(
            batch,
            tokens=torch.from_numpy(np.stack([row.tokens for row in masked])),
            labels=batch.tokens,
            loss_mask=torch.from_numpy(np.stack([row.is_chosen for row in masked])),
        )
        types = [sample.token_types for sample in samples if sample.token_types is not None]
        if not types:
            return batch
        assert len(types) == len(samples), "some samples of a batch are pairs of sentences, some are not"
        swapped = torch.tensor([sample.is_swapped for sample in samples])
        rows = torch.from_numpy(np.stack([row[:-1] for row in types]))
        return batch.with_sentences(SentencePairs(rows, swapped, num_masked=batch.num_loss_tokens))

    def masked(self, sample: Sample, number: int) -> MaskedRow:
        """The tokens of the sample with this number, some of them masked."""
        tokens = sample.tokens[:-1]
        # Three draws a place, in the order of places: a longer row has the same at its beginning.
        chance, fate, other = numpy_stream(self.seed, "masked tokens", number).random((len(tokens), 3)).T
        is_plain = ~np.isin(tokens, list(self.special))
        is_plain[len(tokens) - sample.num_filler :] = False
        is_chosen = is_plain & (chance < self.mask_prob)
        any_token = np.minimum((other * self.vocab_size).astype(np.int64), self.vocab_size - 1)
        replaced = np.where(fate < MASKED, self.special.mask, np.where(fate < MASKED + RANDOM, any_token, tokens))
        return MaskedRow(np.where(is_chosen, replaced, tokens), is_chosen)
