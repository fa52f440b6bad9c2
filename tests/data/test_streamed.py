"""Tests of training from object storage: the same samples and losses as from a disk, whatever store and cache do."""

import errno
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import VOCABULARY, run_job, steps_of, tiny, train_on_ranks, write_tokens
from object_stores import NEEDS_S3
from ranks import warm_context
from sweeps import further

from megatronish.commands.inspect_data import main as inspect
from megatronish.config.sections.data import BlendPhase, DataConfig, FimConfig
from megatronish.core.errors import RunError, UserError
from megatronish.core.remote import RemotePath
from megatronish.data import block_cache, stores
from megatronish.data.block_cache import BlockCache, blocks_of
from megatronish.data.chat.dataset import open_chats
from megatronish.data.datasets import DatasetSplits, build_datasets
from megatronish.data.fill_in_middle import MiddleRule
from megatronish.data.indexed import IndexedTokens, IndexedWriter
from megatronish.data.loader import BatchShare, Collator, micro_batches
from megatronish.data.sample import Dataset, DatasetSettings, DatasetSource, Sample, read_ahead
from megatronish.data.sentences import open_sentences
from megatronish.data.shards import DataShard, write_manifest
from megatronish.data.text import TokenizedText, read_text
from megatronish.data.token_files import TokenFiles
from megatronish.model.batch import MicroBatch
from megatronish.tokenizer.control_tokens import MaskTokens, MiddleTokens
from megatronish.tokenizer.plain import BytesTokenizer, NullTokenizer

BLOCK, SUM = 512, 128
RULE = MiddleRule(
    FimConfig(fim_data=True, fim_rate=1.0), NullTokenizer(VOCABULARY), MiddleTokens(1, 2, 3, 4), VOCABULARY - 1, None
)


SMALL = ((block_cache, "BLOCK_BYTES", BLOCK), (block_cache, "SUM_BYTES", SUM), (stores, "FIRST_WAIT", 0.0))
"""Blocks that short data have many of, and a store that is asked again without a pause."""


def small_blocks() -> None:
    """Planted in another process."""
    for module, name, value in SMALL:
        setattr(module, name, value)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in SMALL:
        monkeypatch.setattr(module, name, value)


@pytest.fixture(params=["memory", pytest.param("s3", marks=NEEDS_S3)])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemotePath]:
    """An empty folder of a store."""
    base = "memory://data" if request.param == "memory" else request.getfixturevalue("s3").url
    folder = RemotePath(f"{base}/{tmp_path.name}")
    yield folder
    folder.remove_tree()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[RemotePath]:
    """An empty folder of a store in memory."""
    folder = RemotePath(f"memory://data/{tmp_path.name}")
    yield folder
    folder.remove_tree()


def copied(disk: Path, store: RemotePath) -> None:
    """Copy all files of a folder to a store."""
    for path in disk.rglob("*"):
        if path.suffix in (".bin", ".idx", ".json"):
            with (store / path.relative_to(disk).as_posix()).open("wb") as file:
                file.write(path.read_bytes())


def pairs_in(disk: Path) -> None:
    """Two pairs and a manifest of both, in a folder of its own."""
    shards = []
    for seed, name in enumerate("ab"):
        pair = IndexedTokens(write_tokens(disk / name, seed=seed))
        shards.append(DataShard(pair.prefix, pair.dtype, len(pair), pair.num_documents, pair.num_tokens))
    (disk / "joined").mkdir()
    write_manifest(shards, str(disk / "joined" / "both"))


def opened(place: str, cache: Path, *, paths: str, size: float = 1.0, **changes: Any) -> DatasetSplits:
    """Data sets of these paths in a place; `phases` are those of a schedule."""
    phases = changes.pop("phases", ())
    words = tuple(word if word[0].isdigit() else f"{place}/{word}" for word in paths.split())
    data = DataConfig(data_path=words, split="80,20,0", data_store_cache_path=str(cache), data_store_cache_size=size)
    data = DataConfig(**vars(data) | changes)
    return build_datasets(data, seq_length=16, seed=1, vocab_size=VOCABULARY, eod=VOCABULARY - 1, phases=phases)


def assert_same(one: Dataset, other: Dataset, *, number: int = 60) -> None:
    """Equal identities, and equal samples in an equal order, fetched ahead in parts."""
    assert one.identity == other.identity
    for index in range(number):
        if index % 20 == 0:
            read_ahead(other, range(index, index + 20))
        expected, streamed = one.sample(index), other.sample(index)
        for name in ("tokens", "loss_mask", "document_ids", "token_types"):
            np.testing.assert_array_equal(getattr(expected, name), getattr(streamed, name))


