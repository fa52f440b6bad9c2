"""Tests of Megatron's .bin/.idx format: identical bytes, atomic writes, and an error for each kind of damage."""

import errno
import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from paths import GOLDEN

from megatronish.core.errors import RunError, UserError
from megatronish.data.indexed import IndexedTokens, IndexedWriter, bin_path, idx_path, token_dtype, writing

FIXTURE = json.loads((GOLDEN / "indexed_fixture.json").read_text())


def write_fixture(prefix: Path) -> None:
    with IndexedWriter(prefix, dtype=np.dtype("<u2")) as writer:
        writer.add_document([1, 2, 3])
        writer.add_document([4, 5])
        writer.add_document([])
        writer.add_document([6, 7, 8, 9], [1, 3])


def write(prefix: Path, documents: list[list[int]], *, dtype: str = "<u2") -> None:
    with IndexedWriter(prefix, dtype=np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(document)


def test_the_writer_makes_megatrons_bytes(tmp_path: Path) -> None:
    write_fixture(tmp_path / "a")
    assert bin_path(tmp_path / "a").read_bytes().hex() == FIXTURE["bin"]
    assert idx_path(tmp_path / "a").read_bytes().hex() == FIXTURE["idx"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_the_reader_reads_megatrons_bytes(tmp_path: Path) -> None:
    bin_path(tmp_path / "a").write_bytes(bytes.fromhex(FIXTURE["bin"]))
    idx_path(tmp_path / "a").write_bytes(bytes.fromhex(FIXTURE["idx"]))
    file = IndexedTokens(tmp_path / "a")
    assert (len(file), file.num_documents, file.num_tokens, file.dtype) == (4, 4, 9, np.uint16)
    assert [file[i].tolist() for i in range(4)] == [[1, 2, 3], [4, 5], [6], [7, 8, 9]]
    assert [file.document(i).tolist() for i in range(4)] == [[1, 2, 3], [4, 5], [], [6, 7, 8, 9]]
    assert file.document_starts().tolist() == [0, 3, 5, 5, 9]
    assert [file.document_start(i) for i in range(5)] == [0, 3, 5, 5, 9]


def test_an_index_with_modalities_is_read(tmp_path: Path) -> None:
    write_fixture(tmp_path / "a")
    with idx_path(tmp_path / "a").open("ab") as file:
        file.write(bytes(4))
    assert IndexedTokens(tmp_path / "a").num_tokens == 9


def test_documents_added_in_bulk_are_the_same_bytes(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [], [4], [5, 6], []]
    write(tmp_path / "one", documents)
    with IndexedWriter(tmp_path / "bulk", dtype=np.dtype("<u2")) as writer:
        writer.add_documents([1, 2, 3, 4], [3, 0, 1])
        writer.add_documents([5, 6], [2, 0])
    for path in (bin_path, idx_path):
        assert path(tmp_path / "one").read_bytes() == path(tmp_path / "bulk").read_bytes()


def test_merging_equals_writing_one_after_the_other(tmp_path: Path) -> None:
    first, second = [[1, 2], []], [[], [3], [4, 5, 6]]
    write(tmp_path / "first", first)
    write(tmp_path / "second", second)
    write(tmp_path / "both", first + second)
    with IndexedWriter(tmp_path / "merged", dtype=np.dtype("<u2")) as writer:
        writer.add_prefix(tmp_path / "first")
        writer.add_prefix(tmp_path / "second")
    for path in (bin_path, idx_path):
        assert path(tmp_path / "merged").read_bytes() == path(tmp_path / "both").read_bytes()


def test_merging_another_dtype_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "wide", [[1]], dtype="<i4")
    with (
        pytest.raises(ValueError, match=r"holds int32 tokens and cannot be merged .* of uint16"),
        IndexedWriter(tmp_path / "narrow", dtype=np.dtype("<u2")) as writer,
    ):
        writer.add_prefix(tmp_path / "wide")


def test_a_file_without_any_token_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a", [[], []])
    file = IndexedTokens(tmp_path / "a")
    assert (file.num_documents, file.num_tokens, file.document(1).tolist()) == (2, 0, [])


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (65499, "uint16"), (65500, "int32")])
def test_the_dtype_changes_where_megatrons_does(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(dtype)


def test_nothing_appears_under_its_name_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        write(tmp_path / "a", [[1, 2], [70000]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a.bin", "a.bin and its .idx"),
        ("a.bin.0123456789ab.tmp", "a.bin and its .idx"),
        ("task-1.0123456789ab.tmp/a.bin", "task-1.0123456789ab.tmp/a.bin and its .idx"),
        ("a.shards.idx", "a.shards.idx"),
    ],
)
def test_what_cannot_be_written_is_told_by_its_name(name: str, told: str) -> None:
    with (
        pytest.raises(RunError, match=rf"^{told} cannot be written: full; free space there first$"),
        writing(Path(name)),
    ):
        raise OSError(errno.EIO, "full")


def test_a_pair_being_replaced_stays_as_it_was_until_the_end(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2]])
    with IndexedWriter(tmp_path / "a", dtype=np.dtype("<u2")) as writer:
        writer.add_document([7, 8, 9])
        assert IndexedTokens(tmp_path / "a").tokens.tolist() == [1, 2]
    assert IndexedTokens(tmp_path / "a").tokens.tolist() == [7, 8, 9]


