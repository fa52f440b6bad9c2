"""Spans of tokens that are hidden and asked for: the collator of T5, and rows of an encoder and a decoder.

Of a text of L tokens --mask-prob of them are hidden, in spans of --mean-span-length tokens on average (Raffel et al.
2020, arXiv:1910.10683, section 3.1.4). In the encoder's row a span is one sentinel; the decoder's row has each sentinel
and what it hides:

    text       the house at the end of the road
    encoder    the <s0> at the end <s1> road </s>
    decoder    <s0> house <s1> of the </s>

How many tokens and spans are hidden follows from L alone, and which ones is named by (seed, number of the sample): so
it depends on no layout and no worker, and a sample that comes again in another epoch hides others. Data sets have texts
of the greatest L whose rows fit (`text_length`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatronish.config.config import Config
from megatronish.config.sections.data import DataConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.core.hidden_spans import SpanRule, text_length, too_few_sentinels
from megatronish.data.sample import Sample
from megatronish.model.batch import MicroBatch
from megatronish.parallel.streams import numpy_stream
from megatronish.tokenizer.control_tokens import SpanTokens

Ids = NDArray[np.int64]


def rule_of(data: DataConfig) -> SpanRule:
    """What the flags say is hidden."""
    return SpanRule(data.mask_prob, data.mean_span_length)


def sides_of(model: ModelConfig) -> tuple[int, int]:
    """Tokens of the encoder's and of the decoder's row of a sample."""
    encoder, decoder = model.encoder_seq_length, model.decoder_seq_length
    assert encoder is not None and decoder is not None, "a T5 is trained with the lengths of its sides"
    return encoder, decoder


def sample_length(model: ModelConfig, data: DataConfig, *, seq_length: int) -> int:
    """Tokens of a text that a data set is asked for: as many as a row has, or those whose hidden spans fit two rows."""
    if not model.has_encoder or data.has_chats:
        return seq_length
    encoder, decoder = sides_of(model)
    return text_length(rule_of(data), encoder_length=encoder, decoder_length=decoder)


class SideRows(NamedTuple):
    """What the encoder reads and what the decoder writes of a sample, without filler."""

    inputs: Ids
    targets: Ids


@dataclass(frozen=True)
class SpanCollator:
    """Rules by which samples become a micro-batch of T5: `collate(samples, sample_ids)`.

    Of a sample's L + 1 tokens the last, which is a label alone, is not read.
    """

    special: SpanTokens
    encoder_length: int
    decoder_length: int
    seed: int
    rule: SpanRule

    @classmethod
    def of(cls, config: Config, special: SpanTokens) -> "SpanCollator":
        """The rules that a config asks for; UserError where a text has more spans than there are sentinels."""
        rule, (encoder, decoder) = rule_of(config.data), sides_of(config.model)
        if complaint := too_few_sentinels(rule, encoder, decoder, len(special.sentinels)):
            raise UserError(complaint)
        return cls(special, encoder, decoder, config.training.seed, rule)

    def __call__(self, samples: Sequence[Sample], sample_ids: Sequence[int]) -> MicroBatch:
        """B samples -> [B, Se + Sd] tensors on the CPU."""
        rows = [self.rows(sample, number) for sample, number in zip(samples, sample_ids, strict=True)]
        return side_by_side(
            rows,
            sample_ids,
            special=self.special,
            encoder_length=self.encoder_length,
            decoder_length=self.decoder_length,
        )

    def rows(self, sample: Sample, number: int) -> SideRows:
        """The rows of the sample with this number."""
        text = sample.tokens[: len(sample.tokens) - 1 - sample.num_filler]
        tokens, spans = self.rule.hidden(len(text))
        stream = numpy_stream(self.seed, "spans", number)
        shown = _parts(len(text) - tokens, spans, stream)
        hidden = _parts(tokens, spans, stream)
        # Shown and hidden runs take turns, and a shown one comes first.
        cuts = np.cumsum(np.stack((shown, hidden), axis=1).reshape(-1))[:-1]
        runs = np.split(text, cuts)
        sentinels = [np.array([sentinel]) for sentinel in self.special.sentinels[:spans]]
        end = [np.array([self.special.end])]
        inputs = [part for pair in zip(runs[::2], sentinels, strict=True) for part in pair]
        targets = [part for pair in zip(sentinels, runs[1::2], strict=True) for part in pair]
        return SideRows(*(np.concatenate(parts + end).astype(np.int64) for parts in (inputs, targets)))


def _parts(total: int, number: int, stream: np.random.Generator) -> Ids:
    """Sizes of so many parts of a whole, none empty, every partition as likely as any other."""
    cuts = np.sort(stream.permutation(total - 1)[: number - 1]) + 1
    return np.diff(np.concatenate(([0], cuts, [total])))


def side_by_side(
    rows: Sequence[SideRows],
    sample_ids: Sequence[int],
    *,
    special: SpanTokens,
    encoder_length: int,
    decoder_length: int,
) -> MicroBatch:
    """The micro-batch of rows of two sides, each filled up to its length.

    The decoder reads what it wrote one token before, first the start token. Filler of the encoder is document 1, which
    no token of document 0 sees; filler of the decoder comes after all that counts.
    """
    length = encoder_length + decoder_length
    tokens = np.full((len(rows), length), special.filler, np.int64)
    labels, documents = tokens.copy(), np.ones_like(tokens)
    mask = np.zeros((len(rows), length), np.bool_)
    for number, (inputs, targets) in enumerate(rows):
        assert len(inputs) <= encoder_length and len(targets) <= decoder_length, "rows are cut before they come here"
        end = encoder_length + len(targets)
        tokens[number, : len(inputs)] = inputs
        documents[number, : len(inputs)] = 0
        tokens[number, encoder_length:end] = np.concatenate(([special.start], targets[:-1]))
        labels[number, encoder_length:end] = targets
        mask[number, encoder_length:end] = True
    batch = MicroBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(mask),
        position_ids=torch.arange(length).expand(len(rows), -1).contiguous(),
        sample_ids=torch.tensor(sample_ids),
        document_ids=torch.from_numpy(documents),
    )
    return batch.with_encoder(encoder_length)