KINDS: dict[str, dict[str, Any]] = {
    "a pair": {"paths": "a"},
    "a part": {"paths": "a[0.1:0.7]"},
    "a blend": {"paths": "0.3 a 0.7 b"},
    "a manifest": {"paths": "joined/both.shards.json"},
    "packed": {"paths": "0.3 a 0.7 joined/both.shards.json", "packing": "best-fit"},
    "a schedule": {"paths": "a b", "phases": (BlendPhase(0, (1, 0)), BlendPhase(20, (0.5, 0.5)))},
}


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_a_disk_in_their_order(kind: str, tmp_path: Path, folder: RemotePath) -> None:
    pairs_in(tmp_path / "disk")
    copied(tmp_path / "disk", folder)
    disk = opened(f"{tmp_path}/disk", tmp_path / "unused", **KINDS[kind])
    for size in (1.0, 3 * BLOCK / 1e9):  # the second is far smaller than the data
        store = opened(folder.url, tmp_path / "cache", size=size, **KINDS[kind])
        assert_same(disk.train, store.train)
        assert_same(disk.valid["validation"], store.valid["validation"], number=15)
    assert not (tmp_path / "unused").exists(), "what lies on a disk needs no cache"
    assert bytes_kept(tmp_path / "cache") <= 3 * BLOCK


def bytes_kept(cache: Path) -> int:
    return sum(path.stat().st_size for path in (cache / "blocks").rglob("*") if path.is_file())


def test_middles_and_sentences_are_those_of_a_disk(tmp_path: Path, memory: RemotePath) -> None:
    pairs_in(tmp_path / "disk")
    with IndexedWriter(tmp_path / "disk" / "sentences", dtype=np.dtype("<u2")) as writer:
        for count in range(1, 60):
            writer.add_document(np.arange(3 * count) % 90 + 4, [3] * count)
    copied(tmp_path / "disk", memory)
    splits = [
        opened(place, tmp_path / "cache", paths="0.5 a 0.5 b").with_middles(RULE, seed=3)
        for place in (f"{tmp_path}/disk", memory.url)
    ]
    assert_same(splits[0].train, splits[1].train)
    files = TokenFiles(str(tmp_path / "cache"))
    masks = MaskTokens(first=1, separator=2, mask=3, filler=0)
    settings = DatasetSettings(40, 5, VOCABULARY, 2, masks=masks, files=files)
    places = (f"{tmp_path}/disk/sentences", f"{memory.url}/sentences")
    assert_same(*(open_sentences(DatasetSource("training", path), settings) for path in places))


def test_blocks_of_a_step_are_fetched_together_before_its_samples(
    tmp_path: Path, memory: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs_in(tmp_path / "disk")
    copied(tmp_path / "disk", memory)
    data = opened(memory.url, tmp_path / "cache", paths="0.5 a 0.5 b").with_middles(RULE, seed=3).train
    read, lock, at_once, most, before = RemotePath.read_range, threading.Lock(), 0, 0, list[int]()

    def slow(self: RemotePath, start: int, end: int) -> bytes:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.05)
        with lock:
            at_once -= 1
        return read(self, start, end)

    def collate(samples: Sequence[Sample], numbers: Sequence[int]) -> MicroBatch:
        before.append(len(ranges))
        return Collator(eod=None)(samples, numbers)

    monkeypatch.setattr(RemotePath, "read_range", slow)
    ranges = counted(monkeypatch)
    micro_batches(data, consumed_samples=0, global_batch_size=24, share=BatchShare(0, 1, 2), collate=collate)
    assert most >= 3 and ranges and set(before) == {len(ranges)}


# ---- runs


def store_on_disk(tmp_path: Path) -> str:
    """Two pairs in a store that all processes see, and next to them on a disk; its URL."""
    for seed, name in enumerate("ab"):
        write_tokens(tmp_path / "disk" / name, seed=seed)
    store = RemotePath((tmp_path / "store").as_uri())
    copied(tmp_path / "disk", store)
    return store.url


def blend_in(place: str, tmp_path: Path) -> str:
    flags = f"--data-path 0.3 {place}/a 0.7 {place}/b --split 80,20,0 --eval-interval 3 --eval-iters 1"
    return f"{flags} --tokenizer-type null --data-store-cache-path {tmp_path}/cache --data-store-cache-size 0.001"


