"""Trial of a foreign tokenizer: loaded once in a child process, with texts that find what would end this process.

The libraries behind tokenizer.json, SentencePiece and tiktoken files are compiled. A file can make them panic, abort,
fill the memory, or match a regular expression for ever. A file that passed is remembered by its bytes in the user's
cache folder, so only the first start that meets it takes the time, on one process of a machine.
"""

import hashlib
import importlib.metadata
import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from megatronish.core.contained import ChildBounds, Contained, ContainedError, PanicError
from megatronish.core.errors import UserError
from megatronish.core.files import one_builder, ordinary
from megatronish.core.private import cache_folder, is_own, private_folder

FORMAT = "megatronish tokenizer trial 1"
LARGEST_FILE = 1 << 30
BOUNDS = ChildBounds(memory=4 << 30, seconds=10.0, seconds_each_byte=0.0)
SECONDS_A_MEGABYTE = 0.5
"""Loading 33 MB of tokenizer.json takes 2 s."""
REPEATED = 48
"""So often a character stands in a probe: an expression that tries two ways at each of them does not end."""
TEXTS = (
    *("", " ", "\n", "\t\r\n  \x00\x01", "a", "Hello, world! 1234567 x = [i**2]\n\tdon't STOP.", "\u2581\u2581a\u2581"),
    *(
        "Über naïve ½ é e\u0301 \u202e\u200d",
        "漢字かな한국어",
        "😀👩\u200d👩\u200d👧",
        "\U0010ffff\ue000\ufffd",
        "مرحبا नमस्ते",
    ),
)
MOST_PIECES = 200
"""Pieces of the vocabulary that are written, too."""


class TriedTokenizer(Protocol):
    """What a trial calls of a tokenizer."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...
    def encode_all(self, texts: Sequence[str]) -> list[list[int]]: ...
    def encode_marked(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def control_encoder(self) -> Any: ...


def try_once(kind: str, data: Any, files: Sequence[Path]) -> None:
    """Try the tokenizer of these files, unless its bytes have passed before; UserError if it is none to be loaded.

    `data` is a `DataConfig`. A file that cannot be read is left to its reader.
    """
    try:
        sizes = [ordinary(path).stat().st_size for path in files]
        if (size := sum(sizes)) > LARGEST_FILE:
            raise UserError(
                f"--tokenizer-model {files[0]} has {size:,} bytes, far more than a tokenizer; name its file"
            )
        digests = [_digest(path) for path in files]
    except OSError:
        return
    settings = (data.tiktoken_pattern, data.tiktoken_special_tokens, data.tiktoken_num_special_tokens, data.vocab_size)
    versions = [importlib.metadata.version(name) for name in ("tokenizers", "sentencepiece")]
    key = hashlib.sha256(repr((FORMAT, kind, digests, settings if kind == "tiktoken" else (), versions)).encode())
    try:
        passed = private_folder(cache_folder() / "tokenizers") / key.hexdigest()[:32]
    except OSError:  # no folder can be written: it is tried by each process of each start
        _try(kind, data, files, size)
        return
    if is_own(passed):
        return
    with one_builder(passed, patience_seconds=60):
        if not is_own(passed):
            _try(kind, data, files, size)
            with suppress(OSError):
                passed.touch()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _try(kind: str, data: Any, files: Sequence[Path], size: int) -> None:
    seconds = BOUNDS.seconds + SECONDS_A_MEGABYTE * size / 1e6
    child = Contained(
        "megatronish.tokenizer.build:tokenizer_trial_of_child", bounds=ChildBounds(BOUNDS.memory, seconds)
    )
    try:
        child.ask((kind, data, [str(path) for path in files]))
    except ContainedError as error:
        raise UserError(
            f"--tokenizer-model {files[0]} cannot be used: loading it, or writing a short text with it, {error}; fetch "
            "it again, or name another tokenizer"
        ) from error
    except ValueError as error:  # a sentence of its reader. Here the same file may do worse than raise: it is not read
        raise UserError(str(error)) from None
    finally:
        child.close()


# In the child.


def trial_of(build: Mapping[str, Callable[[Any], TriedTokenizer]]) -> Callable[[tuple[str, Any, list[str]]], str]:
    """What the child does: load a tokenizer and write with it all that it may be asked to write."""

    def tried(question: tuple[str, Any, list[str]]) -> str:
        kind, data, files = question
        _write(build[kind](data), files)
        return ""

    return tried


def _write(tokenizer: TriedTokenizer, files: Sequence[str]) -> None:
    controls = None
    with suppress(UserError):  # it has none
        controls = tokenizer.control_encoder()
    for text in _probes(files):
        with _may_refuse():
            tokenizer.decode(tokenizer.encode(text))
        with _may_refuse():
            tokenizer.encode_marked(text)
        with _may_refuse():
            if controls is not None:
                controls.encode(text, [])
    with _may_refuse():
        tokenizer.encode_all(TEXTS)
    last = tokenizer.vocab_size - 1
    for ids in ([], [0], [last], [last + 1], list(range(min(last, 300)))):
        with _may_refuse():
            tokenizer.decode(ids)


@contextmanager
def _may_refuse() -> Iterator[None]:
    """Context of a text that a tokenizer may have no tokens for, or an id that it may not have."""
    try:
        yield
    except PanicError as error:
        raise RuntimeError(str(error)) from error
    except (ValueError, OverflowError):
        pass


def _probes(files: Sequence[str]) -> Iterator[str]:
    """Texts of every script, every character of a keyboard many times, what patterns name, and pieces."""
    yield from TEXTS
    written = Path(files[0]).read_text(encoding="utf-8", errors="replace")
    characters = set()
    with suppress(ValueError, RecursionError):
        content = json.loads(written)
        patterns, pieces = [*_patterns(content)], [*_pieces(content)]
        characters = {character for pattern in patterns for character in pattern} - set(string.printable)
        for pattern in patterns:
            letters = re.sub(r"\\.|[^\w\s]", "", pattern)[:8] or pattern[:8]
            yield letters * REPEATED + "!\x00"
            yield pattern[:200]
        yield from pieces
    for character in [*string.printable, *"éя漢\u2581\u3000", *sorted(characters)[:100]]:
        yield character * REPEATED + ("\x00" if character == "!" else "!")


def _patterns(content: Any) -> Iterator[str]:
    """Texts under "Regex" and "String" of a tokenizer.json, those that are replaced, the pattern of a tekken.json."""
    waiting = (
        [content.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "config")]
        if isinstance(content, dict)
        else []
    )
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            for name, value in each.items():
                if name in ("Regex", "String", "content", "pattern", "prefix") and isinstance(value, str) and value:
                    yield value
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _pieces(content: Any) -> Iterator[str]:
    """Names of added tokens, and pieces of the vocabulary in equal distances."""
    if not isinstance(content, dict):
        return
    added, model = content.get("added_tokens"), content.get("model")
    for token in added[:MOST_PIECES] if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            yield token["content"]
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict | list):
        every = max(len(vocabulary) // MOST_PIECES, 1)
        for piece in list(vocabulary)[::every]:
            word = piece[0] if isinstance(piece, list) and piece else piece
            if isinstance(word, str):
                yield word[:1000]
