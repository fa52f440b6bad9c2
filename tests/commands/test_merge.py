"""Tests of `megatronish merge`: byte for byte what one call of preprocessing writes, checked, in little memory."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

from megatronish.commands.merge import main
from megatronish.data.indexed import IndexedWriter, bin_path, idx_path
from megatronish.data.preprocess import preprocess
from megatronish.tokenizer.plain import BytesTokenizer

TEXTS = ["first", "", "second é", "third", "", "the fourth and last"]


def write_texts(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    return path


def write_pair(prefix: Path, documents: Sequence[Sequence[int]] = ((1, 2), (3,)), dtype: str = "<u2") -> str:
    with IndexedWriter(prefix, dtype=np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def shards(folder: Path) -> list[str]:
    """Three pairs of two documents each, made by preprocessing; their names are in the order of the texts."""
    folder.mkdir()
    for number in range(3):
        source = write_texts(folder / f"{number}.jsonl", TEXTS[2 * number : 2 * number + 2])
        preprocess([source], str(folder / f"shard_{number}"), tokenizer=BytesTokenizer, append_eod=True)
    return [f"{folder}/shard_{number}_text_document" for number in range(3)]


def same(one: object, other: object) -> bool:
    return all(path(str(one)).read_bytes() == path(str(other)).read_bytes() for path in (bin_path, idx_path))


def test_a_folder_of_pairs_becomes_what_one_call_of_preprocessing_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefixes = shards(tmp_path / "shards")
    preprocess(
        [write_texts(tmp_path / "all.jsonl", TEXTS)], f"{tmp_path}/all", tokenizer=BytesTokenizer, append_eod=True
    )
    assert main(["--input", str(tmp_path / "shards"), "--output-prefix", f"{tmp_path}/merged"]) == 0
    assert same(tmp_path / "merged", tmp_path / "all_text_document")
    assert capsys.readouterr().out == f"{tmp_path}/merged: 3 pairs | 6 documents | 42 tokens\n"
    # Prefixes are taken in the order in which they are given.
    assert main(["--input", *prefixes, "--output-prefix", f"{tmp_path}/named"]) == 0
    assert same(tmp_path / "named", tmp_path / "merged")
    assert main(["--input", *reversed(prefixes), "--output-prefix", f"{tmp_path}/reversed"]) == 0
    assert not same(tmp_path / "reversed", tmp_path / "merged")


def test_an_empty_list_of_pairs_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--input", "--output-prefix", "x"]) == 2
    assert "--input is empty; name a folder of pairs, or their prefixes" in capsys.readouterr().err


def test_object_storage_is_refused_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--input", "s3://bucket/a", "--output-prefix", str(tmp_path / "all")]) == 2
    assert "error: --input s3://bucket/a is on object storage, and pairs are merged on" in capsys.readouterr().err
    assert main(["--input", str(tmp_path), "--output-prefix", "s3://bucket/all"]) == 2
    assert "error: --output-prefix s3://bucket/all is a URL" in capsys.readouterr().err


def test_what_an_earlier_call_wrote_into_the_folder_is_no_input(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    shards(folder)
    for _ in range(2):
        assert main(["--input", str(folder), "--output-prefix", f"{folder}/all"]) == 0
    assert main(["--input", str(folder), "--output-prefix", f"{tmp_path}/twice"]) == 0
    assert bin_path(f"{tmp_path}/twice").stat().st_size == 2 * bin_path(f"{folder}/all").stat().st_size


def test_input_that_cannot_be_merged_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, wide = write_pair(tmp_path / "good"), write_pair(tmp_path / "wide", dtype="<i4")
    half, cut, images = (write_pair(tmp_path / name) for name in ("half", "cut", "images"))
    bin_path(half).unlink()
    bin_path(cut).write_bytes(bin_path(cut).read_bytes()[:-1])
    idx_path(images).write_bytes(idx_path(images).read_bytes() + bytes(2))
    (tmp_path / "empty").mkdir()
    folder = tmp_path / "mixed"
    folder.mkdir()
    write_pair(folder / "a")
    idx_path(write_pair(folder / "b")).unlink()
    joined = tmp_path / "joined"
    joined.mkdir()
    idx_path(write_pair(joined / "a")).rename(joined / "a.shards.idx")
    for inputs, sentence in (
        ([good, wide], f"{wide} holds int32 tokens and {good} holds uint16: they come from different vocabularies"),
        ([good, half], f"data file {half}.bin does not exist"),
        ([good, cut], f"{cut}.bin has 5 bytes but its .idx says 6: it is truncated"),
        ([good, images], f"{images} has a modality for each sequence"),
        ([str(tmp_path / "empty")], "holds no .bin/.idx pair; name a folder of pairs, or their prefixes"),
        ([str(folder)], f"data file {folder}/b.idx does not exist"),
        ([str(joined)], f"{joined}/a.shards.json, which joins shards and is no pair; move it to another folder"),
        ([good, str(tmp_path / "out")], "out.idx does not exist"),
    ):
        assert main(["--input", *inputs, "--output-prefix", f"{tmp_path}/out"]) == 2, sentence
        told = capsys.readouterr().err
        assert told.startswith("error: ")
        assert sentence in told
    assert main(["--input", good, "--output-prefix", good]) == 2
    assert f"--output-prefix {good} is one of the pairs to merge" in capsys.readouterr().err
    assert main(["--input", good, "--output-prefix", f"{tmp_path}/out/"]) == 2
    assert f"--output-prefix '{tmp_path}/out/' names a folder and no files" in capsys.readouterr().err
    assert main(["--input", good, "--output-prefix", f"{good}.bin/x"]) == 2
    assert "cannot be written: " in capsys.readouterr().err
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("out") or path.suffix == ".tmp"]


IN_LITTLE_MEMORY = """
import resource, sys
from megatronish.commands.merge import main

folder, allowed = sys.argv[1:]
assert main(["--input", f"{folder}/small", "--output-prefix", f"{folder}/warm"]) == 0
held = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (held + int(allowed), held + int(allowed)))
assert main(["--input", f"{folder}/big", f"{folder}/big", "--output-prefix", f"{folder}/merged"]) == 0
"""


def test_more_pairs_are_merged_than_files_may_be_open(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    for number in range(100):
        write_pair(tmp_path / "shards" / f"{number:03}", [[number]])
    code = "import resource, sys; from megatronish.commands.merge import main; "
    code += "resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60)); sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--input", str(tmp_path / "shards"), "--output-prefix", f"{tmp_path}/all"]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert np.fromfile(tmp_path / "all.bin", "<u2").tolist() == list(range(100))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux limits what a process may hold")
def test_files_larger_than_the_memory_that_is_allowed_are_merged(tmp_path: Path) -> None:
    write_pair(tmp_path / "small")
    document = np.arange(1 << 24, dtype=np.int64) % 65_000  # 32 MB in the file
    write_pair(tmp_path / "big", [document, document])
    command = [sys.executable, "-c", IN_LITTLE_MEMORY, str(tmp_path), str(16 << 20)]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    merged = bin_path(tmp_path / "merged").read_bytes()
    assert merged == 2 * bin_path(tmp_path / "big").read_bytes()
