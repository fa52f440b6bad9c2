"""Forwards of a model chunk for the executor: to train it and to evaluate it, and to score completions by it."""

import torch

from megatronish.layers.cross_entropy import VocabParallelLogits
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT
from megatronish.model.routing import Tally
from megatronish.objectives.objective import LOSS, LogitsObjective
from megatronish.objectives.pairs import AnyObjective, PairObjective, counted_once, pair_scores
from megatronish.parallel.pipeline.executor import ChunkOutput


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
    if isinstance(objective, LogitsObjective):
        logits = model.logits(model.hidden(x, batch, step=step, chunk=chunk, tally=tally))
        sums = objective.sums_of_logits(VocabParallelLogits(logits, model.vocab_size, model.tp.axis), batch)
    elif isinstance(objective, PairObjective):
        losses, cp = model(x, batch, step=step, chunk=chunk, tally=tally), model.execution.cp
        sums = counted_once(objective.sums_of_pairs(pair_scores(losses, batch, cp)), cp)
    else:
        sums = objective.sums(model(x, batch, step=step, chunk=chunk, tally=tally), batch)
    return ChunkOutput(sums[LOSS], {name: value.detach() for name, value in sums.items()} | _counted(tally, model))


def score_chunk(model: GPT, chunk: int, x: torch.Tensor | None, batch: MicroBatch, *, step: int | None) -> ChunkOutput:
    """The forward of a chunk; where it ends the model, the log-probabilities of completions [P, 2], without sums."""
    y = model(x, batch, step=step, chunk=chunk)
    if model.chunks[chunk].is_last:
        y = pair_scores(y, batch, model.execution.cp).log_probs
    return ChunkOutput(y, {})


def _counted(tally: Tally | None, model: GPT) -> dict[str, torch.Tensor]:
    """What the routers of a forward have counted, a row for each layer of the model."""
    return {} if tally is None else tally.stacked(model.config.num_layers)
