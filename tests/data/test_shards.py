"""Tests of shards: joined in little memory, or one data set by a manifest, with the identity of the joined pair."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatronish.config.check import missing_files
from megatronish.config.sections.data import DataConfig
from megatronish.core.errors import UserError
from megatronish.data.datasets import build_datasets
from megatronish.data.indexed import BLOCK, IndexedTokens, IndexedWriter, bin_path, idx_path
from megatronish.data.sample import DatasetSettings, DatasetSource
from megatronish.data.samples import open_gpt_samples
from megatronish.data.sentences import open_sentences
from megatronish.data.shards import DataShard, JoinedTokens, ShardedTokens, join_shards, write_manifest
from megatronish.data.text import read_text
from megatronish.data.token_files import TokenFiles
from megatronish.tokenizer.control_tokens import MaskTokens
from megatronish.tokenizer.plain import BytesTokenizer


def write_shards(folder: Path, sizes: list[int], *, dtype: str = "<u2") -> list[DataShard]:
    """Shards of so many documents, some empty, some of several sequences."""
    draw, shards = np.random.default_rng(0), []
    for number, size in enumerate(sizes):
        prefix = folder / "shards" / f"{number}"
        with IndexedWriter(prefix, dtype=np.dtype(dtype)) as writer:
            for _ in range(size):
                lengths = draw.integers(1, 9, draw.integers(0, 3)).tolist()
                writer.add_document(draw.integers(0, 200, sum(lengths)), lengths)
        pair = IndexedTokens(prefix)
        shards.append(DataShard(str(prefix), pair.dtype, len(pair), pair.num_documents, pair.num_tokens))
    return shards


def joined_by_a_writer(shards: list[DataShard], prefix: Path) -> str:
    with IndexedWriter(prefix, dtype=shards[0].dtype) as writer:
        for shard in shards:
            writer.add_prefix(shard.prefix)
    return str(prefix)


def test_joined_shards_are_what_one_writer_writes(tmp_path: Path) -> None:
    for number, sizes in enumerate(([5], [0], [3, 0, 40, 0], [0, 7])):
        shards = write_shards(tmp_path / f"{number}", sizes)
        expected = joined_by_a_writer(shards, tmp_path / "expected")
        join_shards(shards, f"{tmp_path}/joined", on_bytes=lambda _number: None)
        for path in (bin_path, idx_path):
            assert path(tmp_path / "joined").read_bytes() == path(expected).read_bytes()


def test_an_index_is_joined_and_checked_in_memory_that_does_not_grow_with_it(tmp_path: Path) -> None:
    peaks = []
    for number in (1, 8):
        prefix = tmp_path / f"{number}"
        with IndexedWriter(prefix, dtype=np.dtype("<u2")) as writer:
            writer.add_documents(np.zeros(number * BLOCK, np.uint16), np.ones(number * BLOCK, np.int64))
        shard = DataShard(str(prefix), np.dtype("<u2"), number * BLOCK, number * BLOCK, number * BLOCK)
        tracemalloc.start()
        join_shards([shard, shard], f"{tmp_path}/joined", on_bytes=lambda _number: None)
        assert IndexedTokens(f"{tmp_path}/joined").num_documents == 2 * number * BLOCK
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_a_shard_without_its_sum_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    shard = write_shards(tmp_path, [5])[0]._replace(sums=("0" * 64, "0" * 64))
    with pytest.raises(UserError, match=r"0.bin is damaged: its bytes do not have the sum"):
        join_shards([shard], f"{tmp_path}/joined", on_bytes=lambda _number: None)
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


def test_a_manifest_is_the_same_data_set_as_the_joined_pair(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [30, 0, 1, 50, 0])
    joined, manifest = tmp_path / "x" / "joined", write_manifest(shards, f"{tmp_path}/all")
    join_shards(shards, str(joined), on_bytes=lambda _number: None)
    pair, sharded = IndexedTokens(joined), TokenFiles().open(str(manifest))
    assert isinstance(sharded, ShardedTokens)
    assert (sharded.identity, sharded.content) == (pair.identity, pair.content)
    assert sharded.num_tokens == pair.num_tokens
    for document in range(pair.num_documents):
        assert sharded.document(document).tolist() == pair.document(document).tolist()
    assert np.asarray(sharded.tokens).tolist() == np.asarray(pair.tokens).tolist()
    settings = DatasetSettings(seq_length=16, seed=1, vocab_size=257, eod=256)
    one, other = (
        open_gpt_samples(DatasetSource("training", str(path), (0.1, 0.9)), settings) for path in (joined, manifest)
    )
    assert one.identity == other.identity
    for index in range(2 * one.num_samples):
        assert one.sample(index).tokens.tolist() == other.sample(index).tokens.tolist()
    masked = DatasetSettings(seq_length=16, seed=1, vocab_size=257, eod=256, masks=MaskTokens(253, 254, 255, 252))
    first, second = (open_sentences(DatasetSource("training", str(path)), masked) for path in (joined, manifest))
    assert first.sample(3).tokens.tolist() == second.sample(3).tokens.tolist()
    files = TokenFiles()
    text = read_text(str(manifest), tokenizer=BytesTokenizer, json_key="text", vocab_size=257, files=files)
    assert text.tokens.tolist() == np.asarray(pair.tokens).tolist()


def test_a_folder_with_a_manifest_can_be_moved(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    manifest = write_manifest(write_shards(tmp_path / "a", [5, 5]), f"{tmp_path}/a/all")
    before = TokenFiles().open(str(manifest)).identity
    (tmp_path / "a").rename(tmp_path / "b")
    assert TokenFiles().open(str(tmp_path / "b" / manifest.name)).identity == before


def test_a_manifest_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    manifest = write_manifest(write_shards(tmp_path, [5, 5]), f"{tmp_path}/all")
    whole, shard = json.loads(manifest.read_text()), bin_path(tmp_path / "shards" / "1")
    tokens = shard.read_bytes()

    def refused(sentence: str) -> None:
        with pytest.raises(UserError, match=sentence):
            TokenFiles().open(str(manifest))

    shard.write_bytes(tokens[:-2])
    refused(rf"1.bin has {len(tokens) - 2} bytes but {manifest} says {len(tokens)}; make it again with megatronish")
    shard.unlink()
    refused(rf"1.bin does not exist; {manifest} names it: bring it back, or preprocess that task again")
    shard.write_bytes(tokens)
    for content in ("{", "[]", json.dumps({**whole, "format": "other"}), json.dumps({**whole, "bins": [{}]})):
        manifest.write_text(content)
        refused(r"all.shards.json is not a manifest of shards \(.*; make it again with")
    manifest.write_text(json.dumps({**whole, "bins": whole["bins"][:1]}))
    refused(r"all.shards.json names \d+ bytes but its index says \d+")
    manifest.unlink()
    refused(r"data file \S+all.shards.json does not exist; make it again with")


def test_slices_cross_the_borders_of_arrays() -> None:
    arrays = [np.arange(0, 3), np.empty(0, np.int64), np.arange(3, 4), np.arange(4, 10)]
    tokens = JoinedTokens(arrays, np.dtype("<i8"))
    for start in range(11):
        for end in range(start, 12):
            assert tokens[start:end].tolist() == list(range(10))[start:end]
    assert np.shares_memory(tokens[5:7], arrays[3])
    assert len(JoinedTokens([], np.dtype("<i8"))) == 0


def test_a_config_takes_a_manifest_in_the_place_of_a_prefix(tmp_path: Path) -> None:
    manifest = write_manifest(write_shards(tmp_path, [30, 50]), f"{tmp_path}/all")
    path = f"{manifest}[0:0.9]"
    assert missing_files(DataConfig(data_path=(path,), tokenizer_type="bytes")) == []
    settings = {"seq_length": 16, "seed": 1, "vocab_size": 257, "eod": 256}
    assert build_datasets(DataConfig(data_path=(path,), tokenizer_type="bytes"), **settings).train.sample(0)  # type: ignore[arg-type]
    manifest.unlink()
    (complaint,) = missing_files(DataConfig(data_path=(path,), tokenizer_type="bytes"))
    assert complaint.startswith(f"data_path={manifest}: {manifest} does not exist; make them with megatronish")
