"""Tokenizer files of a model: their standard names, where a config finds them, and copies of them."""

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath
from typing import Any, get_args

from megatronish.config.sections.data import DataConfig
from megatronish.tokenizer.names import (
    NAMES,
    SENTENCEPIECE,
    TEKKEN,
    TEMPLATES,
    TIKTOKEN,
    WORDPIECE,
    TokenizerType,
    tokenizer_of_files,
)

_TOKENS = ("tokenizer.json", "tokenizer.model", TIKTOKEN, "vocab.json", "merges.txt")
_STANDARD = {"sentencepiece": SENTENCEPIECE, **dict.fromkeys(WORDPIECE, "vocab.txt")}
"""Names of a tokenizer's file by its kind, where it is no tokenizer.json."""


def in_folder(folder: Path) -> dict[str, Path]:
    """Tokenizer files in a folder, with templates of a folder in it, by their standard names."""
    templates = {f"{TEMPLATES}/{path.name}": path for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    return {name: folder / name for name in NAMES if (folder / name).is_file()} | templates


def files_of(data: DataConfig) -> dict[str, Path]:
    """Tokenizer files that a config names, by their standard names; files that are missing are left out.

    A tiktoken file has no standard name that other programs would read, except those of Kimi K2 and of Mistral.
    """
    if data.tokenizer_type == "tiktoken" and PurePath(data.tokenizer_model or "").name not in (TIKTOKEN, TEKKEN):
        return {}
    files: dict[str, Path] = {}
    if data.tokenizer_type not in get_args(TokenizerType):
        return files  # what the file of a plug-in's tokenizer is, the plug-in knows alone
    model = Path(data.tokenizer_model) if data.tokenizer_model else None
    standard = _STANDARD.get(data.tokenizer_type, "tokenizer.json")
    if model is not None and data.tokenizer_type == "tiktoken":
        standard = model.name
    if data.vocab_file and data.merge_file:
        files = {"vocab.json": Path(data.vocab_file), "merges.txt": Path(data.merge_file)}
    elif model is not None and model.is_dir():
        files = in_folder(model)
    elif model is not None:
        beside = {name: path for name, path in in_folder(model.parent).items() if name not in _TOKENS}
        has_files = standard == "tokenizer.json" or model.name == standard  # else they may be another tokenizer's
        files = (beside if has_files else {}) | {standard: model}
    return {name: path for name, path in files.items() if path.is_file()}


def read_files_of(data: DataConfig) -> dict[str, Path]:
    """All files that a tokenizer of a config, and chats with it, are read from, by names that they keep in a copy.

    None for a plug-in's tokenizer: which files it reads, the plug-in knows alone.
    """
    if data.tokenizer_type not in ("sentencepiece", "huggingface", "tiktoken"):
        return {}
    if data.vocab_file and data.merge_file and not data.tokenizer_model:
        return {"vocab.json": Path(data.vocab_file), "merges.txt": Path(data.merge_file)}
    if data.tokenizer_model is None:
        return {}
    model = Path(data.tokenizer_model)
    folder = model if model.is_dir() else model.parent
    beside = in_folder(folder)
    if not model.is_dir():
        beside = {name: path for name, path in beside.items() if name not in _TOKENS} | {model.name: model}
    return beside


def copy(files: Mapping[str, Path], folder: Path) -> None:
    """Copy files into a folder under the names that are their keys; the folder is made if it does not exist."""
    folder.mkdir(exist_ok=True)
    for name, path in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)


def fields_of(names: Collection[str], *, folder: PurePath) -> dict[str, Any]:
    """Fields of DataConfig for the tokenizer that files of these names in `folder` make up."""
    none = {"tokenizer_type": "null", "tokenizer_model": None, "vocab_file": None, "merge_file": None}
    return none | tokenizer_of_files(names, folder=folder, like_gpt2=True)
