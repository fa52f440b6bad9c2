"""Blocks of the block cache so small that short data have many of them; what is kept of them, fetched and damaged."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatronish.core.remote import RemotePath
from megatronish.data import block_cache, stores

BLOCK, SUM = 512, 128


def small_blocks(put: Callable[[object, str, object], None] = setattr) -> None:
    """Make blocks small here, and ask a store again without a pause: for good, or by a monkeypatch's setattr."""
    put(block_cache, "BLOCK_BYTES", BLOCK)
    put(block_cache, "SUM_BYTES", SUM)
    put(stores, "FIRST_WAIT", 0.0)


def bytes_kept(cache: Path) -> int:
    """Bytes of all blocks in a cache."""
    return sum(path.stat().st_size for path in (cache / "blocks").rglob("*") if path.is_file())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Ranges that a store is asked for from now on."""
    ranges, read = list[tuple[int, int]](), RemotePath.read_range

    def read_range(self: RemotePath, start: int, end: int) -> bytes:
        ranges.append((start, end))
        return read(self, start, end)

    monkeypatch.setattr(RemotePath, "read_range", read_range)
    return ranges


def damage_bit(path: Path) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
