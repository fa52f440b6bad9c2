"""Tests of training from object storage: the same samples and losses as from a disk, whatever store and cache do."""

import errno
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import VOCABULARY, run_job, steps_of, tiny, train_on_ranks, write_tokens
from small_blocks import BLOCK, bytes_kept, counted, damage_bit, small_blocks
from sweeps import further

from megatronish.commands.inspect_data import main as inspect
from megatronish.config.sections.data import BlendPhase, DataConfig, FimConfig
from megatronish.core.errors import UserError
from megatronish.core.remote import RemotePath
from megatronish.data import block_cache, stores
from megatronish.data.block_cache import BlockCache
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

RULE = MiddleRule(
    FimConfig(fim_data=True, fim_rate=1.0), NullTokenizer(VOCABULARY), MiddleTokens(1, 2, 3, 4), VOCABULARY - 1, None
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch.setattr)


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
def test_samples_are_those_of_a_disk_in_their_order(kind: str, tmp_path: Path, store_folder: RemotePath) -> None:
    pairs_in(tmp_path / "disk")
    copied(tmp_path / "disk", store_folder)
    disk = opened(f"{tmp_path}/disk", tmp_path / "unused", **KINDS[kind])
    for size in (1.0, 3 * BLOCK / 1e9):  # the second is far smaller than the data
        store = opened(store_folder.url, tmp_path / "cache", size=size, **KINDS[kind])
        assert_same(disk.train, store.train)
        assert_same(disk.valid["validation"], store.valid["validation"], number=15)
    assert not (tmp_path / "unused").exists(), "what lies on a disk needs no cache"
    assert bytes_kept(tmp_path / "cache") <= 3 * BLOCK


def test_middles_and_sentences_are_those_of_a_disk(tmp_path: Path, memory_folder: RemotePath) -> None:
    pairs_in(tmp_path / "disk")
    with IndexedWriter(tmp_path / "disk" / "sentences", dtype=np.dtype("<u2")) as writer:
        for count in range(1, 60):
            writer.add_document(np.arange(3 * count) % 90 + 4, [3] * count)
    copied(tmp_path / "disk", memory_folder)
    splits = [
        opened(place, tmp_path / "cache", paths="0.5 a 0.5 b").with_middles(RULE, seed=3)
        for place in (f"{tmp_path}/disk", memory_folder.url)
    ]
    assert_same(splits[0].train, splits[1].train)
    files = TokenFiles(str(tmp_path / "cache"))
    masks = MaskTokens(first=1, separator=2, mask=3, filler=0)
    settings = DatasetSettings(40, 5, VOCABULARY, 2, masks=masks, files=files)
    places = (f"{tmp_path}/disk/sentences", f"{memory_folder.url}/sentences")
    assert_same(*(open_sentences(DatasetSource("training", path), settings) for path in places))


def test_blocks_of_a_step_are_fetched_together_before_its_samples(
    tmp_path: Path, memory_folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs_in(tmp_path / "disk")
    copied(tmp_path / "disk", memory_folder)
    data = opened(memory_folder.url, tmp_path / "cache", paths="0.5 a 0.5 b").with_middles(RULE, seed=3).train
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


def test_the_index_of_a_run_and_the_digest_of_its_tokens_are_fetched_again_where_a_bit_is_another(
    tmp_path: Path, memory_folder: RemotePath
) -> None:
    pairs_in(tmp_path / "disk")
    copied(tmp_path / "disk", memory_folder)
    disk = opened(f"{tmp_path}/disk", tmp_path / "unused", paths="a")
    for _ in range(2):
        store = opened(memory_folder.url, tmp_path / "cache", paths="a")
        assert_same(disk.train, store.train)
        paths = [path for path in (tmp_path / "cache" / "whole").iterdir() if path.suffix != ".sum"]
        assert len(paths) == 2
        for path in paths:
            damage_bit(path)


# ---- what is told


def test_what_cannot_be_read_is_told(
    tmp_path: Path, memory_folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs_in(tmp_path / "disk")
    copied(tmp_path / "disk", memory_folder)
    (memory_folder / "bad.shards.json").write_text("{}")
    (memory_folder / "cut.idx").write_text("MMIDIDX")
    (memory_folder / "cut.bin").write_text("")
    (memory_folder / "b.bin").write_text("short")
    (memory_folder / "a.bin").unlink()

    def told(path: str) -> str:
        with pytest.raises(UserError) as error:
            TokenFiles(str(tmp_path / "cache")).open(path)
        return str(error.value)

    url = memory_folder.url
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


@pytest.mark.parametrize("has_place", [False, True])
def test_inspect_reads_a_store(
    has_place: bool,
    tmp_path: Path,
    store_folder: RemotePath,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    pairs_in(tmp_path / "disk")
    copied(tmp_path / "disk", store_folder)
    flags, told = ["--tokenizer-type", "null", "--vocab-size", str(VOCABULARY)], list[str]()
    if has_place:
        flags += ["--data-store-cache-path", str(tmp_path / "own"), "--data-store-cache-size", "0.001"]
    for place in (f"{tmp_path}/disk", store_folder.url):
        for words in (["a"], ["joined/both.shards.json", "--check"], ["b", "--check"]):
            assert inspect([f"{place}/{words[0]}", *words[1:], *flags]) == 0
        told.append(capsys.readouterr().out.replace(place, ""))
    assert told[0] == told[1]
    assert (tmp_path / "home" / "megatronish" / "data" / "blocks").is_dir() != has_place
    assert (tmp_path / "own" / "blocks").is_dir() == has_place
    assert (tmp_path / "own" / "samples").is_dir() == has_place


def test_a_text_to_evaluate_is_read_from_a_store(tmp_path: Path, store_folder: RemotePath) -> None:
    pairs_in(tmp_path / "disk")
    copied(tmp_path / "disk", store_folder)
    for place in (tmp_path / "disk", store_folder):
        with (place / "text.jsonl").open("wb") as file:
            file.write(b'{"text": "one"}\n{}\n{"text": "two three"}\n')
        with (place / "lines").open("wb") as file:
            file.write(b'{"text": "without an ending"}\n')
    files = TokenFiles(str(tmp_path / "cache"))

    def read(place: str, name: str) -> TokenizedText:
        path = f"{place}/{name}"
        return read_text(path, tokenizer=BytesTokenizer, json_key="text", vocab_size=300, eod=5, files=files)

    for name in ("a", "joined/both.shards.json", "text.jsonl", "lines"):
        disk, store = read(f"{tmp_path}/disk", name), read(store_folder.url, name)
        np.testing.assert_array_equal(disk.tokens, store.tokens)
        np.testing.assert_array_equal(disk.starts, store.starts)
        assert (disk.eod, disk.num_bytes) == (store.eod, store.num_bytes)
        assert [line.replace(f"{tmp_path}/disk", store_folder.url) for line in disk.bad_lines] == list(store.bad_lines)
    for name in ("none.jsonl", "none", "none.shards.json"):
        with pytest.raises(UserError, match=r"none.* (does not exist|no such object)"):
            read(store_folder.url, name)
