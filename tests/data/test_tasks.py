"""The data theorem: bytes do not depend on tasks, their order, workers, kills and reruns; what changed is refused."""

import gzip
import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatronish.commands.preprocess_tasks import main, task_numbers
from megatronish.core.errors import RunError, UserError
from megatronish.core.remote import Location
from megatronish.data import tasks
from megatronish.data.batch_work import WorkerDiedError
from megatronish.data.indexed import bin_path, idx_path
from megatronish.data.pieces import InputFile, cut_into_tasks
from megatronish.data.preprocess import preprocess
from megatronish.data.shards import join_shards
from megatronish.data.tasks import (
    Plan,
    TaskRecord,
    TaskRun,
    make_plan,
    ranges,
    read_plan,
    record_of,
    run_task,
    shards_of,
    sign_of,
    tokenizer_digest,
    whole_result,
)
from megatronish.tokenizer.plain import BytesTokenizer

SETTINGS = {
    "json_keys": ["text"],
    "append_eod": True,
    "split_sentences": False,
    "strict": False,
    "max_bad_fraction": 0.9,
    "plugin": [],
}
DIGEST = tokenizer_digest(BytesTokenizer(), [])


def lines_of(seed: int, number: int) -> list[str]:
    """Lines as they are found: documents short and long, empty ones, blank lines, bad ones."""
    draw = random.Random(seed)
    made = []
    for place in range(number):
        kind = draw.random()
        text = "é" * draw.randrange(3) + f"{seed} {place} " * draw.choice([0, 1, 5, 200])
        made.append("" if kind < 0.1 else '{"txt": 1}' if kind < 0.2 else json.dumps({"text": text, "n": place}))
    return made


def inputs_of(folder: Path) -> list[Path]:
    """Files of each kind, among them one that holds nearly all bytes, one without a last newline, and an empty one."""
    folder.mkdir()
    files = {
        "a.jsonl": "\n".join(lines_of(1, 400)).encode(),
        "b.jsonl.gz": gzip.compress("\n".join(lines_of(2, 300)).encode(), mtime=0),
        "c.jsonl": ("\ufeff" + "\r\n".join(lines_of(3, 30))).encode(),
        "d.json": json.dumps([{"text": f"element {number}"} for number in range(50)]).encode(),
        "e.jsonl": b"",
        "f.jsonl": b'{"text": "' + b"long " * 2000 + b'"}\n\n\n',
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return sorted(folder.iterdir())


def run_of(**changes: Any) -> TaskRun:
    settings = {"tokenizer": BytesTokenizer, "digest": DIGEST, "workers": 1, "on_bad_line": lambda _line: None}
    return TaskRun(**{**settings, "on_progress": lambda _summary, _num_bytes: None, **changes})


def plan_of(prefix: Path, files: Sequence[Location], num_tasks: int, **changes: Any) -> Plan:
    return make_plan(str(prefix), files, num_tasks=num_tasks, settings={**SETTINGS, **changes}, tokenizer=DIGEST)


def joined(plan: Plan) -> tuple[bytes, bytes]:
    shards = [shards_of(plan, record)[0] for record in whole_result(plan)]
    (name,) = plan.names(plan.prefix)
    join_shards(shards, name, on_bytes=lambda _number: None)
    return bin_path(name).read_bytes(), idx_path(name).read_bytes()


def in_one(prefix: Path, files: list[Path], bad: list[str] | None = None) -> tuple[bytes, bytes]:
    """What one process writes of all files."""
    told = [] if bad is None else bad
    preprocess(files, str(prefix), tokenizer=BytesTokenizer, append_eod=True, on_bad_line=told.append)
    name = f"{prefix}_text_document"
    return bin_path(name).read_bytes(), idx_path(name).read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("num_tasks", [1, 2, 3, 7, 61])
def test_bytes_and_bad_lines_are_those_of_one_process_for_any_number_and_order_of_tasks(
    tmp_path: Path, num_tasks: int
) -> None:
    files, bad = inputs_of(tmp_path / "in"), list[str]()
    expected = in_one(tmp_path / "one", files, bad)
    plan = plan_of(tmp_path / "many", files, num_tasks)
    order = list(range(num_tasks))
    random.Random(num_tasks).shuffle(order)
    for number in order:
        run_task(plan, number, run_of())
    assert joined(read_plan(plan.path)) == expected
    records = whole_result(plan)
    found = [f"{path}:{line}: {why}" for record in records for path, line, why in record.first_bad_lines]
    assert found == bad
    assert len(bad) > 30
    assert sum(record.bad_lines for record in records) == len(bad)


@pytest.mark.processes
def test_bytes_are_those_of_one_process_for_any_number_of_workers(tmp_path: Path) -> None:
    files = inputs_of(tmp_path / "in")
    plan = plan_of(tmp_path / "many", files, 2)
    for number, workers in enumerate((1, 3)):
        run_task(plan, number, run_of(workers=workers))
    assert joined(plan) == in_one(tmp_path / "one", files)


def test_row_groups_of_parquet_are_pieces(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow, of the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"row {number} " * (number % 9) if number % 11 else None for number in range(1000)]
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "x.parquet", row_group_size=100)
    (tmp_path / "y.jsonl").write_text("\n".join(lines_of(5, 40)))
    files, bad = [tmp_path / "x.parquet", tmp_path / "y.jsonl"], list[str]()
    expected = in_one(tmp_path / "one", files, bad)
    for num_tasks in (2, 5, 30):
        plan = plan_of(tmp_path / f"many{num_tasks}", files, num_tasks)
        assert sum(pieces != () for pieces in plan.tasks) > 1
        for number in range(num_tasks):
            run_task(plan, number, run_of())
        assert joined(plan) == expected
        lines = [bad_line for record in whole_result(plan) for bad_line in record.first_bad_lines]
        assert [f"{path}:{line}: {why}" for path, line, why in lines] == bad


