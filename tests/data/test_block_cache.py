"""Tests of the block cache: every byte is the object's, whatever lies on the disk, dies, or reads at the same time."""

import errno
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import warm_context
from small_blocks import BLOCK, SUM, bytes_kept, counted, damage_bit, small_blocks

from megatronish.core.errors import RunError, UserError
from megatronish.core.remote import RemotePath
from megatronish.data import block_cache
from megatronish.data.block_cache import BlockCache, blocks_of


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch.setattr)


@pytest.fixture
def content(memory_folder: RemotePath) -> bytes:
    """Bytes of an object `x` in memory: three blocks and a part of one."""
    data = np.random.default_rng(0).bytes(3 * BLOCK + 77)
    put(memory_folder, data)
    return data


def put(folder: RemotePath, data: bytes) -> None:
    with (folder / "x").open("wb") as file:
        file.write(data)


def test_every_range_is_that_of_the_object_and_each_block_is_fetched_once(
    tmp_path: Path, memory_folder: RemotePath, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = counted(monkeypatch)
    for _ in range(2):  # the second time as another process
        cache = BlockCache.open(str(tmp_path), 1.0)
        (stored,) = cache.objects([memory_folder / "x"])
        ends = sorted(
            {0, 1, SUM - 1, SUM, SUM + 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, len(content) - 1, len(content)}
        )
        for start in ends:
            for end in ends:
                if start <= end:
                    assert cache.read(stored, start, end) == content[start:end]
        assert cache.whole(stored).read_bytes() == content
    blocks = [(start, min(start + BLOCK, len(content))) for start in range(0, len(content), BLOCK)]
    assert sorted(ranges) == sorted([*blocks, (0, len(content))])


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def damage_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [damage_cut, damage_zeros, damage_bit])
def test_a_damaged_block_is_fetched_again(
    damage: Callable[[Path], None], tmp_path: Path, memory_folder: RemotePath, content: bytes
) -> None:
    cache = BlockCache.open(str(tmp_path), 1.0)
    (stored,) = cache.objects([memory_folder / "x"])
    cache.read_ahead(blocks_of(stored, 0, len(content)))
    paths = [path for path in (tmp_path / "blocks").rglob("*") if path.is_file()]
    assert len(paths) == 4
    for path in paths:
        damage(path)
    assert cache.read(stored, 0, len(content)) == content
    assert BlockCache.open(str(tmp_path), 1.0).read(stored, 0, len(content)) == content


