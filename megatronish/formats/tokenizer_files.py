"""Which files make up a tokenizer, and how does a model take them along?"""

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath
from typing import Any

from megatronish.config.data import DataConfig
from megatronish.config.tokenizer_names import tokenizer_of_files

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "tekken.json",
)
_TOKENS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


def in_folder(folder: Path) -> dict[str, Path]:
    """Those of a folder, by name."""
    return {name: folder / name for name in NAMES if (folder / name).is_file()}


def files_of(data: DataConfig) -> dict[str, Path]:
    """Those that a config names, as far as they are there, under the names that everybody looks for."""
    found: dict[str, Path] = {}
    model = Path(data.tokenizer_model) if data.tokenizer_model else None
    if data.tokenizer_type == "sentencepiece" and model is not None:
        found = {"tokenizer.model": model}
    elif data.vocab_file and data.merge_file:
        found = {"vocab.json": Path(data.vocab_file), "merges.txt": Path(data.merge_file)}
    elif model is not None and model.is_dir():
        found = in_folder(model)
    elif model is not None:
        beside = {name: path for name, path in in_folder(model.parent).items() if name not in _TOKENS}
        found = beside | {"tokenizer.json": model}
    return {name: path for name, path in found.items() if path.is_file()}


def copy(files: Mapping[str, Path], folder: Path) -> None:
    """Put them into a folder, which is made if need be."""
    folder.mkdir(exist_ok=True)
    for name, path in files.items():
        shutil.copyfile(path, folder / name)


def fields_of(names: Collection[str], *, folder: PurePath) -> dict[str, Any]:
    """The fields of DataConfig that name the tokenizer which these files in `folder` make up."""
    none = {"tokenizer_type": "null", "tokenizer_model": None, "vocab_file": None, "merge_file": None}
    return none | tokenizer_of_files(names, folder=folder, like_gpt2=True)