def with_tiny_cache() -> None:
    """Planted in a job: a cache that has room for four blocks, so that a run asks its store all the time."""
    small_blocks()
    make = block_cache.BlockCache.__init__

    def made(self: BlockCache, folder: Path, _: int) -> None:
        make(self, folder, 4 * (BLOCK + 16))

    block_cache.BlockCache.__init__ = made  # type: ignore[method-assign]


def failing_every_third_time() -> None:
    """Planted in a job: a store whose connection is lost at every third request."""
    with_tiny_cache()
    read, numbers = RemotePath.read_range, itertools.count()

    def failing(self: RemotePath, start: int, end: int) -> bytes:
        if next(numbers) % 3 == 2:
            raise OSError(errno.EIO, "the connection was lost", self.url)
        return read(self, start, end)

    RemotePath.read_range = failing  # type: ignore[method-assign]


def test_losses_are_those_of_a_disk_in_another_layout_too(tmp_path: Path) -> None:
    """From a store that fails, through a cache far smaller than the data."""
    url = store_on_disk(tmp_path)
    for more in ("--exit-interval 3 --save-interval 3 --tp 2", "--dp 2 --zero-stage 1"):
        flags = f"--micro-batch-size 2 {more}"
        train_on_ranks(tiny(tmp_path / "disk", flags, data=blend_in(f"{tmp_path}/disk", tmp_path)), world_size=2)
        argv = tiny(tmp_path / "store", flags, data=blend_in(url, tmp_path))
        ended = run_job(argv, tmp_path, plant=failing_every_third_time)
        assert ended.status == 0, ended
    assert len(steps_of(tmp_path / "disk")) == 6
    assert steps_of(tmp_path / "disk") == steps_of(tmp_path / "store")
    assert bytes_kept(tmp_path / "cache") <= 4 * (BLOCK + 16)
    # And a run that began on a disk continues from a store.
    told = train_on_ranks(tiny(tmp_path / "disk", "--train-iters 7", data=blend_in(url, tmp_path)))
    assert "continuing from" in told


def dead_after_fifty() -> None:
    """Planted in a job: a store that gives fifty blocks, and then no more."""
    _mortal(lambda: None)


def silent_after_fifty() -> None:
    """Planted in a job: a store that gives fifty blocks, and then no answer."""
    block_cache.REQUEST_SECONDS = 0.5
    _mortal(lambda: threading.Event().wait())


def _mortal(wait: Callable[[], object]) -> None:
    with_tiny_cache()
    stores.TRIES = 2
    read, numbers = RemotePath.read_range, itertools.count()

    def mortal(self: RemotePath, start: int, end: int) -> bytes:
        if end - start == BLOCK and next(numbers) >= 50:
            wait()
            raise OSError(errno.EIO, "the connection was lost", self.url)
        return read(self, start, end)

    RemotePath.read_range = mortal  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("plant", "reason"),
    [further((dead_after_fifty, "the connection was lost")), (silent_after_fifty, "no answer within 0.5 s")],
)
def test_a_store_that_dies_ends_a_run_with_a_sentence(plant: Callable[[], None], reason: str, tmp_path: Path) -> None:
    url = store_on_disk(tmp_path)
    argv = tiny(tmp_path / "run", "--dp 2 --train-iters 500", data=blend_in(url, tmp_path))
    ended = run_job(argv, tmp_path, plant=plant)
    assert ended.status == 1, ended
    assert f".bin cannot be read, after 2 tries: {reason}; the store does not answer" in ended.errors, ended
    assert "Traceback" not in ended.errors
    assert steps_of(tmp_path / "run"), "it had begun"


# ---- the cache


@pytest.fixture
def content(memory: RemotePath) -> bytes:
    """Bytes of an object `x` in memory: three blocks and a part of one."""
    data = np.random.default_rng(0).bytes(3 * BLOCK + 77)
    put(memory, data)
    return data


