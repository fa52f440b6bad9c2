"""Tests of preprocessing: any number of workers writes the same files, bad lines are counted, nothing hangs."""

import gzip
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dying_tokenizers import DyingOnArrival, DyingTokenizer, dying_at_its_start, missing_in_workers
from jobs import Finished
from paths import ROOT
from ranks import is_running, wait_until
from scripts import run_script
from sweeps import some_of

from megatronish.commands.preprocess import (
    PreprocessArguments,
    main,
    tokenizer_settings,
    with_lists_joined,
    without_megatron_flags,
)
from megatronish.commands.preprocess_tasks import main as tasks_main
from megatronish.core.errors import RunError, UserError
from megatronish.data.batch_work import WorkerDiedError
from megatronish.data.encoding import EncodingJob
from megatronish.data.indexed import IndexedTokens
from megatronish.data.preprocess import preprocess
from megatronish.data.readers import BATCH_BYTES
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.plain import BytesTokenizer


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_texts(path: Path, texts: Sequence[str]) -> Path:
    return write_lines(path, [json.dumps({"text": text}) for text in texts])


def documents(prefix: Path) -> list[list[int]]:
    file = IndexedTokens(prefix)
    return [file.document(number).tolist() for number in range(file.num_documents)]


def tool(*arguments: object) -> Finished:
    """How a run of the tool ended."""
    with tempfile.TemporaryDirectory() as folder:
        return run_script(["tools/preprocess_data.py", *arguments], Path(folder))


def test_texts_become_documents_that_end(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "x.jsonl", ["ab", "", "\u00e9"])
    summary = preprocess([source], str(tmp_path / "p"), tokenizer=BytesTokenizer, append_eod=True)
    assert documents(tmp_path / "p_text_document") == [[97, 98, 256], [], [195, 169, 256]]
    assert (summary.documents, summary.tokens, summary.bad_lines) == (3, 6, 0)


