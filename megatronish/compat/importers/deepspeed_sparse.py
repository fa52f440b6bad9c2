"""Section sparse_attention of DeepSpeed's ds_config.json as a pattern of blocks, mode by mode.

DeepSpeed's defaults are its JSON's, not those of its classes. Its layouts are bidirectional unless the section says
otherwise, and a window of w blocks there has its own block in the middle. Attention here is causal: of such a window
the own block remains, and the w // 2 blocks before it, which is also what DeepSpeed leaves of it when unidirectional.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatronish.compat.importers.imported import UNKNOWN, Imported
from megatronish.compat.importers.values import number, text, whole
from megatronish.core.errors import UserError
from megatronish.core.foreign import shown

WITHIN = "sparse_attention"
EVERY_MODE = ("mode", "block", "attention", "different_layout_per_head")
MOST_BLOCKS = 100_000
GLOBAL_PLACES = ("global_block_indices", "global_block_end_indices")


def sparse_attention(found: Imported, values: Mapping[str, Any]) -> None:
    """Set the pattern of a section that is there; its keys that no pattern has are listed, each with its reason."""
    if not values:
        return
    mode = text(values, "mode", "fixed", within=f"{WITHIN}.")
    if mode == "dense":
        return
    if mode == "variable":
        found.warn(f"{WITHIN}.mode", "windows of unlike sizes are not there; use --attention-pattern fixed")
        return
    if mode not in MODES:
        raise UserError(
            f"{WITHIN}.mode={shown(mode)} must be one of dense, variable, {', '.join(MODES)}; correct the file"
        )
    pattern, read, names = MODES[mode]
    found.set("attention_pattern", pattern)
    _set(found, "attention_block_size", values, "block", 16)
    read(found, values)
    _of_every_mode(found, values, mode)
    for key in values.keys() - {*EVERY_MODE, *names}:
        found.leave_out(f"{WITHIN}.{key}", f"mode {mode} does not read it" if key in KNOWN else UNKNOWN)


def _of_every_mode(found: Imported, values: Mapping[str, Any], mode: str) -> None:
    usual = "unidirectional" if mode == "local_sliding_window" else "bidirectional"
    if text(values, "attention", usual, within=f"{WITHIN}.") != "unidirectional":
        found.warn(
            f"{WITHIN}.attention",
            "attention here is causal, as with unidirectional: of a block what is after it is not seen",
        )
    if values.get("different_layout_per_head") and mode == "bigbird":
        found.warn(f"{WITHIN}.different_layout_per_head", "all heads have one pattern, with the same random blocks")


def _number(values: Mapping[str, Any], key: str, default: int) -> int:
    given = number(values, key, within=f"{WITHIN}.", least=0, most=MOST_BLOCKS)
    return default if given is None else whole(given, f"{WITHIN}.{key}")


def _set(found: Imported, field: str, values: Mapping[str, Any], key: str, default: int) -> None:
    found.set(field, _number(values, key, default), key=f"{WITHIN}.{key}")


def _fixed(found: Imported, values: Mapping[str, Any]) -> None:
    _set(found, "attention_local_blocks", values, "num_local_blocks", 4)
    _set(found, "attention_global_blocks", values, "num_global_blocks", 1)
    if _number(values, "num_different_global_patterns", 1) != 1:
        found.warn(f"{WITHIN}.num_different_global_patterns", "all heads see the last blocks of each window")
    if values.get("horizontal_global_attention"):
        found.warn(f"{WITHIN}.horizontal_global_attention", "rows are not global: a token sees no later one")


def _sliding(found: Imported, values: Mapping[str, Any]) -> None:
    found.set("attention_local_blocks", _number(values, "num_sliding_window_blocks", 3) // 2 + 1)


def _bigbird(found: Imported, values: Mapping[str, Any]) -> None:
    _sliding(found, values)
    _set(found, "attention_global_blocks", values, "num_global_blocks", 1)
    _set(found, "attention_random_blocks", values, "num_random_blocks", 0)


def _longformer(found: Imported, values: Mapping[str, Any]) -> None:
    """Global blocks are those at the begin of the sequence, and no others."""
    _sliding(found, values)
    begins = _numbers(values, "global_block_indices", [0])
    ends = _numbers(values, "global_block_end_indices", [begin + 1 for begin in begins])
    if len(begins) != len(ends):
        raise UserError(
            f"{WITHIN}.global_block_indices has {len(begins)} numbers, and global_block_end_indices must have as many, "
            f"not {len(ends)}; correct the file"
        )
    first = 0
    for begin, end in sorted(zip(begins, ends, strict=True)):
        first = max(first, end) if begin <= first else first
    found.set("attention_global_blocks", first)
    if max(ends, default=0) > first:
        found.warn(f"{WITHIN}.global_block_indices", f"of the global blocks the first {first} of the sequence remain")


def _numbers(values: Mapping[str, Any], key: str, default: list[int]) -> list[int]:
    given = values.get(key)
    if given is None:
        return default
    if not isinstance(given, list) or any(type(each) is not int or not 0 <= each <= MOST_BLOCKS for each in given):
        raise UserError(
            f"{WITHIN}.{key}={shown(given)} must be a list of whole numbers from 0 to {MOST_BLOCKS}; correct the file"
        )
    return given


Read = Callable[[Imported, Mapping[str, Any]], None]
MODES: dict[str, tuple[str, Read, tuple[str, ...]]] = {
    "fixed": (
        "fixed",
        _fixed,
        ("num_local_blocks", "num_global_blocks", "num_different_global_patterns", "horizontal_global_attention"),
    ),
    "bigbird": ("bigbird", _bigbird, ("num_sliding_window_blocks", "num_global_blocks", "num_random_blocks")),
    "bslongformer": ("longformer", _longformer, ("num_sliding_window_blocks", *GLOBAL_PLACES)),
    "local_sliding_window": ("sliding", _sliding, ("num_sliding_window_blocks",)),
}
"""Pattern of each mode, the function that reads its options, and their names."""
KNOWN = {*(name for _, _, names in MODES.values() for name in names), "local_window_blocks"}
