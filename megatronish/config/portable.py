"""Paths of a config that lead to the same files from everywhere: in checkpoints, and in config.toml of a run folder.

A path that a user types is seen from the folder that the command was started in. What a run writes of itself is read
from other folders, and after the run folder was moved: there, paths are absolute, and those of files in the run folder
begin with {here}, the folder of the TOML file itself. Any TOML config may use {here}. Of the files that a run cannot be
used without, its tokenizer and its chat template, the run folder has copies; `with_copies` finds them.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from megatronish.config.config import Config
from megatronish.config.hub import name_of
from megatronish.config.sections.data import split_part

HERE = "{here}"
TOKENIZER = "tokenizer"  # the folder of a checkpoint, or of a run, in which its tokenizer may lie
TOKENIZER_PATHS = ("tokenizer_model", "vocab_file", "merge_file")

WRITTEN = (
    *("run_dir", "save", "local_save", "offload_folder", "tensorboard_dir", "wandb_save_dir", "data_cache_path"),
    "data_store_cache_path",
    *("memory_snapshot_path", "dry_run_report", "kill_switch_path"),
)
"""Fields that name a file or a folder, whether it is there or not."""
READ = ("load", "load_hf", *TOKENIZER_PATHS, "chat_template", "forecast_device", "mlflow_tracking_uri", "plugin")
"""Fields that may name a file or a folder; what does not exist under that name is the name of something else."""
DATA = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
"""Fields that list the prefixes of data files, with weights between them."""


def absolute(config: Config) -> Config:
    """The same config, with absolute paths."""
    return _with_paths(config, lambda path: name_of(os.path.abspath(path)))


def relative_to_itself(config: Config, folder: Path) -> Config:
    """The config as a TOML file in `folder` has it: what lies in the folder is named from {here}."""
    return _with_paths(config, partial(_from_here, folder=Path(os.path.abspath(folder))))


def from_here(value: Any, folder: Path) -> Any:
    """Value of a TOML file in `folder`: {here} is replaced at the beginning of each text, and of those of a list."""
    if isinstance(value, dict):
        return {key: from_here(each, folder) for key, each in value.items()}
    if isinstance(value, list):
        return [from_here(each, folder) for each in value]
    if isinstance(value, str) and (value == HERE or value.startswith(f"{HERE}/")):
        return os.path.abspath(folder) + value.removeprefix(HERE)
    return value


def _from_here(path: str, *, folder: Path) -> str:
    name = Path(os.path.abspath(path))
    return str(PurePosixPath(HERE) / name.relative_to(folder)) if name.is_relative_to(folder) else name_of(str(name))


def _with_paths(config: Config, convert: Callable[[str], str]) -> Config:
    """The config with each path converted; URLs and names of other things stay."""
    fields: dict[str, Any] = {}
    for section in vars(config).values():
        for name, value in vars(section).items():
            if name in WRITTEN and value and "://" not in value:
                fields[name] = convert(value)
            elif name in READ and isinstance(value, tuple):
                fields[name] = tuple(convert(path) if os.path.exists(path) else path for path in value)
            elif name in READ and value and os.path.exists(value):
                fields[name] = convert(value)
            elif name in DATA:
                fields[name] = tuple(_prefix(path, convert) for path in value)
    return config.with_fields(**fields)


def _prefix(word: str, convert: Callable[[str], str]) -> str:
    """A prefix of data files, or the file itself, converted; a weight, or what there is no file of, stays."""
    try:
        prefix, _ = split_part(word)
    except ValueError:
        return word
    if not any(os.path.exists(f"{prefix}{end}") for end in ("", ".idx")):
        return word
    return convert(prefix) + word.removeprefix(prefix)


def with_copies(state: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """Config of a checkpoint's state, with the present paths of its tokenizer and its chat template.

    They lie inside the checkpoint's `folder` if it was converted, and next to the checkpoints or in the run's folder if
    it is of a run. What lies nowhere there keeps the path that the run had it from. TypeError for a state that is none.
    """
    config = {section: dict(fields) for section, fields in state["config"].items()}
    data = config.get("data", {})
    for name in TOKENIZER_PATHS:
        if PurePosixPath(data.get(name) or "/").parts[0] == TOKENIZER and (folder / data[name]).exists():
            data[name] = str(folder / data[name])
    for name, path in dict(state.get("copies", {})).items():
        section, _, field = name.partition(".")
        for place in (folder.parent.parent, folder.parent):
            if isinstance(place, Path) and (place / path).exists():
                config[section][field] = str(place / path)
                break
    return config
