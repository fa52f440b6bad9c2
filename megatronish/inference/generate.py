"""Text generation with a KV cache: prefill, then decode token by token, in one process or over ranks of tp and pp.

Every token is one run of the pipeline executor (parallel/pipeline/executor.py) with a plan of forwards alone. A
micro-batch is a batch of prompts, and as many batches are generated at a time as there are pipeline stages, so that
stages work at the same time.

The text of a prompt is a function of the seed and the prompt (and of which copy of an equal prompt it is): it depends
neither on the batch nor on the layout. But layouts sum in different orders and so round logits differently. Where two
tokens are almost equally good, rounding may decide between them, in bf16 now and then.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from megatronish.attention.cached import KeyValueCache
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT
from megatronish.parallel import comm
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.pipeline.executor import Boundary, ChunkOutput, Executor
from megatronish.parallel.schedules.plan import Action, looped
from megatronish.parallel.streams import torch_stream

# Batch of texts in generation: its input to the model for prefill and decode, and its KV cache.
#
# Prefill is the forward of whole prompts, decode the forward of one new token of each text, which attends to the KV
# cache (attention/cached.py). A model sees `seq_length` tokens. Once the cache is full, the first token of each text is
# dropped from view and positions start at 0 again, so keys and values in the cache are no longer valid: from then on
# every token is a prefill of the last `seq_length` tokens.
#
# LongRoPE turns all tokens of a text by other angles once it is longer than the original context. Then the cache is not
# valid, either: the token at which a text outgrows that context is a prefill.


class GeneratedToken(NamedTuple):
    """Next token of the text of prompt `number`; None once the text has ended, by a stop token or by its length."""

    number: int
    token: int | None


@dataclass(frozen=True)
class GeneratedText:
    """Tokens of one prompt and of its text so far, or of the answer to a `source` alone.

    `stream` is the random stream that its tokens are drawn from.
    """

    number: int
    tokens: list[int]
    stream: torch.Generator
    source: Sequence[int] = ()
    """What an encoder reads, of which the text is the answer."""


@dataclass(frozen=True, kw_only=True)
class CachedMicroBatch(MicroBatch):
    """Micro-batch whose tokens follow those in a KV cache."""

    cache: KeyValueCache


@dataclass
class DecodingBatch:
    """Texts that go through the model together, up to `num_left` more tokens each, and their KV cache.

    Texts that end leave the batch. Rows of the input end in the same column; `begins` is the column in which each text
    begins, 0 for the longest.
    """

    texts: list[GeneratedText]
    num_left: int
    seq_length: int
    short_context: int | None = None
    """Of LongRoPE: tokens of the longest text that is turned as in the original context."""
    cache: KeyValueCache = field(default_factory=lambda: KeyValueCache(0))
    begins: list[int] = field(default_factory=list)

    def next_input(self) -> CachedMicroBatch:
        """Input of the next forward, on the CPU: [B, 1] for decode, [B, longest text] for prefill."""
        if not self.cache.is_full and not self._outgrows:
            return self._input([text.tokens[-1:] for text in self.texts])
        visible = [text.tokens[-self.seq_length :] for text in self.texts]
        longest = max(map(len, visible))
        # The last token of a text is chosen but never an input, so 1 is subtracted.
        self.cache = KeyValueCache(min(self.seq_length, longest + self.num_left - 1))
        self.begins = [longest - len(tokens) for tokens in visible]
        return self._input(visible)

    @property
    def _outgrows(self) -> bool:
        """Whether a text is longer than the original context for the first time."""
        context = self.short_context
        return context is not None and any(len(text.tokens) == context + 1 for text in self.texts)

    def _input(self, rows: Sequence[Sequence[int]]) -> CachedMicroBatch:
        """Rows of tokens in the columns after those of the cache.

        Padding before a shorter text is a document of its own: attention masks it as it masks other documents.
        """
        longest = max(map(len, rows))
        first_column = self.cache.num_columns
        tokens = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
        begin = torch.tensor(self.begins)[:, None]  # [B, 1]
        columns = torch.arange(first_column + longest)
        batch = CachedMicroBatch(
            tokens=tokens,
            labels=tokens,
            loss_mask=torch.zeros_like(tokens, dtype=torch.bool),
            position_ids=(columns[first_column:] - begin).clamp(min=0),
            sample_ids=torch.arange(len(rows)),
            document_ids=(columns >= begin).long() if any(self.begins) else None,
            cache=self.cache,
        )
        if self.short_context is None:
            return batch
        return batch.with_text_lengths(torch.tensor([min(len(text.tokens), self.seq_length) for text in self.texts]))

    def append(self, chosen: Sequence[int | None], *, stops: Collection[int]) -> Iterator[GeneratedToken]:
        """Add the next token [B] of each text, and drop the texts that end with it; None ends a text as stops do."""
        self.num_left -= 1
        remaining = []
        for row, (text, token) in enumerate(zip(self.texts, chosen, strict=True)):
            if token is None or token in stops:
                yield GeneratedToken(text.number, None)
            else:
                remaining.append(row)
                text.tokens.append(token)
                yield GeneratedToken(text.number, token)
        if self.num_left == 0:
            yield from (GeneratedToken(self.texts[row].number, None) for row in remaining)
            remaining = []
        if len(remaining) < len(self.texts):
            self.texts, self.begins = [self.texts[row] for row in remaining], [self.begins[row] for row in remaining]
            self.cache.keep(remaining)


@dataclass
class AnsweringBatch(DecodingBatch):
    """Texts of a model with an encoder, each the answer to its own source, which is read in the first forward."""

    def next_input(self) -> CachedMicroBatch:
        """Input of the next forward, on the CPU: [B, 1], at first after the sources, [B, longest source + 1]."""
        newest = torch.tensor([text.tokens[-1:] for text in self.texts])
        if self.begins:
            return self._of(newest, None, encoder_length=0)
        self.cache, self.begins = KeyValueCache(self.num_left), [0] * len(self.texts)
        longest = max(len(text.source) for text in self.texts)
        sources = torch.tensor([[*text.source, *[0] * (longest - len(text.source))] for text in self.texts])
        lengths = torch.tensor([len(text.source) for text in self.texts])[:, None]
        filler = (torch.arange(longest + 1) >= lengths).long()
        return self._of(torch.cat((sources, newest), dim=1), filler, encoder_length=longest)

    def _of(self, tokens: Tensor, documents: Tensor | None, *, encoder_length: int) -> CachedMicroBatch:
        batch = CachedMicroBatch(
            tokens=tokens,
            labels=tokens,
            loss_mask=torch.zeros_like(tokens, dtype=torch.bool),
            position_ids=torch.zeros_like(tokens),
            sample_ids=torch.arange(len(tokens)),
            document_ids=documents,
            cache=self.cache,
        )
        return batch.with_encoder(encoder_length)


def forward_chunk(model: GPT, x: Tensor | None, micro_batch: MicroBatch, /, *, step: int | None) -> ChunkOutput:
    """Forward of a stage that reads and extends the KV cache of its micro-batch.

    At the end of the model: the logits [B, V] of each row's next token, in fp32, of the true vocabulary.
    """
    assert isinstance(micro_batch, CachedMicroBatch)
    cache = micro_batch.cache
    x = model.hidden(x, micro_batch, step=step, cache=cache)
    cache.advance(x.shape[0] - micro_batch.encoder_length)
    if not model.is_last:
        return ChunkOutput(x, {})
    # Only the last column predicts a new token: [S, B, D] -> [1, B, D] -> [B, V/tp], gathered over tp along V.
    logits = comm.start_all_gather(model.logits(x[-1:])[0].t(), model.tp.axis).wait()
    return ChunkOutput(logits[: model.vocab_size].t().float(), {})


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token. Temperature 0 is greedy decoding; top_k 0 and top_p 1 keep all tokens."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def never(_number: int) -> bool:
    """Texts end by themselves alone."""
    return False


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    seq_length: int,
    stops: Collection[int] = (),
    sampling: Sampling | None = None,
    batch_size: int = 8,
    mesh: Mesh | None = None,
    ends: Callable[[int], bool] = never,
    decoder_start: int | None = None,
) -> Iterator[GeneratedToken]:
    """Tokens of each prompt's text as they are generated: `num_tokens`, or fewer if one of `stops` comes before.

    A model with an encoder reads the prompts there, and its answers begin after the token `decoder_start`. Prompts have
    at least one token each. A batch is `batch_size` prompts; tokens of as many batches as there are
    pipeline stages come in turn. `ends` is asked before each token whether the text of a prompt, by its number, ends
    here; it does where any rank says so. A collective call: all ranks of `mesh` that share a copy of the model iterate
    to the end and get the same tokens.
    """
    if num_tokens == 0:
        yield from (GeneratedToken(number, None) for number in range(len(prompts)))
        return
    mesh, sampling = mesh or Mesh.start(), sampling or Sampling()
    texts, make_batch = _texts_of(prompts, seed=sampling.seed), DecodingBatch
    if model.config.has_encoder:
        assert decoder_start is not None, "a decoder begins with a token of its own"
        texts = [replace(text, tokens=[decoder_start], source=text.tokens) for text in texts]
        make_batch = AnsweringBatch
    waiting = iter(
        [
            make_batch(texts[first : first + batch_size], num_tokens, seq_length, model.config.short_context)
            for first in range(0, len(texts), batch_size)
        ]
    )
    executor = executor_of(model, mesh, forward_chunk)
    active: list[DecodingBatch] = []
    while True:
        # 1. Batches that have ended make room for new ones: a batch for each stage keeps all stages busy.
        active += islice(waiting, mesh.pp.size - len(active))
        if not active:
            return
        # 2. Prefill or decode: one forward of each batch through all stages. Only ranks of the last one get logits.
        logits = _next_logits(executor, active)
        # 3. One rank samples, and every rank gets the tokens: the next input of the first stage.
        chosen = iter(_sample(logits, [batch.texts for batch in active], sampling, mesh, ends))
        # 4. Texts grow by their tokens; those that end leave their batch and its KV cache.
        for batch in active:
            yield from batch.append(list(islice(chosen, len(batch.texts))), stops=stops)
        active = [batch for batch in active if batch.texts]


def _texts_of(prompts: Sequence[Sequence[int]], *, seed: int) -> list[GeneratedText]:
    """Texts of the prompts, each with its own random stream: copies of a prompt are numbered to differ."""
    copies: Counter[tuple[int, ...]] = Counter()
    texts = []
    for number, prompt in enumerate(map(tuple, prompts)):
        texts.append(GeneratedText(number, list(prompt), torch_stream(seed, "generate", *prompt, copies[prompt])))
        copies[prompt] += 1
    return texts


def executor_of(model: GPT, mesh: Mesh, forward: Callable[..., ChunkOutput]) -> Executor:
    """Pipeline executor of this rank's stage, whose forward is `forward` of the model and what an executor gives.

    All ranks of the pipeline make theirs at the same time.
    """
    assert len(model.chunks) == 1, "generation runs one chunk a stage"
    dtype = next(model.parameters()).dtype
    return Executor(
        [partial(forward, model)],
        looped(num_stages=mesh.pp.size),
        p2p_axes=mesh.p2p_axes,
        boundary=Boundary(model.config.hidden_size, dtype, mesh.device, model.tp),
    )


@torch.no_grad()
def _next_logits(executor: Executor, batches: Sequence[DecodingBatch]) -> list[Tensor]:
    """Logits [B, V] in fp32 of each batch's next tokens, on the ranks of the last stage; elsewhere none."""
    next_logits: list[Tensor] = []
    executor.run(
        [Action("F", 0, number) for number in range(len(batches))],
        [batch.next_input().to(executor.boundary.device) for batch in batches],
        step=None,
        on_model_output=lambda _number, logits: next_logits.append(logits),
    )
    return next_logits


