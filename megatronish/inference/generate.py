"""What does a trained model write? Token by token, over ranks of tp and pp or in one process.

The prompts of a batch run through the model once. From then on every token runs alone, and attention finds those before
it in a cache (attention/cached.py). A model sees `seq_length` tokens. When they are full, their first ones are given up
and the rest begins anew at its first position, without what the cache knew of them: then every token runs all of them.

What is written after a prompt is a function of the seed and the prompt, the second time of the same prompt another one:
neither the batch it is in nor the layout matters. But logits are rounded otherwise where sums are taken in another
order, so two tokens that are all but equally good may change places, in bf16 now and then.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatronish import comm
from megatronish.attention.cached import KeyValueCache
from megatronish.mesh import Mesh
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT
from megatronish.pipeline.transfers import Boundary
from megatronish.streams import torch_stream


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 takes the likeliest; top_k 0 and top_p 1 leave all to choose from."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class GeneratedToken(NamedTuple):
    """The next token after prompt number `number`; None once it has ended, by a token that ends it or by its length."""

    number: int
    token: int | None


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
) -> Iterator[GeneratedToken]:
    """What follows each prompt, as it comes: `num_tokens`, or as many as there are before one of `stops`.

    Prompts have at least one token each; `batch_size` of them are gone on with at a time. All ranks of `mesh` call this
    and go through all of it.
    """
    sampling = sampling or Sampling()
    copies: Counter[tuple[int, ...]] = Counter()
    texts = []
    for number, prompt in enumerate(map(tuple, prompts)):
        texts.append(_Text(number, list(prompt), torch_stream(sampling.seed, "generate", *prompt, copies[prompt])))
        copies[prompt] += 1
    writer = _Writer(model, mesh or Mesh.start(), sampling, seq_length, stops)
    for first in range(0, len(texts), batch_size):
        yield from writer.write(texts[first : first + batch_size], num_tokens)


@dataclass(frozen=True)
class _Text:
    """A prompt and what follows it so far; `stream` says how chance falls."""

    number: int
    tokens: list[int]
    stream: torch.Generator


@dataclass(frozen=True)
class _Writer:
    model: GPT
    mesh: Mesh
    sampling: Sampling
    seq_length: int
    stops: Collection[int]

    @torch.no_grad()
    def write(self, texts: list[_Text], num_tokens: int) -> Iterator[GeneratedToken]:
        """Go on with these texts, all at once."""
        cache, begins = KeyValueCache(0), list[int]()
        for left in range(num_tokens, 0, -1):
            if cache.is_full:
                seen = [text.tokens[-self.seq_length :] for text in texts]
                longest = max(map(len, seen))
                cache = KeyValueCache(min(self.seq_length, longest + left - 1))
                begins = [longest - len(tokens) for tokens in seen]
            else:
                seen = [text.tokens[-1:] for text in texts]
            logits = self._next_logits(seen, begins, cache)
            going_on = []
            for row, (text, token) in enumerate(zip(texts, self._choose(logits, texts), strict=True)):
                if token in self.stops:
                    yield GeneratedToken(text.number, None)
                else:
                    going_on.append(row)
                    text.tokens.append(token)
                    yield GeneratedToken(text.number, token)
            if not going_on:
                return
            if len(going_on) < len(texts):
                texts, begins = [texts[row] for row in going_on], [begins[row] for row in going_on]
                cache.keep(going_on)
        yield from (GeneratedToken(text.number, None) for text in texts)

    def _next_logits(self, seen: Sequence[Sequence[int]], begins: Sequence[int], cache: KeyValueCache) -> Tensor | None:
        """[B, V] in fp32, true vocabulary, on the ranks of the last stage. Rows of tokens end in the same column."""
        model, mesh = self.model, self.mesh
        batch = _batch(seen, begins, first_column=cache.num_columns).to(mesh.device)
        num_rows, num_columns = batch.tokens.shape
        dtype = next(model.parameters()).dtype
        boundary = Boundary((num_columns, num_rows, model.config.hidden_size), dtype, mesh.device, mesh.tp)
        line, x = mesh.p2p_axes["F", True], None
        if not mesh.pp.is_first:
            piece = comm.start_receive(boundary.empty_slice(), line, source=mesh.pp.rank - 1, tag=0).wait()
            x = boundary.whole(piece)
        x = model.hidden(x, batch, step=None, cache=cache)
        cache.advance(num_columns)
        if not mesh.pp.is_last:
            comm.start_send(boundary.slice_of(x), line, to=mesh.pp.rank + 1, tag=0).wait()
            return None
        logits = comm.start_all_gather(model.logits(x[-1:])[0].t(), mesh.tp).wait()
        return logits[: model.vocab_size].t().float()

    def _choose(self, logits: Tensor | None, texts: Sequence[_Text]) -> list[int]:
        """The next token of each text, chosen by one rank for all."""
        chosen = torch.zeros(len(texts), dtype=torch.int64, device=self.mesh.device)
        if logits is not None and self.mesh.tp.is_first:
            chances = None
            if self.sampling.temperature:
                width = logits.shape[-1]
                rows = [torch.rand(width, dtype=torch.float64, generator=text.stream) for text in texts]
                chances = torch.stack(rows).to(logits.device)
            chosen = choose(logits, chances, self.sampling)
        return comm.all_reduce(chosen, self.mesh.world).tolist()


def _batch(seen: Sequence[Sequence[int]], begins: Sequence[int], *, first_column: int) -> MicroBatch:
    """Tokens from `first_column` on, of texts that begin in columns `begins` >= 0 and end together.

    What stands before a text, made up, is a document of its own.
    """
    longest = max(map(len, seen))
    tokens = torch.tensor([[0] * (longest - len(row)) + list(row) for row in seen])
    begin = torch.tensor(begins)[:, None]
    columns = torch.arange(first_column + longest)
    return MicroBatch(
        tokens=tokens,
        labels=tokens,
        loss_mask=torch.zeros_like(tokens, dtype=torch.bool),
        position_ids=(columns[first_column:] - begin).clamp(min=0),
        sample_ids=torch.arange(len(seen)),
        document_ids=(columns >= begin).long() if any(begins) else None,
    )


def choose(logits: Tensor, chances: Tensor | None, sampling: Sampling) -> Tensor:
    """[B, V], fp64 [B, V] in [0, 1) -> [B]: as likely as their probabilities say, if all chances are drawn evenly.

    The token with the largest sum of score and noise, which is made of a token's own chance (Gumbel's): a logit that is
    rounded otherwise changes the choice only where two such sums all but agree.
    """
    if chances is None or sampling.temperature == 0.0:
        return logits.argmax(-1)
    # The largest becomes 0, and fp64 holds any temperature: nothing is infinity minus infinity, or 0 over 0.
    scores = (logits - logits.amax(-1, keepdim=True)).double() / sampling.temperature
    values, order = scores.softmax(-1).sort(descending=True, stable=True)
    # Keep the likeliest tokens whose sum before each is below top_p: never none.
    kept = values.cumsum(-1) - values < sampling.top_p
    if sampling.top_k > 0:
        kept[:, sampling.top_k :] = False
    # A chance of 0 would be infinitely bad luck, for all tokens if there is one alone.
    noise = -(-chances.clamp(min=torch.finfo(torch.float64).tiny).log()).log()
    left_out = torch.empty_like(kept).scatter(-1, order, ~kept)
    return (scores + noise).masked_fill(left_out, -torch.inf).argmax(-1)
