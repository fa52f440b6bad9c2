"""A training run of the theorem: what is trained, how it is spread over ranks, and what each rank sees of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import deep_ep_stand_in
import numpy as np
import pytest
import torch
from adapted import draw_adapters
from clamps import watched_clamps
from engines import evaluated
from problem import CYCLE, DECOUPLED, EOD, NUM_STEPS, OPTIMIZERS, SEED, SGD_RATE, VOCABULARY, Problem, Spread
from torch import Tensor

from megatronish.config.config import Config
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.core.hidden_spans import SpanRule, text_length
from megatronish.data.loader import BatchShare, Collator, micro_batches
from megatronish.data.masked import MaskedCollator
from megatronish.data.sample import Dataset, Sample
from megatronish.data.sentences import SPECIAL, pair
from megatronish.data.spans import SpanCollator
from megatronish.engine.build import build_engine
from megatronish.engine.engine import Engine
from megatronish.engine.results import StepResult
from megatronish.launch.place import Place
from megatronish.model.batch import MicroBatch
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.streams import numpy_stream
from megatronish.report.statistics import params_norm
from megatronish.tokenizer.control_tokens import MaskTokens, SpanTokens
from megatronish.train.base_model import draw_base
from megatronish.verify.verify import Choices, RoutingRecorder


class Held(NamedTuple):
    """A rectangle of a global tensor, as one rank holds it."""

    offset: tuple[int, ...]
    values: Tensor


Parts = dict[str, list[Held]]


class Routed(NamedTuple):
    """What routers of a run saw: tokens of each expert in every step, as numbers [L, E], and their states at the end.

    `choices` of one process are those of every token, for a run in another precision to replay.
    """

    tokens: list[Tensor]
    states: dict[str, Tensor]
    choices: dict[str, Choices]

    @property
    def margin(self) -> float:
        """Smallest margin of a choice (`Router.margins`), over tokens and layers: rounding must not reach it."""
        return min((margin for choices in self.choices.values() for margin in choices.margins), default=math.inf)


class Record(NamedTuple):
    """What one rank saw. `*_parts` are its share of the tensors."""

    metrics: list[dict[str, float]]
    grad_norms: list[float]
    evaluation: tuple[float, int]
    """Loss after the last step, and the number of tokens that it is the mean of."""
    params_norm: float
    initial_parts: Parts
    gradient_parts: Parts
    trained_parts: Parts
    amplified: dict[str, float]
    """What steps make of the largest element of each gradient (`amplification`), to which noise is relative."""
    routed: Routed
    clamps: list[float]
    """Distances of values from the limits of clamps (clamps.py), of one process."""

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [metrics["loss"] for metrics in self.metrics]


class Samples:
    """Random tokens with ends of documents among them, more in some samples than in others; every fifth all ends."""

    name = identity = "samples"
    num_samples = None

    def __init__(self, seq_length: int) -> None:
        self.length = seq_length + 1

    def sample(self, index: int) -> Sample:
        stream = numpy_stream(SEED, "samples", index)
        share = 1.0 if index % 5 == 4 else stream.random() * 0.5
        ends = stream.random(self.length) < share
        return Sample(np.where(ends, EOD, stream.integers(1, VOCABULARY, self.length)))


MASKS = MaskTokens(first=1, separator=2, mask=3, filler=4)


class Pairs:
    """Two random texts, in order or not; with filler of its own length in every third sample."""

    name = identity = "pairs"
    num_samples = None

    def __init__(self, seq_length: int, *, filled: bool) -> None:
        self.length, self.filled = seq_length, filled

    def sample(self, index: int) -> Sample:
        stream = numpy_stream(SEED, "pairs", index)
        size = self.length - SPECIAL - (int(stream.integers(0, 5)) if self.filled and index % 3 else 0)
        text = stream.integers(5, VOCABULARY, size)
        # Few are in order: as many of both would make the gradient of the classifier's bias a difference of equal sums.
        return pair((text[: size // 3], text[size // 3 :]), length=self.length, masks=MASKS, is_swapped=index % 5 > 0)


HIDDEN = SpanRule(0.3, 2.0)
SPANS = SpanTokens(start=4, end=1, filler=4, sentinels=range(VOCABULARY - 1, VOCABULARY - 6, -1))


def sides_of(seq_length: int) -> tuple[int, int]:
    """Tokens of encoder and decoder: two thirds and one."""
    return 2 * seq_length // 3, seq_length // 3


class Texts:
    """Random texts of the length whose spans fit a row; with filler of its own length in every third sample."""

    name = identity = "texts"
    num_samples = None

    def __init__(self, seq_length: int, *, filled: bool) -> None:
        encoder, decoder = sides_of(seq_length)
        self.length = text_length(HIDDEN, encoder_length=encoder, decoder_length=decoder) + 1
        self.filled = filled

    def sample(self, index: int) -> Sample:
        stream = numpy_stream(SEED, "texts", index)
        filler = int(stream.integers(0, 4)) if self.filled and index % 3 else 0
        return Sample(stream.integers(5, VOCABULARY - 5, self.length), num_filler=filler)


def train(place: Place, problem: Problem, spread: Spread, replayed: dict[str, Choices] | None = None) -> Record:
    """Two steps of the problem's optimizer, and an evaluation.

    `replayed` are the choices of experts that every token is given; one process without them records its own.
    """
    if place.world_size > 1:
        return _train(place, problem, spread, replayed)
    with watched_clamps() as distances:
        return _train(place, problem, spread, replayed)._replace(clamps=distances)


def _train(place: Place, problem: Problem, spread: Spread, replayed: dict[str, Choices] | None) -> Record:
    mesh = Mesh.of(spread.parallel, place, has_experts=problem.model.num_experts is not None)
    share = BatchShare(mesh.dp.rank, mesh.dp.size, spread.micro_batch_size)
    batches = partial(batches_of, problem, share)
    engine = build(mesh, problem, spread)
    routing = Routing(engine, replayed, is_alone=place.world_size == 1)
    initial = parts(engine, masters_of(engine))
    results = []
    for step in range(NUM_STEPS):
        routing.begin(step)
        results.append(one_step(engine, problem, batches(step), step))
        if step == 0:
            gradients = parts(engine, engine.data_parallel.gradients)
    routing.begin(NUM_STEPS)
    trained = parts(engine, masters_of(engine))
    return Record(
        metrics=[dict(result.metrics) for result in results],
        grad_norms=[result.grad_norm for result in results],
        evaluation=evaluated(engine, batches(NUM_STEPS)),
        params_norm=params_norm(engine),
        initial_parts=initial,
        gradient_parts=gradients,
        trained_parts=trained,
        amplified={
            name: NUM_STEPS
            * amplification(engine, problem, name)
            * max(float(held.values.abs().max()) for held in helds)
            for name, helds in gradients.items()
            if helds
        },
        routed=Routed(
            [result.expert_load.tokens for result in results if result.expert_load is not None],
            states_of(engine),
            routing.choices,
        ),
        clamps=[],
    )


def one_step(
    engine: Engine, problem: Problem, batches: list[MicroBatch], step: int, *, is_last: bool = False
) -> StepResult:
    """A step of the problem's optimizer at its learning rates."""
    rate = OPTIMIZERS[problem.optimizer].lr or SGD_RATE
    return engine.step(
        batches,
        num_steps_done=step,
        learning_rate=rate,
        decoupled_learning_rate=2 * rate if problem.decoupled else None,
        weight_decay=0.1,
        momentum=CYCLE[step % len(CYCLE)],
        is_last=is_last,
    )


