"""Tests of schedule drawings: text, pictures and tools/draw_schedule.py."""

import errno
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from paths import ROOT

from megatronish.commands.draw import main
from megatronish.parallel.schedules.draw_png import draw_png
from megatronish.parallel.schedules.plan import Action
from megatronish.parallel.schedules.recorded import Recorded
from megatronish.parallel.schedules.simulate import Costs, simulate
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.parallel.schedules.timeline import Timed, draw

STEP = Recorded(
    "1f1b", [[("F", 0, 0, 5.0, 6.0), ("B", 0, 0, 9.0, 11.0)], [("F", 0, 0, 6.5, 7.5), ("B", 0, 0, 7.5, 9.0)]]
)


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/draw_schedule.py", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_actions_of_unequal_length_each_have_a_column() -> None:
    f, b = (Action("F", 0, i) for i in range(2))
    row = [Timed(f, 0.0, 1.0), Timed(b, 1.0, 1.01), Timed(f, 1.01, 2.01), Timed(b, 4.0, 6.0)]
    assert draw([row]) == "stage 0:  F0  F1  F0   .  F1  --"


def test_the_last_chunk_of_many_has_a_number() -> None:
    timeline = [[Timed(Action("F", chunk, 3), float(chunk), chunk + 1.0) for chunk in range(28)]]
    assert draw(timeline).startswith("stage 0:     F3a     F3b")
    assert draw(timeline).endswith("F3z  F3[26]  F3[27]")


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_drawn_into_a_png(name: str, tmp_path: Path) -> None:
    schedule = SCHEDULES[name]
    plan = schedule.plan(num_stages=2, num_microbatches=3)
    simulation = simulate(plan, costs=Costs(transfer=0.1), placement=schedule.place(num_stages=2))
    draw_png(simulation, tmp_path / "plan.png", title="a plan")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_leaves_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = simulate(SCHEDULES["1f1b"].plan(num_stages=2, num_microbatches=2))
    path = tmp_path / "plan.png"
    draw_png(plan, path, title="a plan")
    before = path.read_bytes()
    (tmp_path / "link.png").symlink_to(path)

    def fill_the_disk(_figure: Figure, target: Any, **_options: Any) -> None:
        with target.open("wb") if isinstance(target, Path) else nullcontext(target) as file:
            file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", fill_the_disk)
        with pytest.raises(OSError, match="No space left"):
            draw_png(plan, path, title="another")
    assert path.read_bytes() == before
    draw_png(plan, tmp_path / "link.png", title="through a link")
    assert (tmp_path / "link.png").is_symlink() and path.read_bytes() != before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link.png", "plan.png"]
    draw_png(plan, Path("/dev/null"), title="nowhere")
    assert Path("/dev/null").is_char_device()


def test_the_tool_draws_and_counts() -> None:
    done = run_tool("--schedule", "1f1b", "--pp", "4", "--microbatches", "8")
    assert done.returncode == 0, done.stderr
    assert "stage 3:   .   .   .  F0  B0" in done.stdout
    assert "bubble rate 27.27%" in done.stdout


def test_the_tool_takes_times_of_a_whole_stage_whatever_the_chunks() -> None:
    two, four = (run_tool("--schedule", "interleaved", "--pp", "4", "--chunks", chunks) for chunks in "24")
    assert "makespan 28.5, bubble rate 15.79%" in two.stdout  # 8 x 3 and a bubble of 3 x 3 / 2
    assert "makespan 26.25, bubble rate 8.57%" in four.stdout
    assert "F7d" in four.stdout


def test_the_tool_draws_a_step_as_it_was(tmp_path: Path) -> None:
    STEP.write(tmp_path / "step.json")
    done = run_tool("--recorded", str(tmp_path / "step.json"), "--png", str(tmp_path / "new" / "step.png"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("stage 0:  F0   .   .   .  B0  --\nstage 1:   .  F0  B0  --   .   .\n")
    assert "makespan 6, bubble rate 54.17%" in done.stdout
    assert (tmp_path / "new" / "step.png").exists()


REFUSED = [
    (["--schedule", "2f2b"], "schedule='2f2b' is not known; use one of gpipe, 1f1b, interleaved, zb-h1, zb-v"),
    (["--schedule", "zb-v", "--chunks", "3"], "schedule zb-v has num_chunks=2 a stage, not 3"),
    (["--microbatches", "0"], "microbatches=0 must be at least 1"),
    (["--transfer", "-1"], "transfer=-1.0 must not be negative"),
    (["--png", "schedule"], "png=schedule must end in .png"),
    (["--recorded", "step.json", "--pp", "2"], "--recorded draws a step as it was: leave out all else"),
    (["--recorded", "no/such/file.json"], "no/such/file.json cannot be read: No such file"),
    (["--recorded", "README.md"], "README.md is not a recorded step"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED)
def test_the_tool_refuses_in_a_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1


def test_the_tool_ends_with_the_status_of_its_error() -> None:
    done = run_tool("--schedule", "zb-v", "--stages", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "draw_schedule: stages=0 must be at least 1\n"
