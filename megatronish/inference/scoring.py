"""Scores of texts by a model, over ranks of tp, pp and dp: texts that it writes, log-likelihoods, and perplexity."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatronish.data.loader import BatchShare, Collator
from megatronish.data.text import Windows
from megatronish.engine.engine import Engine
from megatronish.inference.generate import Sampling, executor_of, generate
from megatronish.inference.session import Session
from megatronish.inference.text_stream import TextStream
from megatronish.layers.vocabulary import vocab_parallel_cross_entropy
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT
from megatronish.objectives.objective import LOSS
from megatronish.parallel import comm
from megatronish.parallel.all_or_none import from_all
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.pipeline.executor import ChunkOutput, Executor
from megatronish.parallel.schedules.plan import Action

# Texts of many prompts, each until a stop string, over ranks of tp, pp and dp.


@dataclass(frozen=True)
class Writing:
    """Order of texts of at most `num_tokens` tokens, which one of `stops` or of `stop_strings` ends before."""

    prompts: Sequence[Sequence[int]]
    num_tokens: int
    stops: frozenset[int]
    stop_strings: Sequence[str]
    sampling: Sampling

    def __call__(self, session: Session) -> list[str]:
        """Each replica of the model writes a part of the texts."""
        return over_replicas(session.mesh, len(self.prompts), partial(self._write, session))

    def _write(self, session: Session, numbers: Sequence[int]) -> dict[int, str]:
        """Texts of these prompts, the longest first: a batch has prompts of about one length."""
        order = sorted(numbers, key=lambda number: -len(self.prompts[number]))
        streams = [TextStream(session.decode, stop_strings=self.stop_strings) for _ in order]
        written = generate(
            session.trained.model,
            [self.prompts[number] for number in order],
            num_tokens=self.num_tokens,
            seq_length=session.seq_length,
            stops=self.stops,
            sampling=self.sampling,
            batch_size=session.batch_size,
            mesh=session.mesh,
            ends=lambda place: streams[place].has_stopped,
        )
        for place, token in written:
            if token is None:
                streams[place].finish()
            else:
                streams[place].add(token)
        return {number: stream.text for number, stream in zip(order, streams, strict=True)}


Found = TypeVar("Found")


class TokenPair(NamedTuple):
    """A context, which is given, and the continuation whose likelihood is asked for; one token at least of each."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    def whole(self, seq_length: int) -> list[int]:
        """The last tokens, of which the model sees all except the last one."""
        return [*self.context, *self.continuation][-(seq_length + 1) :]


class Likelihood(NamedTuple):
    """Log-likelihood of a continuation in nats, and whether each of its tokens is the likeliest one."""

    value: float
    is_greedy: bool