def amplification(engine: Engine, problem: Problem, name: str) -> float:
    """By how much a step moves a parameter, at most, for an error in its gradient.

    SGD and Muon's matrices are as near as gradients are. Adam divides by the root of the second moment, which is next
    to nothing where a gradient is, and by its epsilon: there it makes steps of rounding noise.
    """
    config = OPTIMIZERS[problem.optimizer]
    if problem.optimizer == "sgd" or (problem.optimizer == "muon" and is_matrix(engine, name)):
        return 0.0
    return 2 * (config.lr or 0.0) / config.adam_eps  # the rate of embedding and head may be twice that of the others


def is_matrix(engine: Engine, name: str) -> bool:
    """Whether Muon steps the parameter."""
    return engine.stage.shardings[name].role == "matrix"


def batches_of(problem: Problem, share: BatchShare, step: int) -> list[MicroBatch]:
    """This rank's micro-batches of a step; of BERT pairs of sentences with masked tokens, of T5 hidden spans."""
    rows = Collator(
        EOD,
        reset_position_ids=problem.documents,
        reset_attention_mask=problem.documents,
        eod_mask_loss=problem.eod_mask_loss,
    )
    dataset: Dataset = Samples(problem.seq_length)
    collate: Callable[[Sequence[Sample], Sequence[int]], MicroBatch] = rows
    if problem.model.has_encoder:
        dataset, (encoder, decoder) = Texts(problem.seq_length, filled=problem.documents), sides_of(problem.seq_length)
        hide = SpanCollator(SPANS, encoder, decoder, SEED, HIDDEN)

        def collate(samples: Sequence[Sample], sample_ids: Sequence[int]) -> MicroBatch:
            batch = hide(samples, sample_ids)
            # Without documents the encoder sees its filler.
            return batch if problem.documents else replace(batch, document_ids=None).with_encoder(encoder)

    elif not problem.model.is_causal:
        dataset = Pairs(problem.seq_length, filled=problem.documents)
        collate = MaskedCollator(rows, MASKS, VOCABULARY, SEED, mask_prob=0.5)
    return micro_batches(
        dataset,
        consumed_samples=step * problem.global_batch_size,
        global_batch_size=problem.global_batch_size,
        share=share,
        collate=collate,
    )


