"""A file of chats, or of pairs of completions, in rows of a length: which samples fit, what is cut, their order."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronish.data.chat.conversation import PAIRED
from megatronish.data.chat.masked import MaskedTokens
from megatronish.data.chat.setup import SideLimits
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

    A sample is one text, or the two of a pair of completions, which are cut so that both fit into a row. With `sides`
    it is what an encoder reads and what a decoder writes, each cut to its row; what is read keeps its end.
    """

    def __init__(
        self,
        masked: MaskedTokens,
        path: Path,
        *,
        part: tuple[float, float],
        seq_length: int,
        seed: int,
        sides: SideLimits | None = None,
    ) -> None:
        self.path, self.masked, self.sides = path, masked, sides
        self.counts = masked.counts
        self.is_paired = self.counts.chat_format in PAIRED
        self._texts_each = 2 if self.is_paired else 1
        self.num_in_file = len(masked) // self._texts_each
        first, end = (round(fraction * self.num_in_file) for fraction in part)
        self.capacity = seq_length + 1
        self._kept, self.lengths, self.fit = self._fitted(range(first, end))
        self.num_samples = len(self._kept)
        self._seed = seed
        named = (FORMAT, masked.identity, first, end, *(sides or ()))
        self.identity = hashlib.sha256(repr(named).encode()).hexdigest()
        self.stored: NDArray[np.float32] | None = None  # [samples, 2], log-probabilities by a reference
        self._order: tuple[int, NDArray[np.int64]] = (-1, self._kept)

    def _fitted(self, samples: range) -> tuple[NDArray[np.int64], NDArray[np.int64], Fit]:
        """Samples that keep a trained token in each text, their lengths, and the numbers of the audit."""
        kept, lengths, trained, cut, lost_end, dropped = [], [], 0, 0, 0, 0
        for sample in samples:
            masks = [self.masked.mask(document) for document in self._documents(sample)]
            rests = [mask[places] for mask, places in zip(masks, self._places(masks), strict=True)]
            inside = [int(np.count_nonzero(rest[1:])) for rest in rests]
            cut += any(len(mask) > len(rest) for mask, rest in zip(masks, rests, strict=True))
            lost_end += any(np.count_nonzero(mask[1:]) > left for mask, left in zip(masks, inside, strict=True))
            dropped += min(inside) == 0
            if min(inside):
                kept.append(sample)
                lengths.append(sum(map(len, rests)))
                trained += sum(inside)
        fit = Fit(len(samples), sum(lengths), trained, cut, lost_end, dropped)
        return np.array(kept, np.int64), np.array(lengths, np.int64), fit

    def _documents(self, sample: int) -> range:
        return range(sample * self._texts_each, (sample + 1) * self._texts_each)

    def _places(self, masks: list[NDArray[np.bool_]]) -> Sequence[slice | NDArray[np.bool_]]:
        """Of the tokens of each text of a sample those that are in a row."""
        if self.sides is None:
            return [slice(size) for size in self._cut_sizes([len(mask) for mask in masks])]
        return [_of_sides(mask, self.sides) for mask in masks]

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
        return [
            ChatText(self.masked.tokens(document)[places], mask[places])
            for document, mask, places in zip(documents, masks, self._places(masks), strict=True)
        ]

    def label(self, place: int) -> bool:
        """Of a pair: whether the first completion is wanted."""
        return bool(self.masked.mask(self._documents(int(self._kept[place]))[0])[0])

    def reference(self, place: int) -> NDArray[np.float32] | None:
        """Of a pair: its log-probabilities by the reference, where they are stored."""
        return None if self.stored is None else self.stored[place]


def border_of(mask: NDArray[np.bool_]) -> int:
    """Number of tokens that an encoder reads, of a text whose trained tokens a decoder writes after them."""
    return len(mask) - int(np.count_nonzero(mask))


def _of_sides(mask: NDArray[np.bool_], sides: SideLimits) -> NDArray[np.bool_]:
    """bool [tokens]: the beginning of each side, and the end of what is read."""
    kept, border = np.ones(len(mask), np.bool_), border_of(mask)
    kept[sides.encoder - 1 : border - 1] = False
    kept[border + sides.decoder :] = False
    return kept


def shuffled(size: int, *names: str | int) -> NDArray[np.int64]:
    """Permutation by sorting raw draws, which numpy keeps equal over its versions."""
    return numpy_stream("chats", *names).bit_generator.random_raw(size).argsort(kind="stable")
