"""Kinds of tokenizers: their names, the names of Megatron-LM, and the files by which a kind is known."""

from collections.abc import Collection
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

from megatronish.core.errors import UserError
from megatronish.core.names import Choice

TokenizerType = Literal["sentencepiece", "huggingface", "tiktoken", "wordpiece_lower", "wordpiece", "bytes", "null"]

TOKENIZER_NAMES: dict[str, Choice] = {kind: Choice() for kind in get_args(TokenizerType)}
"""Kinds of tokenizers of --tokenizer-type, those of plug-ins too."""

MEGATRON_TOKENIZERS: dict[str, TokenizerType] = {
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "HuggingFaceTokenizer": "huggingface",
    "GPT2BPETokenizer": "huggingface",
    "PretrainedFromHF": "huggingface",
    "TikTokenizer": "tiktoken",
    "BertWordPieceLowerCase": "wordpiece_lower",
    "BertWordPieceCase": "wordpiece",
    "NullTokenizer": "null",
}

WORDPIECE = ("wordpiece_lower", "wordpiece")
"""Kinds whose file is the vocab.txt of a BERT, a piece a line: of texts in lower case, or as they are."""

SPECIAL_TOKENS_LAST = ("<|endoftext|>",)
"""Special tokens that follow those of a tiktoken file of lines."""
LARGEST_VOCABULARY = 2**17
"""Tokens that are taken of a tiktoken file of JSON, special ones included, where --vocab-size is not given."""

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
)
"""Files of a tokenizer in a Hugging Face folder, and what stands next to them and is read with them."""

SENTENCEPIECE = "tokenizer.model"
TIKTOKEN = "tiktoken.model"
TEKKEN = "tekken.json"
"""Files of a tokenizer without a tokenizer.json: of SentencePiece, of Kimi K2, which splits text in its own way, and of
Mistral's models since 2024."""

TEMPLATES = "additional_chat_templates"
"""Folder next to them that may have more templates (.jinja)."""


def tokenizer_type(name: str) -> str:
    """Kind of tokenizer that `name`, one of the table or of Megatron-LM, stands for; UserError if there is none."""
    kind = MEGATRON_TOKENIZERS.get(name, name)
    if kind not in TOKENIZER_NAMES:
        raise UserError(
            f"--tokenizer-type {name} is not known; use one of {', '.join(TOKENIZER_NAMES)}, or Megatron's "
            f"{', '.join(MEGATRON_TOKENIZERS)}, or name the plug-in that registers it with --plugin"
        )
    return kind


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
    if TIKTOKEN in names:
        model = str(folder / TIKTOKEN)
        return {"tokenizer_type": "tiktoken", "tokenizer_model": model, "tiktoken_pattern": "kimi"}
    if TEKKEN in names:
        return {"tokenizer_type": "tiktoken", "tokenizer_model": str(folder / TEKKEN)}
    return {}
