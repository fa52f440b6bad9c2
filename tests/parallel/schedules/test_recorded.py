"""Tests of recorded steps: written, read, measured, and exported as a Chrome trace."""

import json
from pathlib import Path

import pytest

from megatronish.core.errors import UserError
from megatronish.parallel.schedules.plan import Action
from megatronish.parallel.schedules.recorded import Recorded
from megatronish.parallel.schedules.simulate import Costs, simulate
from megatronish.parallel.schedules.table import SCHEDULES

STEP = Recorded(
    "zb-h1",
    [
        [("F", 0, 0, 100.0, 101.0), ("B", 0, 0, 103.5, 105.0), ("W", 0, 0, 105.0, 105.5)],
        [("F", 0, 0, 101.25, 102.0), ("B", 0, 0, 102.0, 103.25), ("W", 0, 0, 103.25, 104.25)],
    ],
)


def test_a_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    STEP.write(tmp_path / "new" / "step.json")
    assert Recorded.read(tmp_path / "new" / "step.json") == STEP


def test_times_count_from_the_first_start() -> None:
    timed = STEP.timed()
    assert timed.timeline[1][0] == (Action("F", 0, 0), 1.25, 2.0)
    assert timed.makespan == 5.5
    assert timed.peak_live == [1, 1]


def test_the_bubble_of_a_real_step_is_the_idle_share_of_its_span() -> None:
    assert STEP.timed().bubble_rate == pytest.approx(1 - (3.0 + 3.0) / 2 / 5.5)


def test_a_plan_carried_out_exactly_as_simulated_measures_the_same() -> None:
    plan = SCHEDULES["zb-v"].plan(num_stages=4, num_microbatches=6)
    simulated = simulate(plan, costs=Costs(1, 2, 3, 0.5), placement=SCHEDULES["zb-v"].place(num_stages=4))
    rows = [[(*timed.action, timed.start + 7, timed.end + 7) for timed in row] for row in simulated.timeline]
    recorded = Recorded("zb-v", rows).timed()
    assert recorded.timeline == simulated.timeline
    assert recorded.bubble_rate == pytest.approx(simulated.bubble_rate)
    assert recorded.peak_live == simulated.peak_live


def test_a_chrome_trace_has_a_row_for_each_stage(tmp_path: Path) -> None:
    STEP.write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == ["stage 0", "stage 1"]
    shown = [event for event in events if event["ph"] == "X"]
    assert len(shown) == 6
    first = shown[3]
    assert (first["name"], first["cat"], first["tid"]) == ("F0", "forward", 1)
    assert (first["ts"], first["dur"]) == (1.25e6, 0.75e6)


BROKEN = [
    "not JSON",
    "[]",
    '{"stages": [[["F", 0, 0, 1, 2]]]}',
    '{"schedule": "1f1b", "stages": []}',
    '{"schedule": "1f1b", "stages": [[]]}',
    '{"schedule": "1f1b", "stages": [[["F", 0, 0, 1]]]}',
    '{"schedule": "1f1b", "stages": [[["X", 0, 0, 1, 2]]]}',
    '{"schedule": "1f1b", "stages": [[["F", -1, 0, 1, 2]]]}',
    '{"schedule": "1f1b", "stages": [[["F", 0, 0.5, 1, 2]]]}',
    '{"schedule": "1f1b", "stages": [[["F", 0, 0, 2, 1]]]}',
    '{"schedule": "1f1b", "stages": [[["F", 0, 0, 1, ' + "9" * 4000 + "]]]}",
    '{"schedule": "1f1b", "stages": [[["F", 0, 0, "now", 1]]]}',
    '{"schedule": "1f1b", "stages": [[[["F"], 0, 0, 0, 1]]]}',
]


@pytest.mark.parametrize("content", BROKEN)
def test_what_is_not_a_step_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"step.json is not a recorded step .*; megatronish pretrain writes one"):
        Recorded.read(path)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_a_step_without_delays_takes_as_long_as_its_simulation(name: str, chunks: int) -> None:
    schedule = SCHEDULES[name]
    plan = schedule.plan(num_stages=2, num_microbatches=6, num_chunks=chunks)
    placement = schedule.place(num_stages=2, num_chunks=chunks)
    ran = simulate(plan, placement=placement, durations=lambda stage, action: 1.0 + stage + "FBW".index(action.kind))
    rows = [[(*timed.action, timed.start + 100, timed.end + 100) for timed in row] for row in ran.timeline]
    simulated = Recorded(name, rows).simulated()
    assert simulated is not None
    assert simulated.makespan == pytest.approx(ran.makespan)
    # A last action that once took longer makes the step longer, and its simulation not.
    last = max((row[-1] for row in rows), key=lambda row: row[4])
    slow = [[(*row[:4], row[4] + 3.0) if row is last else row for row in each] for each in rows]
    delayed = Recorded(name, slow)
    simulated = delayed.simulated()
    assert simulated is not None
    assert delayed.timed().makespan == pytest.approx(simulated.makespan + 3.0)


def test_a_schedule_of_a_plug_in_has_no_simulation() -> None:
    assert Recorded("of my own", [[("F", 0, 0, 0.0, 1.0), ("B", 0, 0, 1.0, 2.0)]]).simulated() is None
