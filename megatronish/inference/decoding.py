"""Batch of texts in generation: its input to the model for prefill and decode, and its KV cache.

Prefill is the forward of whole prompts, decode the forward of one new token of each text, which attends to the KV cache
(attention/cached.py). A model sees `seq_length` tokens. Once the cache is full, the first token of each text is dropped
from view and positions start at 0 again, so keys and values in the cache are no longer valid: from then on every token
is a prefill of the last `seq_length` tokens.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatronish.attention.cached import KeyValueCache
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT
from megatronish.parallel import comm
from megatronish.parallel.pipeline.executor import ChunkOutput


class GeneratedToken(NamedTuple):
    """Next token of the text of prompt `number`; None once the text has ended, by a stop token or by its length."""

    number: int
    token: int | None


@dataclass(frozen=True)
class GeneratedText:
    """Tokens of one prompt and of its text so far. `stream` is the random stream that its tokens are drawn from."""

    number: int
    tokens: list[int]
    stream: torch.Generator


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
    cache: KeyValueCache = field(default_factory=lambda: KeyValueCache(0))
    begins: list[int] = field(default_factory=list)

    def next_input(self) -> CachedMicroBatch:
        """Input of the next forward, on the CPU: [B, 1] for decode, [B, longest text] for prefill."""
        if not self.cache.is_full:
            return self._input([text.tokens[-1:] for text in self.texts])
        visible = [text.tokens[-self.seq_length :] for text in self.texts]
        longest = max(map(len, visible))
        # The last token of a text is chosen but never an input, so 1 is subtracted.
        self.cache = KeyValueCache(min(self.seq_length, longest + self.num_left - 1))
        self.begins = [longest - len(tokens) for tokens in visible]
        return self._input(visible)

    def _input(self, rows: Sequence[Sequence[int]]) -> CachedMicroBatch:
        """Rows of tokens in the columns after those of the cache.

        Padding before a shorter text is a document of its own: attention masks it as it masks other documents.
        """
        longest = max(map(len, rows))
        first_column = self.cache.num_columns
        tokens = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
        begin = torch.tensor(self.begins)[:, None]  # [B, 1]
        columns = torch.arange(first_column + longest)
        return CachedMicroBatch(
            tokens=tokens,
            labels=tokens,
            loss_mask=torch.zeros_like(tokens, dtype=torch.bool),
            position_ids=(columns[first_column:] - begin).clamp(min=0),
            sample_ids=torch.arange(len(rows)),
            document_ids=(columns >= begin).long() if any(self.begins) else None,
            cache=self.cache,
        )

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


def forward_chunk(model: GPT, x: Tensor | None, micro_batch: MicroBatch, /, *, step: int | None) -> ChunkOutput:
    """Forward of a stage that reads and extends the KV cache of its micro-batch.

    At the end of the model: the logits [B, V] of each row's next token, in fp32, of the true vocabulary.
    """
    assert isinstance(micro_batch, CachedMicroBatch)
    cache = micro_batch.cache
    x = model.hidden(x, micro_batch, step=step, cache=cache)
    cache.advance(x.shape[0])
    if not model.is_last:
        return ChunkOutput(x, {})
    # Only the last column predicts a new token: [S, B, D] -> [1, B, D] -> [B, V/tp], gathered over tp along V.
    logits = comm.start_all_gather(model.logits(x[-1:])[0].t(), model.tp.axis).wait()
    return ChunkOutput(logits[: model.vocab_size].t().float(), {})
