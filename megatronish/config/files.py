"""Check that the files which a config names exist. Their content is checked by their readers."""

from collections.abc import Iterator
from pathlib import Path

from megatronish.config.sections.data import DataConfig, parse_blend, split_part
from megatronish.config.shipped import HOW_TO_MAKE

LONGEST, LONGEST_NAME = 4000, 240
"""Characters of a path and of a name in it: Linux takes 4096 and 255, and an ending comes after them."""


def missing_files(data: DataConfig) -> list[str]:
    """Complaints about data prefixes and tokenizer files that do not exist; none with --mock-data."""
    if data.mock_data:
        return []
    return [*_missing_data(data), *_missing_tokenizer(data)]


def _missing_data(data: DataConfig) -> Iterator[str]:
    if data.dataset_type != "pretrain":  # what a path of another kind means, that kind knows alone
        return
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        try:
            prefixes = [split_part(path)[0] for _, path in parse_blend(getattr(data, name))]
        except ValueError:  # the rules say so
            continue
        for prefix in prefixes:
            if complaint := _no_path(prefix):
                yield f"{name}={prefix[:60]!r}: {complaint}"
                continue
            missing = [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").is_file()]
            odd = [path for path in missing if Path(path).exists()]
            if odd:
                yield f"{name}={prefix}: {odd[0]} is no file but a folder, a pipe or a device; name the prefix of files"
            elif missing:
                are = "does not exist" if len(missing) == 1 else "do not exist"
                yield f"{name}={prefix}: {' and '.join(missing)} {are}; {_data_remedy(prefix)}"


def _no_path(text: str) -> str | None:
    """What is wrong with a text that can be no path of files; None if nothing is."""
    if not Path(text).name:
        return "it names no file; name the prefix of files, what stands before .bin and .idx"
    if "\0" in text:
        return "a path has no NUL; correct it"
    if len(text) > LONGEST or max(map(len, Path(text).parts)) > LONGEST_NAME:
        return f"a path of {len(text)} characters is too long; name files elsewhere"
    return None


def _data_remedy(prefix: str) -> str:
    for end in (".bin", ".idx"):
        if prefix.endswith(end) and Path(prefix).is_file():
            return f"leave {end} off: use {prefix.removesuffix(end)}"
    if Path(f"{prefix}_text_document.idx").is_file():
        return f"use {prefix}_text_document"
    if prefix in HOW_TO_MAKE:
        return f"make them in this folder with: {HOW_TO_MAKE[prefix]}; or use --mock-data"
    if Path(prefix).is_file():
        return "chats are read as they are with dataset_type=chat; of other texts make them with megatronish preprocess"
    return "make them with megatronish preprocess, or use --mock-data"


def _missing_tokenizer(data: DataConfig) -> Iterator[str]:
    if data.tokenizer_type not in ("sentencepiece", "huggingface", "tiktoken"):
        return
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        path = getattr(data, name)
        if path is not None and Path(path).is_dir() and data.tokenizer_type == "sentencepiece":
            yield f"{name}={path} is a folder; name the SentencePiece file in it, or use --tokenizer-type huggingface"
        if path is not None and not Path(path).exists():
            remedy = "correct the path, or use --tokenizer-type bytes, which needs no file"
            if path in HOW_TO_MAKE:
                remedy = f"make it in this folder with: {HOW_TO_MAKE[path]}"
            yield f"{name}={path} does not exist; {remedy}"
