"""Data set of chats: files of conversations, mixed by weight, packed into rows of S + 1 tokens.

Which chats are in which row is a plan for each epoch, a function of the files' content, the sequence length, the seed
and the epoch: neither the layout nor the length of the run changes it. Files are mixed first and packed then, so a row
may hold chats of several files. An epoch has as many chats as all files together; a file with a larger weight than its
share begins its next pass earlier.

A chat that is longer than a row is cut: its beginning stays. If no trained token is left of it, it is dropped.

A model with an encoder has a row for each pair of what is read and what is written (chat/encoder.py): two lengths
are not packed as one is.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronish.core.errors import UserError
from megatronish.core.remote import is_url
from megatronish.data.blend import Blend
from megatronish.data.chat.conversation import kind_of
from megatronish.data.chat.file import FORMAT, ChatFile, shuffled
from megatronish.data.chat.prepare import prepared
from megatronish.data.sample import Dataset, DatasetSettings, DatasetSource, Sample
from megatronish.data.samples import TooSmallError

# Packing: samples of different lengths into rows of one length, so that little is left empty.
#
# Best fit, the longest first: each sample goes into the fullest row that has place for it. The free spaces that rows
# have are the bits of one number, so the row is found by a shift. The cost is O(n) shifts after a sort.
#
# A plan is a function of the lengths, their order and the length of a row: it is global, so no layout changes it.
# Samples are packed in windows of WINDOW, in the order of the epoch: so every epoch has rows of its own, and a window
# is large enough to leave less than half a percent empty.


WINDOW = 10_000


class Packs(NamedTuple):
    """Rows of samples: row r has the samples `members[bounds[r] : bounds[r + 1]]`."""

    members: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def row(self, number: int) -> NDArray[np.int64]:
        """The samples of one row."""
        return self.members[self.bounds[number] : self.bounds[number + 1]]


def packs_of(lengths: NDArray[np.int64], capacity: int) -> Packs:
    """Rows for samples of these lengths (each from 1 to `capacity`), named by their numbers in `lengths`."""
    rows: list[list[int]] = []
    for first in range(0, len(lengths), WINDOW):
        rows += [[first + member for member in row] for row in _best_fit(lengths[first : first + WINDOW], capacity)]
    return _of_rows(rows)


def single_rows(count: int) -> Packs:
    """A row for each of so many samples."""
    return Packs(np.arange(count), np.arange(count + 1))


def permuted(packs: Packs, order: NDArray[np.int64]) -> Packs:
    """The same rows in another order: the fullest ones come first out of packing."""
    return _of_rows([packs.row(number).tolist() for number in order.tolist()])


def _of_rows(rows: list[list[int]]) -> Packs:
    members = np.array([member for row in rows for member in row], np.int64)
    return Packs(members, np.cumsum([0, *map(len, rows)]))


def _best_fit(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    with_space: dict[int, list[list[int]]] = defaultdict(list)
    spaces = 0  # bit s is set where a row has s places left
    for member in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[member])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = with_space[space].pop()
            if not with_space[space]:
                spaces ^= 1 << space
        else:
            space, row = capacity, []
            rows.append(row)
        row.append(member)
        left = space - length
        if left:
            with_space[left].append(row)
            spaces |= 1 << left
    return rows


EPOCHS_IN_MEMORY = 2
BOTH = ", which has to hold both completions of a pair"


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
        self.is_paired = files[0].is_paired
        _refuse_mixed(files)
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
    def learned_by(self) -> Literal["text", "pairs", "labelled"]:
        """What an objective learns from these data."""
        return kind_of(self.files[0].counts.chat_format)

    @property
    def num_samples(self) -> int:
        """Rows of the first epoch; others may have a few more or less."""
        return len(self.epoch(0).packs)

    def samples_until(self, num_epochs: float) -> int:
        """Rows of so many epochs from the start, each packed for itself; those of a part of an epoch are rounded up."""
        number = int(num_epochs)
        part = Fraction(num_epochs) - number
        last = len(self.epoch(number).packs) if part else 0
        self._plan_until(number)
        return self._first_rows[number] + ceil(part * last)

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
        return self.row([(int(epoch.files[chat]), int(epoch.places[chat])) for chat in chats.tolist()])

    def row(self, chats: Sequence[tuple[int, int]]) -> Sample:
        """Row of these chats, each a place in a file. What is left over is a document of its own, not trained."""
        texts = [(file, text) for file, place in chats for text in self.files[file].texts(place)]
        lengths = [len(text.tokens) for _, text in texts]
        left = self._length - sum(lengths)
        padding = [np.full(left, self.settings.eod, np.int64)]
        mixes = len(self.files) > 1 and not self.is_paired
        return Sample(
            np.concatenate([*(text.tokens for _, text in texts), *padding]).astype(np.int64),
            np.concatenate([*(text.mask for _, text in texts), np.zeros(left, np.bool_)]),
            np.repeat(np.arange(len(lengths) + 1), [*lengths, left]),
            np.repeat([*(file for file, _ in texts), 0], [*lengths, left]) if mixes else None,
            num_filler=left,
            **self._pairs(chats) if self.is_paired else {},
        )

    def _pairs(self, chats: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Labels of the pairs of a row, and their log-probabilities by a reference, where these are stored."""
        fields = {"pair_labels": np.array([self.files[file].label(place) for file, place in chats])}
        references = [self.files[file].reference(place) for file, place in chats]
        kept = [each for each in references if each is not None]
        return {**fields, "pair_reference": np.stack(kept)} if kept else fields

    def epoch(self, number: int) -> ChatEpoch:
        """Plan of an epoch; the plans before it are made first, because they say where its rows begin."""
        self._plan_until(number + 1)
        if number not in self._epochs:
            self._keep(number, self._planned(number))
        return self._epochs[number]

    def _plan_until(self, end: int) -> None:
        """Plan the epochs before `end`, so that it is known at which row each begins."""
        for each in range(len(self._first_rows) - 1, end):
            self._keep(each, self._planned(each))
            self._first_rows.append(self._first_rows[each] + len(self._epochs[each].packs))

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
        order = shuffled(len(packs), self.settings.seed, self.identity, "rows", number)
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