@pytest.mark.processes
def test_any_number_of_workers_writes_the_same_files(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    texts = ["x" * int(length) for length in draw.integers(0, BATCH_BYTES // 20, 200)]
    first, second = write_texts(tmp_path / "a.jsonl", texts), write_texts(tmp_path / "b.jsonl", texts[::-1])
    for workers in (1, 3):
        preprocess([first, second], str(tmp_path / f"{workers}"), tokenizer=BytesTokenizer, workers=workers)
    for ending in ("bin", "idx"):
        one, three = (tmp_path / f"{workers}_text_document.{ending}" for workers in (1, 3))
        assert one.read_bytes() == three.read_bytes()
    assert [len(document) for document in documents(tmp_path / "1_text_document")] == [*map(len, texts + texts[::-1])]


def test_a_bad_line_is_counted_and_named(tmp_path: Path) -> None:
    bad = ["{", '{"txt": "a"}', '{"text": 3}', "[1]", '{"text": "\\ud800"}', "[" * 100_000, '{"text": null}']
    source = write_lines(tmp_path / "x.jsonl", ['{"text": "good"}', "", *bad, '{"text": "good"}'])
    told: list[str] = []
    summary = preprocess([source], str(tmp_path / "p"), tokenizer=BytesTokenizer, on_bad_line=told.append)
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
    summary = preprocess([tmp_path / "x.jsonl"], str(tmp_path / "p"), tokenizer=BytesTokenizer)
    assert (summary.documents, summary.bad_lines) == (2, 1)


def test_each_key_has_files_that_stay_aligned(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "x.jsonl", ['{"a": "1", "b": "22"}', '{"a": "3"}', '{"b": "", "a": "4"}'])
    summary = preprocess([source], str(tmp_path / "p"), tokenizer=BytesTokenizer, json_keys=["a", "b"])
    assert documents(tmp_path / "p_a_document") == [[49], [52]]
    assert documents(tmp_path / "p_b_document") == [[50, 50], []]
    assert (summary.documents, summary.bad_lines) == (2, 1)


def test_gzip_is_read_and_a_broken_one_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "ab"}\n' * 1000)
    (tmp_path / "x.jsonl.gz").write_bytes(whole)
    preprocess([tmp_path / "x.jsonl.gz"], str(tmp_path / "p"), tokenizer=BytesTokenizer)
    assert len(documents(tmp_path / "p_text_document")) == 1000
    for broken, message in (
        (whole[:-12], r"x\.jsonl\.gz is cut off .*; copy it again"),
        (b"no gzip", r"x\.jsonl\.gz ends in \.gz, but does not begin as gzip does; rename it"),
        (whole[:40] + bytes(9) + whole[49:], r"x\.jsonl\.gz is (cut off|damaged) .*; copy it again"),
    ):
        (tmp_path / "x.jsonl.gz").write_bytes(broken)
        with pytest.raises(ValueError, match=message):
            preprocess([tmp_path / "x.jsonl.gz"], str(tmp_path / "q"), tokenizer=BytesTokenizer)
    assert not list(tmp_path.glob("q*"))


def test_several_files_are_listed_and_those_of_one_name_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    source = write_texts(folder / "c.jsonl", ["ab"])
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(source.read_bytes()))
    argv = ["--input", str(folder), "--output-prefix", str(tmp_path / "p"), "--tokenizer-type", "bytes"]
    assert main(argv) == 0
    said = capsys.readouterr().err
    assert f"reading 2 files: {source}, {source}.gz\n" in said
    assert f"warning: {source} and {source}.gz differ in their endings alone, and both are read; name one of" in said
    assert main([*argv[:1], *[str(source)] * 12, *argv[2:]]) == 0
    said = capsys.readouterr().err
    assert f"{source} and 2 more\n" in said
    assert f"warning: {source} is named twice, and both are read, as in 10 other cases; name one" in said
    assert main([*argv[:1], str(source), *argv[2:]]) == 0
    assert "reading" not in capsys.readouterr().err


def test_a_wrong_flag_is_a_sentence_of_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--input", "x", "--output-prefix", "p", "--max-bad-fraction", "abc"]) == 2
    assert capsys.readouterr().err.startswith("error: --max-bad-fraction abc must be a number such as 0.1 (")


@pytest.mark.parametrize("key", ["../x", "/x", "a/../../x", "a\0"])
def test_a_key_that_would_name_files_of_another_folder_is_refused(tmp_path: Path, key: str) -> None:
    source = write_lines(tmp_path / "x.jsonl", [json.dumps({key: "ab"})])
    (tmp_path / "out" / "p_").mkdir(parents=True)  # p_/../x is a path
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"^--json-keys .* must not hold a slash or a zero byte: the files of a key"):
        preprocess([source], str(tmp_path / "out" / "p"), tokenizer=BytesTokenizer, json_keys=[key])
    assert sorted(tmp_path.rglob("*")) == before


def test_an_input_that_would_be_written_over_is_refused(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "p_text_document.bin", ["ab"])
    before = source.read_bytes()
    with pytest.raises(UserError, match=r"--output-prefix \S+p_text_document.bin is a file that is read; choose"):
        preprocess([source], str(tmp_path / "p"), tokenizer=BytesTokenizer)
    assert source.read_bytes() == before


@pytest.mark.parametrize("prefix", ["", ".", "out/", "out/.."])
def test_a_prefix_without_a_name_is_refused(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["--input", str(write_texts(tmp_path / "x.jsonl", ["ab"])), "--tokenizer-type", "bytes"]
    for words in (argv, ["plan", *argv, "--tasks", "2"]):
        assert tasks_main([*words, "--output-prefix", prefix]) == 2
        assert f"error: --output-prefix {prefix!r} names a folder and no files; add a name" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize("content", ["", "\n\n", "{\n"])
def test_an_input_without_a_document_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"x\.jsonl holds no document .*each line must be a JSON object with a text"):
        preprocess([tmp_path / "x.jsonl"], str(tmp_path / "p"), tokenizer=BytesTokenizer)
    assert not list(tmp_path.glob("p*"))


