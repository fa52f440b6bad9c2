"""Tests of the benchmark against other frameworks: a tiny run, who is thrown out, and the report."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from benchmarks import side_by_side, turns
from benchmarks.contestants.case import SIZES, Case
from benchmarks.contestants.entries import BASELINE, ENTRIES, groups
from benchmarks.side_by_side_report import BEGIN, END, draw, tables_of, write_report

FP32 = Case("one", "tiny", "fp32")

SCRIPT = """
import json, sys
print(json.dumps({"parameters": 5}), flush=True)
for number, line in enumerate(sys.stdin):
    if "step" in line and number == int(sys.argv[2]):
        raise SystemExit("out of luck")
    print(json.dumps({"seconds": 0.5, "loss": float(sys.argv[1]), "peak": 2**20}), flush=True)
"""


def contestant(name: str, folder: Path, *, loss: float = 2.0, fails_at: int = -1) -> turns.Runner:
    command = [sys.executable, "-c", SCRIPT, str(loss), str(fails_at)]
    runner = turns.start(name, [command], threads=1, folder=folder)
    turns.wait_until_built(runner)
    return runner


def record(*, failure: str | None = None, machine: str = "two cores") -> dict[str, Any]:
    seconds = [0.2] * 20
    rows = [
        {"name": BASELINE, "failure": None, "seconds": seconds, "losses": [5.0], "peak_bytes": 2**30},
        {"name": "megatronish", "failure": failure, "seconds": [0.1] * 20, "losses": [5.0], "peak_bytes": 2**29},
    ]
    return {
        "date": "2000-01-01 00:00",
        "commit": "abc",
        "machine": machine,
        "torch": "2",
        "load": 0.5,
        "threads": 2,
        "case": {"layout": "one", "size": "small", "numbers": "fp32"},
        "tokens": 2048,
        "flops": 10**10,
        "parameters": 6_901_760,
        "products_flops_per_second": 2 * 10**11,
        "rows": rows,
    }


@pytest.mark.processes
def test_a_quick_run_trains_the_plain_loop_and_megatronish_alike(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--quick", "--only", "one", "--contestants", "megatronish", "--threads", "1"]
    assert side_by_side.main(flags) == 0
    printed = capsys.readouterr().out
    assert "one process: tiny, fp32" in printed
    row = next(line for line in printed.splitlines() if line.startswith("  megatronish  "))
    assert "**" in row and "GiB" in row  # it was measured


@pytest.mark.processes
def test_who_trains_another_model_or_fails_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    runners = [
        contestant("plain loop", tmp_path),
        contestant("equal", tmp_path),
        contestant("other loss", tmp_path, loss=2.001),
        contestant("failing", tmp_path, fails_at=2),
    ]
    try:
        turns.take_turns(runners, range(1), measured=False)
        assert side_by_side.leave_if_other(runners, FP32) == ["other loss"]
        turns.take_turns(runners, range(1, 5), measured=True)
        assert [len(runner.seconds) for runner in runners] == [4, 4, 0, 1]
        assert [runner.failure for runner in runners] == [
            None,
            None,
            "begins with loss 2.001, the plain loop with 2.0",
            "its process ended: out of luck",
        ]
    finally:
        for runner in runners:
            runner.end()


def test_the_report_is_made_of_several_runs(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    peers, elsewhere = record(), record(machine="four cores")
    peers["rows"].append(peers["rows"][1] | {"name": "a peer", "seconds": [0.4] * 20})
    records = (peers, record(failure="not installed"), elsewhere, record())
    results.write_text("".join(json.dumps(each) + "\n" for each in records))
    page = tmp_path / "BENCHMARKS.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_report(results, tmp_path)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| megatronish | 20,480 (20,480 to 20,480) | **2.00** (2.00 to 2.00) | 0.50 GiB | 50% | 0e+00 |" in text
    assert "not installed" not in text  # the newer run replaces it
    # Rows of different runs, or machines, are in no table together; those of the newest run come first.
    newest, earlier = text.split("### Earlier runs, and other machines")
    assert "a peer" not in newest and newest.count("| megatronish |") == 1
    assert earlier.count("| megatronish |") == 2 and "four cores" in earlier and "**0.50** (0.50 to 0.50)" in earlier
    assert (tmp_path / "pictures" / "side_by_side.png").stat().st_size > 1000


def test_no_title_of_the_chart_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **_options: drawn.append(figure))
    tables = tables_of(ROOT / "benchmarks" / "side_by_side.jsonl")
    draw([(table.record, table.lines) for table in tables], tmp_path / "chart.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in figure.axes]  # with titles and labels
    assert len(boxes) == len(tables)
    assert min(box.x0 for box in boxes) >= 0 and max(box.x1 for box in boxes) <= figure.bbox.x1


@pytest.mark.parametrize("told", ["megatronic", "megatronish,DDP", "megatronish,"])
def test_a_contestant_that_no_case_has_is_told(told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        side_by_side.parse(["--only", "one", "--contestants", told])
    told_back = capsys.readouterr().err
    assert "is none of those in these cases; they are plain loop, plain loop, compiled, " in told_back
    assert side_by_side.parse(["--only", "one,dp2", "--contestants", "mega*,DDP"]).contestants == "mega*,DDP"


def test_contestants_that_do_not_fit_into_memory_are_measured_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    case, entries = Case("one", "gpt2-124m", "fp32"), list(ENTRIES[1:8])
    monkeypatch.setattr("benchmarks.contestants.entries.available_memory", lambda: 100 << 30)
    assert groups(entries, case) == [entries]
    monkeypatch.setattr("benchmarks.contestants.entries.available_memory", lambda: 18 << 30)
    several = groups(entries, case)
    assert len(several) > 1 and all(group[0] == entries[0] for group in several)
    assert {entry.name for group in several for entry in group} == {entry.name for entry in entries}


def test_an_environment_that_is_not_there_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(side_by_side, "ENVIRONMENTS", tmp_path)
    litgpt = next(entry for entry in ENTRIES if entry.name == "litgpt")
    runner = side_by_side.begin(litgpt, FP32, threads=1, state=tmp_path / "state.pt")
    assert runner.failure is not None and runner.failure.startswith("not installed")


def test_an_unknown_word_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        side_by_side.parse(["--only", "one,dp3"])
    assert "'dp3' is none of one, dp2, tp2, pp2" in capsys.readouterr().err


def test_a_case_counts_its_tokens_and_flops() -> None:
    small = SIZES["small"]
    assert Case("one", "small", "fp32").num_tokens == 2048
    assert Case("dp2", "small", "fp32").num_tokens == Case("pp2", "small", "fp32").num_tokens == 4096
    matrices = 6 * 12 * small.hidden_size**2 + small.vocab_size * small.hidden_size
    assert Case("one", "small", "fp32").linear_flops == 6 * matrices
