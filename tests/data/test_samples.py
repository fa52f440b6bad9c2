"""Tests of samples: every token is a label once, the order depends only on data and seed, a stale cache is rejected."""

import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from ranks import run_ranks, wait_until, warm_context

from megatronish.core.errors import RunError
from megatronish.core.files import one_builder
from megatronish.data.indexed import IndexedTokens, IndexedWriter
from megatronish.data.samples import GPTSamples, stable_order
from megatronish.launch.place import Place

S = 8


def write(prefix: Path, lengths: list[int]) -> None:
    """Documents of these lengths; all tokens of the file are different: 0, 1, 2, ..."""
    with IndexedWriter(prefix, dtype=np.dtype("<i4")) as writer:
        writer.add_documents(np.arange(sum(lengths)), lengths)


def open_samples(
    prefix: Path, *, seed: int = 1, seq_length: int = S, part: tuple[int, int] | None = None, cache: Path | None = None
) -> GPTSamples:
    file = IndexedTokens(prefix)
    first, end = part or (0, file.num_documents)
    return GPTSamples(
        file,
        name="training",
        first_document=first,
        end_document=end,
        seq_length=seq_length,
        seed=seed,
        vocab_size=1_000_000,
        cache_folder=cache,
    )


def take(samples: GPTSamples, count: int, first: int = 0) -> NDArray[np.int64]:
    return np.stack([samples.sample(index).tokens for index in range(first, first + count)])


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """100 documents, empty, short and long ones."""
    prefix = tmp_path / "data"
    write(prefix, [0, *np.random.default_rng(0).integers(0, 30, 98).tolist(), 0])
    return prefix


def serial_epoch(file: IndexedTokens, order: list[int]) -> list[int]:
    return [token for document in order for token in file.document(document).tolist()]


@pytest.mark.parametrize("seq_length", [1, 2, 8, 100])
def test_every_token_of_an_epoch_is_a_label_once_but_fewer_than_a_sample(prefix: Path, seq_length: int) -> None:
    samples = open_samples(prefix, seq_length=seq_length)
    num_tokens = IndexedTokens(prefix).num_tokens
    assert samples.num_samples == (num_tokens - 1) // seq_length
    for epoch in range(3):
        labels = take(samples, samples.num_samples, epoch * samples.num_samples)[:, 1:].ravel()
        assert max(Counter(labels.tolist()).values()) == 1
        assert num_tokens - len(labels) < seq_length + 1


def test_samples_are_runs_of_documents_laid_end_to_end(prefix: Path) -> None:
    file, samples = IndexedTokens(prefix), open_samples(prefix)
    epoch = samples._epoch(0)
    starts = [int(file.document_start(document)) for document in range(file.num_documents)]
    lengths = np.diff([0, *epoch.ends])
    laid = [
        token for start, length in zip(epoch.starts, lengths, strict=True) for token in range(start, start + length)
    ]
    assert sorted(laid) == list(range(file.num_tokens))
    assert set(epoch.starts.tolist()) <= set(starts)
    for place, cut in enumerate(epoch.cuts.tolist()):
        assert samples.sample(place).tokens.tolist() == laid[cut * S : cut * S + S + 1]


def test_documents_and_samples_are_shuffled_anew_in_each_epoch(prefix: Path) -> None:
    samples = open_samples(prefix)
    first, second = samples._epoch(0), samples._epoch(1)
    assert sorted(first.cuts.tolist()) == sorted(second.cuts.tolist()) == list(range(samples.num_samples))
    for a, b in zip(first, second, strict=True):
        assert not np.array_equal(a, b)
    assert first.cuts.tolist() != sorted(first.cuts.tolist())
    assert first.starts.tolist() != sorted(first.starts.tolist())


def test_the_order_depends_on_seed_and_data_alone(prefix: Path, tmp_path: Path) -> None:
    count = 3 * open_samples(prefix).num_samples
    reference = take(open_samples(prefix), count)
    backwards = open_samples(prefix)
    assert all(np.array_equal(backwards.sample(index).tokens, reference[index]) for index in reversed(range(count)))
    (tmp_path / "elsewhere").mkdir()
    for ending in (".bin", ".idx"):
        shutil.copy(f"{prefix}{ending}", tmp_path / "elsewhere" / f"moved{ending}")
    assert np.array_equal(take(open_samples(tmp_path / "elsewhere" / "moved"), count), reference)
    assert not np.array_equal(take(open_samples(prefix, seed=2), count), reference)