@pytest.mark.processes
def test_a_killed_worker_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "x.jsonl", ["x" * BATCH_BYTES, "die", *["x" * BATCH_BYTES] * 20])
    with pytest.raises(WorkerDiedError, match="a tokenizing worker died"):
        preprocess([source], str(tmp_path / "p"), tokenizer=DyingTokenizer, workers=2)
    assert not list(tmp_path.glob("p*"))


@pytest.mark.processes
@pytest.mark.parametrize("tokenizer", [dying_at_its_start, DyingOnArrival()])
def test_workers_that_die_while_starting_are_an_error_and_not_a_hang(
    tmp_path: Path, tokenizer: Callable[[], BytesTokenizer]
) -> None:
    source = write_texts(tmp_path / "x.jsonl", ["x" * BATCH_BYTES] * 20)
    start = time.monotonic()
    with pytest.raises(WorkerDiedError, match="a tokenizing worker died"):
        preprocess([source], str(tmp_path / "p"), tokenizer=tokenizer, workers=2)
    assert time.monotonic() - start < 30
    assert not list(tmp_path.glob("p*"))


@pytest.mark.processes
def test_a_worker_that_cannot_build_the_tokenizer_says_why(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "x.jsonl", ["ab"])
    with pytest.raises(
        RunError, match=r"cannot build the tokenizer \(FileNotFoundError: tokenizer.json is not there\)"
    ):
        preprocess([source], str(tmp_path / "p"), tokenizer=missing_in_workers, workers=2)


@pytest.mark.sweep
def test_workers_know_the_tokenizer_of_a_plug_in(tmp_path: Path) -> None:
    (tmp_path / "alphabet.txt").write_text("abc")
    source = write_texts(tmp_path / "x.jsonl", ["abc", "ba"])
    plugin = ROOT / "examples" / "plugins" / "characters.py"
    options = ("--tokenizer-type", "characters", "--tokenizer-model", tmp_path / "alphabet.txt", "--plugin", plugin)
    done = tool("--input", source, "--output-prefix", tmp_path / "p", "--workers", "2", *options)
    assert done.status == 0, done.errors
    assert documents(tmp_path / "p_text_document") == [[0, 1, 2], [1, 0]]


def test_what_a_worker_is_sent_fits_into_a_pipe_that_nobody_reads(tmp_path: Path) -> None:
    """64 KiB on Linux: a large tokenizer.json is named and not sent."""
    vocabulary = {f"token {number}": number for number in range(20_000)} | {"</s>": 20_000}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "</s>"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    settings = PreprocessArguments(input=(), output_prefix="", tokenizer_model=str(path))
    job = EncodingJob(partial(build_tokenizer, tokenizer_settings(settings)), ("text",), append_eod=False)
    assert job.tokenizer().vocab_size == 20_001
    assert path.stat().st_size > 1 << 18
    assert len(pickle.dumps(job)) < 1 << 12


def test_a_run_with_bad_lines_says_so_last(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "x.jsonl", ['{"text": "ab"}'] * 6 + ["{"] * 5)
    options = ("--input", source, "--output-prefix", tmp_path / "p", "--tokenizer-type", "bytes")
    done = tool(*options)
    assert done.status == 0
    assert done.errors.splitlines()[-1] == "5 of 11 lines were bad and were left out"
    assert len(documents(tmp_path / "p_text_document")) == 6


def test_too_many_bad_lines_are_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "x.jsonl", ['{"text": "ab"}'] * 5 + ["{"] * 6)
    options = ("--input", source, "--output-prefix", tmp_path / "p", "--tokenizer-type", "bytes")
    done = tool(*options)
    assert done.status == 2
    assert f"error: 6 of 11 lines of {source} are bad, more than --max-bad-fraction 0.5 of them, and" in done.errors
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]
    assert tool(*options, "--max-bad-fraction", "0.6").status == 0
    assert "6 of 11 lines were bad" in tool(*options, "--max-bad-fraction", "1").errors
    assert "--max-bad-fraction 2.0 must be at least 0 and at most 1" in tool(*options, "--max-bad-fraction", "2").errors