def test_tasks_are_of_about_equal_bytes_also_inside_of_a_file(tmp_path: Path) -> None:
    sizes = [1_000, 300_000, 0, 10_000, 90_000]
    files = []
    for number, size in enumerate(sizes):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes((b"x" * 99 + b"\n") * (size // 100))
        files.append(InputFile.of(str(path)))
    for num_tasks in (1, 2, 3, 10, 64):
        found = cut_into_tasks(files, num_tasks)
        of_task = [sum(piece.num_bytes for piece in pieces) for pieces in found]
        assert sum(of_task) == sum(sizes)
        assert max(of_task) - min(of_task) <= 200
        pieces = [piece for pieces in found for piece in pieces]
        assert [piece.path for piece in pieces] == sorted(piece.path for piece in pieces)
        for one, next_one in pairwise(pieces):
            assert next_one.start == (one.end or 0), "pieces of a file follow each other, and the last has no end"


def in_child(work: Callable[[], object]) -> int:
    """Status of a copy of this process that does the work: 0, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Whether a child was killed before its `step`-th call that changes files; else it has done all of the work."""

    left = [step]

    def before(of: Callable[..., Any], *args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return of(*args, **options)

    def planted() -> None:
        for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir"):
            setattr(os, name, partial(before, getattr(os, name)))
        work()

    return in_child(planted) == signal.SIGKILL


@pytest.mark.processes
def test_a_kill_at_any_change_of_files_loses_nothing_that_was_whole(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for seed, path in enumerate(files):
        path.write_text("\n".join(lines_of(seed, 30)))
    expected, plan = in_one(tmp_path / "one", files), plan_of(tmp_path / "many", files, 2)
    whole = run_task(plan, 0, run_of())
    for step in count(1):
        was_killed = killed_at(step, lambda: run_task(plan, 1, run_of()))
        assert record_of(plan, 0, sums=True) == whole
        record = record_of(plan, 1, sums=True)
        if not was_killed:
            break
        if record is not None:  # it was killed after its record was there
            (plan.folder / "task-00001.json").unlink()
    assert step > 10, "so many changes of files are there at least"
    assert joined(plan) == expected
    left = {path.name.partition(".")[0] for path in plan.folder.iterdir() if path.suffix == ".tmp"}
    assert left == set(), "what killed runs had begun is removed"
    for step in count(1):  # of the join
        if not killed_at(step, lambda: joined(plan)):
            break
        assert idx_path(f"{plan.prefix}_text_document").exists() <= bin_path(f"{plan.prefix}_text_document").exists()
    assert joined(plan) == expected


@pytest.mark.processes
def test_kills_at_random_moments_and_two_runs_at_once_leave_the_bytes_of_one_process(tmp_path: Path) -> None:
    files, draw = inputs_of(tmp_path / "in"), random.Random(0)
    expected, plan = in_one(tmp_path / "one", files), plan_of(tmp_path / "many", files, 3)
    children = list[int]()
    for _ in range(12):
        number = draw.randrange(3)
        pid = os.fork()
        if pid == 0:
            try:
                run_task(plan, number, run_of())
            finally:
                os._exit(0)
        children.append(pid)
        time.sleep(draw.random() * 0.05)
        if draw.random() < 0.6:
            os.kill(draw.choice(children), signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)
    for number in range(3):
        run_task(plan, number, run_of())
    assert joined(plan) == expected


def test_a_second_run_that_comes_later_keeps_what_the_first_has_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(lines_of(0, 30)))
    plan = plan_of(tmp_path / "p", [tmp_path / "a.jsonl"], 1)
    publish, first = tasks._publish, list[TaskRecord]()

    def publish_after_another(*args: Any) -> TaskRecord:
        monkeypatch.setattr(tasks, "_publish", publish)
        first.append(run_task(plan, 0, run_of()))
        before = bin_path(plan.folder / "task-00000_text_document").stat().st_ino
        found = publish(*args)
        assert bin_path(plan.folder / "task-00000_text_document").stat().st_ino == before
        return found

    monkeypatch.setattr(tasks, "_publish", publish_after_another)
    assert run_task(plan, 0, run_of()) == first[0] == record_of(plan, 0, sums=True)


@pytest.mark.parametrize("damage", ["bin is gone", "bin is short", "bin has another byte", "idx has another byte"])
def test_a_shard_that_is_not_whole_is_written_again(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(lines_of(0, 30)))
    argv = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "p")]
    assert main(["plan", *argv, "--tasks", "1"]) == 0
    plan = ["--plan", str(tmp_path / "p.plan.json")]
    assert main(["run", *plan, "--task", "0"]) == 0
    path = tmp_path / "p.shards" / f"task-00000_text_document.{damage[:3]}"
    whole = path.read_bytes()
    assert main(["run", *plan, "--task", "0"]) == 0
    assert "task 0 of 1: is whole | " in capsys.readouterr().out
    if damage.endswith("gone"):
        path.unlink()
    else:
        path.write_bytes(whole[:-1] if damage.endswith("short") else whole[:-1] + bytes([whole[-1] ^ 1]))
    if damage.endswith("byte"):  # status looks at sizes alone, and a join finds it
        assert main(["status", *plan]) == 0
        assert main(["merge", *plan]) == 2
        assert f"{path} is damaged: its bytes do not have the sum" in capsys.readouterr().err
    assert main(["status", *plan, "--check"]) == 1
    assert main(["run", *plan, "--task", "0"]) == 0
    assert path.read_bytes() == whole
    assert main(["status", *plan, "--check"]) == 0


def test_an_input_that_changed_is_refused_before_and_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n' * 10)
    plan = plan_of(tmp_path / "p", [path], 2)
    state = path.stat()
    for content, changed_ns, what in (
        ('{"text": "abc"}\n' * 9, None, r"was changed since \S+p.plan.json was made \(160 bytes then, 144 now\)"),
        ('{"text": "abd"}\n' * 10, state.st_mtime_ns, "was changed since"),
        ('{"text": "abc"}\n' * 10, state.st_mtime_ns + 1, "was changed since"),
        (None, None, r"of \S+p.plan.json cannot be read: No such file or directory; bring it back"),
    ):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
            if changed_ns is not None:
                os.utime(path, ns=(state.st_atime_ns, changed_ns))
        with pytest.raises(UserError, match=rf"^input {path} {what}"):
            run_task(plan, 0, run_of())
        sign = sign_of(plan, 0)
        assert sign is not None
        assert sign.failure.startswith(f"input {path} ")
    path.write_text('{"text": "abc"}\n' * 10)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))

    def change(*_: object) -> None:
        path.touch()

    with pytest.raises(UserError, match="was changed since"):
        run_task(plan, 0, run_of(on_progress=change))
    assert record_of(plan, 0) is None