def _sample(
    logits: Sequence[Tensor],
    batches: Sequence[Sequence[GeneratedText]],
    sampling: Sampling,
    mesh: Mesh,
    ends: Callable[[int], bool],
) -> list[int | None]:
    """Next token of every text, batch after batch, on all ranks; None where `ends` of a rank says so.

    The first tp rank of the last stage chooses. The others add zeros, so an all-reduce hands its tokens to every rank.
    In the second row each rank adds which texts end.
    """
    tokens_and_ends = torch.zeros(2, sum(map(len, batches)), dtype=torch.int64)
    tokens_and_ends[1] = torch.tensor([ends(text.number) for texts in batches for text in texts])
    tokens_and_ends = tokens_and_ends.to(mesh.device, non_blocking=True)
    if logits and mesh.tp.is_first:
        chosen = [
            choose(scores, _uniform(texts, like=scores) if sampling.temperature else None, sampling)
            for scores, texts in zip(logits, batches, strict=True)
        ]
        tokens_and_ends[0] = torch.cat(chosen)
    tokens, ended = comm.all_reduce(comm.all_reduce(tokens_and_ends, mesh.tp), mesh.pp).tolist()
    return [None if end else token for token, end in zip(tokens, ended, strict=True)]


def _uniform(texts: Sequence[GeneratedText], *, like: Tensor) -> Tensor:
    """Uniform random numbers in [0, 1), fp64 [B, V]: each row from the stream of its text."""
    rows = [torch.rand(like.shape[-1], dtype=torch.float64, generator=text.stream) for text in texts]
    return torch.stack(rows).to(like.device)