def test_a_key_may_be_inside_of_another(tmp_path: Path) -> None:
    lines = [{"meta": {"body": "ab"}}, {"meta.body": "c", "meta": {"body": "d"}}, {"meta": {}}, {"meta": 3}]
    source, bad = write_lines(tmp_path / "x.jsonl", [json.dumps(line) for line in lines]), list[str]()
    preprocess([source], str(tmp_path / "p"), tokenizer=BytesTokenizer, json_keys=["meta.body"], on_bad_line=bad.append)
    assert documents(tmp_path / "p_meta.body_document") == [[97, 98], [99]]
    assert [line.split(": ", 1)[1] for line in bad] == ["key 'meta.body' is missing"] * 2


def test_flags_of_megatron_are_idle_or_refused_with_the_reason() -> None:
    own = {"input", "workers", "append-eod"}
    argv = "--input a b --dataset-impl mmap --partitions=4 --keep_sequential_samples --workers 2 --workers-to-check 1 2"
    found = without_megatron_flags([*argv.split(), "--append-eod", "--no-append-eod"], own)
    assert found.argv == ["--input", "a", "b", "--workers", "2", "--append-eod", "--no-append-eod"]
    assert [note.partition(" is idle: ")[0] for note in found.notes] == [
        "--dataset-impl mmap",
        "--partitions 4",
        "--keep-sequential-samples",
        "--workers-to-check 1 2",
    ]
    argv = "--dataset-impl lazy --worker 3 --frobnicate x --input a"
    with pytest.raises(UserError) as caught:
        without_megatron_flags(argv.split(), own)
    assert str(caught.value).splitlines() == [
        "--dataset-impl lazy is refused: the only format is that of mmap; leave it out",
        "--worker is not a flag; did you mean --workers?",
        "--frobnicate is not a flag; see --help",
    ]


def test_a_list_given_several_times_adds_up() -> None:
    argv = "--input a --output-prefix o --input=b c --append-eod --json_keys x --json-keys y"
    joined = " ".join(with_lists_joined(argv.split()))
    assert joined == "--input a b c --output-prefix o --append-eod --json-keys x y"
    assert with_lists_joined(["--output-prefix", "o"]) == ["--output-prefix", "o"]


def test_the_tool_takes_a_command_line_of_megatron(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "x.jsonl", ["ab"])
    options = ("--input", source, "--output-prefix", tmp_path / "p", "--tokenizer-type", "bytes", "--workers", "1")
    done = tool(*options, "--dataset-impl", "mmap", "--partitions", "1", "--log-interval", "1000")
    assert done.status == 0
    assert "note: --partitions 1 is idle: " in done.errors
    assert tool(*options, "--partition", "1").status == 2


def test_the_kind_of_tokenizer_follows_from_its_files() -> None:
    def kind(**settings: str) -> str:
        return tokenizer_settings(PreprocessArguments(input=(), output_prefix="", **settings)).tokenizer_type  # type: ignore[arg-type]

    assert kind(vocab_file="v", merge_file="m") == "huggingface"
    assert kind(tokenizer_model="x/tokenizer.json") == "huggingface"
    assert kind(tokenizer_model="x/tokenizer.model") == kind() == "sentencepiece"
    assert kind(vocab_file="v", merge_file="m", tokenizer_type="bytes") == "bytes"


@pytest.mark.parametrize(
    ("signum", "workers"),
    some_of(product((signal.SIGTERM, signal.SIGHUP), (1, 2)), [(signal.SIGTERM, 2), (signal.SIGHUP, 1)]),
)
def test_a_signal_leaves_no_file_behind(tmp_path: Path, workers: int, signum: int) -> None:
    parent = endless_tool(tmp_path, workers=workers)
    parent.send_signal(signum)
    assert parent.wait(60) == 128 + signum
    errors = parent.communicate()[1]
    assert f"stopped by {signal.Signals(signum).name}; nothing was written\n" in errors
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


