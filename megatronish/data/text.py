"""Text to measure perplexity on: the tokens of a .bin/.idx pair, or of JSON lines, tokenized here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronish.core.errors import UserError
from megatronish.data.encoding import Encoder, EncodingJob, encode_batch
from megatronish.data.indexed import IndexedTokens
from megatronish.data.inputs import ENDINGS
from megatronish.data.readers import read_batches

PAIR = (".bin", ".idx")


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
    path: str, *, tokenizer: Callable[[], Encoder], json_key: str, vocab_size: int, eod: int | None = None
) -> TokenizedText:
    """Text of the .bin/.idx pair of this prefix, or of a file of JSON or Parquet (data/inputs.py).

    Documents of JSON lines end with `eod`, the end-of-document token of the model (the tokenizer may have another).

    UserError for what is neither, holds less than two tokens, or holds tokens outside the vocabulary.
    """
    is_lines = not path.endswith(PAIR) and (Path(path).is_file() or path.endswith(ENDINGS))
    text = _read_lines(Path(path), tokenizer(), json_key, eod) if is_lines else _open_pair(path, eod)
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


def _open_pair(prefix: str, eod: int | None) -> TokenizedText:
    pair = IndexedTokens(prefix)
    return TokenizedText(pair.tokens, pair.document_starts(), eod)


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


def _read_lines(path: Path, tokenizer: Encoder, json_key: str, eod: int | None) -> TokenizedText:
    if not path.is_file():
        raise UserError(f"--data-path {path} does not exist; check the path")
    counting = _CountingEncoder(tokenizer, eod)
    job = EncodingJob(lambda: counting, (json_key,), append_eod=True)
    tokens, lengths, bad_lines = [np.empty(0, np.int32)], list[int](), list[str]()
    for batch in read_batches(path, (json_key,)):
        encoded = encode_batch(batch, job, counting)
        tokens += encoded.tokens
        lengths += encoded.lengths[0]
        bad_lines += encoded.bad_lines
    if not lengths:
        raise UserError(
            f"--data-path {path} holds no document ({len(bad_lines)} bad lines); each line must be a JSON object with "
            f"a text under {json_key}"
        )
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return TokenizedText(np.concatenate(tokens), starts, counting.eod, counting.num_bytes, tuple(bad_lines))
