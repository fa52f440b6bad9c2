"""Flags that list data sets in a file or in a text: Megatron-LM's and BigScience's ways, read into the data fields."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatronish.core.foreign import parse_json, read_text, shown

Lists = list[tuple[str, tuple[str, ...]]]
"""[(field, its values), ...]"""

SPLITS = {"train": "train_data_path", "valid": "valid_data_path", "test": "test_data_path"}
_ENTRY = re.compile(r"(\S+)\s+(\S+):(\S+)\s+(\S+)")


def _read(path: str) -> str:
    """Text of a file; ValueError, a sentence, if there is none."""
    try:
        return read_text(Path(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); correct the path") from None
    except ValueError as error:  # bytes that are no text, too many, or NUL in the path
        raise ValueError(f"{shown(path)} cannot be read ({error}); correct the path") from None


def words_of_file(path: str) -> Lists:
    """--data-args-path: a file with the words of --data-path."""
    return [("data_path", tuple(_read(path).split()))]


def splits_of_file(path: str) -> Lists:
    """--per-split-data-args-path: a JSON file {"train": [...], "valid": [...], "test": [...]}."""
    try:
        entries = parse_json(_read(path))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); write {{'train': [PREFIX], 'valid': [PREFIX]}}") from None
    if not isinstance(entries, dict) or not set(entries) <= set(SPLITS):
        raise ValueError(f"{path} must hold lists named train, valid and test, and nothing else")
    lists: Lists = []
    for split, words in entries.items():
        words = words.split() if isinstance(words, str) else [] if words is None else words
        if not isinstance(words, list) or not all(isinstance(word, str | int | float) for word in words):
            raise ValueError(
                f"{path} must hold lists named train, valid and test of weights and prefixes; {split} is {shown(words)}"
            )
        if words:
            lists.append((SPLITS[split], tuple(map(str, words))))
    return lists


def weighted_splits(text: str, *, split: str) -> Lists:
    """BigScience's "NAME: WEIGHT START:END PREFIX, ..." as --train-data-path and the others.

    Several names are several validation sets.
    """
    groups: list[list[tuple[str, str]]] = []
    for part in re.split(r"[,\n]", text.replace('"', " ").replace("'", " ")):
        name, entry = re.fullmatch(r"\s*(?:([^\s:]+):\s)?\s*(.*?)\s*", part, re.DOTALL).groups()  # type: ignore[union-attr]
        if name is not None or not groups:
            groups.append([])
        if not entry:
            continue
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(
                f"{entry!r} must be WEIGHT START:END PREFIX, as in 'train: 0.3 0:1 PREFIX, 0.7 0:1 PREFIX'"
            )
        weight, start, end, prefix = match.groups()
        whole = (start, end) in (("0", "1"), ("0.0", "1.0"))
        groups[-1].append((weight, prefix if whole else f"{prefix}[{start}:{end}]"))
    groups = [group for group in groups if group]
    if len(groups) > 1 and not all(len(group) == 1 for group in groups):
        raise ValueError("several names of several data sets each are not there; use one name, or a data set a name")
    words = [word for group in groups for pair in group for word in (pair if len(groups) == 1 else pair[1:])]
    found_lists: Lists = [(SPLITS[split], tuple(words))]
    return found_lists if len(groups) < 2 else [*found_lists, ("multiple_validation_sets", ("true",))]


def weighted_splits_of_file(path: str, *, split: str) -> Lists:
    """The same from a file, as --train-weighted-split-paths-path and its like name it."""
    return weighted_splits(_read(path), split=split)


class DataList(NamedTuple):
    """Flag that lists data sets: its reader, and what it means."""

    read: Callable[[str], Lists]
    text: str


DATA_LISTS: dict[str, DataList] = {
    "data-args-path": DataList(words_of_file, "a file with the words of `--data-path`"),
    "per-split-data-args-path": DataList(
        splits_of_file, "a JSON file with the words of `--train-data-path`, `--valid-data-path`, `--test-data-path`"
    ),
    **{
        f"{split}-weighted-split-paths": DataList(
            partial(weighted_splits, split=split), f"`--{split}-data-path`, written NAME: WEIGHT START:END PREFIX, ..."
        )
        for split in SPLITS
    },
    **{
        f"{split}-weighted-split-paths-path": DataList(
            partial(weighted_splits_of_file, split=split), f"a file with the words of `--{split}-weighted-split-paths`"
        )
        for split in SPLITS
    },
}