def test_a_tokenizer_that_changed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Other(BytesTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.replace("!", "?"))

    assert tokenizer_digest(Other(), []) != DIGEST
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    (tmp_path / "plugged.txt").write_text("abc")
    assert tokenizer_digest(BytesTokenizer(), [tmp_path / "plugged.txt"]) != DIGEST
    vocabulary = {"type": "WordLevel", "vocab": {"abc": 0, "</s>": 1}, "unk_token": "</s>"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": vocabulary}))
    argv = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer-model", str(path), "--output-prefix", f"{tmp_path}/p"]
    assert main(["plan", *argv, "--tasks", "2"]) == 0
    vocabulary["vocab"] = {"abd": 0, "</s>": 1}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": vocabulary}))
    assert main(["run", "--plan", f"{tmp_path}/p.plan.json", "--task", "0"]) == 2
    assert f"the tokenizer is not the one that {tmp_path}/p.plan.json was made with" in capsys.readouterr().err


def test_a_plan_that_was_made_again_keeps_the_tasks_that_are_the_same(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in files:
        path.write_text('{"text": "abc"}\n' * 10)
    plan = plan_of(tmp_path / "p", files, 2)
    records = [run_task(plan, number, run_of()) for number in range(2)]
    files[1].touch()
    plan = plan_of(tmp_path / "p", files, 2)
    assert record_of(plan, 0) == records[0]
    assert record_of(plan, 1) is None
    plan = plan_of(tmp_path / "p", files, 2, append_eod=False)
    assert record_of(plan, 0) is None


def test_a_failure_is_one_sentence_that_status_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"txt": 1}\n' * 10)
    argv = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "p")]
    assert main(["plan", *argv, "--tasks", "12", "--strict"]) == 0
    plan = ["--plan", str(tmp_path / "p.plan.json")]
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert main(["run", *plan, "--task", "1"]) == 2
    sentence = f"{tmp_path}/a.jsonl:4: key 'text' is missing; correct the line, or leave --strict out to skip such"
    assert f"error: {sentence}" in capsys.readouterr().err
    assert main(["status", *plan]) == 1
    out = capsys.readouterr().out
    assert "0 of 12 tasks are whole | 0 documents | 0 tokens | 0 bad lines\n" in out
    assert f"process {os.getpid()}, job 4711, 0 documents, failed: {sentence}" in out
    assert "never begun: 0,2-11\nmissing: --array=0-11\n" in out
    assert main(["merge", *plan]) == 2
    assert "12 of 12 tasks are not whole: 0-11; run them: megatronish preprocess run --plan" in capsys.readouterr().err


