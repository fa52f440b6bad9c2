"""Tests of benchmarks/gpu_report without a GPU: a trial of the whole report, and what it says of its aims."""

import importlib
import json
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
    assert report.main(["--tiny", "--folder", str(tmp_path), "--part", "sweep tiny-llama", "--part", "tests"]) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    (first, second), *others = [row["first_losses"] for row in found["sweep"]]
    assert len(others) >= 2
    assert all(abs(a - first) < 1e-3 * first and abs(b - second) < 5e-4 * second for a, b in others)
    page = (tmp_path / "report.md").read_text()
    assert "its numbers mean nothing" in page
    assert "| met |" not in page and "missed" not in page
    for contender in ("megatronish", "plain, compiled", "FSDP2, compiled"):
        assert f"| tiny-llama | 2 | 2 x 64 | {contender} |" in page
    assert "## Where a step of megatronish goes, tiny-llama" in page
    for row in found["sweep"]:
        if row["contender"].startswith("megatronish"):
            assert share_of("matrix products", row["where"]) > 0 < share_of("other compute", row["where"])
            assert share_of("hooks", row["where"]) < 10  # there are none
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to report on")
def test_without_a_gpu_there_is_no_report_but_a_trial(report: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([]) == 2
    assert "torch sees none here; --tiny tries it without one" in capsys.readouterr().err


@pytest.mark.processes
def test_a_part_that_fails_hangs_or_has_no_time_loses_itself_alone(report: ModuleType) -> None:
    def ended(code: str, *, limit: float = 60.0, left: float = 60.0, needs_gpu: bool = False) -> Any:
        return report.run(report.Part("part", ["-c", code], limit, needs_gpu), left=left, has_gpu=False)

    assert ended("print('fine')")[2:4:2] + ended("print('fine')")[4:] == ("done", "fine\n")
    assert ended("raise SystemExit(3)").status == "failed"
    slow = ended("import time; print('begun', flush=True); time.sleep(60)", limit=2.0)
    assert (slow.status, slow.output) == ("too long", "begun\n")
    assert ended("", left=0.0).status == "left out"
    assert ended("", needs_gpu=True).output == "there is no GPU here"


def test_a_part_that_does_not_exist_is_refused_in_one_sentence(
    report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main(["--tiny", "--folder", str(tmp_path), "--part", "nothing"]) == 2
    assert capsys.readouterr().err == (
        "--part nothing is the beginning of no part's name; the parts are: build of the kernels, sweep tiny, "
        "sweep tiny-llama, kernels, tests on a GPU\n"
    )
    assert not (tmp_path / "report.md").exists()


@pytest.mark.processes
def test_weights_that_a_killed_part_has_left_are_removed_before_the_next(report: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "sweep.8b.pt").write_bytes(b"of another run")
    assert report.main(["--tiny", "--folder", str(tmp_path), "--part", "tests"]) == 0
    assert not list(tmp_path.glob("*.pt"))


def test_lines_of_a_part_that_was_killed_are_kept(report: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    assert report.rows_in(path) == []
    path.write_text('{"model": "124m"}\n{"model": "35')
    assert report.rows_in(path) == [{"model": "124m"}]


def test_other_initial_weights_do_not_pass_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of the same weights, of the plain loop with them, and of two other seeds, as sweep.py measured them."""
    monkeypatch.syspath_prepend(FOLDER)
    same = importlib.import_module("sweep").same
    first = (6.3, 6.24)
    assert same((6.3 * 1.0001, 6.24 * 1.00002), first)
    assert not same((6.3 * 1.011, 6.24 * 1.0002), first) and not same((6.3 * 1.0008, 6.24 * 1.003), first)


def a_report(*, ours: float, plain: float, kernels: str = "", is_trial: bool = False) -> dict[str, Any]:
    """Invented seconds of a step at 1.3B, and a table of kernels; one contender has failed."""

    def row(contender: str, **found: Any) -> dict[str, Any]:
        return {"model": "1.3b", "shape": SHAPE, "contender": contender, "flops_per_token": 1e10, **found}

    def timed(contender: str, seconds: float) -> dict[str, Any]:
        speeds = {"product_flops": 5e14, "data_sheet_tflops": 1000.0}
        return row(contender, seconds=[seconds] * 4, peak_bytes=3 * 2**30, expected_bytes=2 * 2**30, **speeds)

    failed = row("FSDP2, compiled", error="OutOfMemoryError: a | b")
    return {
        "circumstances": dict.fromkeys(("date", "device", "torch", "cuda", "python", "commit"), "-")
        | {"memory_gib": 80.0, "load": 0.0},
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
    assert told[:2] == [(mfu.format("54.6%"), True), ("1.3b 1.33 (eager 0.13)", True)]
    assert told[2:] == [(mfu.format("32.8%"), False), ("1.3b 0.80 (eager 0.08)", False)]
    assert all(aim.is_met is None for aim in pages.aims(a_report(ours=0.3, plain=0.4, is_trial=True)))
    page = pages.page(a_report(ours=0.5, plain=0.4))
    assert "| 1.3b | 24 | 4 x 2048 | megatronish --compile | 500.0 (500.0 to 500.0) | 16,384 | 0.80 |" in page
    assert "| FSDP2, compiled | OutOfMemoryError: a / b |" in page
    assert "| 1.3b | megatronish | 3.00 | 2.00 | 1.50 |" in page


def test_what_failed_or_was_not_measured_meets_no_aim(pages: ModuleType) -> None:
    """A model of which only the plain loop trains is a miss; one whose part gave no row leaves the aim open."""
    report = a_report(ours=0.3, plain=0.4)
    report["parts"].append({"name": "sweep 8b", "status": "too long", "seconds": 90.0, "output": ""})
    aim = pages.aims(report)[1]
    assert (aim.found, aim.is_met) == ("1.3b 1.33 (eager 0.13), 8b not measured (eager not measured)", None)
    (plain,) = [row for row in report["sweep"] if row["contender"] == "plain, compiled"]
    died = {"model": "8b", "contender": "megatronish --compile", "error": "OutOfMemoryError", "shape": SHAPE}
    report["sweep"] += [died, plain | {"model": "8b"}]
    aim = pages.aims(report)[1]
    assert (aim.found, aim.is_met) == ("1.3b 1.33 (eager 0.13), 8b failed (eager not measured)", False)


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
