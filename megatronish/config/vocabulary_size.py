"""Size of a tokenizer's vocabulary, from its files alone: no library that runs a tokenizer is loaded for it."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatronish.config.sections.data import DataConfig
from megatronish.core.errors import UserError
from megatronish.tokenizer.names import LARGEST_VOCABULARY, SPECIAL_TOKENS_LAST, TEKKEN, WORDPIECE, tokenizer_type
from megatronish.tokenizer.settings import behind, settings_of

OF_BYTES = 257
SENTINEL = b"<extra_id_0>"
"""Name of the first sentinel, of a tokenizer that has its own."""
MOST_BYTES = 200 * 2**20  # of a file that is read here
PIECES = 1  # number of the field of a SentencePiece model that repeats for each piece
WIDTHS = {1: 8, 5: 4}  # bytes of values of fixed size, by their wire type


def vocabulary_of_files(data: DataConfig) -> int | None:
    """Tokens of the tokenizer that a config names, sentinels included; None if its files are missing or do not tell."""
    with suppress(OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError, UserError, IndexError):
        # Files are foreign and nothing here is required: whatever is wrong with them means None, and their reader
        # complains.
        size = _own_vocabulary(data)
        return None if size is None else size + _more_sentinels(data)
    return None


def _own_vocabulary(data: DataConfig) -> int | None:
    kind = tokenizer_type(data.tokenizer_type)
    if kind == "bytes":
        return OF_BYTES
    if kind in WORDPIECE:
        return len(_content(Path(data.vocab_file or data.tokenizer_model or "")).splitlines())
    if kind == "huggingface" and data.vocab_file:
        return 1 + max(json.loads(_content(Path(data.vocab_file))).values())
    if data.tokenizer_model is None:
        return None
    path = Path(data.tokenizer_model)
    if kind == "huggingface":
        if path.is_dir() and not (path / "tokenizer.json").exists():
            return 1 + max(json.loads(_content(path / "vocab.json")).values())
        return 1 + max(_ids(json.loads(_content(path / "tokenizer.json" if path.is_dir() else path))))
    if kind == "tiktoken":
        return _tiktoken_size(path, data)
    if kind == "sentencepiece":
        size = sum(number == PIECES for number in _fields(_content(path)))
        return 1 + max(behind(settings_of(path), size, source=path), default=size - 1) if size else None
    return None


def _more_sentinels(data: DataConfig) -> int:
    """Sentinels that a tokenizer is given: none where its file has its own."""
    if data.vocab_extra_ids == 0 or data.tokenizer_model is None:
        return data.vocab_extra_ids
    path = Path(data.tokenizer_model)
    content = _content(path / "tokenizer.json" if path.is_dir() else path)
    return 0 if SENTINEL in content else data.vocab_extra_ids


def _content(path: Path) -> bytes:
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} is too large for a tokenizer")
    return path.read_bytes()


def _tiktoken_size(path: Path, data: DataConfig) -> int:
    """Tokens of a tiktoken file: those of a JSON list follow the special ones, and lines have them at their end."""
    content = _content(path)
    if content.lstrip().startswith(b"["):
        largest = max(int(entry["rank"]) for entry in json.loads(content))
        return min(largest + 1 + data.tiktoken_num_special_tokens, LARGEST_VOCABULARY)
    if content.lstrip().startswith(b"{"):
        return int(json.loads(content)["config"]["default_vocab_size"])
    if path.name == TEKKEN:
        return int(json.loads(content)["config"]["default_vocab_size"])
    largest = max(int(line.split()[1]) for line in content.splitlines() if line.strip())
    if not data.tiktoken_special_tokens and (added := behind(settings_of(path), largest + 1, source=path)):
        return max(added) + 1
    return largest + 1 + len(data.tiktoken_special_tokens or SPECIAL_TOKENS_LAST)


def _ids(tokenizer: dict[str, Any]) -> Iterator[int]:
    """Ids of a tokenizer.json: a table, or the places of Unigram's list; and what was added."""
    # A vocabulary may have gaps, so the size is the largest id + 1, and not the number of entries.
    vocabulary = tokenizer["model"]["vocab"]
    yield from vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    yield from (int(token["id"]) for token in tokenizer.get("added_tokens") or ())


def _fields(message: bytes) -> Iterator[int]:
    """Numbers of the fields of a protobuf message, in their order."""
    at = 0
    while at < len(message):
        # The wire format of protobuf: a key is (number of the field) * 8 + (type of what follows). Type 0 is a varint,
        # type 2 has its length in front, 1 and 5 have fixed sizes. Other types are none of SentencePiece's: a KeyError.
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
        # Seven bits a byte, the lowest first; the eighth says that another byte follows.
        byte = message[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
