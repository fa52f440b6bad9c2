"""Tests of --profile-schedule: its drawing, its trace for chrome://tracing, and its numbers."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from jobs import call_main, tiny, train_on_ranks
from sweeps import further

from megatronish.parallel.schedules.recorded import Recorded
from megatronish.parallel.schedules.table import SCHEDULES

FLAGS = "--num-layers 4 --profile-schedule --profile-step-start 2 --profile-step-end 4 --train-iters 4"


@pytest.mark.parametrize(
    ("schedule", "layout"), [("1f1b", "--dp 2 --pp 2"), further(("zb-v", "--tp 2 --cp 2 --pp 2 --dp 1"))]
)
def test_steps_are_recorded_as_they_ran(schedule: str, layout: str, tmp_path: Path) -> None:
    world_size = 4 if schedule == "1f1b" else 8
    train_on_ranks(tiny(tmp_path, f"{FLAGS} {layout} --pipeline-schedule {schedule}"), world_size=world_size)
    folder = tmp_path / "schedule"
    kinds = (".json", ".png", ".trace.json")
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"step_{n}{kind}" for n in (2, 3) for kind in kinds)
    recorded = Recorded.read(folder / "step_3.json")
    plan = SCHEDULES[schedule].plan(num_stages=2, num_microbatches=2 if schedule == "1f1b" else 4)
    assert [[tuple(row[:3]) for row in rows] for rows in recorded.rows] == plan
    timed = recorded.timed()
    for row in timed.timeline:
        assert all(before.end <= after.start for before, after in pairwise(row))
    # What a stage needs from another one was computed there before.
    ends = {(s, t.action): t.end for s, row in enumerate(timed.timeline) for t in row}
    starts = {(s, t.action): t.start for s, row in enumerate(timed.timeline) for t in row}
    forwards = [action for action in plan[1] if action.kind == "F" and action.chunk == 0]
    assert all(ends[0, action] <= starts[1, action] for action in forwards)
    assert 0 < timed.bubble_rate < 1
    events = json.loads((folder / "step_3.trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == sum(map(len, plan))


def test_a_run_that_was_never_where_it_should_look_says_so(tmp_path: Path) -> None:
    train_on_ranks(tiny(tmp_path, "--train-iters 2"))
    flags = "--train-iters 4 --profile-schedule --profile-step-start 1 --profile-step-end 3"
    assert "recorded nothing: this run was never in steps 1 to 2; set --profile-step-start" not in train_on_ranks(
        tiny(tmp_path / "other", flags)
    )
    assert "recorded nothing: this run was never in steps 1 to 2; set --profile-step-start" in train_on_ranks(
        tiny(tmp_path, flags)
    )


def test_a_folder_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "schedule").touch()
    ended = call_main(tiny(tmp_path, FLAGS))
    assert ended.status == 2
    assert "--profile-schedule" in ended.errors and "cannot be written" in ended.errors