@pytest.mark.parametrize("damage", [damage_cut, damage_zeros, damage_bit])
@pytest.mark.parametrize("suffix", ["", ".sum"])
def test_a_damaged_index_is_fetched_again(
    damage: Callable[[Path], None],
    suffix: str,
    tmp_path: Path,
    memory_folder: RemotePath,
    content: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = BlockCache.open(str(tmp_path), 1.0)
    (stored,) = cache.objects([memory_folder / "x"])
    path, ranges = cache.whole(stored), counted(monkeypatch)
    assert cache.whole(stored) == path and not ranges
    damaged = path.with_name(path.name + suffix)
    if suffix:
        damaged.write_text("damaged" if damage is damage_bit else "12" if damage is damage_cut else "")
    else:
        damage(path)
    for _ in range(2):
        assert BlockCache.open(str(tmp_path), 1.0).whole(stored).read_bytes() == content
    assert ranges == [(0, len(content))], "it is fetched once"


def test_the_least_recently_used_blocks_go_first(
    tmp_path: Path, memory_folder: RemotePath, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache.open(str(tmp_path), (3 * (BLOCK + 4 * 4) + 50) / 1e9)
    (stored,) = cache.objects([memory_folder / "x"])
    monkeypatch.setattr(block_cache, "KEPT_PART", 1.0)
    for number in (0, 1, 2, 0):
        cache.read(stored, number * BLOCK, (number + 1) * BLOCK)
        time.sleep(0.01)  # clocks of files are coarse
    cache.read(stored, 3 * BLOCK, len(content))
    kept = sorted(path.name for path in (tmp_path / "blocks").rglob("*") if path.is_file())
    assert kept == ["00", "02", "03"]
    assert bytes_kept(tmp_path) == int((tmp_path / "blocks.sum").read_text())
    # A smaller size counts from the start, and a sum that a kill left wrong is corrected.
    (tmp_path / "blocks.sum").write_text("")
    BlockCache.open(str(tmp_path), 2 * BLOCK / 1e9)
    assert bytes_kept(tmp_path) <= 2 * BLOCK


def read_all(folder: str, url: str, out: str) -> None:
    """Another process of the machine: read an object through the cache."""
    small_blocks()
    cache = BlockCache.open(folder, 4 * BLOCK / 1e9)
    (stored,) = cache.objects([RemotePath(url)])
    data = b"".join(cache.read(stored, start, min(start + 300, stored.size)) for start in range(0, stored.size, 300))
    Path(out).write_bytes(data)


def die_in_a_write(folder: str, url: str) -> None:
    """Another process: killed when a half of a block is written."""
    small_blocks()
    commit = block_cache.AtomicFile.commit

    def killed(self: Any, **options: Any) -> None:
        self.file.truncate(BLOCK // 2)
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        commit(self, **options)

    block_cache.AtomicFile.commit = killed  # type: ignore[method-assign]
    cache = BlockCache.open(folder, 1.0)
    (stored,) = cache.objects([RemotePath(url)])
    cache.read(stored, 3 * BLOCK, 4 * BLOCK)


def started(context: ForkServerContext, function: Callable[..., None], *arguments: str) -> Any:
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def test_two_processes_read_at_once_and_one_that_is_killed_in_a_write_leaves_no_block(tmp_path: Path) -> None:
    data = np.random.default_rng(1).bytes(10 * BLOCK)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "x").write_bytes(data)
    url, context = (tmp_path / "store" / "x").as_uri(), warm_context()
    killed = started(context, die_in_a_write, str(tmp_path / "cache"), url)
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    left = [path for path in (tmp_path / "cache" / "blocks").rglob("*") if path.is_file()]
    assert left and all(path.suffix in (".tmp", ".lock") for path in left)
    readers = [started(context, read_all, str(tmp_path / "cache"), url, str(tmp_path / name)) for name in "ab"]
    for reader, name in zip(readers, "ab", strict=True):
        reader.join(60)
        assert reader.exitcode == 0 and (tmp_path / name).read_bytes() == data
    assert bytes_kept(tmp_path / "cache") <= 4 * BLOCK


def test_threads_that_want_a_block_fetch_it_once(
    tmp_path: Path, memory_folder: RemotePath, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache.open(str(tmp_path), 1.0)
    (stored,) = cache.objects([memory_folder / "x"])
    ranges = counted(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: cache.read(stored, 5, 50), range(8))) == {content[5:50]}
    assert ranges == [(0, BLOCK)]


def test_a_full_disk_costs_time_alone(
    tmp_path: Path,
    memory_folder: RemotePath,
    content: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = BlockCache.open(str(tmp_path), 1.0)
    (stored,) = cache.objects([memory_folder / "x"])
    monkeypatch.setattr(block_cache.AtomicFile, "commit", full)
    for start in (0, BLOCK, 5):
        assert cache.read(stored, start, start + 99) == content[start : start + 99]
    (warning,) = caplog.messages
    assert "not kept" in warning and "No space left on device" in warning
    with pytest.raises(RunError, match=r"--data-store-cache-path .* cannot be written: No space left"):
        cache.whole(stored)


def test_an_object_that_is_replaced_is_another_one_and_ends_a_run_that_reads_it(
    tmp_path: Path, memory_folder: RemotePath, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache.open(str(tmp_path), 1.0)
    (stored,) = cache.objects([memory_folder / "x"])
    cache.read(stored, 0, BLOCK)
    time.sleep(0.01)
    put(memory_folder, content[::-1])
    monkeypatch.setattr(block_cache, "LOOK_SECONDS", 0.0)
    with pytest.raises(RunError, match="/x were replaced while this run reads them"):
        cache.read(stored, BLOCK, BLOCK + 1)
    (other,) = cache.objects([memory_folder / "x"])
    assert cache.read(other, 0, len(content)) == content[::-1]


def test_a_server_without_ranges_and_a_range_that_comes_short_are_told(
    tmp_path: Path, memory_folder: RemotePath, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache.open(str(tmp_path), 1.0)
    (stored,) = cache.objects([memory_folder / "x"])
    monkeypatch.setattr(RemotePath, "read_range", lambda *_: content)
    with pytest.raises(UserError, match=r"the data .*/x: bytes 0 to 512 .* it knows no ranges"):
        cache.read(stored, 0, 1)
    monkeypatch.setattr(RemotePath, "read_range", lambda *_: b"ab")
    with pytest.raises(RunError, match=r"after 5 tries: 2 of 512 bytes came"):
        cache.read(stored, 0, 1)
