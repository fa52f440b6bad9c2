"""Tests of benchmarks/gpu_report without a GPU: a trial of the whole report, and what it says of its aims."""

import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from paths import ROOT

FOLDER = ROOT / "benchmarks" / "gpu_report"
SHAPE = {"num_layers": 24, "micro_batch_size": 4, "seq_length": 2048}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, as if Python had been started with it."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("report")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("pages")


def share_of(row: str, table: list[str]) -> float:
    """Percent of a step in a row of the table of where it goes; 0 without that row."""
    found = [line for line in table if f"%  {row} " in line]
    return float(found[0].split("%")[0].split()[-1]) if found else 0.0


@pytest.mark.sweep
@pytest.mark.processes
def test_a_trial_writes_the_whole_report_on_a_cpu(report: ModuleType, tmp_path: Path) -> None:
    """Both files, every contender with the same first loss, and no aim that is met or missed by a trial."""
    assert report.main(["--tiny", "--folder", str(tmp_path), "--part", "4", "--part", "tests"]) == 0
    measured = json.loads((tmp_path / "report.json").read_text())
    (first, second), *others = [row["first_losses"] for row in measured["sweep"]]
    assert len(others) == 5
    assert all(abs(a - first) < 1e-3 * first and abs(b - second) < 5e-4 * second for a, b in others)
    page = (tmp_path / "report.md").read_text()
    assert "its numbers mean nothing" in page
    assert "| met |" not in page and "missed" not in page
    for contender in ("megatronish", "plain, compiled", "FSDP2, compiled"):
        for count in (1, 8):
            assert f"| tiny-llama | 2 | 2 x 64 | x {count} | {contender} |" in page
    assert "## Where a step of megatronish goes, tiny-llama" in page
    for row in measured["sweep"]:
        assert row["seconds"] and len(row["seconds"]) == len(row["plain_seconds"])
        if row["contender"].startswith("megatronish") and row["micro_batches"] == 1:
            assert share_of("matrix products", row["where"]) > 0 < share_of("other compute", row["where"])
            assert share_of("hooks", row["where"]) < 10  # there are none
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.sweep
@pytest.mark.processes
def test_on_a_machine_twenty_times_slower_calls_in_turn_come_to_the_end(report: ModuleType, tmp_path: Path) -> None:
    """By a clock that says so: no call takes eight minutes, each adds rows, and what is done stays.

    A part that is too long is killed after PART_LIMIT, and half a second that this takes is ten of that clock.
    """
    words = ["--tiny", "--folder", str(tmp_path), "--part", "5", "--times-slower", "20"]
    clock, rows = report.Clock(20.0), 0
    for _ in range(12):
        begin, status = clock.now(), report.main(words)
        measured = json.loads((tmp_path / "report.json").read_text())
        done = [row for row in measured["sweep"] if "seconds" in row]
        assert len(done) >= rows
        rows, (part,) = len(done), measured["parts"]
        assert part["seconds"] < 480 and clock.now() - begin < 2 * report.PART_LIMIT
        if status == 0:
            break
    assert (part["status"], rows) == ("done", 6)
    assert report.main(words) == 0 and json.loads((tmp_path / "report.json").read_text())["parts"] == [part]


def test_every_part_fits_into_a_call_of_eight_minutes(report: ModuleType, tmp_path: Path) -> None:
    parts = report.parts_of(tmp_path, tiny=False)
    assert len(parts) == 5
    assert all(sum(task.limit for task in part) <= report.PART_LIMIT < 480 for part in parts)
    assert [task.name for task in parts[0]][1:] == ["tests: kernels in Triton", "tests: CUDA kernels"]


def test_tests_that_need_a_gpu_are_all_in_the_report(report: ModuleType) -> None:
    """Every file of tests with the mark `gpu`, but for compute-sanitizer's."""
    named = {*report.gpu_tests(of_kernels=True), *report.gpu_tests(of_kernels=False)}
    marked = {
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()
    }
    assert marked - named == {"tests/kernels/test_kernels_sanitizer.py"}
    assert "tests/kernels/test_kernels_dropout.py" in named


