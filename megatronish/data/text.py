"""Text to measure perplexity on: the tokens of a .bin/.idx pair, or of JSON lines, tokenized here.

Windows over it predict each token exactly once. A span of n tokens has n - 1 predictions: every token but the first,
from those before it. A window shows `seq_length` tokens; the next one begins `stride` further, and what both could
predict counts in the first, where it came first. So except for those of the first window every prediction sees at least
seq_length - stride tokens before its own. The last window is filled up with made-up tokens that are not predicted;
nothing is dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronish.config.sections.data import MANIFEST
from megatronish.core.errors import UserError
from megatronish.core.remote import Location, RemotePath, location
from megatronish.data.encoding import Encoder, EncodingJob, encode_batch
from megatronish.data.indexed import IndexedTokens
from megatronish.data.inputs import ENDINGS
from megatronish.data.readers import read_batches
from megatronish.data.sample import Sample
from megatronish.data.stores import ask
from megatronish.data.token_files import TokenFiles

PAIR = (".bin", ".idx", MANIFEST)


@dataclass(frozen=True)
class TokenizedText:
    """Tokens of documents end to end; document d is `tokens[starts[d] : starts[d + 1]]`.

    `eod` is the token that ends documents, and `num_bytes` the size of the text, where known. `bad_lines` has a
    sentence for each line without text.
    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    eod: int | None = None
    num_bytes: int | None = None
    bad_lines: tuple[str, ...] = ()


def read_text(
    path: str,
    *,
    tokenizer: Callable[[], Encoder],
    json_key: str,
    vocab_size: int,
    eod: int | None = None,
    files: TokenFiles,
) -> TokenizedText:
    """Text of the .bin/.idx pair of this prefix, or of a file of JSON or Parquet (data/inputs.py); both may be URLs.

    Documents of JSON lines end with `eod`, the end-of-document token of the model (the tokenizer may have another).

    UserError for what is neither, holds less than two tokens, or holds tokens outside the vocabulary.
    """
    source = location(path)
    is_lines = not path.endswith(PAIR) and (_is_file(source) or path.endswith(ENDINGS))
    text = _read_lines(source, tokenizer(), json_key, eod) if is_lines else _text_of(files.open(path), eod)
    if len(text.tokens) < 2:
        raise UserError(
            f"--data-path {path} holds {len(text.tokens)} tokens, and perplexity needs at least two; name a longer text"
        )
    lowest, highest = int(text.tokens.min()), int(text.tokens.max())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        place = int(np.argmax(text.tokens == wrong))
        raise UserError(
            f"--data-path {path} holds token {wrong} at place {place:,}, but the model's vocabulary has {vocab_size}; "
            "name a text that was tokenized with the tokenizer of this model"
        )
    return text


def _is_file(place: Location) -> bool:
    return ask(place, place.is_file, what="--data-path") if isinstance(place, RemotePath) else place.is_file()


def _text_of(pair: IndexedTokens, eod: int | None) -> TokenizedText:
    return TokenizedText(np.asarray(pair.tokens), pair.document_starts(), eod)


class _CountingEncoder:
    """Tokenizer that adds up the bytes of the texts it encodes."""

    def __init__(self, tokenizer: Encoder, eod: int | None) -> None:
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        self.eod = tokenizer.eod if eod is None else eod
        self.num_bytes = 0

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        ids = self.tokenizer.encode_all(texts)
        self.num_bytes += sum(len(text.encode()) for text in texts)
        return ids


def _read_lines(path: Location, tokenizer: Encoder, json_key: str, eod: int | None) -> TokenizedText:
    if not _is_file(path):
        raise UserError(f"--data-path {path} does not exist; check the path")
    counting = _CountingEncoder(tokenizer, eod)
    job = EncodingJob(lambda: counting, (json_key,), append_eod=True)
    tokens, lengths, bad_lines = [np.empty(0, np.int32)], list[int](), list[str]()
    for batch in read_batches(path, (json_key,)):
        encoded = encode_batch(batch, job, counting)
        tokens += encoded.tokens
        lengths += encoded.lengths[0]
        bad_lines += map(str, encoded.bad_lines)
    if not lengths:
        raise UserError(
            f"--data-path {path} holds no document ({len(bad_lines)} bad lines); each line must be a JSON object with "
            f"a text under {json_key}"
        )
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return TokenizedText(np.concatenate(tokens), starts, counting.eod, counting.num_bytes, tuple(bad_lines))


class Windows:
    """Windows over spans of tokens; span d is `tokens[starts[d] : starts[d + 1]]`, and no window crosses spans."""

    def __init__(self, tokens: NDArray[Any], starts: NDArray[np.int64], *, seq_length: int, stride: int) -> None:
        assert 1 <= stride <= seq_length
        self.tokens, self.starts, self.seq_length, self.stride = tokens, starts, seq_length, stride
        predictions = np.maximum(np.diff(starts) - 1, 0)
        later = -(-np.maximum(predictions - seq_length, 0) // stride)
        self._before = np.concatenate(([0], np.cumsum((predictions > 0) + later)))
        self.num_predictions = int(predictions.sum())

    def __len__(self) -> int:
        return int(self._before[-1])

    def narrowed(self, *, multiple_of: int) -> "Windows":
        """The same predictions from windows no wider than the longest span, rounded up to a multiple."""
        longest = max(1, int(np.diff(self.starts).max()) - 1)
        width = min(self.seq_length, -(-longest // multiple_of) * multiple_of)
        return Windows(self.tokens, self.starts, seq_length=width, stride=min(self.stride, width))

    def sample(self, index: int) -> Sample:
        """A window, filled up with zeros that do not count in the loss; beyond the last window, zeros alone.

        The first window of a span counts all its labels, a later one the last `stride`: the window before counted the
        labels before them.
        """
        tokens, loss_mask = np.zeros(self.seq_length + 1, np.int64), np.zeros(self.seq_length + 1, np.bool_)
        if index < len(self):
            start, end, is_first = self._place(index)
            tokens[: end - start] = self.tokens[start:end]
            loss_mask[1 if is_first else self.seq_length - self.stride + 1 : end - start] = True
        return Sample(tokens, loss_mask)

    def _place(self, index: int) -> tuple[int, int, bool]:
        """First token of a window, the end of its labels, and whether it is the first window of its span."""
        span = int(np.searchsorted(self._before, index, side="right")) - 1
        number = index - int(self._before[span])
        start = int(self.starts[span]) + number * self.stride
        return start, min(start + self.seq_length + 1, int(self.starts[span + 1])), number == 0
