"""Pairs of texts as a micro-batch of a model with an encoder and a decoder, which fine-tunes on them.

A sample (chat/encoder.py) is [input, end, target, end, filler], and what its `loss_mask` counts is the target:

    sample     translate house </s> maison </s> . .
    encoder    translate house </s>
    decoder    <start> maison        -> maison </s>

Each side of a micro-batch is as long as its longest row needs, not as long as the config allows: what is left out is
filler, which no loss reads and no token sees. Places, which name dropout masks, stay those of whole rows, so it does
not matter which samples a layout puts into one micro-batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatronish.config.config import Config
from megatronish.data.chat.file import border_of
from megatronish.data.loader import places_together
from megatronish.data.sample import Sample
from megatronish.data.spans import SideRows, side_by_side, sides_of
from megatronish.model.batch import MicroBatch
from megatronish.tokenizer.control_tokens import SpanTokens


@dataclass(frozen=True)
class TextPairCollator:
    """Rules by which samples become a micro-batch: `collate(samples, sample_ids)`.

    Lengths of a side are multiples of `multiple`, at most those of the config; None: always those of the config.
    """

    special: SpanTokens
    encoder_length: int
    decoder_length: int
    multiple: int | None = None

    @classmethod
    def of(cls, config: Config, special: SpanTokens) -> "TextPairCollator":
        """The rules that a config asks for."""
        return cls(special, *sides_of(config.model), places_together(config))

    def __call__(self, samples: Sequence[Sample], sample_ids: Sequence[int]) -> MicroBatch:
        """B samples -> [B, Se + Sd] tensors on the CPU."""
        rows = [self.rows(sample) for sample in samples]
        encoder = self._length([len(row.inputs) for row in rows], self.encoder_length)
        decoder = self._length([len(row.targets) for row in rows], self.decoder_length)
        batch = side_by_side(
            rows, sample_ids, special=self.special, encoder_length=encoder, decoder_length=decoder
        ).with_encoder(encoder, room=self.encoder_length)
        datasets = [sample.dataset_ids[0] for sample in samples if sample.dataset_ids is not None]
        if not datasets:
            return batch
        of_labels = torch.from_numpy(np.array(datasets))[:, None].expand_as(batch.labels).contiguous()
        return replace(batch, dataset_ids=of_labels).with_encoder(encoder, room=self.encoder_length)

    def rows(self, sample: Sample) -> SideRows:
        """What the encoder reads and what the decoder writes; of made-up tokens as much as there is room."""
        text = sample.tokens[: len(sample.tokens) - sample.num_filler]
        if sample.loss_mask is None:
            return SideRows(text[: self.encoder_length], text[self.encoder_length : -1])
        return SideRows(*np.split(text, [border_of(sample.loss_mask[: len(text)])]))

    def _length(self, sizes: Sequence[int], most: int) -> int:
        """Tokens of one side of the micro-batch."""
        multiple = most if self.multiple is None else self.multiple
        return min(most, multiple * math.ceil(max(sizes) / multiple))