@pytest.mark.processes
def test_what_is_not_here_is_named_and_leaves_out_what_needs_it(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs = importlib.import_module("needs")
    monkeypatch.setattr(needs, "is_here", lambda name: name not in ("tyro", "nvcc"))
    assert report.main(["--tiny", "--folder", str(tmp_path), "--part", "sweep tiny"]) == 0
    told = capsys.readouterr().out
    assert "tyro is not here: nothing that imports megatronish can run\nnvcc is not here: the CUDA kernels are" in told
    assert "sweep tiny: left out (not here: tyro)" in told
    assert "- tyro is not here" in (tmp_path / "report.md").read_text()


def test_a_wheel_of_a_folder_is_imported_without_being_installed(tmp_path: Path, report: ModuleType) -> None:
    needs = importlib.import_module("needs")
    with zipfile.ZipFile(tmp_path / "unheard_of-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("unheard_of.py", "IT = 1\n")
    assert not needs.is_here("unheard_of")
    before = sys.path[:]
    try:
        assert needs.add_wheels(tmp_path) == [str(tmp_path / "unheard_of-1.0-py3-none-any.whl")]
        assert needs.is_here("unheard_of")
    finally:
        sys.path[:] = before


@pytest.mark.processes
def test_a_report_of_another_commit_is_kept_and_not_gone_on_with(report: ModuleType, tmp_path: Path) -> None:
    about = report.circumstances() | {"not_here": []}
    outcome = report.Outcome("kernels: norm", "", "done", 1.0, "")
    (task,) = (task for task in report.parts_of(tmp_path, tiny=True)[1] if task.name == outcome.name)
    report.Report.of(tmp_path, about, is_trial=True).add(outcome)
    assert report.Report.of(tmp_path, about, is_trial=True).is_done(task)
    assert not report.Report.of(tmp_path, about | {"commit": "another"}, is_trial=True).is_done(task)
    assert len(list(tmp_path.glob("earlier/*/report.json"))) == 1 and not (tmp_path / "report.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to report on")
def test_without_a_gpu_there_is_no_report_but_a_trial(report: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([]) == 2
    assert "torch sees none here; --tiny tries it without one" in capsys.readouterr().err


@pytest.mark.processes
def test_a_task_that_fails_hangs_or_has_no_time_loses_itself_alone(report: ModuleType) -> None:
    def ended(code: str, *, limit: float = 60.0, left: float = 60.0, needs_gpu: bool = False) -> Any:
        return report.run(report.Task("task", ["-c", code], limit, (), needs_gpu), left=left, has_gpu=False)

    assert ended("print('fine')")[2:4:2] + ended("print('fine')")[4:] == ("done", "fine\n")
    assert ended("raise SystemExit(3)").status == "failed"
    assert ended("raise SystemExit(75)").status == "unfinished"
    slow = ended("import time; print('begun', flush=True); time.sleep(60)", limit=2.0)
    assert (slow.status, slow.output) == ("too long", "begun\n")
    assert ended("", left=0.0).status == "left out"
    assert ended("", needs_gpu=True).output == "there is no GPU here"


def test_a_part_that_does_not_exist_is_refused_in_one_sentence(
    report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wanted in ("nothing", "0", "6"):
        assert report.main(["--tiny", "--folder", str(tmp_path), "--part", wanted]) == 2
        told = capsys.readouterr().err
        assert told.startswith(
            f"--part {wanted} is neither a number from 1 to 5 nor the beginning of a name: build of "
        )
    assert not (tmp_path / "report.md").exists()


@pytest.mark.processes
def test_weights_that_a_killed_part_has_left_are_removed_before_the_next(report: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "sweep.8b.pt").write_bytes(b"of another run")
    assert report.main(["--tiny", "--folder", str(tmp_path), "--part", "tests"]) == 0
    assert not list(tmp_path.glob("*.pt"))


def test_lines_of_a_sweep_that_was_killed_are_kept_and_the_last_of_a_contender_counts(
    report: ModuleType, tmp_path: Path
) -> None:
    lines, path = importlib.import_module("lines"), tmp_path / "sweep.jsonl"
    assert lines.rows_in(path) == {}
    row = {"model": "124m", "contender": "plain", "micro_batches": 1}
    lines.write(path, row | {"error": "killed"})
    with path.open("a") as file:
        file.write('{"model": "35')
    lines.write(path, row | {"seconds": [1.0]})
    assert list(lines.rows_in(path).values()) == [row | {"seconds": [1.0]}]


def test_what_was_killed_or_failed_is_taken_after_what_was_not_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    sweep, lines = importlib.import_module("sweep"), importlib.import_module("lines")
    about, makes = {"model": "tiny", "shape": vars(sweep.MODELS["tiny"])}, dict.fromkeys("abcd")
    sweeping = sweep.Sweep(about, makes, tmp_path / "lines.jsonl", clock=sweep.Clock())
    for contender, told in (("a", {"error": "killed"}), ("b", {"seconds": [1.0]}), ("d", {"seconds": [1.0]})):
        for count in (1, 8) if contender != "d" else (1,):
            lines.write(sweeping.lines, {**about, "contender": contender, "micro_batches": count, **told})
    assert sweeping.left() == ["c", "a", "d"]


def test_turns_alternate_and_end_with_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    sweep, taken = importlib.import_module("sweep"), []
    contenders = {
        name: sweep.Contender(lambda given, name=name: taken.append((name, *given)), range(8), (0.0, 0.0), {})
        for name in "ab"
    }
    seconds = sweep.in_turns(contenders, 2, clock=sweep.Clock(), end=float("inf"), seconds_of_rounds=60.0)
    assert [len(each) for each in seconds.values()] == [20, 20]
    assert taken[:4] == [("a", 0, 1), ("b", 0, 1), ("b", 0, 1), ("a", 0, 1)]
    late = sweep.in_turns(contenders, 1, clock=sweep.Clock(), end=0.0, seconds_of_rounds=60.0)
    assert [len(each) for each in late.values()] == [1, 1]


def test_other_initial_weights_do_not_pass_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of the same weights, of the plain loop with them, and of two other seeds, as sweep.py measured them."""
    monkeypatch.syspath_prepend(FOLDER)
    same = importlib.import_module("sweep").same
    first = (6.3, 6.24)
    assert same((6.3 * 1.0001, 6.24 * 1.00002), first)
    assert not same((6.3 * 1.011, 6.24 * 1.0002), first) and not same((6.3 * 1.0008, 6.24 * 1.003), first)


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan: pip install torchtitan")
def test_torchtitans_layers_have_the_loss_and_the_gradients_of_the_plain_decoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    plain, libraries = importlib.import_module("plain"), importlib.import_module("libraries")
    shape = plain.Shape(2, 64, 4, 64, 2, 512, 128, kv_heads=2)
    decoder, titan = plain.PlainDecoder(shape), libraries.LIBRARIES["torchtitan"].make(shape)
    weights = [each.detach().clone() for each in decoder.parameters()]
    titan.take(weights)
    tokens = torch.randint(512, (2, 65))
    losses = [model(tokens[:, :-1], tokens[:, 1:].contiguous()) for model in (decoder, titan)]
    for loss in losses:
        loss.backward()
    assert abs(losses[0] - losses[1]) < 1e-6 * losses[0]
    titan.take([each.grad for each in decoder.parameters()])  # gradients in its own order
    for value, parameter in zip((each.detach() for each in titan.parameters()), titan.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, value, rtol=1e-4, atol=1e-6)


def a_report(*, ours: float, plain: float, kernels: str = "", is_trial: bool = False) -> dict[str, Any]:
    """Invented seconds of a step at 1.3B, and a table of kernels; one contender has failed."""

    def row(contender: str, **found: Any) -> dict[str, Any]:
        about = {"model": "1.3b", "shape": SHAPE, "flops_per_token": 1e10, "micro_batches": 1}
        return {**about, "contender": contender, **found}

    def timed(contender: str, seconds: float) -> dict[str, Any]:
        speeds = {"product_flops": 5e14, "data_sheet_tflops": 1000.0, "plain_seconds": [plain] * 4}
        return row(contender, seconds=[seconds] * 4, peak_bytes=3 * 2**30, expected_bytes=2 * 2**30, **speeds)

    failed = row("FSDP2, compiled", error="OutOfMemoryError: a | b")
    return {
        "circumstances": dict.fromkeys(("date", "device", "torch", "cuda", "python", "commit"), "-")
        | {"memory_gib": 80.0, "load": 0.0, "not_here": []},
        "is_trial": is_trial,
        "sweep": [
            timed("megatronish", 10 * ours),
            timed("megatronish --compile", ours),
            timed("plain, compiled", plain),
            failed,
        ],
        "parts": [{"name": "kernels", "status": "done", "seconds": 1.0, "output": kernels}],
    }


def test_aims_are_met_or_missed_in_the_open(pages: ModuleType) -> None:
    """8,192 tokens of 10 GFLOP in 0.3 s are 273 TFLOP/s, 55 % of a product of 500; in 0.5 s they are 33 %."""
    fast, slow = (pages.aims(a_report(ours=seconds, plain=0.4)) for seconds in (0.3, 0.5))
    mfu = "{} (megatronish --compile)"
    told = [(aim.found, aim.is_met) for aim in (*fast[:2], *slow[:2])]
    assert told[:2] == [(mfu.format("54.6%"), True), ("1.3b x 1 1.33 (eager 0.13)", True)]
    assert told[2:] == [(mfu.format("32.8%"), False), ("1.3b x 1 0.80 (eager 0.08)", False)]
    assert all(aim.is_met is None for aim in pages.aims(a_report(ours=0.3, plain=0.4, is_trial=True)))
    page = pages.page(a_report(ours=0.5, plain=0.4))
    assert "| 1.3b | 24 | 4 x 2048 | x 1 | megatronish --compile | 500.0 (500.0 to 500.0) | 16,384 | 0.80 |" in page
    assert "| FSDP2, compiled | OutOfMemoryError: a / b |" in page
    assert "| 1.3b | x 1 | megatronish | 3.00 | 2.00 | 1.50 |" in page


def test_what_failed_or_was_not_measured_meets_no_aim(pages: ModuleType) -> None:
    """A model of which only the plain loop trains is a miss; one whose part gave no row leaves the aim open."""
    report = a_report(ours=0.3, plain=0.4)
    report["parts"].append({"name": "sweep 8b", "status": "too long", "seconds": 90.0, "output": ""})
    aim = pages.aims(report)[1]
    assert (aim.found, aim.is_met) == ("1.3b x 1 1.33 (eager 0.13), 8b not measured (eager not measured)", None)
    (plain,) = [row for row in report["sweep"] if row["contender"] == "plain, compiled"]
    died = plain | {"model": "8b", "contender": "megatronish --compile", "error": "OutOfMemoryError"}
    report["sweep"] += [died, plain | {"model": "8b"}]
    aim = pages.aims(report)[1]
    assert (aim.found, aim.is_met) == ("1.3b x 1 1.33 (eager 0.13), 8b x 1 failed (eager not measured)", False)


@pytest.mark.parametrize(("of_copy", "of_compile"), [(90, 1.2), (80, 0.7)])
def test_a_part_of_kernels_that_was_killed_can_miss_an_aim_but_not_meet_one(
    pages: ModuleType, of_copy: int, of_compile: float
) -> None:
    head = "| operation | shape | pass | time | GB/s | of a copy | eager | torch.compile | apex |"
    row = f"| rms norm | 8x8 | forward | 3 us | 3 | {of_copy}% | x 1 | x {of_compile:.2f} | - |"
    report = a_report(ours=0.3, plain=0.4, kernels=f"{head}\n| --- |\n{row}\n")
    is_good, compared = of_copy > 85, f"x {of_compile:.2f} to"
    forward, _, _, slower = pages.aims(report)[2:]
    assert (forward.is_met, slower.is_met) == (is_good, is_good)
    assert slower.text == "kernels: never slower than torch.compile" and slower.found.startswith(compared)
    report["parts"][0]["status"] = "too long"
    forward, _, _, slower = pages.aims(report)[2:]
    assert (forward.is_met, slower.is_met) == ((None, None) if is_good else (False, False))
    assert forward.found.endswith("; the part did not end well, and 1 rows are all there are")


def test_a_kernel_is_held_against_the_aim_of_its_kind_and_pass(pages: ModuleType) -> None:
    table = ["| operation | shape | pass | time | GB/s | of a copy |", "| --- | --- | --- | --- | --- | --- |"]
    for operation, direction, share in (
        *(("layer norm", "forward", 86), ("rms norm", "forward", 84), ("scaled causal softmax", "backward", 76)),
        *(("cross entropy", "forward", 81), ("cross entropy", "backward", 80), ("bias + gelu", "forward", 10)),
    ):
        table.append(f"| {operation} | 8x8 | {direction} | 1 us | 1 | {share}% |")
    found = pages.aims(a_report(ours=0.3, plain=0.4, kernels="\n".join(["a line before", *table])))[2:]
    assert [aim.is_met for aim in found] == [False, True, True, None]
    assert found[0].found == "84% to 86%, median 85%"
