"""Sizes of vocabularies, read from a tokenizer's files without the libraries that run tokenizers."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatronish.config.sections.data import DataConfig
from megatronish.core.errors import UserError
from megatronish.tokenizer.names import tokenizer_type

OF_BYTES = 257
MOST_BYTES = 200 * 2**20  # of a file that is read here
PIECES = 1  # number of the field of a SentencePiece model that repeats for each piece
WIDTHS = {1: 8, 5: 4}  # bytes of values of fixed size, by their wire type


def vocabulary_of_files(data: DataConfig) -> int | None:
    """Tokens of the tokenizer that a config names; None where its files are not there or do not tell."""
    with suppress(OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError, UserError, IndexError):
        kind = tokenizer_type(data.tokenizer_type)
        if kind == "bytes":
            return OF_BYTES
        if kind == "huggingface" and data.vocab_file:
            return 1 + max(json.loads(_content(Path(data.vocab_file))).values())
        if data.tokenizer_model is None:
            return None
        path = Path(data.tokenizer_model)
        if kind == "huggingface":
            found = json.loads(_content(path / "tokenizer.json" if path.is_dir() else path))
            return 1 + max(_ids(found))
        if kind == "sentencepiece":
            return sum(number == PIECES for number in _fields(_content(path))) or None
    return None


def _content(path: Path) -> bytes:
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} is too large for a tokenizer")
    return path.read_bytes()


def _ids(tokenizer: dict[str, Any]) -> Iterator[int]:
    """Ids of a tokenizer.json: a table, or the places of Unigram's list; and what was added."""
    vocabulary = tokenizer["model"]["vocab"]
    yield from vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    yield from (int(each["id"]) for each in tokenizer.get("added_tokens") or ())


def _fields(message: bytes) -> Iterator[int]:
    """Numbers of the fields of a protobuf message, in their order."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            _, at = _varint(message, at)
        elif kind == 2:
            size, at = _varint(message, at)
            at += size
        else:
            at += WIDTHS[kind]
        if at > len(message):
            raise ValueError("the message is cut short")
        yield key >> 3


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """(value, place after it) of an integer of as many bytes as it needs."""
    value = shift = 0
    while True:
        byte = message[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
