"""Fill in the middle: documents whose middle comes last, after their beginning and end.

Bavarian et al. 2022 (arXiv:2207.14255). Two places of a text cut it into prefix, middle and suffix, and special tokens
P, M, S tell them apart. A model that has learned such texts writes what belongs between two texts:

    PSM    P prefix S suffix M middle
    SPM    P S suffix M prefix middle

As Megatron-LM does, a sample is changed after it was cut from the data: each of its documents, or the part of one that
is in it, by itself, so the tokens that end documents stay where documents end. Places are those of characters: the
tokens of a document are read as text, which is cut, and the three parts are turned into tokens again. Where that would
lose something (a special token inside, half a character at the border of a sample, a tokenizer that puts a space before
every text), the cut is between two tokens. The sample then is cut, or filled up, to the length that it had.

Draws are named by (seed, data set, number of the sample). So no layout, no worker and no resume changes a sample, and
one that comes again in another epoch has other middles.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatronish.config.sections.data import FimConfig
from megatronish.data.sample import Dataset, Sample, build_indices, read_ahead
from megatronish.parallel.streams import numpy_stream
from megatronish.tokenizer.control_tokens import MiddleTokens
from megatronish.tokenizer.tokenizer import Tokenizer

FORMAT = "megatronish fill in the middle 1"
UNKNOWN = "\ufffd"  # what bytes that are no text are decoded to


@dataclass(frozen=True)
class MiddleRule:
    """How documents change: tokens, and the parts of documents and fragments that do."""

    config: FimConfig
    tokenizer: Tokenizer
    tokens: MiddleTokens
    border: int
    split: int | None

    @classmethod
    def of(cls, config: FimConfig, tokenizer: Tokenizer) -> "MiddleRule":
        """The rule of a config. UserError if the tokenizer lacks a token."""
        given = (config.fim_prefix_token, config.fim_middle_token, config.fim_suffix_token, config.fim_pad_token)
        border, split = tokenizer.eod, None
        if config.fim_eod_token is not None:
            border = tokenizer.token_named(config.fim_eod_token, flag="--fim-eod-token")
        if config.fim_split_sample is not None:
            split = tokenizer.token_named(config.fim_split_sample, flag="--fim-split-sample")
        return cls(config, tokenizer, tokenizer.middle_tokens(given), border, split)

    @property
    def facts(self) -> tuple[object, ...]:
        """All that a sample depends on, but the tokenizer."""
        return (*astuple(self.config), *self.tokens, self.border, self.split)

    def document(self, ids: NDArray[np.int64], stream: np.random.Generator) -> list[int]:
        """Tokens of a document, its middle perhaps last; of one with fragments that of each."""
        if self.split is None or not (ids == self.split).any():
            return self._permuted(ids.tolist(), self.config.fim_rate, stream)
        if stream.random() >= self.config.fim_rate:
            return ids.tolist()
        rate = self.config.fim_rate if self.config.fim_fragment_rate is None else self.config.fim_fragment_rate
        tokens = list[int]()
        for run in _runs(ids == self.split):
            part = ids[run].tolist()
            tokens += part if part[0] == self.split else self._permuted(part, rate, stream)
        return tokens

    def _permuted(self, ids: list[int], rate: float, stream: np.random.Generator) -> list[int]:
        """The tokens as PSM or SPM, or as they are; four draws each time."""
        chance, kind, *places = stream.random(4).tolist()
        if chance >= rate:
            return ids
        text = self.tokenizer.decode(ids)
        if self.config.fim_no_prefix is not None and text.startswith(self.config.fim_no_prefix):
            return ids
        prefix, middle, suffix = self._cut(ids, text, sorted(places))
        tokens = self.tokens
        if kind < self.config.fim_spm_rate:
            return [tokens.prefix, tokens.suffix, *suffix, tokens.middle, *prefix, *middle]
        return [tokens.prefix, *prefix, tokens.suffix, *suffix, tokens.middle, *middle]

    def _cut(self, ids: list[int], text: str, places: Sequence[float]) -> list[list[int]]:
        """Three parts of a document, cut at these places of 0 to 1: of its characters, or of its tokens."""
        first, last = (int(place * (len(text) + 1)) for place in places)
        if UNKNOWN not in text and self._special.isdisjoint(ids):
            parts = self.tokenizer.encode_all([text[:first], text[first:last], text[last:]])
            if self.tokenizer.decode([token for part in parts for token in part]) == text:
                return parts
        first, last = (int(place * (len(ids) + 1)) for place in places)
        return [ids[:first], ids[first:last], ids[last:]]

    @cached_property
    def _special(self) -> frozenset[int]:
        """Tokens that no text is written with."""
        return frozenset(self.tokenizer.special_tokens().values())


class FilledMiddle:
    """Dataset of the samples of another one, `plain`, in which the middle of documents may come last."""

    def __init__(self, plain: Dataset, rule: MiddleRule, *, seed: int) -> None:
        self.plain, self.name, self.num_samples = plain, plain.name, plain.num_samples
        self._rule, self._seed = rule, seed
        self.identity = hashlib.sha256(repr((FORMAT, plain.identity, seed, rule.facts)).encode()).hexdigest()

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Fetch what these samples are read from."""
        read_ahead(self.plain, indices)

    def build_indices(self, num_samples: int) -> None:
        """Build the indices of the first so many samples, where they are not kept yet."""
        build_indices(self.plain, num_samples)

    def sample(self, index: int) -> Sample:
        """The sample of this number of `plain`, of the same length."""
        sample, rule = self.plain.sample(index), self._rule
        stream = numpy_stream(self._seed, "fill in the middle", self.name, index)
        length = len(sample.tokens)
        text = sample.tokens[: length - sample.num_filler]
        is_packed = sample.document_ids is not None
        documents = sample.document_ids if sample.document_ids is not None else np.zeros(length, np.int64)
        parts, numbers = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
        for run in _runs(text == rule.border, documents[: len(text)]):
            ids = text[run]
            part = ids if ids[0] == rule.border else np.asarray(rule.document(ids, stream), np.int64)
            parts.append(part)
            numbers.append(np.full(len(part), documents[run.start]))
        tokens, document_ids = np.concatenate(parts)[:length], np.concatenate(numbers)[:length]
        filler = length - len(tokens)
        tokens = np.append(tokens, np.full(filler, rule.tokens.filler))
        if not is_packed:
            return Sample(tokens, num_filler=filler)
        document_ids = np.append(document_ids, np.full(filler, document_ids[-1] + 1))
        return Sample(tokens, np.arange(length) < length - filler, document_ids, num_filler=filler)


def _runs(is_border: NDArray[np.bool_], documents: NDArray[np.int64] | None = None) -> Iterator[slice]:
    """Places of what is between borders, and of each border, in their order; a run is in one document."""
    begins = is_border[1:] | is_border[:-1]
    if documents is not None:
        begins |= np.diff(documents) != 0
    places = [0, *(np.flatnonzero(begins) + 1).tolist(), len(is_border)]
    yield from map(slice, places[:-1], places[1:])
