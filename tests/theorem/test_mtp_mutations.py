"""Mutations of multi-token prediction: each mistake that a layout could make fails the comparison with one process."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import theorem
import torch
from comparison import aspects_that_differ, assert_same_training, serial
from problem import Problem, Spread
from ranks import run_ranks
from test_experts_mutations import Patch, no_mistake, planted_train
from torch import Tensor

from megatronish.config.sections.model import ModelConfig
from megatronish.core.layout import Layout
from megatronish.engine import engine, forward
from megatronish.layers.vocabulary import VocabParallelEmbedding
from megatronish.model.batch import MicroBatch, TokensAhead
from megatronish.model.gpt import GPT, Embedding
from megatronish.parallel import sharding
from megatronish.parallel.data_parallel import gradients
from megatronish.parallel.mesh import Mesh

PROBLEM = Problem(
    ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        disable_bias_linear=True,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.2,
        make_vocab_size_divisible_by=4,
        mtp_num_layers=2,
        mtp_loss_scaling_factor=1.0,
    ),
    seq_length=16,
    global_batch_size=2,
    documents=True,
)
CUT, STAGES, DATA = Spread(Layout(cp=2), 1), Spread(Layout(pp=2), 1), Spread(Layout(dp=2), 1)


def shifted_after_the_cut(patch: Patch) -> None:
    """Each rank of cp shifts what it holds itself, and misses what another one has."""

    def planted(batches: Sequence[MicroBatch], mesh: Mesh, *, num_depths: int = 0) -> list[MicroBatch]:
        held = forward.on_rank(batches, mesh)
        if not num_depths:
            return held
        counts = [TokensAhead.of(batch, num_depths).counts for batch in batches]
        shifted = [TokensAhead.of(replace(part, document_ids=None), num_depths) for part in held]
        return [
            part.with_ahead(replace(ahead, counts=of_batch))
            for part, ahead, of_batch in zip(held, shifted, counts, strict=True)
        ]

    patch.setattr(engine, "on_rank", planted)


def lookups_ahead_not_summed(patch: Patch) -> None:
    """The table of words has no gradient of its use where the model ends."""
    words = Embedding.words

    def planted(self: Embedding, tokens: Tensor) -> Tensor:
        embedded = words(self, tokens)
        return embedded.detach() + 0.0 * embedded

    losses = GPT._losses_ahead

    def without(self: GPT, *given: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Embedding, "words", planted)
            return losses(self, *given)

    patch.setattr(GPT, "_losses_ahead", without)


def copy_of_the_table_not_tied(patch: Patch) -> None:
    """Each stage keeps the gradient that its own use gives the table of words."""
    shardings = VocabParallelEmbedding.shardings

    def planted(self: VocabParallelEmbedding) -> dict[str, sharding.Sharding]:
        return {name: replace(each, tied=None) for name, each in shardings(self).items()}

    patch.setattr(VocabParallelEmbedding, "shardings", planted)


def copy_of_the_table_counted_twice(patch: Patch) -> None:
    """Both holders of the table count its gradient in the norm."""
    patch.setattr(gradients.BucketPlan, "counted", property(lambda _plan: True))


def divided_by_the_main_count(patch: Patch) -> None:
    """A depth is divided by the predictions of the main loss."""

    def planted(batches: Sequence[MicroBatch], mesh: Mesh) -> list[MicroBatch]:
        return [
            batch.with_ahead(replace(batch.ahead, factors=torch.ones(2))) if batch.ahead is not None else batch
            for batch in forward.with_factors(batches, mesh)
        ]

    patch.setattr(engine, "with_factors", planted)


def divided_by_own_counts(patch: Patch) -> None:
    """Each data rank divides a depth by the predictions that it has itself."""

    def planted(batches: Sequence[MicroBatch], _mesh: Mesh) -> list[MicroBatch]:
        shifted = [batch.ahead for batch in batches if batch.ahead is not None]
        main, *depths = torch.tensor([ahead.counts for ahead in shifted]).sum(0).tolist()
        factors = torch.tensor([main / max(number, 1) for number in depths])
        return [
            batch.with_ahead(replace(ahead, factors=factors)) for batch, ahead in zip(batches, shifted, strict=True)
        ]

    patch.setattr(engine, "with_factors", planted)


def borders_crossed(patch: Patch) -> None:
    """A prediction counts whose position is in the document before."""
    of = TokensAhead.of

    def planted(batch: MicroBatch, num_depths: int) -> TokensAhead:
        places = torch.arange(batch.tokens.shape[1]).expand_as(batch.position_ids)
        return of(replace(batch, document_ids=None, position_ids=places), num_depths)

    patch.setattr(TokensAhead, "of", planted)


def weights_of_depths_not_gathered(patch: Patch) -> None:
    """After an update the model keeps the weights that depths had before it; masters are new."""
    one_step = theorem.one_step

    def planted(engine: engine.Engine, *given: Any) -> Any:
        weights = engine.stage.model.named_parameters()
        before = {name: weight for name, weight in weights if name.startswith("layers.2.")}
        old = {name: weight.detach().clone() for name, weight in before.items()}
        result = one_step(engine, *given)
        for name, weight in before.items():
            weight.data.copy_(old[name])
        return result

    patch.setattr(theorem, "one_step", planted)


MUTATIONS = [
    (shifted_after_the_cut, CUT, {"metrics", "gradients"}),
    (borders_crossed, CUT, {"metrics", "gradients"}),
    (lookups_ahead_not_summed, STAGES, {"gradients", "norm"}),
    (copy_of_the_table_not_tied, STAGES, {"gradients"}),
    (copy_of_the_table_counted_twice, STAGES, {"norm"}),
    (divided_by_the_main_count, STAGES, {"gradients", "norm"}),
    (divided_by_own_counts, DATA, {"gradients", "norm"}),
    (weights_of_depths_not_gathered, replace(DATA, zero=1, overlap=False), {"metrics"}),
]


@pytest.mark.parametrize(("plant", "spread", "shown_by"), MUTATIONS, ids=[plant.__name__ for plant, _, _ in MUTATIONS])
def test_a_mistake_in_further_predictions_is_found(
    plant: Callable[[Patch], None], spread: Spread, shown_by: set[str]
) -> None:
    assert_same_training(run_ranks(2, planted_train, PROBLEM, spread, no_mistake), serial(PROBLEM))
    found = aspects_that_differ(run_ranks(2, planted_train, PROBLEM, spread, plant), serial(PROBLEM))
    assert shown_by <= found, found
