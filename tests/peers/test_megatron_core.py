"""Tests of the dataset format against megatron-core, in both directions. Run by `make test-peers`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatronish.data.indexed import IndexedTokens, IndexedWriter, bin_path, idx_path, token_dtype

pytestmark = pytest.mark.peers("megatron.core")
peer: Any = pytest.importorskip(
    "megatron.core.datasets.indexed_dataset",
    reason="megatron-core is not installed here; `make test-peers` runs this in an environment that has it",
    exc_type=ImportError,
)
torch: Any = pytest.importorskip("torch")


def documents(vocab_size: int) -> list[list[list[int]]]:
    """Documents of sequences of tokens; some are empty."""
    draw = np.random.default_rng(vocab_size)
    return [
        [draw.integers(0, vocab_size, draw.integers(1, 50)).tolist() for _ in range(sequences)]
        for sequences in draw.integers(0, 4, 200)
    ]


def write_here(prefix: Path, vocab_size: int) -> None:
    with IndexedWriter(prefix, dtype=token_dtype(vocab_size)) as writer:
        for document in documents(vocab_size):
            writer.add_document([token for sequence in document for token in sequence], [len(s) for s in document])


def write_there(prefix: Path, vocab_size: int) -> None:
    dtype = peer.DType.optimal_dtype(vocab_size)
    builder = peer.IndexedDatasetBuilder(str(bin_path(prefix)), dtype=dtype)
    for document in documents(vocab_size):
        tokens = [token for sequence in document for token in sequence]
        builder.add_document(torch.tensor(tokens, dtype=torch.int64), [len(sequence) for sequence in document])
    builder.finalize(str(idx_path(prefix)))


@pytest.mark.parametrize("vocab_size", [257, 65499, 65500, 128256])
def test_the_same_documents_are_the_same_bytes(tmp_path: Path, vocab_size: int) -> None:
    write_here(tmp_path / "here", vocab_size)
    write_there(tmp_path / "there", vocab_size)
    for path in (bin_path, idx_path):
        assert path(tmp_path / "here").read_bytes() == path(tmp_path / "there").read_bytes()


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("vocab_size", [257, 128256])
def test_the_peer_reads_what_is_written_here(tmp_path: Path, vocab_size: int, mmap: bool) -> None:
    write_here(tmp_path / "a", vocab_size)
    theirs = peer.IndexedDataset(str(tmp_path / "a"), mmap=mmap)
    sequences = [sequence for document in documents(vocab_size) for sequence in document]
    assert len(theirs) == len(sequences)
    assert all(theirs[i].tolist() == sequence for i, sequence in enumerate(sequences))
    assert theirs.document_indices.tolist() == np.cumsum([0, *map(len, documents(vocab_size))]).tolist()


@pytest.mark.parametrize("vocab_size", [257, 128256])
def test_what_the_peer_writes_is_read_here(tmp_path: Path, vocab_size: int) -> None:
    write_there(tmp_path / "a", vocab_size)
    file = IndexedTokens(tmp_path / "a")
    expected = documents(vocab_size)
    assert file.num_documents == len(expected)
    for number, document in enumerate(expected):
        assert file.document(number).tolist() == [token for sequence in document for token in sequence]


def test_merging_gives_the_peers_bytes(tmp_path: Path) -> None:
    write_here(tmp_path / "a", 257)
    write_here(tmp_path / "b", 1000)
    with IndexedWriter(tmp_path / "here", dtype=token_dtype(257)) as writer:
        writer.add_prefix(tmp_path / "a")
        writer.add_prefix(tmp_path / "b")
    builder = peer.IndexedDatasetBuilder(str(bin_path(tmp_path / "there")), dtype=np.uint16)
    builder.add_index(str(tmp_path / "a"))
    builder.add_index(str(tmp_path / "b"))
    builder.finalize(str(idx_path(tmp_path / "there")))
    for path in (bin_path, idx_path):
        assert path(tmp_path / "here").read_bytes() == path(tmp_path / "there").read_bytes()
