"""Pairs of sentences: samples of BERT, [CLS] A [SEP] B [SEP], from files whose sequences are sentences.

Sentences of a document are taken in order until they have the tokens of a sample; a part of the samples is shorter
(--short-seq-prob), with any number of tokens from two on. Of each run of sentences the first ones are A and the rest B,
cut at a random place, and in half of the samples B stands first: whether they are swapped is what the binary head
learns (sentence order, Lan et al. 2020, arXiv:1909.11942, as Megatron-LM has it). A run of a single sentence is all A.
A pair that is too long loses tokens at the front or the end of its longer half.

Which sentences make up a sample is drawn once, by the seed and the document: so an epoch has the same samples as any
other, in another order, and cut and swapped in another way. All is named, so that no layout and no worker changes it.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronish.core.errors import UserError
from megatronish.data.indexed import IndexedTokens
from megatronish.data.sample import DatasetSettings, DatasetSource, Sample
from megatronish.data.samples import TooSmallError
from megatronish.parallel.streams import numpy_stream
from megatronish.tokenizer.control_tokens import MaskTokens

SPECIAL = 3
"""Tokens of a pair that are no text: one before it, one after each sentence."""
FORMAT = "megatronish sentences 1"


class SentenceRun(NamedTuple):
    """Sentences [begin, end) of a file that make up a sample, and the most tokens of text that it may have."""

    begin: int
    end: int
    most: int


def pair(
    parts: tuple[NDArray[np.int64], NDArray[np.int64]],
    *,
    length: int,
    masks: MaskTokens,
    is_swapped: bool,
    is_full: bool = False,
) -> Sample:
    """The sample of two texts, of `length` + 1 tokens; the second may be empty.

    `is_full`: there is no filler in any sample of the data, so that none needs to be masked.
    """
    a, b = parts
    separator = np.array([masks.separator])
    row = np.concatenate([np.array([masks.first]), a, separator, *([b, separator] if len(b) else [])])
    filler = length - len(row)
    assert filler >= 0 and not (is_full and filler), f"{len(row)} tokens are not {length}"
    types = np.zeros(length + 1, np.int64)
    types[len(a) + 2 : len(row)] = 1
    documents = np.zeros(length + 1, np.int64)
    documents[len(row) :] = 1
    return Sample(
        np.concatenate([row, np.full(filler + 1, masks.filler)]).astype(np.int64),
        document_ids=None if is_full else documents,
        num_filler=filler,
        token_types=types,
        is_swapped=is_swapped,
    )


class SentenceSamples:
    """Samples of pairs of sentences from a range of a file's documents; `sample(i)` for any i >= 0."""

    def __init__(
        self, file: IndexedTokens, source: DatasetSource, settings: DatasetSettings, *, documents: range
    ) -> None:
        assert settings.masks is not None, "sentences need the special tokens of a tokenizer"
        self.name, self.settings, self.masks, self.file = source.name, settings, settings.masks, file
        refuse_short(settings.seq_length)
        facts = (FORMAT, file.identity, documents, settings.seq_length, settings.seed, settings.short_seq_prob)
        self._order = hashlib.sha256(repr(facts).encode()).hexdigest()
        self.identity = hashlib.sha256(f"{self._order} {file.content} {settings.masks}".encode()).hexdigest()
        self._runs = self._runs_of(documents)
        self.num_samples: int = len(self._runs)
        if not self._runs:
            raise TooSmallError(
                f"the {source.name} data of {file.prefix} has no sentence in {len(documents)} of its "
                f"{file.num_documents} documents; give it more data, or a larger part of --split"
            )
        self._orders: dict[int, NDArray[np.int64]] = {}
        self.sample(0)

    def _runs_of(self, documents: range) -> list[SentenceRun]:
        """Every sample of an epoch, in the order of the file."""
        room, settings, runs = self.settings.seq_length - SPECIAL, self.settings, list[SentenceRun]()
        lengths, starts = self.file.sequence_lengths, self.file.document_indices
        for document in documents:
            stream = numpy_stream(settings.seed, "sentences", document)
            begin, end = int(starts[document]), int(starts[document + 1])
            while begin < end:
                short, size = stream.random(2)
                most = 2 + int(size * (room - 1)) if short < settings.short_seq_prob else room
                stop, tokens = begin, 0
                while stop < end and (stop == begin or tokens < most):
                    tokens += int(lengths[stop])
                    stop += 1
                runs += [SentenceRun(begin, stop, most)] * (tokens > 0)
                begin = stop
        return runs

    def sample(self, index: int) -> Sample:
        """A pair of the run of sentences that comes at this place of its epoch."""
        run = self._run(index)
        self.file.check_size()
        texts = [self.file[sequence] for sequence in range(run.begin, run.end)]
        cut, swap, front = numpy_stream(self.settings.seed, "pairs", self._order, index).random(3)
        number = 1 + int(cut * (len(texts) - 1)) if len(texts) > 1 else 1
        a, b = (np.concatenate([np.empty(0, np.int64), *part]) for part in (texts[:number], texts[number:]))
        a, b = _shortened(a, b, most=run.most, front=front)
        is_swapped = bool(len(b)) and swap < 0.5
        self._check(a, b)
        parts = (b, a) if is_swapped else (a, b)
        return pair(parts, length=self.settings.seq_length, masks=self.masks, is_swapped=is_swapped)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Fetch what these samples are read from; of data on a disk nothing."""
        runs = map(self._run, indices)
        self.file.read_ahead((self.file.sequence_start(run.begin), self.file.sequence_start(run.end)) for run in runs)

    def _run(self, index: int) -> SentenceRun:
        epoch, place = divmod(index, self.num_samples)
        return self._runs[self._order_of(epoch)[place]]

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            stream = numpy_stream(self.settings.seed, "data", self._order, "sentences", epoch)
            order = stream.bit_generator.random_raw(self.num_samples).argsort(kind="stable")
            self._orders = {epoch: order, **dict(list(self._orders.items())[:1])}
        return self._orders[epoch]

    def _check(self, *texts: NDArray[np.int64]) -> None:
        largest = max(int(text.max(initial=0)) for text in texts)
        if largest >= self.settings.vocab_size:
            raise UserError(
                f"{self.file.where} holds token id {largest}, but the vocabulary has {self.settings.vocab_size}; "
                "train with the tokenizer that the data was made with, or preprocess it again"
            )


def refuse_short(seq_length: int) -> None:
    """UserError for a sample without room for two sentences."""
    if seq_length < SPECIAL + 2:
        raise UserError(
            f"seq_length={seq_length} has no room for two sentences of a token each between {SPECIAL} special tokens; "
            f"use --seq-length {SPECIAL + 2} or more"
        )


def _shortened(
    a: NDArray[np.int64], b: NDArray[np.int64], *, most: int, front: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Both texts with at most `most` tokens together: the longer one loses them first, at its front by chance."""
    excess = len(a) + len(b) - most
    if excess <= 0:
        return a, b
    of_longer = min(excess, abs(len(a) - len(b)))
    both = excess - of_longer
    of_a = (of_longer if len(a) > len(b) else 0) + (both + 1) // 2
    of_b = excess - of_a
    return _without(a, of_a, front), _without(b, of_b, front)


def _without(text: NDArray[np.int64], number: int, front: float) -> NDArray[np.int64]:
    """The text without so many tokens, of which the part `front` is taken from its beginning."""
    at_front = int(front * (number + 1))
    return text[at_front : len(text) - (number - at_front)]


def open_sentences(source: DatasetSource, settings: DatasetSettings) -> SentenceSamples:
    """Pairs of the sentences of the .bin/.idx pair with this prefix."""
    file = settings.files.open(source.path)
    first, end = (round(fraction * file.num_documents) for fraction in source.part)
    return SentenceSamples(file, source, settings, documents=range(first, end))
