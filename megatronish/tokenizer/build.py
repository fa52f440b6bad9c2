"""Table of tokenizers by --tokenizer-type, and the tokenizer of a config."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from megatronish.config.sections.data import MOCK_VOCAB_SIZE, DataConfig
from megatronish.core.errors import UserError
from megatronish.tokenizer import trial
from megatronish.tokenizer.hugging_face import HuggingFaceTokenizer
from megatronish.tokenizer.names import WORDPIECE, TokenizerType, tokenizer_type
from megatronish.tokenizer.plain import BytesTokenizer, NullTokenizer
from megatronish.tokenizer.sentence_piece import SentencePieceTokenizer
from megatronish.tokenizer.tokenizer import Tokenizer


def build_tokenizer(data: DataConfig) -> Tokenizer:
    """Tokenizer of a config; under --mock-data one that needs no file. A larger --vocab-size widens its vocabulary."""
    if data.mock_data:
        return NullTokenizer(data.vocab_size or MOCK_VOCAB_SIZE)
    kind = tokenizer_type(data.tokenizer_type)
    # Compiled libraries can end this process on a bad file: a child tries it first.
    if files := _files_of(kind, data):
        trial.try_once(kind, data, files)
    tokenizer = TOKENIZERS[kind](data)
    # Larger is fine, and rounds the model's table up; smaller would give ids without a row.
    if data.vocab_extra_ids and kind != "null" and not tokenizer.own_sentinels():
        tokenizer.vocab_size += data.vocab_extra_ids
    if data.vocab_size is not None and data.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"--vocab-size {data.vocab_size} is smaller than the {kind} tokenizer's vocabulary of "
            f"{tokenizer.vocab_size}; leave --vocab-size out, or give at least {tokenizer.vocab_size}, or take the "
            "tokenizer of the model that the run starts from"
        )
    tokenizer.vocab_size = data.vocab_size or tokenizer.vocab_size
    return tokenizer


def _files_of(kind: str, data: DataConfig) -> list[Path]:
    """Files that a compiled library reads; empty if there are none, or not all of them."""
    if kind not in ("sentencepiece", "huggingface", "tiktoken", *WORDPIECE):
        return []
    if data.tokenizer_model is None or (kind == "huggingface" and (data.vocab_file or data.merge_file)):
        files = [Path(name) for name in (data.vocab_file, data.merge_file) if name is not None]
    elif (path := Path(data.tokenizer_model)).is_dir():
        one, two = [path / "tokenizer.json"], [path / "vocab.json", path / "merges.txt"]
        files = one if one[0].is_file() else two
    else:
        files = [path]
    return files if all(file.is_file() for file in files) else []


def _build(kind: str, data: DataConfig) -> Tokenizer:
    if kind == "bytes":
        return BytesTokenizer()
    if kind == "null":
        if data.vocab_size is None:
            raise UserError("--tokenizer-type null has no vocabulary of its own; give --vocab-size")
        return NullTokenizer(data.vocab_size)
    if kind == "huggingface" and (data.vocab_file or data.merge_file):
        if not (data.vocab_file and data.merge_file):
            raise UserError("a GPT-2 tokenizer is two files; give --vocab-file and --merge-file together")
        return HuggingFaceTokenizer.from_gpt2(Path(data.vocab_file), Path(data.merge_file))
    if kind in WORDPIECE and data.vocab_file and data.tokenizer_model is None:
        data = replace(data, tokenizer_model=data.vocab_file)
    if data.tokenizer_model is None:
        raise UserError(
            f"--tokenizer-type {kind} needs the tokenizer's file; give --tokenizer-model, or use --tokenizer-type bytes"
        )
    path = Path(data.tokenizer_model)
    if not path.exists():
        raise UserError(f"--tokenizer-model {path} does not exist; check the path")
    if kind in WORDPIECE:
        path = path / "vocab.txt" if path.is_dir() else path
        return HuggingFaceTokenizer.from_wordpieces(path, lowercase=kind == "wordpiece_lower")
    if kind == "tiktoken":
        return HuggingFaceTokenizer.from_tiktoken(path, data)
    return SentencePieceTokenizer(path) if kind == "sentencepiece" else HuggingFaceTokenizer.from_path(path)


TOKENIZERS: dict[str, Callable[[DataConfig], Tokenizer]] = {
    kind: partial(_build, kind) for kind in get_args(TokenizerType)
}
"""The tokenizers of --tokenizer-type, under the names of `TOKENIZER_NAMES`."""


def tokenizer_trial_of_child() -> Callable[[tuple[str, Any, list[str]]], str]:
    """What the child of a trial calls (trial.py)."""
    return trial.trial_of(TOKENIZERS)
