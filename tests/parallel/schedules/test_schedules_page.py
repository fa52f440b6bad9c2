"""Tests of docs/SCHEDULES.md: its tables and drawings equal those generated anew."""

import shlex
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest
from paths import ROOT

from megatronish.commands.draw import main
from megatronish.parallel.schedules.simulate import Costs, simulate
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.parallel.schedules.timeline import TimedPlan

PAGE = (ROOT / "docs" / "SCHEDULES.md").read_text(encoding="utf-8")
LINES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 2)]
COMMANDS = [line[3:-1] for line in PAGE.splitlines() if line.startswith("- `python tools/draw_schedule.py")]


def simulated(name: str, chunks: int, *, m: int, costs: Costs) -> TimedPlan:
    """Eight stages, by the costs of a whole stage."""
    schedule = SCHEDULES[name]
    plan = schedule.plan(num_stages=8, num_microbatches=m, num_chunks=chunks)
    placement = schedule.place(num_stages=8, num_chunks=chunks)
    return simulate(plan, costs=costs.per_chunk(chunks), placement=placement)


def refuse_stale(expected: Iterable[Iterable[str]]) -> None:
    """The page has these rows."""
    rows = ["| " + " | ".join(cells) + " |" for cells in expected]
    table = "\n".join(rows)
    assert table in PAGE, f"docs/SCHEDULES.md should say\n{table}"


def title(name: str, chunks: int) -> str:
    return f"{name}, {chunks} chunks" if chunks > 1 else name


def test_the_table_of_ticks_bubbles_and_memory_is_current() -> None:
    for m in (4, 16, 64):
        rows = []
        for name, chunks in LINES:
            done = simulated(name, chunks, m=m, costs=Costs())
            idle = 1 - 3 * m / done.makespan
            peaks = [f"{live / chunks:g}" for live in (done.peak_live[0], done.peak_live[-1])]
            rows.append([title(name, chunks), f"{done.makespan:g}", f"{idle:.1%}", f"{done.bubble_rate:.1%}", *peaks])
        refuse_stale(rows)


def test_the_table_of_transfers_is_current() -> None:
    rows = []
    for name, chunks in LINES:
        ticks = [simulated(name, chunks, m=16, costs=Costs(transfer=t)).makespan for t in (0, 0.05, 0.1, 0.2, 0.5)]
        rows.append([title(name, chunks), *(f"{round(each, 2):g}" for each in ticks)])
    refuse_stale(rows)


def test_the_table_of_weight_gradients_is_current() -> None:
    rows = []
    for name, chunks in LINES:
        ticks = [simulated(name, chunks, m=16, costs=Costs(weight=w)).makespan for w in (1, 0.75, 0.5, 0.25)]
        rows.append([title(name, chunks), *(f"{round(each, 2):g}" for each in ticks)])
    refuse_stale(rows)


def test_the_table_of_odd_numbers_is_current() -> None:
    rows = []
    for name, chunks in LINES:
        ticks = [simulated(name, chunks, m=m, costs=Costs()).makespan for m in (16, 17, 20, 23, 24)]
        rows.append([title(name, chunks), *(f"{round(each, 2):g}" for each in ticks)])
    refuse_stale(rows)


def test_the_published_table_is_current() -> None:
    measured = {
        24: (18.522, 18.086, 9.337, 0.601),
        32: (18.513, 18.086, 9.331, 0.626),
        64: (18.546, 18.097, 9.321, 0.762),
    }
    published = {24: (0.2431, 0.1585), 32: (0.1985, 0.1242), 64: (0.1240, 0.0674)}
    rows = []
    for m, times in measured.items():
        cells = [f"{m}", *(f"{each:.3f}" for each in times)]
        for name, rate in zip(("1f1b", "zb-h1"), published[m], strict=True):
            cells += [f"{rate:.4f}", f"{simulated(name, 1, m=m, costs=Costs(*times)).bubble_rate:.5f}"]
        rows.append(cells)
    refuse_stale(rows)


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_the_drawings_are_what_the_tool_draws(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    picture = words[words.index("--png") + 1] if "--png" in words else ""
    words = [str(tmp_path / "new.png") if word == picture else word for word in words[1:]]
    assert main(words[1:]) == 0
    if picture:
        # Not the bytes: fonts and compression differ from one version of matplotlib to the next.
        assert png_size(ROOT / picture) == png_size(tmp_path / "new.png")
    else:
        drawn = capsys.readouterr().out.split("\n\n")[0]
        assert drawn in PAGE, f"docs/SCHEDULES.md should show\n{drawn}"


def test_every_schedule_has_a_drawing_and_a_picture() -> None:
    for name in SCHEDULES:
        mine = [command for command in COMMANDS if f"--schedule {name} " in f"{command} "]
        assert len(mine) == 2
        assert f"![{name}](pictures/schedule_{name}.png)" in PAGE


def png_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG file in pixels."""
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height
