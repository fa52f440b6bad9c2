"""Tests of plans of preprocessing in tasks: how inputs are cut, and what is told of one that does not fit."""

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from task_runs import DIGEST, in_one, inputs_of, joined, lines_of, plan_of, run_of

from megatronish.commands.preprocess_tasks import main, task_numbers
from megatronish.core.errors import UserError
from megatronish.data import tasks
from megatronish.data.indexed import bin_path
from megatronish.data.pieces import InputFile, cut_into_tasks
from megatronish.data.tasks import ranges, read_plan, record_of, run_task, sign_of, tokenizer_digest, whole_result
from megatronish.tokenizer.plain import BytesTokenizer


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