def test_a_disk_that_is_full_and_a_worker_that_dies_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 10)
    plan = plan_of(tmp_path / "p", [tmp_path / "a.jsonl"], 1)
    for error, kind in ((OSError(28, "No space left on device"), RunError), (WorkerDiedError("it died"), RunError)):

        def fail(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(tasks, "sync_folder" if isinstance(error, OSError) else "encode_pieces", fail)
            with pytest.raises(kind, match=r"No space left on device; |it died"):
                run_task(plan, 0, run_of())
        sign = sign_of(plan, 0)
        assert sign is not None
        assert sign.failure
        assert [path for path in plan.folder.iterdir() if path.suffix == ".tmp"] == []
    assert run_task(plan, 0, run_of()) == record_of(plan, 0, sums=True)


def test_too_many_bad_lines_of_all_tasks_are_refused_at_the_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"txt": 1}\n' * 10 + '{"text": "abc"}\n' * 9)
    argv = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "p")]
    plan = ["--plan", str(tmp_path / "p.plan.json")]
    assert main(["plan", *argv, "--tasks", "3"]) == 0
    assert main(["run", *plan, "--task", "0::1"]) == 0
    assert main(["merge", *plan]) == 2
    assert "10 of 19 lines of" in capsys.readouterr().err
    assert main(["run", *plan, "--task", "5::6"]) == 0  # the last job of an array that is longer
    assert "p.plan.json has 3 tasks, and --task names none of them" in capsys.readouterr().out
    assert main(["plan", *argv, "--tasks", "3", "--max-bad-fraction", "0.6"]) == 0  # and no task runs again
    capsys.readouterr()
    assert main(["merge", *plan]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path}/p_text_document: 3 shards | 9 documents | 27 tokens\n"
    assert said.err.endswith("10 of 19 lines were bad and were left out\n")