def test_ctrl_c_while_workers_start_is_one_word(tmp_path: Path) -> None:
    """To the whole group, as a terminal sends it: workers are then at their imports."""
    parent = endless_tool(tmp_path, workers=3)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    assert wait_until(lambda: len(children.read_text().split()) > 2)  # one of them is a tracker of resources
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.wait(60) == 130
    names, warning, *told = [line[:80] for line in parent.communicate()[1].splitlines()]
    assert told == ["interrupted"], f"after the files and that one is named often: {names}, {warning}"
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


def test_what_a_killed_run_left_is_removed_by_the_next_and_what_another_one_writes_is_not(tmp_path: Path) -> None:
    killed, alive = endless_tool(tmp_path), endless_tool(tmp_path)
    assert len(list(tmp_path.glob("p_text_document.bin.*.tmp"))) == 2
    killed.kill()
    killed.wait()
    source = write_texts(tmp_path / "y.jsonl", ["ab"])
    preprocess([source], str(tmp_path / "p"), tokenizer=BytesTokenizer)
    assert len(list(tmp_path.glob("p_text_document.bin.*.tmp"))) == 1
    assert alive.poll() is None
    alive.terminate()
    alive.wait(60)
    assert not list(tmp_path.glob("*.tmp"))
    assert documents(tmp_path / "p_text_document") == [[97, 98]]


def endless_tool(folder: Path, *, workers: int = 1) -> subprocess.Popen[str]:
    """The tool at work on more text than it can read in the time of a test."""
    source, before = folder / "x.jsonl", len(list(folder.glob("*.tmp")))
    if not source.exists():
        write_texts(source, ["x" * 1000] * 10_000)
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", *[str(source)] * 1000]
    command += ["--output-prefix", str(folder / "p"), "--tokenizer-type", "bytes", "--workers", str(workers)]
    how: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    how["preexec_fn"] = heed_signals
    parent = subprocess.Popen(command, env={"PYTHONPATH": str(ROOT)}, **how)
    assert wait_until(lambda: len(list(folder.glob("*.tmp"))) > before)
    return parent


def heed_signals() -> None:
    """Of a child: who starts the tests in the background, or by nohup, has some ignored, which children inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_the_tool_tells_what_it_did_and_how_it_ended(tmp_path: Path) -> None:
    good = write_texts(tmp_path / "good.jsonl", ["ab", "c"])
    bad = write_lines(tmp_path / "bad.jsonl", ['{"text": "ab"}', "{"])
    options = ("--output-prefix", tmp_path / "p", "--tokenizer-type", "bytes", "--append-eod")

    done = tool("--input", good, bad, *options)
    assert done.status == 0
    assert re.search(r"3 documents \| 8 tokens \| [\d,]+ tokens/s \| 1 bad lines", done.output)
    assert f"bad line {bad}:2: " in done.errors

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
        assert message in failed.errors
        assert "Traceback" not in failed.errors


def test_a_disk_that_takes_no_more_is_told_with_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "x.jsonl", ["x" * 5000] * 20)
    options = f"--input {source} --output-prefix {tmp_path}/p --tokenizer-type bytes"
    # Python would keep bytecode that is cut, and no later start could import it.
    environ = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    for limit, when in (("64", "in the middle"), ("0", "at the end, of what is buffered")):
        command = f"ulimit -f {limit}; exec {sys.executable} {ROOT}/tools/preprocess_data.py {options}"
        done = subprocess.run(["sh", "-c", command], env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 1, when
        assert (
            f"error: {tmp_path}/p_text_document.bin and its .idx cannot be written: File too large; raise"
            in done.stderr
        )
        assert "Traceback" not in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    parent = endless_tool(tmp_path, workers=2)
    assert wait_until(lambda: len(children_of(parent.pid)) > 2)  # two workers, and Python's resource tracker
    children = children_of(parent.pid)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not any(is_running(child) for child in children)), "a worker outlived its parent"
    assert not list(tmp_path.glob("*.idx"))


def children_of(parent: int) -> list[int]:
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listing.splitlines() if int(line.split()[1]) == parent]
