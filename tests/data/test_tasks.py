"""The data theorem: bytes do not depend on tasks, their order, workers, kills, reruns and failures."""

import gzip
import json
import os
import random
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from task_runs import in_one, inputs_of, joined, killed_at, lines_of, plan_of, run_of

from megatronish.commands.preprocess_tasks import main
from megatronish.core.errors import RunError
from megatronish.data import tasks
from megatronish.data.batch_work import WorkerDiedError
from megatronish.data.indexed import bin_path, idx_path
from megatronish.data.tasks import TaskRecord, read_plan, record_of, run_task, sign_of, whole_result


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
