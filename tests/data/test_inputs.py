"""Tests of input files: every format that is read gives the same documents, every other one is refused by name."""

import bz2
import gzip
import json
import lzma
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from megatronish.core.errors import UserError
from megatronish.data.inputs import FOREIGN, input_files, optional_library, same_names, text_format
from megatronish.data.readers import read_batches

TEXTS = [
    "ab",
    "",
    "\u00e9 \U0001f469\u200d\U0001f680",
    "two\nlines",
    "x" * 70_000,
    *(f"text {number}" for number in range(900)),
]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def texts_of(path: Path, key: str = "text") -> list[str]:
    batches = list(read_batches(path, [key]))
    numbers = [batch.first_line + place for batch in batches for place in range(len(batch.lines))]
    assert numbers == list(range(1, len(numbers) + 1))
    return [json.loads(line)[key] for batch in batches for line in batch.lines]


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def zstd() -> Callable[[bytes], bytes]:
    library = pytest.importorskip("zstandard", reason="needs zstandard, an optional library")
    return library.ZstdCompressor().compress


def compressed(ending: str, content: bytes) -> bytes:
    by_ending: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    return by_ending[ending](content) if ending in by_ending else zstd()(content)


ENDINGS = [".gz", ".bz2", ".xz", ".zst"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", ["by its ending", "by its first bytes"])
def test_compressed_lines_are_read(tmp_path: Path, ending: str, name: str) -> None:
    path = written(tmp_path / f"x.jsonl{ending if 'ending' in name else ''}", compressed(ending, LINES))
    assert texts_of(path) == TEXTS
    halves = compressed(ending, LINES[:5000]) + compressed(ending, LINES[5000:])  # as `cat a.gz b.gz` makes it
    assert texts_of(written(path, halves)) == TEXTS


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("damage", ["cut off", "other bytes", "not compressed"])
def test_a_broken_compression_is_named_and_nothing_is_lost_in_silence(tmp_path: Path, ending: str, damage: str) -> None:
    whole = compressed(ending, LINES)
    broken = {
        "cut off": whole[: len(whole) // 2],
        "other bytes": whole[: len(whole) // 2] + bytes(20) + whole[len(whole) // 2 + 20 :],
        "not compressed": LINES,
    }
    said = {
        "cut off": r"is cut off (after line \d+|near its beginning) \(.+\); copy it again",
        "other bytes": r"is (damaged|cut off) (after line \d+|near its beginning).*\(.+\); copy it again",
        "not compressed": rf"ends in {ending}, but does not begin as \w+ does; rename it if it is not compressed, else",
    }
    with pytest.raises(UserError, match=said[damage]):
        texts_of(written(tmp_path / f"x.jsonl{ending}", broken[damage]))


@pytest.mark.parametrize(
    "array",
    [json.dumps, lambda records: json.dumps(records, indent=4), lambda records: " \n" + json.dumps(records) + "\n"],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_json_array_gives_an_element_a_line(
    tmp_path: Path, array: Callable[[list[dict[str, str]]], str], mark: bytes
) -> None:
    content = mark + array([{"text": text} for text in TEXTS]).encode()
    assert texts_of(written(tmp_path / "x.json", content)) == TEXTS
    assert texts_of(written(tmp_path / "x.json.gz", gzip.compress(content))) == TEXTS


def test_an_element_longer_than_what_is_read_at_once_is_whole(tmp_path: Path) -> None:
    long = ["\u4e2d" * 400_000, "short", "y" * 3_000_000]
    content = json.dumps([{"text": text} for text in long], ensure_ascii=False).encode()
    assert texts_of(written(tmp_path / "x.json", content)) == long


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"text": "a"}, {"text": "b"', "element 2 cannot be read: "),
        (b'[{"text": "a"} {"text": "b"}]', "element 2 cannot be read: there is no comma before it"),
        (b'[{"text": "a"}', "element 2 cannot be read: the file ends before it"),
        (b'[{"text": "a"}, {text: "b"}]', "element 2 cannot be read: .*; correct it, or write one object a line"),
        (b'[{"text": "\xff"}]', "element 1 cannot be read: .*utf-8"),
        (b'[{"text": "a"}]\n[{"text": "b"}]', "continues after its JSON array; write one object a line"),
    ],
)
def test_a_broken_array_is_named_with_its_element(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        texts_of(written(tmp_path / "x.json", content))


def test_lines_that_are_arrays_of_something_else_stay_lines(tmp_path: Path) -> None:
    (batch,) = read_batches(written(tmp_path / "x.jsonl", b'[1]\n{"text": "a"}\n'), ["text"])
    assert batch.lines == [b"[1]", b'{"text": "a"}']


def parquet() -> tuple[ModuleType, ModuleType]:
    return (
        pytest.importorskip("pyarrow", reason="needs pyarrow, an optional library"),
        pytest.importorskip("pyarrow.parquet"),
    )


def test_parquet_gives_its_columns(tmp_path: Path) -> None:
    arrow, tables = parquet()
    table = arrow.table({"text": TEXTS, "id": range(len(TEXTS)), "meta": [{"body": text} for text in TEXTS]})
    tables.write_table(table, tmp_path / "x.parquet", row_group_size=100)
    assert texts_of(tmp_path / "x.parquet") == TEXTS
    nested = [batch.lines for batch in read_batches(tmp_path / "x.parquet", ["meta.body"])]
    assert [json.loads(line) for lines in nested for line in lines] == [{"meta": {"body": text}} for text in TEXTS]
    assert (
        sum(batch.num_bytes for batch in read_batches(tmp_path / "x.parquet", ["text"]))
        <= (tmp_path / "x.parquet").stat().st_size
    )
    with pytest.raises(
        UserError, match=r"x\.parquet has no column txt; --json-keys names one or more of text, id, meta"
    ):
        texts_of(tmp_path / "x.parquet", "txt")


def test_a_value_that_is_there_once_is_not_unpacked_for_many_rows_at_a_time(tmp_path: Path) -> None:
    arrow, tables = parquet()
    values = arrow.DictionaryArray.from_arrays(arrow.array([0] * 100, "int32"), arrow.array(["a" * 300_000]))
    tables.write_table(arrow.table({"text": values}), tmp_path / "x.parquet")
    batches = list(read_batches(tmp_path / "x.parquet", ["text"]))
    assert [len(batch.lines) for batch in batches] == [1] * 100
    assert [batch.first_line for batch in batches] == list(range(1, 101))


def test_a_frame_of_zstandard_is_not_unpacked_at_once(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl.zst", zstd()(b'{"text": "' + b"a" * (300 << 20)))
    before = time.process_time()
    with pytest.raises(UserError, match=r"line 1 has more than 268,435,456 bytes"):
        texts_of(path)
    assert time.process_time() - before < 10.0


def test_blank_lines_take_no_time_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", b"\n" * 3_000_000 + b" \n" + LINES)
    batches = list(read_batches(path, ["text"]))
    assert batches[0].first_line > 2_000_000
    last = batches[-1]
    assert last.first_line + len(last.lines) == 3_000_002 + len(TEXTS)


@pytest.mark.parametrize("content", [b'{"text": "a"}\n' + b"\n" * 5_000_000, b'[{"text": "a"}]' + b" \n" * 9, b"\n\n"])
def test_all_of_a_file_that_ends_in_blanks_counts_as_read(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "x").write_bytes(content)
    assert sum(batch.num_bytes for batch in read_batches(path, ["text"])) == len(content)


def test_a_row_without_text_is_left_to_be_counted(tmp_path: Path) -> None:
    arrow, tables = parquet()
    tables.write_table(arrow.table({"text": ["a", None]}), tmp_path / "x.parquet")
    assert texts_of(tmp_path / "x.parquet") == ["a", None]
    tables.write_table(arrow.table({"text": [b"a", b"\xff"]}), tmp_path / "y.parquet")
    assert texts_of(tmp_path / "y.parquet") == ["a", None]


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    arrow, tables = parquet()
    tables.write_table(arrow.table({"text": TEXTS}), tmp_path / "x.parquet")
    whole = (tmp_path / "x.parquet").read_bytes()
    for broken in (whole[:-20], whole[:100] + b"\xff" * 5000 + whole[5100:]):
        with pytest.raises(UserError, match=r"x\.parquet cannot be read after row \d+: (.|\n)*; copy it again"):
            texts_of(written(tmp_path / "x.parquet", broken))


@pytest.mark.parametrize(("offset", "magic", "what"), FOREIGN)
def test_other_formats_are_refused_by_name_with_a_remedy(tmp_path: Path, offset: int, magic: bytes, what: str) -> None:
    path = written(tmp_path / "x.jsonl", bytes(offset) + magic + bytes(600))
    with pytest.raises(UserError) as caught:
        texts_of(path)
    assert str(caught.value) == f"--input {path} is {what}"
    with pytest.raises(UserError, match=r"\(without its gzip compression\) is "):
        texts_of(written(tmp_path / "x.jsonl.gz", gzip.compress(bytes(offset) + magic + bytes(600))))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.csv", "id,text\n1,a\n", "is a table of CSV; write each row as a JSON object on a line"),
        ("x.tsv", "id\ttext\n", "is a table of TSV; write"),
        ("x.csv.gz", "id,text\n", "is a table of CSV; write"),
        ("x", "<?xml version='1.0'?>", "is XML or HTML; extract its text"),
        ("x", "\n<!DOCTYPE html>", "is XML or HTML; extract its text"),
    ],
)
def test_tables_and_markup_are_refused_by_name(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    packed = gzip.compress(content.encode()) if name.endswith(".gz") else content.encode()
    with pytest.raises(UserError, match=sentence):
        texts_of(written(tmp_path / name, packed))


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (b"Call me Ishmael.\n", "plain text; write each document as a line"),
        (b'"a"\n', "JSON without keys; write each text as a line"),
        (b'["a", "b"]', "JSON without keys"),
        (b'{"text": "a",\n "id": 1}\n', "JSON objects that go over several lines; write one object a line, as jq -c"),
        (bytes(range(128, 255)), "binary data, and no text"),
        (b"a\0b", "binary data"),
        (b'{"body": "a"}\n', None),
        (b"", None),
    ],
)
def test_what_a_file_without_a_good_line_seems_to_be(head: bytes, what: str | None) -> None:
    found = text_format(head)
    assert found is None if what is None else found is not None and found.startswith(what)


def test_an_empty_list_of_inputs_is_refused() -> None:
    with pytest.raises(UserError, match="--input is empty; name files, folders or patterns"):
        input_files([])


def test_files_that_may_hold_the_same_texts_are_found(tmp_path: Path) -> None:
    names = ("a.jsonl", "a.jsonl.gz", "b.jsonl", "c.parquet", "c.json.zst", "d/a.jsonl", "v1.2.jsonl", "v1.3.jsonl")
    files = [tmp_path / name for name in names]
    pairs = [tuple(str(path.relative_to(tmp_path)) for path in pair) for pair in same_names([*files, files[2]])]
    assert pairs == [("a.jsonl", "a.jsonl.gz"), ("c.parquet", "c.json.zst"), ("b.jsonl", "b.jsonl")]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_refused_with_a_remedy(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(UserError, match=r"is UTF-16\w* text; turn it into UTF-8: iconv -f UTF-16\w* -t UTF-8"):
        texts_of(written(tmp_path / "x.jsonl", LINES.decode().encode(encoding)))


def test_what_is_packed_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not text, but another packed format; unpack .*x\.jsonl\.gz first"):
        texts_of(written(tmp_path / "x.jsonl.gz", gzip.compress(gzip.compress(LINES))))


@pytest.mark.parametrize(("library", "extra"), [("zstandard", "zstd"), ("pyarrow.parquet", "parquet")])
def test_a_missing_library_is_named_with_its_extra(library: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    package = library.partition(".")[0]
    with pytest.raises(
        UserError, match=rf"these are read by {package}, which is not installed; .*megatronish\[{extra}\]"
    ):
        optional_library(library, extra=extra, what="these")


def names_of(files: Sequence[Path], folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in files]


def test_folders_and_patterns_name_their_files_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json.gz", "notes.txt", "deep/c.parquet", ".hidden/d.jsonl", "deep/.e.jsonl", "f.JSONL"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = ["a.json.gz", "b.jsonl", "deep/c.parquet"]
    assert names_of(input_files([tmp_path / "in"]), tmp_path / "in") == found
    assert names_of(input_files([f"{tmp_path}/in/*.json*"]), tmp_path / "in") == ["a.json.gz", "b.jsonl"]
    assert names_of(input_files([f"{tmp_path}/in/**/c.*"]), tmp_path / "in") == ["deep/c.parquet"]
    assert names_of(input_files([f"{tmp_path}/in/*.txt"]), tmp_path / "in") == ["notes.txt"]  # named, so it is meant
    assert names_of(input_files([f"{tmp_path}/i[n]"]), tmp_path / "in") == found
    (tmp_path / "x[1].jsonl").touch()
    assert input_files([tmp_path / "x[1].jsonl"]) == [tmp_path / "x[1].jsonl"]


def test_a_folder_gives_the_files_of_all_folders_in_it_also_behind_links_each_once(tmp_path: Path) -> None:
    folder, other = tmp_path / "in", tmp_path / "other"
    for path in (folder / "parts.jsonl" / "0.json", folder / "b.jsonl", other / "c.jsonl", folder / ".x" / "d.jsonl"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(LINES)
    (folder / "a-link").symlink_to(other)
    (other / "back.json").symlink_to(folder)
    names = ["a-link/c.jsonl", "b.jsonl", "parts.jsonl/0.json"]
    assert names_of(input_files([folder]), folder) == names
    assert names_of(input_files(input_files([folder])), folder) == names
    os.mkfifo(folder / "pipe.jsonl")
    with pytest.raises(UserError, match=r"--input .*/pipe.jsonl cannot be read: it is no file but a pipe or a device"):
        input_files([folder])


def test_a_name_without_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"is a folder without any file that ends in \.jsonl, .*\.parquet; check it"):
        input_files([tmp_path])
    with pytest.raises(UserError, match=r"\*\.jsonl is a pattern that no file fits; check it"):
        input_files([f"{tmp_path}/*.jsonl"])
    with pytest.raises(UserError, match="none is not a file; check the path"):
        input_files([tmp_path / "none"])