@dataclass(frozen=True)
class Scoring:
    """Order of the likelihoods of pairs, in their order."""

    pairs: Sequence[TokenPair]

    def __call__(self, session: Session) -> list[Likelihood]:
        """Each replica of the model scores a part of the pairs."""
        return over_replicas(session.mesh, len(self.pairs), partial(self._score, session))

    @torch.no_grad()
    def _score(self, session: Session, numbers: Sequence[int]) -> dict[int, Likelihood]:
        """Likelihoods of these pairs, the longest first, on the ranks of the last stage; elsewhere none."""
        pp = session.mesh.pp
        executor = executor_of(session.trained.model, session.mesh, _forward)
        likelihoods: dict[int, Likelihood] = {}
        order = sorted(numbers, key=lambda number: -len(self.pairs[number].whole(session.seq_length)))
        batches = [order[first : first + session.batch_size] for first in range(0, len(order), session.batch_size)]
        for first in range(0, len(batches), pp.size):
            group = batches[first : first + pp.size]
            outputs = self._outputs(executor, [self._input(batch, session.seq_length) for batch in group])
            for batch, output in zip(group, outputs, strict=False):
                likelihoods |= self._likelihoods(batch, output.cpu(), session.seq_length)
        return likelihoods

    def _outputs(self, executor: Executor, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Output of each batch on the ranks of the last stage; elsewhere none."""
        outputs: list[Tensor] = []
        executor.run(
            [Action("F", 0, number) for number in range(len(batches))],
            [batch.to(executor.boundary.device) for batch in batches],
            step=None,
            on_model_output=lambda _number, output: outputs.append(output),
        )
        return outputs

    def _input(self, batch: Sequence[int], seq_length: int) -> MicroBatch:
        """Tokens [B, longest text]; padding comes after the text, where no token of it can see it."""
        wholes = [self.pairs[number].whole(seq_length) for number in batch]
        longest = max(map(len, wholes))
        padded = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in wholes])
        tokens, labels = padded[:, :-1].contiguous(), padded[:, 1:].contiguous()
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        micro_batch = MicroBatch(
            tokens, labels, torch.ones_like(tokens, dtype=torch.bool), positions, torch.arange(len(batch))
        )
        return micro_batch.with_text_lengths(torch.tensor([len(whole) - 1 for whole in wholes]))

    def _likelihoods(self, batch: Sequence[int], output: Tensor, seq_length: int) -> dict[int, Likelihood]:
        """From losses and margins [2, S, B]."""
        likelihoods = {}
        for row, number in enumerate(batch):
            pair = self.pairs[number]
            end = len(pair.whole(seq_length)) - 1
            losses, margins = output[:, max(0, end - len(pair.continuation)) : end, row]
            likelihoods[number] = Likelihood(-float(losses.double().sum()), bool((margins >= 0).all()))
        return likelihoods


def _forward(model: GPT, x: Tensor | None, batch: MicroBatch, /, *, step: int | None) -> ChunkOutput:
    """Forward of a stage. At the end: the losses of the labels, and how much less the largest logit is, [2, S, B]."""
    x = model.hidden(x, batch, step=step)
    if not model.is_last:
        return ChunkOutput(x, {})
    tp, labels = model.tp.axis, batch.labels.t().contiguous()
    logits = model.logits(x).float()
    # This rank's rows of the vocabulary, of which the last ones may be padding; a label of another rank adds zero.
    rows = logits.shape[-1]
    first = tp.rank * rows
    num_true = min(max(model.vocab_size - first, 0), rows)
    is_own = (labels >= first) & (labels < first + rows)
    at = logits.gather(-1, (labels - first).clamp(0, rows - 1)[..., None])[..., 0]
    target = comm.all_reduce(torch.where(is_own, at, 0.0), tp)
    largest = logits[..., :num_true].amax(-1) if num_true else torch.full_like(target, -torch.inf)
    largest = comm.all_reduce(largest.contiguous(), tp, "max")
    losses = vocab_parallel_cross_entropy(logits, labels, vocab_size=model.vocab_size, tp=tp)
    return ChunkOutput(torch.stack((losses, target - largest)), {})


def over_replicas(mesh: Mesh, count: int, work: Callable[[Sequence[int]], Mapping[int, Found]]) -> list[Found]:
    """Results 0 to `count` - 1, on every rank: each replica of the model works on a part of the numbers.

    Where replicas share experts, they exchange tokens in every layer, so all of them do all of the work together.
    """
    dp, experts = mesh.dp, mesh.experts
    shares_experts = experts.ep.size * experts.etp.size > mesh.tp.size
    mine = range(count) if shares_experts else range(dp.rank, count, dp.size)
    parts = from_all(mesh.checkpoint_axis, lambda: dict(work(mine)) if mine else {})
    by_number = {number: value for part in parts for number, value in part.items()}
    return [by_number[number] for number in range(count)]


# Perplexity of a model on a text: the sum of token losses over windows that predict each token once.

MICRO_BATCHES_A_STAGE = 8  # in one pipeline run: few enough to fit into memory, enough for a small pipeline bubble


class Perplexity(NamedTuple):
    """Sum of the token losses in nats, and the number of predictions. `num_bytes` is the text's size, where known."""

    num_predictions: int
    nats: float
    num_bytes: int | None

    @property
    def loss(self) -> float:
        """Mean loss in nats per token."""
        return self.nats / self.num_predictions

    @property
    def perplexity(self) -> float:
        """exp(mean loss), infinite where that is too large for a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits of all predictions, end-of-document tokens included, divided by the bytes of the text."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None


def measure(
    engine: Engine,
    windows: Windows,
    *,
    collate: Collator,
    micro_batch_size: int,
    num_bytes: int | None = None,
    on_progress: Callable[[int], Any] = lambda _num_windows: None,
) -> Perplexity:
    """Perplexity over all windows, the same on every rank; a collective call.

    Windows go to the data-parallel ranks as the samples of a training step do. Where they do not divide evenly, the
    last micro-batches are filled with windows without predictions: ranks that communicate get equal micro-batches. With
    dp 1 and pp 1 the last micro-batch is shorter instead. `on_progress` gets the number of windows of each run.
    """
    dp = engine.mesh.dp
    share = BatchShare(dp.rank, dp.size, micro_batch_size)
    size, most = micro_batch_size * dp.size, MICRO_BATCHES_A_STAGE * engine.mesh.pp.size
    nats, count = 0.0, 0
    for first in range(0, len(windows), size * most):
        num_windows = min(size * most, len(windows) - first)
        parts = share.sample_ids(consumed_samples=first, global_batch_size=-(-num_windows // size) * size)
        if dp.size == engine.mesh.pp.size == 1:
            parts = [range(part.start, min(part.stop, len(windows))) for part in parts]
        batches = [collate([windows.sample(number) for number in part], part) for part in parts]
        totals = engine.evaluate(batches)
        nats, count = nats + totals.objective[LOSS], count + totals.weight
        on_progress(num_windows)
    assert count == windows.num_predictions, f"{count} of {windows.num_predictions} predictions were counted"
    return Perplexity(count, nats, num_bytes)
