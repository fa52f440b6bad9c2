"""Tests of BERT's objective: means over masked tokens and over pairs of sentences, of all micro-batches of a step."""

from dataclasses import replace

import pytest
import torch

from megatronish.engine.forward import SentencePreparation
from megatronish.model.batch import MicroBatch, SentencePairs
from megatronish.model.bert import BertLosses
from megatronish.objectives.masked import MaskedLM, MaskedLMAndOrder, masked_objective
from megatronish.parallel.mesh import Mesh

S = 8


def batch_of(rows: int, *, masked: int) -> MicroBatch:
    """A micro-batch of pairs whose first tokens are masked, so many in each row."""
    tokens = torch.zeros(rows, S, dtype=torch.int64)
    mask = (torch.arange(S) < masked).expand(rows, S)
    batch = MicroBatch(tokens, tokens, mask, torch.arange(S).expand(rows, S), torch.arange(rows))
    swapped = torch.zeros(rows, dtype=torch.bool)
    return batch.with_sentences(SentencePairs(tokens, swapped, num_masked=batch.num_loss_tokens))


def test_the_loss_is_the_mean_over_masked_tokens_and_the_mean_over_pairs() -> None:
    objective = masked_objective(bert_no_binary_head=False)
    assert isinstance(objective, MaskedLMAndOrder)
    batches = SentencePreparation(Mesh.start())([batch_of(1, masked=2), batch_of(3, masked=5)])
    generator = torch.Generator().manual_seed(0)
    losses = [
        BertLosses(
            torch.rand(S, len(each.tokens), generator=generator), torch.rand(len(each.tokens), generator=generator)
        )
        for each in batches
    ]
    sums = [objective.sums_of_both(loss, batch) for loss, batch in zip(losses, batches, strict=True)]
    weight = sum(map(objective.weight, batches))
    assert weight == 2 + 15
    found = {name: float(sum(each[name] for each in sums) / weight) for name in objective.names}
    of_tokens = torch.cat([loss.tokens[: 2 + 3 * n].flatten() for n, loss in enumerate(losses)]).mean()
    of_pairs = torch.cat([loss.sentences for loss in losses]).mean()
    expected = (float(of_tokens + of_pairs), float(of_tokens), float(of_pairs))
    assert tuple(found.values()) == pytest.approx(expected, rel=1e-6)


def test_without_a_binary_head_the_loss_is_that_of_masked_tokens() -> None:
    objective, batch = masked_objective(bert_no_binary_head=True), batch_of(2, masked=3)
    assert isinstance(objective, MaskedLM)
    losses = torch.rand(S, 2)
    (total,) = objective.sums(losses, replace(batch)).values()
    assert objective.weight(batch) == 6 and float(total) == pytest.approx(float(losses[:3].sum()))
