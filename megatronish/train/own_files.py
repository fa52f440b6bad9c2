"""Files without which a run folder is of no use, copied into it: the tokenizer, and a chat template of a file.

A copy is never replaced: what a checkpoint was trained with stays. If the folder has another tokenizer already, the
copy gets a name of its own, and each checkpoint names the copy that it belongs to (`copies` of state.json). The base
model of adapters is not copied: it is large, and is named by its path and the hash of its weights (base_model.py).
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from megatronish.config.config import Config
from megatronish.config.dump import to_toml
from megatronish.config.portable import TOKENIZER, relative_to_itself
from megatronish.config.sections.data import DataConfig
from megatronish.core.errors import RunError, UserError
from megatronish.core.files import AtomicFile, write_quickly
from megatronish.core.remote import is_url
from megatronish.formats.tokenizer_files import read_files_of

TEMPLATE = "chat_template.jinja"
SHOWN = 12  # digits of a hash in a sentence


class OwnFiles(NamedTuple):
    """Files to copy into the folder of a run: {name in the folder: source}, and the fields that will name them there.

    `identity` is the hash of the tokenizer's files; None without files.
    """

    files: dict[str, Path]
    fields: dict[str, str]
    identity: str | None

    @classmethod
    def of(cls, config: Config) -> "OwnFiles":
        """The files of a config, under names that no other file has in the run's folder."""
        places, data = places_of(config), config.data
        tokenizer = {} if data.mock_data else read_files_of(data)
        folder = _free_name(TOKENIZER, tokenizer, places)
        files = {f"{folder}/{name}": path for name, path in tokenizer.items()}
        fields = {f"data.{field}": str(folder / name) for field, name in _names(data, tokenizer).items()}
        template = config.chat.chat_template
        if template is not None and template.endswith(".jinja") and os.path.isfile(template):
            name = _free_name(TEMPLATE, {"": Path(template)}, places)
            files[str(name)] = Path(template)
            fields["chat.chat_template"] = str(name)
        return cls(files, fields, _hash(tokenizer) if tokenizer else None)

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint says of these files."""
        return {"copies": self.fields, "tokenizer": self.identity}

    def copy(self, config: Config) -> None:
        """Copy what is not there yet, and write the run's config, which names the copies. By the main rank alone."""
        for place in places_of(config):
            for name, source in self.files.items():
                _copy(source, place / name)
        here = {name.partition(".")[2]: str(config.run_dir / path) for name, path in self.fields.items()}
        written = relative_to_itself(config.with_fields(**here), config.run_dir)
        write_quickly(config.run_dir / "config.toml", to_toml(written))


def places_of(config: Config) -> list[Path]:
    """Folders that each have copies: that of the run, and that of its checkpoints where it lies elsewhere."""
    places = [config.run_dir]
    if not is_url(config.save_place) and Path(config.save_place).absolute().parent != config.run_dir.absolute():
        places.append(Path(config.save_place))
    return places


def other_tokenizer(saved: Mapping[str, Any], now: Mapping[str, Any], *, before: str | None, given: str | None) -> str:
    """Sentence about a tokenizer that is not the one of the checkpoint; empty if it is, or if none is known."""
    old, new = saved.get("tokenizer"), now.get("tokenizer")
    if old is None or new is None or old == new:
        return ""
    return (
        f"the tokenizer {given} (sha256 {str(new)[:SHOWN]}) is not the one that this run was trained with, {before} "
        f"(sha256 {str(old)[:SHOWN]}); from here on the former counts. If that is not meant, name the latter with "
        "--tokenizer-model"
    )


def _names(data: DataConfig, files: Mapping[str, Path]) -> dict[str, str]:
    """{field: name of its file among the copies}; a folder is "."."""
    if not files:
        return {}
    if data.vocab_file and data.merge_file and not data.tokenizer_model:
        return {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    assert data.tokenizer_model is not None
    return {"tokenizer_model": "." if os.path.isdir(data.tokenizer_model) else Path(data.tokenizer_model).name}


def _free_name(name: str, files: Mapping[str, Path], places: list[Path]) -> PurePosixPath:
    """The name, or one with a hash if something else has it in one of the places."""
    if all(_fits(place / name, files) for place in places):
        return PurePosixPath(name)
    path = PurePosixPath(name)
    return path.with_name(f"{path.stem}_{_hash(files)[:SHOWN]}{path.suffix}")


def _fits(path: Path, files: Mapping[str, Path]) -> bool:
    """Whether nothing lies at `path` but a part of these files; the key "" is the path itself."""
    if not os.path.lexists(path):
        return True
    if path.is_file():
        return "" in files and _bytes(path) == _bytes(files[""])
    present = [each for each in path.rglob("*") if each.is_file() and each.suffix != ".tmp"]
    names = {each: each.relative_to(path).as_posix() for each in present}
    return path.is_dir() and all(name in files and _bytes(each) == _bytes(files[name]) for each, name in names.items())


def _hash(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        content = _bytes(files[name])
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; make it readable, or name another file") from error


def _copy(source: Path, target: Path) -> None:
    if target.exists():
        return
    try:
        with source.open("rb") as read, AtomicFile(target) as file:
            shutil.copyfileobj(read, file.file)
    except OSError as error:
        raise RunError(
            f"{source} cannot be copied to {target}: {error.strerror}; correct that, and start again"
        ) from error