def test_the_order_never_changes(tmp_path: Path) -> None:
    """A golden order: what runs were trained on must not change with numpy, the machine or a refactor."""
    write(tmp_path / "data", [3, 4, 0, 5, 2, 6])
    samples = open_samples(tmp_path / "data", seq_length=4)
    assert take(samples, 2 * samples.num_samples)[:, 0].tolist() == [12, 3, 9, 15, 4, 19, 15, 0]


def test_a_range_of_documents_gives_their_tokens_alone(prefix: Path) -> None:
    file, samples = IndexedTokens(prefix), open_samples(prefix, part=(20, 60))
    tokens = set(take(samples, samples.num_samples).ravel().tolist())
    assert min(tokens) >= file.document_start(20)
    assert max(tokens) < file.document_start(60)


def test_identity_tells_what_samples_are_equal(prefix: Path, tmp_path: Path) -> None:
    write(tmp_path / "other", [50, 50])
    all_samples = [
        open_samples(prefix),
        open_samples(prefix, seed=2),
        open_samples(prefix, seq_length=9),
        open_samples(prefix, part=(0, 50)),
        open_samples(tmp_path / "other"),
    ]
    assert len({samples.identity for samples in all_samples}) == len(all_samples)
    assert open_samples(prefix).identity == all_samples[0].identity


def test_other_text_of_the_same_lengths_has_another_identity_and_the_same_order(prefix: Path, tmp_path: Path) -> None:
    shutil.copy(f"{prefix}.idx", tmp_path / "other.idx")
    tokens = bytearray(Path(f"{prefix}.bin").read_bytes())
    tokens[-2] ^= 1
    (tmp_path / "other.bin").write_bytes(tokens)
    one, other = open_samples(prefix), open_samples(tmp_path / "other")
    assert one.identity != other.identity
    assert (take(one, 20) != take(other, 20)).sum() <= 2


def test_the_cache_gives_the_same_samples(prefix: Path, tmp_path: Path) -> None:
    count = 2 * open_samples(prefix).num_samples
    reference = take(open_samples(prefix), count)
    for _ in range(2):
        assert np.array_equal(take(open_samples(prefix, cache=tmp_path / "cache"), count), reference)
    names = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert [name.rpartition("-")[2] for name in names] == ["00000.epoch", "00001.epoch"]