def test_ids_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token ids 1 to 70000 do not fit the uint16"):
        write(tmp_path / "a", [[1, 70000]])


def test_a_missing_file_is_named_with_a_remedy(tmp_path: Path) -> None:
    write(tmp_path / "a_text_document", [[1]])
    with pytest.raises(ValueError, match=r"nothing\.idx does not exist; check the path"):
        IndexedTokens(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"a\.idx does not exist; did you mean .*a_text_document\?"):
        IndexedTokens(tmp_path / "a")
    with pytest.raises(ValueError, match=r"give the prefix without its ending: .*a_text_document$"):
        IndexedTokens(tmp_path / "a_text_document.bin")
    bin_path(tmp_path / "a_text_document").unlink()
    with pytest.raises(ValueError, match=r"a_text_document\.bin does not exist"):
        IndexedTokens(tmp_path / "a_text_document")


def test_truncation_at_any_byte_is_noticed(tmp_path: Path) -> None:
    write_fixture(tmp_path / "a")
    for path in (idx_path(tmp_path / "a"), bin_path(tmp_path / "a")):
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(ValueError, match=rf"{path.name} .*truncated.*copy both files again or run megatronish"):
                IndexedTokens(tmp_path / "a")
        path.write_bytes(whole)


def test_a_bin_of_another_idx_is_noticed(tmp_path: Path) -> None:
    write_fixture(tmp_path / "a")
    with bin_path(tmp_path / "a").open("ab") as file:
        file.write(bytes(2))
    with pytest.raises(ValueError, match=r"a\.bin has 20 bytes but its \.idx says 18: it is not the one its \.idx"):
        IndexedTokens(tmp_path / "a")


def test_foreign_files_are_named(tmp_path: Path) -> None:
    write_fixture(tmp_path / "a")
    path = idx_path(tmp_path / "a")
    whole = path.read_bytes()
    path.write_bytes(b"PK" + whole[2:])
    with pytest.raises(ValueError, match="is not an index in Megatron's MMIDIDX format"):
        IndexedTokens(tmp_path / "a")
    path.write_bytes(whole[:17] + struct.pack("<B", 7) + whole[18:])
    with pytest.raises(ValueError, match="dtype code 7, which is no integer type"):
        IndexedTokens(tmp_path / "a")


# The fixture's .idx: after 34 bytes int32 lengths 3 2 1 3, int64 pointers 0 6 10 12, int64 document indices 0 1 2 2 4.
@pytest.mark.parametrize(
    ("place", "format_", "value", "told"),
    [
        (34, "<i", -1, "a sequence of -1 tokens and is damaged"),
        (34, "<i", 4, "pointers that do not follow from its lengths"),
        (34 + 16 + 8, "<q", 2, "pointers that do not follow from its lengths"),
        (34 + 48, "<q", 1, "document indices that do not rise from 0 to its 4 sequences"),
        (34 + 48 + 8, "<q", 10**6, "document indices that do not rise from 0 to its 4 sequences"),
        (34 + 48 + 8, "<q", -1, "document indices that do not rise from 0 to its 4 sequences"),
        (34 + 48 + 32, "<q", 3, "document indices that do not rise from 0 to its 4 sequences"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(
    tmp_path: Path, place: int, format_: str, value: int, told: str
) -> None:
    write_fixture(tmp_path / "a")
    path = idx_path(tmp_path / "a")
    whole = bytearray(path.read_bytes())
    struct.pack_into(format_, whole, place, value)
    path.write_bytes(whole)
    with pytest.raises(UserError, match=rf"a\.idx has {told}.*; copy both files again or run megatronish"):
        IndexedTokens(tmp_path / "a")


@pytest.mark.parametrize("num_tokens", [0, 1, 2049, 524_288, 524_289, 700_001])
def test_the_hash_of_a_content_is_that_of_its_pieces_whatever_its_size(tmp_path: Path, num_tokens: int) -> None:
    """Small files are read once, and of large ones pieces: caches and runs of other versions rely on the same hash."""
    tokens = np.arange(num_tokens, dtype=np.dtype("<u2"))
    with IndexedWriter(tmp_path / "text", dtype=tokens.dtype) as writer:
        writer.add_document(tokens)
    content = (tmp_path / "text.bin").read_bytes()
    starts = np.unique(np.linspace(0, max(len(content) - 4096, 0), 256, dtype=np.int64)).tolist()
    pieces = [str(len(content)).encode(), *(content[start : start + 4096] for start in starts)]
    assert IndexedTokens(tmp_path / "text").content == hashlib.sha256(b"".join(pieces)).hexdigest()