def choose(logits: Tensor, chances: Tensor | None, sampling: Sampling) -> Tensor:
    """Next tokens [B] from logits [B, V] and uniform random numbers `chances`, fp64 [B, V] in [0, 1); None is greedy.

    Sampling by the Gumbel-max trick: the largest sum of score and noise, and each token's noise comes from its own
    chance. A logit that is rounded differently changes the choice only where the two largest sums are almost equal.
    """
    if chances is None or sampling.temperature == 0.0:
        return logits.argmax(-1)
    # 1. Temperature. The largest score becomes 0, and fp64 holds any temperature: no inf - inf and no 0 / 0.
    scores = (logits - logits.amax(-1, keepdim=True)).double() / sampling.temperature
    # 2. Top-p: keep the likeliest tokens whose sum before each is below top_p, at least one. Top-k: the first k alone.
    values, order = scores.softmax(-1).sort(descending=True, stable=True)
    kept = values.cumsum(-1) - values < sampling.top_p
    if sampling.top_k > 0:
        kept[:, sampling.top_k :] = False
    # 3. Gumbel noise. A chance of 0 would be -inf, for all tokens if only one is kept.
    noise = -(-chances.clamp(min=torch.finfo(torch.float64).tiny).log()).log()
    # 4. `kept` is in sorted order: back to token ids, then the largest sum of the kept tokens.
    left_out = torch.empty_like(kept).scatter(-1, order, ~kept)
    return (scores + noise).masked_fill(left_out, -torch.inf).argmax(-1)
