"""Mock data: made-up tokens that can be learned, a function of seed and sample number.

A sample is a row of documents. A document counts up from a start, low ids being likelier, by its own stride of 1 to 4,
with one token in twenty replaced by any other, and ends with the end-of-document token. A model first learns which
tokens are common, then to count. Mock samples of BERT are pairs of texts, which are parts of such a sample.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from megatronish.data.sample import DatasetSettings, DatasetSource, Sample
from megatronish.data.sentences import SPECIAL, pair, refuse_short
from megatronish.parallel.streams import numpy_stream

NOISE = 0.05
MEAN_DOCUMENT = 64


class MockSamples:
    """Dataset of made-up tokens without end; sample i is a function of (seed, name, i) alone."""

    num_samples: int | None = None

    def __init__(self, *, name: str, seq_length: int, seed: int, vocab_size: int, eod: int) -> None:
        self.name = name
        self._length = seq_length + 1
        self._seed = seed
        self._vocab_size = vocab_size
        self._eod = eod
        facts = ("mock", name, seq_length, seed, vocab_size, eod)
        self.identity = hashlib.sha256(repr(facts).encode()).hexdigest()

    def sample(self, index: int) -> Sample:
        """S + 1 tokens of made-up documents, end to end."""
        stream = numpy_stream(self._seed, "mock", self.name, index)
        place = np.arange(self._length)
        ends = stream.random(self._length) < 1 / MEAN_DOCUMENT
        document: NDArray[np.int64] = np.cumsum(ends) - ends
        begins = np.maximum.accumulate(np.where(np.roll(ends, 1), place, 0))
        ordinary = max(self._vocab_size - 1, 1)
        starts = (ordinary * stream.random(self._length) ** 3).astype(np.int64)
        strides = stream.integers(1, 5, self._length)
        counted = (starts[document] + strides[document] * (place - begins)) % ordinary
        noise = stream.random(self._length) < NOISE
        values = np.where(noise, stream.integers(0, ordinary, self._length), counted)
        return Sample(np.where(ends, self._eod, (self._eod + 1 + values) % self._vocab_size))


def open_mock_samples(source: DatasetSource, settings: DatasetSettings) -> MockSamples:
    """Mock samples named by the source, whose path is not read."""
    return MockSamples(
        name=source.name,
        seq_length=settings.seq_length,
        seed=settings.seed,
        vocab_size=settings.vocab_size,
        eod=settings.eod,
    )


class MockSentenceSamples:
    """Pairs of made-up texts without end, which can be learned: each counts up, and B continues A."""

    num_samples: int | None = None

    def __init__(self, mock: MockSamples, settings: DatasetSettings) -> None:
        assert settings.masks is not None, "sentences need the special tokens of a tokenizer"
        self.name, self._mock, self._settings, self._masks = mock.name, mock, settings, settings.masks
        self.identity = hashlib.sha256(f"sentences {mock.identity}".encode()).hexdigest()

    def sample(self, index: int) -> Sample:
        """A pair whose texts are two parts of a mock sample, in order or not, without filler."""
        length = self._settings.seq_length
        cut, swap = numpy_stream(self._settings.seed, "mock sentences", self.name, index).random(2)
        text = self._mock.sample(index).tokens[: length - SPECIAL]
        middle = 1 + int(cut * (len(text) - 1))
        parts, is_swapped = (text[:middle], text[middle:]), bool(swap < 0.5)
        parts = parts[::-1] if is_swapped else parts
        return pair(parts, length=length, masks=self._masks, is_swapped=is_swapped, is_full=True)


def open_mock(source: DatasetSource, settings: DatasetSettings) -> MockSamples | MockSentenceSamples:
    """Mock samples named by the source, whose path is not read: of BERT, which has masks, pairs of sentences."""
    mock = open_mock_samples(source, settings)
    if settings.masks is None:
        return mock
    refuse_short(settings.seq_length)
    return MockSentenceSamples(mock, settings)
