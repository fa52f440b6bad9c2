"""Tests of inputs on object storage: the same tasks and bytes as from files, and what a store may do wrong."""

import gzip
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from task_runs import in_one, inputs_of, joined, plan_of, run_of

from megatronish.commands.preprocess_tasks import main
from megatronish.core.errors import RunError, UserError
from megatronish.core.remote import Location, RemotePath
from megatronish.data import stores
from megatronish.data.inputs import input_files, same_names
from megatronish.data.stores import LARGEST_READ, TRIES, open_binary
from megatronish.data.tasks import read_plan, run_task


@pytest.fixture
def memory(memory_folder: RemotePath, monkeypatch: pytest.MonkeyPatch) -> RemotePath:
    """A folder of a store in memory, which is asked again without a pause."""
    monkeypatch.setattr(stores, "FIRST_WAIT", 0.0)
    return memory_folder


def put(folder: RemotePath, name: str, content: bytes) -> RemotePath:
    with (folder / name).open("wb") as file:
        file.write(content)
    return folder / name


def copied(files: list[Path], folder: RemotePath) -> list[Location]:
    return [put(folder, path.name, path.read_bytes()) for path in files]


def test_cleaning_takes_the_same_documents_as_from_a_disk(
    tmp_path: Path, store_folder: RemotePath, capsys: pytest.CaptureFixture[str]
) -> None:
    files, told = inputs_of(tmp_path / "in"), list[str]()
    urls = [path.url for path in copied(files, store_folder) if isinstance(path, RemotePath)]
    (tmp_path / "reference.jsonl").write_text('{"q": ["1 300 1 300 1 300", "x"]}')
    reference = put(store_folder, "reference.jsonl", (tmp_path / "reference.jsonl").read_bytes()).url
    flags = ["--tokenizer-type", "bytes", "--deduplicate", "minhash", "--decontaminate-ngram", "2"]
    for name, inputs, path in (("disk", map(str, files), f"{tmp_path}/reference.jsonl"), ("store", urls, reference)):
        argv = ["--input", *inputs, *flags, "--decontaminate", path, "--output-prefix", f"{tmp_path}/{name}"]
        assert main(["plan", *argv, "--tasks", "3", "--max-bad-fraction", "0.9"]) == 0
        for phase in ("sign", "match", "run"):
            assert main([phase, "--plan", f"{tmp_path}/{name}.plan.json", "--task", "0::1"]) == 0
        capsys.readouterr()
        assert main(["merge", "--plan", f"{tmp_path}/{name}.plan.json", "--show-removed"]) == 0
        place = str(tmp_path / "in") if name == "disk" else store_folder.url
        told.append(capsys.readouterr().err.replace(path, "reference").replace(place, ""))
    assert told[0] == told[1]
    assert "by --decontaminate reference\n" in told[0] and "by --deduplicate minhash\n" in told[0]
    for ending in ("bin", "idx"):
        of_disk = (tmp_path / f"disk_text_document.{ending}").read_bytes()
        assert (tmp_path / f"store_text_document.{ending}").read_bytes() == of_disk


@pytest.mark.parametrize("num_tasks", [1, 7])
def test_bytes_are_those_of_the_same_files_on_a_disk(tmp_path: Path, store_folder: RemotePath, num_tasks: int) -> None:
    files, bad = inputs_of(tmp_path / "in"), list[str]()
    expected = in_one(tmp_path / "one", files, bad)
    copied(files, store_folder)
    plan = plan_of(tmp_path / "many", input_files([str(store_folder)]), num_tasks)
    assert [file.path for file in plan.inputs] == [str(store_folder / path.name) for path in files]
    if num_tasks > 1:
        assert any(piece.start for pieces in plan.tasks for piece in pieces), "a file is cut"
    records = [run_task(read_plan(plan.path), number, run_of()) for number in range(num_tasks)]
    assert joined(plan) == expected
    told = [f"{path}:{line}: {why}" for record in records for path, line, why in record.first_bad_lines]
    assert told == [line.replace(f"{tmp_path}/in", str(store_folder)) for line in bad]


def test_row_groups_of_parquet_are_read_in_ranges(tmp_path: Path, store_folder: RemotePath) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow, of the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"row {number} " * (number % 9) for number in range(1000)]
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "x.parquet", row_group_size=100)
    (place,) = copied([tmp_path / "x.parquet"], store_folder)
    plan = plan_of(tmp_path / "many", [place], 3)
    for number in range(3):
        run_task(plan, number, run_of())
    assert joined(plan) == in_one(tmp_path / "one", [tmp_path / "x.parquet"])


