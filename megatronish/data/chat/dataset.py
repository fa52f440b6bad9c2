"""Data set of chats: files of conversations, mixed by weight, packed into rows of S + 1 tokens.

Which chats are in which row is a plan for each epoch, a function of the files' content, the sequence length, the seed
and the epoch: neither the layout nor the length of the run changes it. Files are mixed first and packed then, so a row
may hold chats of several files. An epoch has as many chats as all files together; a file with a larger weight than its
share begins its next pass earlier.

A chat that is longer than a row is cut: its beginning stays. If no trained token is left of it, it is dropped.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronish.data.blend import Blend
from megatronish.data.chat.counts import ChatCounts
from megatronish.data.chat.masked import MaskedTokens
from megatronish.data.chat.packing import Packs, packs_of, permuted, single_rows
from megatronish.data.chat.prepare import prepared
from megatronish.data.sample import Dataset, DatasetSettings, DatasetSource, Sample
from megatronish.data.samples import TooSmallError
from megatronish.streams import numpy_stream

FORMAT = "megatronish packed chats 1"
EPOCHS_IN_MEMORY = 2


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


class ChatFile:
    """Samples of a part of a file as they fit into a row: `take(k)` is number k of an endless shuffled order."""

    def __init__(
        self, masked: MaskedTokens, path: Path, *, part: tuple[float, float], seq_length: int, seed: int
    ) -> None:
        self.path, self.masked = path, masked
        self.counts = ChatCounts(**masked.counts)
        first, end = (round(fraction * len(masked)) for fraction in part)
        self.capacity = seq_length + 1
        self._kept, self.lengths, self.fit = self._fitted(range(first, end))
        self.num_samples = len(self._kept)
        self._seed = seed
        self.identity = hashlib.sha256(repr((FORMAT, masked.identity, first, end)).encode()).hexdigest()
        self._order: tuple[int, NDArray[np.int64]] = (-1, self._kept)

    def _fitted(self, documents: range) -> tuple[NDArray[np.int64], NDArray[np.int64], Fit]:
        """Samples that keep a trained token, their lengths, and the numbers of the audit."""
        kept, lengths, trained, cut, lost_end, dropped = [], [], 0, 0, 0, 0
        for document in documents:
            mask = self.masked.mask(document)
            inside = int(np.count_nonzero(mask[1 : self.capacity]))
            is_cut = len(mask) > self.capacity
            cut += is_cut
            lost_end += is_cut and bool(mask[self.capacity :].any())
            dropped += inside == 0
            if inside:
                kept.append(document)
                lengths.append(min(len(mask), self.capacity))
                trained += inside
        fit = Fit(len(documents), sum(lengths), trained, cut, lost_end, dropped)
        return np.array(kept, np.int64), np.array(lengths, np.int64), fit

    def take(self, number: int) -> int:
        """Number k of the endless order, as a place in `lengths`."""
        epoch, place = divmod(number, self.num_samples)
        if self._order[0] != epoch:
            self._order = (epoch, _order(self.num_samples, self._seed, self.identity, self.capacity, epoch))
        return int(self._order[1][place])

    def tokens(self, place: int) -> NDArray[Any]:
        """Tokens of a sample, as many as fit into a row."""
        return self.masked.tokens(int(self._kept[place]))[: self.capacity]

    def mask(self, place: int) -> NDArray[np.bool_]:
        """Whether each of its tokens is trained."""
        return self.masked.mask(int(self._kept[place]))[: self.capacity]


class ChatRows(NamedTuple):
    """How chats become rows; `eod` fills what is left over."""

    seq_length: int
    seed: int
    eod: int
    pack: bool


@dataclass(frozen=True)
class ChatEpoch:
    """One pass: chat c is place `places[c]` of file `files[c]`, and rows are made of chats."""

    files: NDArray[np.int64]
    places: NDArray[np.int64]
    packs: Packs


class ChatDataset:
    """Rows of S + 1 tokens from files of chats, which do not see each other in a row; a `Dataset`.

    A weight of None is the number of a file's chats.
    """

    def __init__(
        self, files: Sequence[ChatFile], weights: Sequence[float | None], *, name: str, settings: ChatRows
    ) -> None:
        self.name, self.files, self.settings = name, list(files), settings
        self._length = settings.seq_length + 1
        shares = [file.num_samples if weight is None else weight for file, weight in zip(files, weights, strict=True)]
        self._blend = Blend(files, shares, name=name) if len(files) > 1 else None  # type: ignore[arg-type]
        mixed = files[0].identity if self._blend is None else self._blend.identity
        self.identity = hashlib.sha256(repr((FORMAT, mixed, settings)).encode()).hexdigest()
        self._count = sum(file.num_samples for file in files)
        self._first_rows = [0]  # row of the run at which each epoch begins; one more entry than epochs are known
        self._epochs: dict[int, ChatEpoch] = {}

    def mixed(self, members: Sequence[Dataset], weights: Sequence[float | None], *, name: str) -> "ChatDataset":
        """Data set of the files of all members, as a `MixingDataset`."""
        files = [file for member in members if isinstance(member, ChatDataset) for file in member.files]
        return ChatDataset(files, weights, name=name, settings=self.settings)

    @property
    def num_samples(self) -> int:
        """Rows of the first epoch; others may have a few more or less."""
        return len(self.epoch(0).packs)

    @property
    def names(self) -> list[str]:
        """Names of the files, as their losses are reported: the whole path where two have one name."""
        stems = [file.path.stem for file in self.files]
        return [
            stem if stems.count(stem) == 1 else str(file.path) for stem, file in zip(stems, self.files, strict=True)
        ]

    def sample(self, index: int) -> Sample:
        """Row `index` of the run."""
        number = self._epoch_of(index)
        epoch = self.epoch(number)
        chats = epoch.packs.row(index - self._first_rows[number])
        found = [(int(epoch.files[chat]), int(epoch.places[chat])) for chat in chats.tolist()]
        tokens = [self.files[file].tokens(place) for file, place in found]
        lengths = [len(each) for each in tokens]
        left = self._length - sum(lengths)
        # What is left over is a document of its own, which is not trained.
        padding = [np.full(left, self.settings.eod, np.int64)]
        return Sample(
            np.concatenate([*tokens, *padding]).astype(np.int64),
            np.concatenate([*(self.files[file].mask(place) for file, place in found), np.zeros(left, np.bool_)]),
            np.repeat(np.arange(len(lengths) + 1), [*lengths, left]),
            np.repeat([*(file for file, _ in found), 0], [*lengths, left]) if len(self.files) > 1 else None,
        )

    def epoch(self, number: int) -> ChatEpoch:
        """Plan of an epoch; the plans before it are made first, because they say where its rows begin."""
        for each in range(len(self._first_rows) - 1, number + 1):
            self._keep(each, self._planned(each))
            self._first_rows.append(self._first_rows[each] + len(self._epochs[each].packs))
        if number not in self._epochs:
            self._keep(number, self._planned(number))
        return self._epochs[number]

    def _keep(self, number: int, epoch: ChatEpoch) -> None:
        while len(self._epochs) >= EPOCHS_IN_MEMORY:
            del self._epochs[next(iter(self._epochs))]
        self._epochs[number] = epoch

    def _epoch_of(self, index: int) -> int:
        while self._first_rows[-1] <= index:
            self.epoch(len(self._first_rows) - 1)
        return int(np.searchsorted(self._first_rows, index, side="right")) - 1

    def _planned(self, number: int) -> ChatEpoch:
        chosen = [self._place(chat) for chat in range(number * self._count, (number + 1) * self._count)]
        files = np.array([file for file, _ in chosen], np.int64)
        places = np.array([self.files[file].take(taken) for file, taken in chosen], np.int64)
        lengths = np.array([self.files[file].lengths[place] for file, place in zip(files, places, strict=True)])
        packs = packs_of(lengths, self._length) if self.settings.pack else single_rows(len(lengths))
        order = _order(len(packs), self.settings.seed, self.identity, "rows", number)
        return ChatEpoch(files, places, permuted(packs, order))

    def _place(self, chat: int) -> tuple[int, int]:
        """Chat of the run as (file, number in its order)."""
        return (0, chat) if self._blend is None else self._blend.place(chat)

    @property
    def filled(self) -> float:
        """Part of the places of the first epoch that chats take."""
        epoch = self.epoch(0)
        lengths = [int(self.files[file].lengths[place]) for file, place in zip(epoch.files, epoch.places, strict=True)]
        return sum(lengths) / (len(epoch.packs) * self._length)


def _order(size: int, *names: str | int) -> NDArray[np.int64]:
    """Permutation by sorting raw draws, which numpy keeps equal over its versions."""
    return numpy_stream("chats", *names).bit_generator.random_raw(size).argsort(kind="stable")


def open_chats(source: DatasetSource, settings: DatasetSettings) -> ChatDataset:
    """Data set of a file of chats; UserError, a sentence with file and line, for what cannot be trained on."""
    assert settings.chats is not None, "chats need a setup"
    path = Path(source.path)
    masked = prepared(path, settings.chats, cache=Path(settings.cache_path) if settings.cache_path else None)
    file = ChatFile(masked, path, part=source.part, seq_length=settings.seq_length, seed=settings.seed)
    _refuse_empty(file, source, settings)
    rows = ChatRows(settings.seq_length, settings.seed, settings.eod, settings.chats.config.pack_samples)
    return ChatDataset([file], [None], name=source.name, settings=rows)


def _refuse_empty(file: ChatFile, source: DatasetSource, settings: DatasetSettings) -> None:
    """TooSmallError if no sample of the part that is read has a trained token that fits into a row."""
    if file.num_samples:
        return
    if file.fit.dropped:
        raise TooSmallError(
            f"all {file.fit.dropped:,} samples of {source.path} for {source.name} have their first trained token after "
            f"--seq-length {settings.seq_length}; give a longer --seq-length"
        )
    raise TooSmallError(
        f"{source.path} has {len(file.masked):,} samples and leaves none for {source.name}; give it more data or a "
        "larger part of --split (for example 1,0,0)"
    )