def build(mesh: Mesh, problem: Problem, spread: Spread) -> Engine:
    optimizer = replace(OPTIMIZERS[problem.optimizer], **DECOUPLED if problem.decoupled else {})
    if (threshold := problem.largest_logit) is not None:
        optimizer = replace(optimizer, qk_clip=True, qk_clip_threshold=threshold, qk_clip_alpha=0.3)
    config = Config(
        model=problem.model,
        parallel=parallel_of(problem, spread),
        recompute=spread.recompute,
        training=TrainingConfig(
            seq_length=problem.seq_length,
            micro_batch_size=spread.micro_batch_size,
            global_batch_size=problem.global_batch_size,
            seed=problem.seed,
            bf16=problem.bf16,
            fp16=problem.fp16,
            loss_scale=128.0 if problem.fp16 else None,
            attention_backend=spread.attention_backend,
            compile=spread.compile is not None,
            objective="causal_lm" if problem.model.is_causal else "masked_lm",
        ),
        optimizer=replace(optimizer, clip_grad=problem.clip),
        adapter=problem.adapter,
    )
    with pytest.MonkeyPatch.context() as patch:
        if spread.dispatcher == "deepep":
            deep_ep_stand_in.install(patch, of_theorem=not problem.bf16)
        if spread.compile is not None:
            patch.setattr(torch, "compile", partial(torch.compile, backend=spread.compile))
        engine = build_engine(config, mesh, vocab_size=VOCABULARY)
    if problem.adapter.is_used:
        draw_base(engine, seed=problem.seed)
        draw_adapters(engine)
    return engine


def parallel_of(problem: Problem, spread: Spread) -> ParallelConfig:
    """The spread, with the codes that belong to the problem: one process computes with them, too."""
    if problem.weight_block is None:
        return spread.parallel
    return replace(spread.parallel, zero_quantized_weights="int8", zero_quantized_weights_block=problem.weight_block)


def masters_of(engine: Engine) -> dict[str, Tensor]:
    return {name: shard.master for name, shard in engine.data_parallel.shards.items()}


def parts(engine: Engine, tensors: dict[str, Tensor]) -> Parts:
    """Copies of the rectangles that this rank holds; what is left over is padding, which stays zero."""
    found: Parts = {}
    for name, shard in engine.data_parallel.shards.items():
        if name not in tensors:  # it is frozen, and has no gradient
            continue
        local = tensors[name].detach()
        found[name] = [Held(piece.global_offset, piece.view(local).clone()) for piece in shard.pieces]
        assert sum(int(held.values.count_nonzero()) for held in found[name]) == int(local.count_nonzero()), name
    return found


def states_of(engine: Engine) -> dict[str, Tensor]:
    """Copies of the state of this rank's routers."""
    return {
        f"{layer}/{name}": value.clone()
        for layer, router in engine.stage.model.routers().items()
        for name, value in router.state.items()
    }


class Routing:
    """Choices of the experts in a run, recorded or replayed by its steps."""

    def __init__(self, engine: Engine, replayed: dict[str, Choices] | None, *, is_alone: bool) -> None:
        is_watched = is_alone or replayed is not None
        self._recorder = RoutingRecorder(engine.stage.model, replayed or {}) if is_watched else None

    @property
    def choices(self) -> dict[str, Choices]:
        """What was recorded, by layer."""
        return {} if self._recorder is None else self._recorder.choices

    def begin(self, step: int) -> None:
        """This step begins."""
        if self._recorder is not None:
            self._recorder.step = step