@pytest.mark.parametrize("damage", ["truncated", "emptied", "flipped", "zeroed", "a folder"])
def test_a_damaged_cache_is_built_anew(prefix: Path, tmp_path: Path, damage: str) -> None:
    reference = take(open_samples(prefix, cache=tmp_path / "cache"), 5)
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    else:
        broken = {"truncated": whole[:-1], "emptied": b"", "flipped": b"\1" + whole[1:], "zeroed": bytes(len(whole))}
        path.write_bytes(broken[damage])
    assert np.array_equal(take(open_samples(prefix, cache=tmp_path / "cache"), 5), reference)
    assert damage == "a folder" or path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_costs_only_time(
    prefix: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()  # no folder can be made in a file, by root neither
    samples = open_samples(prefix, cache=tmp_path / "file" / "cache")
    assert np.array_equal(take(samples, 5), take(open_samples(prefix), 5))
    assert "--data-cache-path names another folder" in caplog.text


def build_together(_place: Place, prefix: Path, cache: Path, start: float) -> NDArray[np.int64]:
    time.sleep(max(start - time.time(), 0.0))
    samples = open_samples(prefix, cache=cache)
    return take(samples, 2 * samples.num_samples)


def test_processes_that_build_one_cache_at_once_get_equal_samples(prefix: Path, tmp_path: Path) -> None:
    samples = open_samples(prefix)
    reference = take(samples, 2 * samples.num_samples)
    for attempt in range(5):
        cache = tmp_path / f"cache {attempt}"
        results = run_ranks(4, build_together, prefix, cache, time.time() + 0.1)
        assert all(np.array_equal(result, reference) for result in results)
        assert len(list(cache.iterdir())) == 2


def count_builds(place: Place, prefix: Path, folder: Path) -> NDArray[np.int64]:
    """Build at the same time as the other ranks, slowly, and leave a file for each time that this rank did."""
    whole = GPTSamples._build

    def slow(samples: GPTSamples, number: int) -> NDArray[np.int64]:
        (folder / f"rank {place.rank} built epoch {number}").touch()
        time.sleep(0.3)
        return whole(samples, number)

    GPTSamples._build = slow  # type: ignore[method-assign]
    try:
        return build_together(place, prefix, folder / "cache", time.time())
    finally:
        GPTSamples._build = whole  # type: ignore[method-assign]


def test_of_many_ranks_one_builds_and_the_others_wait(prefix: Path, tmp_path: Path) -> None:
    samples = open_samples(prefix)
    results = run_ranks(4, count_builds, prefix, tmp_path)
    assert all(np.array_equal(result, take(samples, 2 * samples.num_samples)) for result in results)
    assert sorted(path.name[-1] for path in tmp_path.glob("rank * built epoch *")) == ["0", "1"]
    assert all(path.suffix == ".epoch" for path in (tmp_path / "cache").iterdir())


def test_where_the_cache_cannot_be_written_ranks_build_at_the_same_time(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()  # a file, in which no folder can be made
    begin = time.monotonic()
    run_ranks(4, count_builds, prefix, tmp_path)
    assert len(list(tmp_path.glob("rank * built epoch *"))) == 8
    assert time.monotonic() - begin < 20  # 0.6 s of building, not 8 times 0.3 s one after another


def hold(path: Path, ready: Path) -> None:
    with one_builder(path):
        ready.touch()
        time.sleep(60)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_builder_that_dies_or_stops_holds_nobody_up(tmp_path: Path, signum: int) -> None:
    path, ready = tmp_path / "x.epoch", tmp_path / "ready"
    builder = warm_context().Process(target=hold, args=(path, ready))
    builder.start()
    assert builder.pid is not None
    assert wait_until(ready.exists)
    os.kill(builder.pid, signum)
    begin = time.monotonic()
    try:
        with one_builder(path, patience_seconds=1.0 if signum == signal.SIGSTOP else 60.0):
            assert time.monotonic() - begin < 10
    finally:
        builder.kill()
        builder.join()


def test_too_little_data_is_told_with_a_remedy(prefix: Path, tmp_path: Path) -> None:
    write(tmp_path / "tiny", [3, 5])
    message = r"training data of .*tiny is 8 tokens in 2 of its 2 documents, fewer than the 9 of one sample .* --split"
    with pytest.raises(ValueError, match=message):
        open_samples(tmp_path / "tiny")
    with pytest.raises(ValueError, match="is 0 tokens in 0 of its 100 documents"):
        open_samples(prefix, part=(100, 100))


def test_ids_beyond_the_vocabulary_are_named(prefix: Path) -> None:
    file = IndexedTokens(prefix)
    with pytest.raises(ValueError, match=r"data\.bin holds token id \d+, but the vocabulary has 5; train with the"):
        GPTSamples(file, name="x", first_document=0, end_document=100, seq_length=S, seed=1, vocab_size=5)


@pytest.mark.parametrize("end", ["data.bin", "data.idx", "*.epoch"])
def test_a_file_cut_short_while_it_is_read_is_told_and_no_bus_error(
    prefix: Path, tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatronish.data.samples.READ_WHOLE", 0)  # small files of the cache are mapped, too
    samples = open_samples(prefix, cache=tmp_path / "cache")
    samples.sample(0)
    (path,) = [*tmp_path.glob(end), *tmp_path.glob(f"cache/{end}")]
    size = path.stat().st_size
    os.truncate(path, 0)
    with pytest.raises(RunError, match=rf"{path} has 0 bytes and had {size} when this run opened it: .*copy or make"):
        samples.sample(1)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000])
@pytest.mark.parametrize("upper_bits", [64, 8, 0])
def test_order_of_draws_is_that_of_a_stable_sort(size: int, upper_bits: int) -> None:
    draws = np.random.default_rng(size).integers(0, 2**64, size, dtype=np.uint64)
    mask = np.uint64((2**64 - 2 ** (64 - upper_bits)) | 0b1001)  # draws that differ at both ends alone: many are equal
    assert np.array_equal(stable_order(draws & mask), (draws & mask).argsort(kind="stable"))
