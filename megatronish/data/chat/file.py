"""A file of chats, or of pairs of completions, in rows of a length: which samples fit, what is cut, their order."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronish.data.chat.conversation import PAIRED
from megatronish.data.chat.masked import MaskedTokens
from megatronish.parallel.streams import numpy_stream

FORMAT = "megatronish packed chats 1"


@dataclass(frozen=True)
class Fit:
    """What a sequence length makes of the samples of a file."""

    num_samples: int
    """Samples of the part of the file that is read, before any is dropped."""
    tokens: int = 0
    trained: int = 0
    cut: int = 0
    """Samples that are longer than a row."""
    lost_end: int = 0
    """Samples whose last trained token is cut off: mostly the one that ends an answer."""
    dropped: int = 0
    """Samples whose trained tokens are all cut off."""


class ChatText(NamedTuple):
    """Tokens of one text of a sample, and whether each is trained."""

    tokens: NDArray[Any]
    mask: NDArray[np.bool_]


class ChatFile:
    """Samples of a part of a file as they fit into a row: `take(k)` is number k of an endless shuffled order.

    A sample is one text, or the two of a pair of completions, which are cut so that both fit into a row.
    """

    def __init__(
        self, masked: MaskedTokens, path: Path, *, part: tuple[float, float], seq_length: int, seed: int
    ) -> None:
        self.path, self.masked = path, masked
        self.counts = masked.counts
        self.is_paired = self.counts.chat_format in PAIRED
        self._texts_each = 2 if self.is_paired else 1
        self.num_in_file = len(masked) // self._texts_each
        first, end = (round(fraction * self.num_in_file) for fraction in part)
        self.capacity = seq_length + 1
        self._kept, self.lengths, self.fit = self._fitted(range(first, end))
        self.num_samples = len(self._kept)
        self._seed = seed
        self.identity = hashlib.sha256(repr((FORMAT, masked.identity, first, end)).encode()).hexdigest()
        self.stored: NDArray[np.float32] | None = None  # [samples, 2], log-probabilities by a reference
        self._order: tuple[int, NDArray[np.int64]] = (-1, self._kept)

    def _fitted(self, samples: range) -> tuple[NDArray[np.int64], NDArray[np.int64], Fit]:
        """Samples that keep a trained token in each text, their lengths, and the numbers of the audit."""
        kept, lengths, trained, cut, lost_end, dropped = [], [], 0, 0, 0, 0
        for sample in samples:
            masks = [self.masked.mask(document) for document in self._documents(sample)]
            sizes = self._cut_sizes([len(mask) for mask in masks])
            inside = [int(np.count_nonzero(mask[1:size])) for mask, size in zip(masks, sizes, strict=True)]
            cut += any(len(mask) > size for mask, size in zip(masks, sizes, strict=True))
            lost_end += any(bool(mask[size:].any()) for mask, size in zip(masks, sizes, strict=True))
            dropped += min(inside) == 0
            if min(inside):
                kept.append(sample)
                lengths.append(sum(sizes))
                trained += sum(inside)
        fit = Fit(len(samples), sum(lengths), trained, cut, lost_end, dropped)
        return np.array(kept, np.int64), np.array(lengths, np.int64), fit

    def _documents(self, sample: int) -> range:
        return range(sample * self._texts_each, (sample + 1) * self._texts_each)

    def _cut_sizes(self, sizes: list[int]) -> list[int]:
        """Lengths of the texts of a sample in a row: of two that do not fit, what one leaves of its half the other has.

        Both begin with the same prompt, so a cut takes from the longer one first.
        """
        left = self.capacity
        if len(sizes) == 1:
            return [min(sizes[0], left)]
        first, second = sizes
        return [min(first, max(left - second, left // 2)), min(second, max(left - first, left - left // 2))]

    def take(self, number: int) -> int:
        """Number k of the endless order, as a place in `lengths`."""
        epoch, place = divmod(number, self.num_samples)
        if self._order[0] != epoch:
            self._order = (epoch, shuffled(self.num_samples, self._seed, self.identity, self.capacity, epoch))
        return int(self._order[1][place])

    def texts(self, place: int) -> list[ChatText]:
        """Texts of a sample, as much of them as fits into a row."""
        documents = self._documents(int(self._kept[place]))
        masks = [self.masked.mask(document) for document in documents]
        if self.is_paired:  # the first bit of the first text is the label
            masks[0] = masks[0].copy()
            masks[0][0] = False
        sizes = self._cut_sizes([len(mask) for mask in masks])
        return [
            ChatText(self.masked.tokens(document)[:size], mask[:size])
            for document, mask, size in zip(documents, masks, sizes, strict=True)
        ]

    def label(self, place: int) -> bool:
        """Of a pair: whether the first completion is wanted."""
        return bool(self.masked.mask(self._documents(int(self._kept[place]))[0])[0])

    def reference(self, place: int) -> NDArray[np.float32] | None:
        """Of a pair: its log-probabilities by the reference, where they are stored."""
        return None if self.stored is None else self.stored[place]


def shuffled(size: int, *names: str | int) -> NDArray[np.int64]:
    """Permutation by sorting raw draws, which numpy keeps equal over its versions."""
    return numpy_stream("chats", *names).bit_generator.random_raw(size).argsort(kind="stable")
