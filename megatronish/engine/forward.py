"""Micro-batches on a rank, and the forwards of a model chunk on them: to train, evaluate, or score completions.

What the losses of pairs of completions need of other passes is computed before the step's own (`PairPreparation`). The
reference is another model, or the same one without adapters. Its log-probabilities come from forward passes over the
same micro-batches in the same layout. Numbers of the whole step (mean lengths, KTO's point of comparison) are summed
over the data ranks before any backward. So no number depends on how a step is cut into micro-batches or over ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatronish.attention.zigzag import places_on
from megatronish.layers.linear import adapters_off
from megatronish.layers.vocabulary import VocabParallelLogits
from megatronish.model.batch import CompletionPairs, MicroBatch, StepNumbers, TokensAhead
from megatronish.model.bert import Bert
from megatronish.model.gpt import GPT
from megatronish.model.routing import Tally
from megatronish.objectives.ahead import MultiTokenPrediction
from megatronish.objectives.masked import SentenceObjective
from megatronish.objectives.objective import LOSS, LogitsObjective
from megatronish.objectives.pairs import AnyObjective, PairObjective, counted_once, pair_scores
from megatronish.parallel import comm
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.pipeline.executor import ChunkOutput, Executor
from megatronish.parallel.pipeline.stage import ModelStage


def run_chunk(
    model: GPT,
    objective: AnyObjective,
    chunk: int,
    x: torch.Tensor | None,
    batch: MicroBatch,
    *,
    step: int | None,
) -> ChunkOutput:
    """The forward of a chunk; where it ends the model, of the objective too."""
    tally = model.new_tally()
    if not model.chunks[chunk].is_last:
        y = model(x, batch, step=step, chunk=chunk, tally=tally)
        return ChunkOutput(y, _counted(tally, model))
    total: Tensor | None = None  # what backward starts from, where it is not the loss alone
    if isinstance(objective, LogitsObjective):
        logits = model.logits(model.hidden(x, batch, step=step, chunk=chunk, tally=tally))
        sums = objective.sums_of_logits(VocabParallelLogits(logits, model.vocab_size, model.tp.axis), batch)
    elif isinstance(objective, PairObjective):
        losses, cp = model(x, batch, step=step, chunk=chunk, tally=tally), model.execution.cp
        sums = counted_once(objective.sums_of_pairs(pair_scores(losses, batch, cp)), cp)
    elif isinstance(objective, SentenceObjective):
        assert isinstance(model, Bert), "only BERT has losses of sentences"
        sums = objective.sums_of_both(model(x, batch, step=step, chunk=chunk, tally=tally), batch)
    elif isinstance(objective, MultiTokenPrediction) and batch.ahead is not None:
        total, sums = objective.sums_ahead(model(x, batch, step=step, chunk=chunk, tally=tally), batch)
    else:
        sums = objective.sums(model(x, batch, step=step, chunk=chunk, tally=tally), batch)
    detached = {name: value.detach() for name, value in sums.items()}
    return ChunkOutput(sums[LOSS] if total is None else total, detached | _counted(tally, model))


def score_chunk(model: GPT, chunk: int, x: torch.Tensor | None, batch: MicroBatch, *, step: int | None) -> ChunkOutput:
    """The forward of a chunk; where it ends the model, the log-probabilities of completions [P, 2], without sums."""
    y = model(x, batch, step=step, chunk=chunk)
    if model.chunks[chunk].is_last:
        y = pair_scores(y, batch, model.execution.cp).log_probs
    return ChunkOutput(y, {})


def _counted(tally: Tally | None, model: GPT) -> dict[str, torch.Tensor]:
    """What the routers of a forward have counted, a row for each layer of the model."""
    return {} if tally is None else tally.stacked(model.config.num_all_layers)


Preparation = Callable[[Sequence[MicroBatch]], list[MicroBatch]]
"""Completion of the micro-batches of a step, as a rank holds them, by numbers of the whole step. Collective."""

LogProbsOf = Callable[[Sequence[MicroBatch]], list[Tensor]]
"""Log-probabilities [P, 2] of the completions of each micro-batch; zeros on stages that do not end the model."""


class Scorer:
    """Log-probabilities of completions by a model, a `LogProbsOf`: forward passes without dropout. Collective."""

    def __init__(self, stage: ModelStage, executor: Executor) -> None:
        self.stage = stage
        chunks = range(stage.stages.num_chunks)
        self._executor = executor.with_chunks([partial(score_chunk, stage.model, chunk) for chunk in chunks])

    @torch.no_grad()
    def __call__(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Of micro-batches as this rank holds them."""
        scores: dict[int, Tensor] = {}
        actions = self.stage.stages.actions(self._executor.stage, len(batches))
        forwards = [action for action in actions if action.kind == "F"]
        self._executor.run(forwards, batches, step=None, on_model_output=scores.__setitem__)
        return [scores.get(number, _zeros(batch)) for number, batch in enumerate(batches)]

    def without_adapters(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The same by the model that the adapters are for."""
        with adapters_off(self.stage.model):
            return self(batches)


class PairPreparation:
    """Completion of the pairs of a step. `reference` None: there is none, or the data have its numbers already."""

    def __init__(self, mesh: Mesh, policy: Scorer, reference: LogProbsOf | None, *, needs_kl: bool) -> None:
        self.mesh, self.policy, self.reference, self.needs_kl = mesh, policy, reference, needs_kl

    def __call__(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches of a step, or of an evaluation, with all that their losses need. Collective."""
        prepared = list(batches)
        if self.reference is not None:
            scores = self.reference(prepared)
            prepared = [_with(batch, reference=score) for batch, score in zip(prepared, scores, strict=True)]
        numbers = self._numbers(prepared)
        return [_with(batch, of_step=numbers) for batch in prepared]

    def _numbers(self, batches: Sequence[MicroBatch]) -> StepNumbers:
        """Means over the pairs of all dp ranks; cp and tp ranks have the same pairs. The host waits once."""
        pairs = [_pairs(each) for each in batches]
        # Lengths of chosen, the same with their prompts, log-ratios; at last how many pairs there are.
        sums = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        scores = self.policy(batches) if self.needs_kl else []
        for each in pairs:
            sums[:2] += torch.stack((each.lengths[:, 0], each.text_lengths[:, 0])).sum(1)
        for each, score in zip(pairs, scores, strict=False):
            if each.reference is not None:
                sums[2] += (score[:, 1] - each.reference[:, 1]).sum()
        totals = torch.cat((sums.cpu(), torch.tensor([sum(len(each.labels) for each in pairs)], dtype=torch.float64)))
        lengths, texts, ratios, number = comm.all_reduce(totals, self.mesh.dp).tolist()
        return StepNumbers(lengths / number, texts / number, max(ratios / number, 0.0))


class SentencePreparation:
    """Completion of pairs of sentences, a `Preparation`: the masked tokens of the step over its pairs."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def __call__(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches of a step, or of an evaluation. Numbers are counted and summed on the CPU."""
        paired_batches = [(batch, batch.sentences) for batch in batches if batch.sentences is not None]
        assert len(paired_batches) == len(batches), "the data has no pairs of sentences"
        numbers = torch.tensor([(pairs.num_masked, len(batch.tokens)) for batch, pairs in paired_batches]).sum(0)
        masked, total = comm.all_reduce(numbers, self.mesh.dp).tolist()
        return [batch.with_sentences(replace(pairs, tokens_a_pair=masked / total)) for batch, pairs in paired_batches]


def with_factors(batches: Sequence[MicroBatch], mesh: Mesh) -> list[MicroBatch]:
    """The micro-batches of a step with the factors of its depths. Numbers are counted and summed on the CPU.

    Without multi-token prediction they are as they are, and nothing is sent.
    """
    counts = [batch.ahead.counts for batch in batches if batch.ahead is not None]
    if not counts:
        return list(batches)
    main, *depths = comm.all_reduce(torch.tensor(counts).sum(0), mesh.dp).tolist()
    factors = torch.tensor([main / max(number, 1) for number in depths], dtype=torch.float32)
    return [
        batch.with_ahead(replace(_ahead(batch), factors=factors.to(batch.tokens.device, non_blocking=True)))
        for batch in batches
    ]


def _ahead(batch: MicroBatch) -> TokensAhead:
    assert batch.ahead is not None, "all micro-batches of a step have tokens ahead, or none"
    return batch.ahead


def _pairs(batch: MicroBatch) -> CompletionPairs:
    assert batch.pairs is not None, "the batch has no pairs of completions"
    return batch.pairs


def _with(batch: MicroBatch, **fields: Any) -> MicroBatch:
    """The micro-batch with these fields of its pairs."""
    return batch.with_pairs(replace(_pairs(batch), **fields))


def _zeros(batch: MicroBatch) -> Tensor:
    return torch.zeros(len(_pairs(batch).labels), 2, device=batch.tokens.device)


def on_rank(micro_batches: Sequence[MicroBatch], mesh: Mesh, *, num_depths: int = 0) -> list[MicroBatch]:
    """What this cp rank holds of whole sequences, on its device; for so many layers of multi-token prediction."""
    batches = list(micro_batches)
    if num_depths:
        batches = [batch.with_ahead(TokensAhead.of(batch, num_depths)) for batch in batches]
    if mesh.cp.size > 1:
        batches = [batch.at(places_on(batch.sides, mesh.cp)) for batch in batches]
    return [batch.to(mesh.device) for batch in batches]


def weight_of(micro_batches: Sequence[MicroBatch], objective: AnyObjective, mesh: Mesh) -> int:
    """The divisor of the step's sums, over the dp ranks of an island. It is counted and summed on the CPU.

    cp ranks have the same whole sequences, so only those of dp add up.
    """
    weight = torch.tensor(sum(objective.weight(batch) for batch in micro_batches))
    return int(comm.all_reduce(weight, mesh.dp))