def test_the_command_reads_urls_and_sees_an_object_that_changed(
    store_folder: RemotePath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = put(store_folder, "a.jsonl", b'{"text": "abc"}\n' * 10)
    argv = ["--input", str(store_folder), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "p")]
    assert main(argv) == 0
    assert main(["plan", *argv, "--tasks", "2"]) == 0
    plan = ["--plan", str(tmp_path / "p.plan.json")]
    assert main(["run", *plan, "--task", "0::1"]) == 0
    assert main(["merge", *plan]) == 0
    put(store_folder, "a.jsonl", b'{"text": "abd"}\n' * 10)
    (tmp_path / "p.shards" / "task-00000.json").unlink()
    assert main(["run", *plan, "--task", "0"]) == 2
    assert f"input {place} was changed since {tmp_path}/p.plan.json was made" in capsys.readouterr().err


def test_folders_and_patterns_name_objects_as_they_name_files(tmp_path: Path, memory: RemotePath) -> None:
    names = ["b/c.jsonl", "b.jsonl", "a.json.gz", "b/d.txt", ".x/e.jsonl", "b/e/f.jsonl"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")
        put(memory, name, b"{}")
    for pattern in ("", "/*.json*", "/*/*.jsonl", "/[ab]*", "/**/*.jsonl", "/b/d.txt"):
        local = [str(path).removeprefix(str(tmp_path)) for path in input_files([f"{tmp_path}{pattern}"])]
        remote = [str(path).removeprefix(str(memory)) for path in input_files([f"{memory}{pattern}"])]
        assert sorted(set(local)) == sorted(remote), pattern
    put(memory, "b.jsonl.gz", b"")
    assert len(same_names(input_files([str(memory)]))) == 1


def test_reads_grow_and_find_every_byte(memory: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(number % 251 for number in range(1 << 20))
    place, lengths, read = put(memory, "x", content), list[int](), RemotePath.read_range

    def counted(self: RemotePath, start: int, end: int) -> bytes:
        lengths.append(end - start)
        return read(self, start, end)

    monkeypatch.setattr(RemotePath, "read_range", counted)
    with open_binary(place) as file:
        assert file.read() == content
        assert file.seek(-3, 2) == len(content) - 3
        assert file.read() == content[-3:]
        file.seek(70_000)
        assert file.read(10) == content[70_000:70_010]
    assert lengths[:3] == [1 << 16, 1 << 17, 1 << 18]
    assert max(lengths) <= LARGEST_READ


def test_a_lost_connection_is_asked_again_and_then_told(
    tmp_path: Path, memory: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = inputs_of(tmp_path / "in")
    plan = plan_of(tmp_path / "many", copied(files, memory), 2)
    read, failures = MemoryFileSystem.cat_file, [0]

    def lost(of: int) -> Callable[..., Any]:
        def cat_file(self: MemoryFileSystem, *args: Any, **options: Any) -> Any:
            failures[0] += 1
            if failures[0] % of:
                raise ConnectionResetError(104, "Connection reset by peer")
            return read(self, *args, **options)

        return cat_file

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", lost(TRIES))
        for number in range(2):
            run_task(plan, number, run_of())
        assert joined(plan) == in_one(tmp_path / "one", files)
        (plan.folder / "task-00000.json").unlink()
        patch.setattr(MemoryFileSystem, "cat_file", lost(10**9))
        with pytest.raises(RunError, match=rf"--input memory://\S+ cannot be read, after {TRIES} tries: Connection re"):
            run_task(plan, 0, run_of())


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("memory://nothing/here", r"memory://nothing/here is no object, and no folder with one that ends in \.jsonl"),
        ("memory://nothing/*.jsonl", "is a pattern that no object fits; check it"),
        ("s3://*/x.jsonl", r"is a pattern of buckets; name the bucket, as in s3://bucket/\*\.jsonl"),
        ("https://me:secret@host/x.jsonl", r"https://\S+ holds a password or a key, which would be written into"),
    ],
)
def test_a_mistake_in_a_url_is_a_sentence(name: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        input_files([name])
    assert "secret" not in str(caught.value)


def test_a_server_without_ranges_or_sizes_is_refused(memory: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    place = put(memory, "a.jsonl", b'{"text": "abc"}\n' * 10_000)
    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "read_range", lambda self, _start, _end: self.read_bytes())
        with pytest.raises(UserError, match="it knows no ranges; copy the file to a disk first"):
            open_binary(place).read(10)
    monkeypatch.setattr(MemoryFileSystem, "info", lambda *_args, **_options: {"type": "file", "size": None})
    with pytest.raises(UserError, match="the server does not say how long it is; copy it to a disk first"):
        open_binary(place)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UserError, match=r"gs://bucket/x.jsonl needs a package that is missing .*pip install 'fsspec"):
        input_files(["gs://bucket/x.jsonl"])


def test_a_compressed_object_that_is_cut_off_is_told(tmp_path: Path, memory: RemotePath) -> None:
    place = put(memory, "a.jsonl.gz", gzip.compress(b'{"text": "abc"}\n' * 999)[:-20])
    with pytest.raises(UserError, match=r"--input memory://\S+a.jsonl.gz is cut off"):
        run_task(plan_of(tmp_path / "p", [place], 1), 0, run_of())
