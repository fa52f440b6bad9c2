"""Kinds of tokenizers: their names, the names of Megatron-LM, and the files by which a kind is known."""

from collections.abc import Collection
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

from megatronish.errors import UserError

TokenizerType = Literal["sentencepiece", "huggingface", "tiktoken", "bytes", "null"]

MEGATRON_TOKENIZERS: dict[str, TokenizerType] = {
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "HuggingFaceTokenizer": "huggingface",
    "GPT2BPETokenizer": "huggingface",
    "PretrainedFromHF": "huggingface",
    "TikTokenizer": "tiktoken",
    "NullTokenizer": "null",
}


def tokenizer_type(name: str) -> TokenizerType:
    """Kind of tokenizer that `name`, a name of ours or of Megatron-LM, stands for; UserError if there is none."""
    ours: tuple[TokenizerType, ...] = get_args(TokenizerType)
    known = {kind: kind for kind in ours} | MEGATRON_TOKENIZERS
    if name not in known:
        raise UserError(
            f"--tokenizer-type {name} is not known; use one of {', '.join(ours)}, "
            f"or Megatron's {', '.join(MEGATRON_TOKENIZERS)}"
        )
    return known[name]


def tokenizer_in(folder: Path, *, like_gpt2: bool) -> dict[str, Any]:
    """Fields of DataConfig for the tokenizer whose files are in `folder`; empty if there is none."""
    return tokenizer_of_files({path.name for path in folder.iterdir()}, folder=folder, like_gpt2=like_gpt2)


def tokenizer_of_files(names: Collection[str], *, folder: PurePath, like_gpt2: bool) -> dict[str, Any]:
    """Fields of DataConfig for the tokenizer that these files of `folder` make up; empty if they make up none.

    vocab.json and merges.txt do not say how text is split into words: they are a tokenizer only if text is split
    `like_gpt2`.
    """
    if "tokenizer.json" in names or (like_gpt2 and {"vocab.json", "merges.txt"} <= set(names)):
        return {"tokenizer_type": "huggingface", "tokenizer_model": str(folder)}
    if "tokenizer.model" in names:
        return {"tokenizer_type": "sentencepiece", "tokenizer_model": str(folder / "tokenizer.model")}
    return {}