def put(memory: RemotePath, data: bytes) -> None:
    with (memory / "x").open("wb") as file:
        file.write(data)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Ranges that a store is asked for from now on."""
    ranges, read = list[tuple[int, int]](), RemotePath.read_range

    def read_range(self: RemotePath, start: int, end: int) -> bytes:
        ranges.append((start, end))
        return read(self, start, end)

    monkeypatch.setattr(RemotePath, "read_range", read_range)
    return ranges


def test_every_range_is_that_of_the_object_and_each_block_is_fetched_once(
    tmp_path: Path, memory: RemotePath, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = counted(monkeypatch)
    for _ in range(2):  # the second time as another process
        cache = BlockCache.open(str(tmp_path), 1.0)
        (stored,) = cache.objects([memory / "x"])
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


def damage_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [damage_cut, damage_zeros, damage_bit])
def test_a_damaged_block_is_fetched_again(
    damage: Callable[[Path], None], tmp_path: Path, memory: RemotePath, content: bytes
) -> None:
    cache = BlockCache.open(str(tmp_path), 1.0)
    (stored,) = cache.objects([memory / "x"])
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
    memory: RemotePath,
    content: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = BlockCache.open(str(tmp_path), 1.0)
    (stored,) = cache.objects([memory / "x"])
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


def test_the_index_of_a_run_and_the_digest_of_its_tokens_are_fetched_again_where_a_bit_is_another(
    tmp_path: Path, memory: RemotePath
) -> None:
    pairs_in(tmp_path / "disk")
    copied(tmp_path / "disk", memory)
    disk = opened(f"{tmp_path}/disk", tmp_path / "unused", paths="a")
    for _ in range(2):
        store = opened(memory.url, tmp_path / "cache", paths="a")
        assert_same(disk.train, store.train)
        paths = [path for path in (tmp_path / "cache" / "whole").iterdir() if path.suffix != ".sum"]
        assert len(paths) == 2
        for path in paths:
            damage_bit(path)


def test_the_least_recently_used_blocks_go_first(
    tmp_path: Path, memory: RemotePath, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache.open(str(tmp_path), (3 * (BLOCK + 4 * 4) + 50) / 1e9)
    (stored,) = cache.objects([memory / "x"])
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
    tmp_path: Path, memory: RemotePath, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache.open(str(tmp_path), 1.0)
    (stored,) = cache.objects([memory / "x"])
    ranges = counted(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: cache.read(stored, 5, 50), range(8))) == {content[5:50]}
    assert ranges == [(0, BLOCK)]


def test_a_full_disk_costs_time_alone(
    tmp_path: Path,
    memory: RemotePath,
    content: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = BlockCache.open(str(tmp_path), 1.0)
    (stored,) = cache.objects([memory / "x"])
    monkeypatch.setattr(block_cache.AtomicFile, "commit", full)
    for start in (0, BLOCK, 5):
        assert cache.read(stored, start, start + 99) == content[start : start + 99]
    (warning,) = caplog.messages
    assert "not kept" in warning and "No space left on device" in warning
    with pytest.raises(RunError, match=r"--data-store-cache-path .* cannot be written: No space left"):
        cache.whole(stored)


# ---- what is told


def test_an_object_that_is_replaced_is_another_one_and_ends_a_run_that_reads_it(
    tmp_path: Path, memory: RemotePath, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache.open(str(tmp_path), 1.0)
    (stored,) = cache.objects([memory / "x"])
    cache.read(stored, 0, BLOCK)
    time.sleep(0.01)
    put(memory, content[::-1])
    monkeypatch.setattr(block_cache, "LOOK_SECONDS", 0.0)
    with pytest.raises(RunError, match="/x were replaced while this run reads them"):
        cache.read(stored, BLOCK, BLOCK + 1)
    (other,) = cache.objects([memory / "x"])
    assert cache.read(other, 0, len(content)) == content[::-1]


def test_what_cannot_be_read_is_told(tmp_path: Path, memory: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs_in(tmp_path / "disk")
    copied(tmp_path / "disk", memory)
    (memory / "bad.shards.json").write_text("{}")
    (memory / "cut.idx").write_text("MMIDIDX")
    (memory / "cut.bin").write_text("")
    (memory / "b.bin").write_text("short")
    (memory / "a.bin").unlink()

    def told(path: str) -> str:
        with pytest.raises(UserError) as error:
            TokenFiles(str(tmp_path / "cache")).open(path)
        return str(error.value)

    url = memory.url
    assert f"the data {url}/a.bin cannot be read: there is no such object; check" in told(f"{url}/a")
    assert "check its name, the credentials and the address of the store" in told(f"{url}/a")
    assert told(f"{url}/a.bin").endswith(f"use {url}/a")
    assert f"{url}/b.bin has 5 bytes but its .idx says" in told(f"{url}/b")
    assert f"{url}/bad.shards.json is not a manifest of shards ('format')" in told(f"{url}/bad.shards.json")
    assert f"{url}/cut.idx has 7 bytes and is truncated" in told(f"{url}/cut")
    assert "the data s3://me:***@bucket/x have a password" in told("s3://me:secret@bucket/x")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--data-store-cache-path .*/file/x cannot be written"):
        TokenFiles(str(tmp_path / "file" / "x")).open(f"{url}/b")
    with pytest.raises(UserError, match=r"--data-store-cache-path s3://bucket/x is a URL, .* name a path"):
        TokenFiles("s3://bucket/x").open(f"{url}/b")
    with pytest.raises(UserError, match=r"--data-cache-path s3://bucket/x is a URL, .* name a path"):
        DatasetSettings(16, 1, VOCABULARY, 0, cache_path="s3://bucket/x").index_folder(f"{url}/b")


def test_chats_are_read_from_a_disk_alone() -> None:
    settings = DatasetSettings(16, 1, VOCABULARY, 0)
    with pytest.raises(UserError, match=r"s3://bucket/x.jsonl is on object storage, and chats are read from a disk"):
        open_chats(DatasetSource("training", "s3://bucket/x.jsonl"), settings)


def test_a_server_without_ranges_and_a_range_that_comes_short_are_told(
    tmp_path: Path, memory: RemotePath, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache.open(str(tmp_path), 1.0)
    (stored,) = cache.objects([memory / "x"])
    monkeypatch.setattr(RemotePath, "read_range", lambda *_: content)
    with pytest.raises(UserError, match=r"the data .*/x: bytes 0 to 512 .* it knows no ranges"):
        cache.read(stored, 0, 1)
    monkeypatch.setattr(RemotePath, "read_range", lambda *_: b"ab")
    with pytest.raises(RunError, match=r"after 5 tries: 2 of 512 bytes came"):
        cache.read(stored, 0, 1)


@pytest.mark.parametrize("has_place", [False, True])
def test_inspect_reads_a_store(
    has_place: bool,
    tmp_path: Path,
    folder: RemotePath,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    pairs_in(tmp_path / "disk")
    copied(tmp_path / "disk", folder)
    flags, told = ["--tokenizer-type", "null", "--vocab-size", str(VOCABULARY)], list[str]()
    if has_place:
        flags += ["--data-store-cache-path", str(tmp_path / "own"), "--data-store-cache-size", "0.001"]
    for place in (f"{tmp_path}/disk", folder.url):
        for words in (["a"], ["joined/both.shards.json", "--check"], ["b", "--check"]):
            assert inspect([f"{place}/{words[0]}", *words[1:], *flags]) == 0
        told.append(capsys.readouterr().out.replace(place, ""))
    assert told[0] == told[1]
    assert (tmp_path / "home" / "megatronish" / "data" / "blocks").is_dir() != has_place
    assert (tmp_path / "own" / "blocks").is_dir() == has_place
    assert (tmp_path / "own" / "samples").is_dir() == has_place


def test_a_text_to_evaluate_is_read_from_a_store(tmp_path: Path, folder: RemotePath) -> None:
    pairs_in(tmp_path / "disk")
    copied(tmp_path / "disk", folder)
    for place in (tmp_path / "disk", folder):
        with (place / "text.jsonl").open("wb") as file:
            file.write(b'{"text": "one"}\n{}\n{"text": "two three"}\n')
        with (place / "lines").open("wb") as file:
            file.write(b'{"text": "without an ending"}\n')
    files = TokenFiles(str(tmp_path / "cache"))

    def read(place: str, name: str) -> TokenizedText:
        path = f"{place}/{name}"
        return read_text(path, tokenizer=BytesTokenizer, json_key="text", vocab_size=300, eod=5, files=files)

    for name in ("a", "joined/both.shards.json", "text.jsonl", "lines"):
        disk, store = read(f"{tmp_path}/disk", name), read(folder.url, name)
        np.testing.assert_array_equal(disk.tokens, store.tokens)
        np.testing.assert_array_equal(disk.starts, store.starts)
        assert (disk.eod, disk.num_bytes) == (store.eod, store.num_bytes)
        assert [line.replace(f"{tmp_path}/disk", folder.url) for line in disk.bad_lines] == list(store.bad_lines)
    for name in ("none.jsonl", "none", "none.shards.json"):
        with pytest.raises(UserError, match=r"none.* (does not exist|no such object)"):
            read(folder.url, name)