def test_each_key_has_a_pair_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "1", "b": "22"}\n{"a": "3"}\n{"a": "4", "b": ""}\n' * 5)
    argv = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer-type", "bytes", "--json-keys", "a", "b"]
    assert main([*argv, "--output-prefix", str(tmp_path / "one")]) == 0
    assert main(["plan", *argv, "--output-prefix", str(tmp_path / "many"), "--tasks", "4"]) == 0
    assert main(["run", "--plan", f"{tmp_path}/many.plan.json", "--task", "0::1"]) == 0
    assert main(["merge", "--plan", f"{tmp_path}/many.plan.json"]) == 0
    for name in ("a_document.bin", "a_document.idx", "b_document.bin", "b_document.idx"):
        assert (tmp_path / f"one_{name}").read_bytes() == (tmp_path / f"many_{name}").read_bytes()


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ("3", {}, [3]),
        ("1::4", {}, [1, 5, 9]),
        ("11::12", {}, []),
        (None, {"SLURM_ARRAY_TASK_ID": "7", "JOB_COMPLETION_INDEX": "2"}, [7]),
        (None, {"JOB_COMPLETION_INDEX": "2"}, [2]),
        ("3", {"SLURM_ARRAY_TASK_ID": "7"}, [3]),
        ("10", {}, "--task 10 is not a task of the plan; tasks are 0 to 9, in an array of Slurm --array=0-9"),
        (None, {"SLURM_ARRAY_TASK_ID": "10"}, "SLURM_ARRAY_TASK_ID=10 is not a task of the plan"),
        (None, {}, "--task is not given, and neither SLURM_ARRAY_TASK_ID nor JOB_COMPLETION_INDEX is set; add --task"),
        ("-1", {}, "--task -1 must be I or I::N, such as 3 or 3::16"),
        ("x", {}, "--task x must be I or I::N"),
        ("4::4", {}, "--task 4::4: of every N-th task the first is 0 to N - 1; for example 0::4"),
        ("0::0", {}, "--task 0::0: of every N-th task"),
    ],
)
def test_the_task_is_that_of_the_flag_or_of_the_scheduler(
    given: str | None, environment: dict[str, str], expected: list[int] | str
) -> None:
    if isinstance(expected, list):
        assert [*task_numbers(given, num_tasks=10, environment=environment)] == expected
    else:
        with pytest.raises(UserError) as caught:
            task_numbers(given, num_tasks=10, environment=environment)
        assert str(caught.value).startswith(expected)


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, sentence in (
        (None, "cannot be read: No such file or directory; name a file of preprocess plan"),
        ("{", "is not a plan (Expecting property name"),
        ("[]", "is not a plan (list indices must be"),
        ('{"format": "other"}', "is not a plan (its format is 'other'); make it again: megatronish preprocess plan"),
        (json.dumps({"format": tasks.FORMAT, "settings": {}, "tokenizer": "", "inputs": [{}], "tasks": []}), "is not"),
    ):
        path = tmp_path / "p.plan.json"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        for verb in ("run", "status", "merge"):
            assert main([verb, "--plan", str(path)]) == 2
            assert f"error: --plan {path} {sentence}" in capsys.readouterr().err
    assert main(["status", "--plan", str(tmp_path / "x.json")]) == 2
    assert "must end in .plan.json, as megatronish preprocess plan names it" in capsys.readouterr().err
    argv = ["--input", str(path), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "p")]
    assert main(["plan", *argv, "--tasks", "0"]) == 2
    assert "--tasks 0 must be at least 1" in capsys.readouterr().err
    assert main(["plan", *argv[:3], "bytes", *argv[4:]]) == 2
    assert "--tasks is not given" in capsys.readouterr().err


