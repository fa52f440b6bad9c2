"""Tests of preprocessing: any number of workers writes the same files, bad lines are counted, nothing hangs."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from paths import ROOT
from ranks import is_running, wait_until

from megatronish.data.indexed import IndexedTokens
from megatronish.data.preprocess import BATCH_BYTES, WorkerDiedError, preprocess
from megatronish.tokenizer import BytesTokenizer


class DyingTokenizer(BytesTokenizer):
    """Its process is killed, as by the kernel when memory is short, at a text that says so."""

    def encode(self, text: str) -> list[int]:
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(text)


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_texts(path: Path, texts: Sequence[str]) -> Path:
    return write_lines(path, [json.dumps({"text": text}) for text in texts])


def documents(prefix: Path) -> list[list[int]]:
    file = IndexedTokens(prefix)
    return [file.document(number).tolist() for number in range(file.num_documents)]


class Outcome(NamedTuple):
    """How a run of the tool ended."""

    status: int
    stdout: str
    stderr: str


def tool(*arguments: object) -> Outcome:
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), *map(str, arguments)]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_texts_become_documents_that_end(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "x.jsonl", ["ab", "", "\u00e9"])
    summary = preprocess([source], str(tmp_path / "p"), tokenizer=BytesTokenizer(), append_eod=True)
    assert documents(tmp_path / "p_text_document") == [[97, 98, 256], [], [195, 169, 256]]
    assert (summary.documents, summary.tokens, summary.bad_lines) == (3, 6, 0)


@pytest.mark.processes
def test_any_number_of_workers_writes_the_same_files(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    texts = ["x" * int(length) for length in draw.integers(0, BATCH_BYTES // 20, 200)]
    first, second = write_texts(tmp_path / "a.jsonl", texts), write_texts(tmp_path / "b.jsonl", texts[::-1])
    for workers in (1, 3):
        preprocess([first, second], str(tmp_path / f"{workers}"), tokenizer=BytesTokenizer(), workers=workers)
    for ending in ("bin", "idx"):
        one, three = (tmp_path / f"{workers}_text_document.{ending}" for workers in (1, 3))
        assert one.read_bytes() == three.read_bytes()
    assert [len(document) for document in documents(tmp_path / "1_text_document")] == [*map(len, texts + texts[::-1])]


def test_a_bad_line_is_counted_and_named(tmp_path: Path) -> None:
    bad = ["{", '{"txt": "a"}', '{"text": 3}', "[1]", '{"text": "\\ud800"}', "[" * 100_000, '{"text": null}']
    source = write_lines(tmp_path / "x.jsonl", ['{"text": "good"}', "", *bad, '{"text": "good"}'])
    told: list[str] = []
    summary = preprocess([source], str(tmp_path / "p"), tokenizer=BytesTokenizer(), on_bad_line=told.append)
    assert (summary.documents, summary.bad_lines) == (2, len(bad))
    places = [int(re.match(rf"{source}:(\d+): ", line).group(1)) for line in told]  # type: ignore[union-attr]
    assert places == list(range(3, 3 + len(bad)))
    assert [line.split(": ", 1)[1] for line in told[1:4]] == [
        "key 'text' is missing",
        "key 'text' must hold text, not int",
        "a line must be a JSON object, not list",
    ]


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "\xff"}\n{"text": "b"}')
    summary = preprocess([tmp_path / "x.jsonl"], str(tmp_path / "p"), tokenizer=BytesTokenizer())
    assert (summary.documents, summary.bad_lines) == (2, 1)


def test_each_key_has_files_that_stay_aligned(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "x.jsonl", ['{"a": "1", "b": "22"}', '{"a": "3"}', '{"b": "", "a": "4"}'])
    summary = preprocess([source], str(tmp_path / "p"), tokenizer=BytesTokenizer(), json_keys=["a", "b"])
    assert documents(tmp_path / "p_a_document") == [[49], [52]]
    assert documents(tmp_path / "p_b_document") == [[50, 50], []]
    assert (summary.documents, summary.bad_lines) == (2, 1)


def test_gzip_is_read_and_a_broken_one_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "ab"}\n' * 1000)
    (tmp_path / "x.jsonl.gz").write_bytes(whole)
    preprocess([tmp_path / "x.jsonl.gz"], str(tmp_path / "p"), tokenizer=BytesTokenizer())
    assert len(documents(tmp_path / "p_text_document")) == 1000
    for broken in (whole[:-12], b"no gzip", whole[:40] + bytes(9) + whole[49:]):
        (tmp_path / "x.jsonl.gz").write_bytes(broken)
        with pytest.raises(ValueError, match=r"x\.jsonl\.gz cannot be unpacked after line \d+: .*; copy it again"):
            preprocess([tmp_path / "x.jsonl.gz"], str(tmp_path / "q"), tokenizer=BytesTokenizer())
    assert not list(tmp_path.glob("q*"))


@pytest.mark.parametrize("content", ["", "\n\n", "{\n"])
def test_an_input_without_a_document_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"x\.jsonl holds no document .*each line must be a JSON object with a text"):
        preprocess([tmp_path / "x.jsonl"], str(tmp_path / "p"), tokenizer=BytesTokenizer())
    assert not list(tmp_path.glob("p*"))


@pytest.mark.processes
def test_a_killed_worker_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "x.jsonl", ["x" * BATCH_BYTES, "die", *["x" * BATCH_BYTES] * 20])
    with pytest.raises(WorkerDiedError, match="a tokenizing worker died"):
        preprocess([source], str(tmp_path / "p"), tokenizer=DyingTokenizer(), workers=2)
    assert not list(tmp_path.glob("p*"))


def test_the_tool_tells_what_it_did_and_how_it_ended(tmp_path: Path) -> None:
    good = write_texts(tmp_path / "good.jsonl", ["ab", "c"])
    bad = write_lines(tmp_path / "bad.jsonl", ['{"text": "ab"}', "{"])
    options = ("--output-prefix", tmp_path / "p", "--tokenizer-type", "bytes", "--append-eod")

    done = tool("--input", good, bad, *options)
    assert done.status == 0
    assert re.search(r"3 documents \| 8 tokens \| [\d,]+ tokens/s \| 1 bad lines", done.stdout)
    assert f"bad line {bad}:2: " in done.stderr

    for arguments, message in [
        (("--input", bad, *options, "--strict"), f"error: {bad}:2: "),
        (("--input", tmp_path / "none", *options), "none is not a file; check the path"),
        (
            ("--input", good, *options, "--workers", 10**11),
            "--workers 100000000000 must be at least 1 and at most 1024",
        ),
        (
            ("--input", good, *options[2:], "--output-prefix", good / "x"),
            f"--output-prefix {good}/x cannot be written: {good}: File exists; choose another",
        ),
        (("--input", good, "--output-prefix", tmp_path / "p"), "needs the tokenizer's file"),
        (("--input", good, "--output-prefix", tmp_path / "p", "--tokenizer-type", "Best"), "Best is not known"),
    ]:
        failed = tool(*arguments)
        assert failed.status == 2
        assert message in failed.stderr
        assert "Traceback" not in failed.stderr


def test_a_disk_that_takes_no_more_is_told_with_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "x.jsonl", ["x" * 5000] * 20)
    options = f"--input {source} --output-prefix {tmp_path}/p --tokenizer-type bytes"
    for limit, when in (("64", "in the middle"), ("0", "at the end, of what is buffered")):
        command = f"ulimit -f {limit}; exec {sys.executable} {ROOT}/tools/preprocess_data.py {options}"
        done = subprocess.run(
            ["sh", "-c", command], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1, when
        assert (
            f"error: {tmp_path}/p_text_document.bin and its .idx cannot be written: File too large; free" in done.stderr
        )
        assert "Traceback" not in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "x.jsonl", ["x" * 1000] * 60_000)
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(source), "--workers", "2"]
    command += ["--output-prefix", str(tmp_path / "p"), "--tokenizer-type", "bytes"]
    parent = subprocess.Popen(command, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    assert wait_until(lambda: len(children_of(parent.pid)) > 2)  # two workers, and Python's resource tracker
    children = children_of(parent.pid)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not any(is_running(child) for child in children)), "a worker outlived its parent"
    assert not list(tmp_path.glob("*.idx"))


def children_of(parent: int) -> list[int]:
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listing.splitlines() if int(line.split()[1]) == parent]