def open_chats(source: DatasetSource, settings: DatasetSettings) -> ChatDataset:
    """Data set of a file of chats; UserError, a sentence with file and line, for what cannot be trained on."""
    if is_url(source.path):
        raise UserError(
            f"--data-path {source.path} is on object storage, and chats are read from a disk; copy the file to one"
        )
    assert settings.chats is not None, "chats need a setup"
    path = Path(source.path)
    masked = prepared(path, settings.chats, cache=Path(settings.cache_path) if settings.cache_path else None)
    masked.check_ids(settings.vocab_size)
    sides = settings.chats.sides
    file = ChatFile(masked, path, part=source.part, seq_length=settings.seq_length, seed=settings.seed, sides=sides)
    _refuse_empty(file, source, settings)
    pack = settings.chats.config.pack_samples and sides is None
    rows = ChatRows(settings.seq_length, settings.seed, settings.eod, pack)
    return ChatDataset([file], [None], name=source.name, settings=rows)


def _refuse_mixed(files: Sequence[ChatFile]) -> None:
    """UserError for files of which an objective learns in different ways."""
    first = files[0]
    for file in files:
        if kind_of(file.counts.chat_format) != kind_of(first.counts.chat_format):
            raise UserError(
                f"{first.path} is of the format {first.counts.chat_format} and {file.path} of "
                f"{file.counts.chat_format}, which no objective learns from together; use one after the other"
            )


def _refuse_empty(file: ChatFile, source: DatasetSource, settings: DatasetSettings) -> None:
    """TooSmallError if no sample of the part that is read has a trained token that fits into a row."""
    if file.num_samples:
        return
    if file.fit.dropped:
        raise TooSmallError(
            f"all {file.fit.dropped:,} samples of {source.path} for {source.name} have their first trained token after "
            f"--seq-length {settings.seq_length}{BOTH if file.is_paired else ''}; give a longer --seq-length"
        )
    raise TooSmallError(
        f"{source.path} has {file.num_in_file:,} samples and leaves none for {source.name}; give it more data or a "
        "larger part of --split (for example 1,0,0)"
    )