def test_a_task_that_fails_keeps_none_of_the_others_waiting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = '{"text": "abc"}\n' * 20
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode() * 9)[:-30])
    (tmp_path / "c.jsonl").write_text(lines)
    argv = ["--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "p"), "--tasks", "3"]
    assert main(["plan", "--input", *(str(path) for path in sorted(tmp_path.iterdir())), *argv]) == 0
    plan = ["--plan", str(tmp_path / "p.plan.json")]
    assert main(["run", *plan, "--task", "0::1"]) == 2
    assert "error: task 1 of 3: " in capsys.readouterr().err
    assert main(["status", *plan]) == 1
    assert "missing: --array=1\n" in capsys.readouterr().out


def test_a_folder_of_inputs_that_holds_the_prefix_gives_the_same_plan_by_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 20)
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for prefix in (tmp_path / "p", tmp_path / "p", "./p", "link/p"):
        argv = ["--input", str(tmp_path), "--tokenizer-type", "bytes", "--output-prefix", str(prefix)]
        assert main(["plan", *argv, "--tasks", "2"]) == 0
        assert main(["run", "--plan", str(tmp_path / "p.plan.json"), "--task", "0::1"]) == 0
        assert main(["merge", "--plan", str(tmp_path / "p.plan.json"), "--manifest"]) == 0  # a .json, too
        assert [Path(file.path).name for file in read_plan(tmp_path / "p.plan.json").inputs] == ["a.jsonl"]


def test_a_plan_runs_no_code_that_the_command_does_not_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    argv = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "p")]
    assert main(["plan", *argv, "--tasks", "1"]) == 0
    path = tmp_path / "p.plan.json"
    plan = json.loads(path.read_text())
    plan["settings"]["plugin"] = [str(tmp_path / "evil.py")]
    path.write_text(json.dumps(plan))
    for verb in (["run", "--task", "0"], ["status"], ["merge"]):
        assert main([verb[0], "--plan", str(path), *verb[1:]]) in (1, 2)
    assert not (tmp_path / "ran").exists()
    assert f"a plan alone runs none; add --plugin {tmp_path}/evil.py if you trust them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda plan: plan["settings"].update(json_keys=["/../../evil/x"]), "must not hold a slash"),
        (lambda plan: plan["settings"].update(append_eod="yes"), "its append_eod is 'yes'"),
        (
            lambda plan: plan["tasks"][0].append(["/etc/passwd", 0, None, 9]),
            "a piece of it is ('/etc/passwd', 0, None, 9)",
        ),
        (lambda plan: plan["tasks"][0][0].__setitem__(2, -1), "a piece of it is "),
    ],
)
def test_what_a_plan_says_is_looked_at_before_it_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Any], object], told: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    path = plan_of(tmp_path / "p", [tmp_path / "a.jsonl"], 1).path
    plan = json.loads(path.read_text())
    change(plan)
    path.write_text(json.dumps(plan))
    before = sorted(tmp_path.rglob("*"))
    for verb in (["run", "--task", "0"], ["status"], ["merge"]):
        assert main([verb[0], "--plan", str(path), *verb[1:]]) == 2
        assert told in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_record_that_names_files_of_another_folder_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    plan = plan_of(tmp_path / "p", [tmp_path / "a.jsonl"], 1)
    record = run_task(plan, 0, run_of())
    moved = [{**each, "name": f"../p.shards/{each['name']}"} for each in record.shards]
    (plan.folder / "task-00000.json").write_text(json.dumps(record._replace(shards=moved)._asdict()))
    assert record_of(plan, 0) is None


def test_a_manifest_is_written_of_shards_that_have_their_sums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    plan = plan_of(tmp_path / "p", [tmp_path / "a.jsonl"], 1)
    shard = run_task(plan, 0, run_of()).shards[0]["name"]
    damaged = bin_path(str(plan.folder / shard))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert main(["merge", "--plan", str(plan.path), "--manifest"]) == 2
    assert "is damaged: its bytes do not have the sum" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.shards.json"))


def test_numbers_are_written_as_those_of_an_array() -> None:
    assert ranges([]) == ""
    assert ranges([3]) == "3"
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_a_run_of_another_plan_ends_with_what_this_plan_writes(tmp_path: Path) -> None:
    """A shard is of the plan that its record names, whatever another plan of the same prefix left."""
    files = inputs_of(tmp_path / "in")
    for num_tasks in (5, 3):
        plan = plan_of(tmp_path / "p", files, num_tasks)
        for number in range(num_tasks):
            run_task(plan, number, run_of())
    assert joined(plan) == in_one(tmp_path / "one", files)
    assert np.fromfile(bin_path(f"{plan.prefix}_text_document"), "<u2").max() == 256
